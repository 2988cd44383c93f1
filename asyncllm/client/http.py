"""One client's connections: its only session, and the road from a request to an answer's headers.

The loop that uses it first, and no other. It never knows what a body means.

An attempt is repeated only while nothing of an answer has come. All attempts, and the waits between them,
fit into one deadline: three attempts of 30 s for a timeout of 30 s were three generations and 91 s.
"""

import asyncio
import errno
import secrets
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import aiohttp
import msgspec
from aiohttp import ClientTimeout

from .errors import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    ReplyTooLargeError,
    status_error,
)
from .retries import Retries

T = TypeVar("T")
REQUEST_ID_HEADER = "X-Request-Id"
MAX_REPLY_BYTES = 256 << 20  # of a whole reply: 50 MB of logprobs are legal
_MAX_ERROR_BYTES = 1 << 20
_MAX_HEADER_BYTES = 64 << 10  # of one header; aiohttp's 8 KiB is less than some gateways send
_HEARTBEAT_S = 30.0  # pings on a WebSocket: below the usual 60 s of proxies, and a half-open peer is found
_CLOSE_S = 2.0  # for the peer's own close frame
_DRAIN_S = 0.1  # for the end of a body after its last event, so that the connection can be used again


class Timeout(msgspec.Struct, frozen=True, kw_only=True):
    """Three waits, in seconds; None: without end. A plain number t in its place is `Timeout.of(t)`."""

    connect: float | None = 5.0  # for one TCP or TLS connection
    read: float | None = 600.0  # silence: until the answer begins, all attempts together, and then between bytes
    total: float | None = None  # from the call to the last byte, the caller's own pauses in a stream included

    @classmethod
    def of(cls, value: "float | Timeout | None", *, stream: bool) -> "Timeout":
        """A number bounds a whole reply from call to end, and a stream's silences: it may go on for hours."""
        if isinstance(value, Timeout):
            return value
        if value is None:
            return cls(connect=None, read=None)
        return cls(connect=min(5.0, value), read=value, total=None if stream else value)


class Call(msgspec.Struct, frozen=True, kw_only=True):
    """One request, the same in every attempt, with the loop's times at which it is too late."""

    method: str
    url: str
    headers: dict[str, str]
    body: bytes | None
    timeout: Timeout
    begin_by_s: float | None
    end_by_s: float | None

    @property
    def request_id(self) -> str:
        return self.headers[REQUEST_ID_HEADER]


def make_call(method: str, url: str, headers: dict[str, str], body: bytes | None, timeout: Timeout) -> Call:
    """The clock starts here. A request id is made unless the caller has one."""
    now_s = asyncio.get_running_loop().time()
    end_by_s = None if timeout.total is None else now_s + timeout.total
    bounds = [bound for bound in (timeout.read, timeout.total) if bound is not None]
    if not any(name.lower() == "x-request-id" for name in headers):
        headers = headers | {REQUEST_ID_HEADER: f"req_{secrets.token_hex(12)}"}
    headers = {REQUEST_ID_HEADER if name.lower() == "x-request-id" else name: value for name, value in headers.items()}
    return Call(
        method=method,
        url=url,
        headers=headers,
        body=body,
        timeout=timeout,
        begin_by_s=now_s + min(bounds) if bounds else None,
        end_by_s=end_by_s,
    )


class Http:
    """Owns the session, unless the caller gave one: that is the caller's to close."""

    def __init__(self, session: aiohttp.ClientSession | None = None) -> None:
        self._given = session
        self._session = session
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    def __repr__(self) -> str:
        state = "closed" if self._closed else "unused" if self._session is None else "open"
        return f"Http({state})"

    @property
    def session(self) -> aiohttp.ClientSession:
        """Made at first use, as a session belongs to the loop that runs then.

        Raises:
            RuntimeError: the client is closed, or belongs to another loop: there its sockets would never wake.
        """
        loop = asyncio.get_running_loop()
        if self._closed:
            raise RuntimeError("the client is closed")
        if self._loop not in (None, loop):
            raise RuntimeError("this client belongs to another event loop; make one for each loop")
        self._loop = loop
        if self._session is None:
            self._session = _make_session()
        return self._session

    async def open(self, call: Call, retries: Retries) -> aiohttp.ClientResponse:
        """The answer, when its headers are there and say success.

        Raises:
            APIStatusError: the server refused, at last.
            APIConnectionError: no server, or none that answered; APITimeoutError among them.
        """
        return await self._in_time(_request, call, retries)

    async def upgrade(self, call: Call, retries: Retries, max_event_bytes: int) -> aiohttp.ClientWebSocketResponse:
        """A WebSocket, when the server has agreed to one.

        Raises: as open().
        """
        return await self._in_time(partial(_upgrade, max_event_bytes=max_event_bytes), call, retries)

    async def _in_time(self, attempt: "Attempt[T]", call: Call, retries: Retries) -> T:
        session = self.session
        try:
            async with asyncio.timeout_at(call.begin_by_s):
                return await _retried(attempt, session, call, retries)
        except TimeoutError:
            waited = min(bound for bound in (call.timeout.read, call.timeout.total) if bound is not None)
            message = f"no answer from {call.url} within {waited:g} s, all attempts together"
            raise APITimeoutError(message, request_id=call.request_id) from None

    async def aclose(self) -> None:
        """Idempotent. A caller's session stays open."""
        session, self._session, self._closed = self._session, None, True
        if session is not None and session is not self._given:
            await session.close()


class _Trace:
    """What aiohttp tells of one attempt's connection."""

    def __init__(self) -> None:
        self.reused = False
        self.disconnected = False

    @property
    def is_stale(self) -> bool:
        return self.reused and self.disconnected


Attempt = Callable[[aiohttp.ClientSession, Call, _Trace], Awaitable[T]]


async def _retried(attempt: Attempt[T], session: aiohttp.ClientSession, call: Call, retries: Retries) -> T:
    num_failed = 0
    stale_seen = False
    while True:
        trace = _Trace()
        try:
            return await attempt(session, call, trace)
        except APIError as error:
            if trace.is_stale and not stale_seen:
                # The server closed a kept connection as we took it up: nobody's failure, so again at once,
                # and even where max_retries is 0.
                stale_seen = True
                continue
            delay_s = retries.delay_s(error, num_failed)
            if delay_s is None or _is_too_late(call, delay_s):
                raise
        num_failed += 1
        await asyncio.sleep(delay_s)


async def _request(session: aiohttp.ClientSession, call: Call, trace: _Trace) -> aiohttp.ClientResponse:
    timeout = ClientTimeout(total=None, sock_connect=call.timeout.connect, sock_read=call.timeout.read)
    try:
        response = await session.request(
            call.method, call.url, headers=call.headers, data=call.body, timeout=timeout, trace_request_ctx=trace
        )
    except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
        trace.disconnected = isinstance(error, (aiohttp.ServerDisconnectedError, ConnectionError))
        raise connection_error(error, call) from error
    if response.status < 300:
        return response
    raise await _refusal(response, call)


async def _upgrade(
    session: aiohttp.ClientSession, call: Call, trace: _Trace, max_event_bytes: int
) -> aiohttp.ClientWebSocketResponse:
    try:
        return await session.ws_connect(
            call.url,
            headers=call.headers,
            max_msg_size=max_event_bytes,
            heartbeat=_HEARTBEAT_S,
            timeout=aiohttp.ClientWSTimeout(ws_close=_CLOSE_S),
        )
    except aiohttp.WSServerHandshakeError as error:
        headers = {name.lower(): value for name, value in (error.headers or {}).items()}
        raise status_error(error.status, headers, b"", call.request_id) from None
    except (aiohttp.ClientError, OSError) as error:
        raise connection_error(error, call) from error


async def _refusal(response: aiohttp.ClientResponse, call: Call) -> APIStatusError:
    try:
        raw = await read_whole(response, call, _MAX_ERROR_BYTES)
    except (APIConnectionError, ReplyTooLargeError):
        raw = b""  # the status alone says enough
    headers = {name.lower(): value for name, value in response.headers.items()}
    return status_error(response.status, headers, raw, request_id_of(response, call))


def connection_error(error: BaseException, call: Call) -> APIConnectionError:
    """Our word for what went wrong below HTTP."""
    if isinstance(error, TimeoutError):
        return APITimeoutError(f"timed out: {error or call.url}", request_id=call.request_id)
    if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED:  # aiohttp's own text talks of ssl:default
        what = "nothing listens there; is the server up, and this its port?"
    else:
        what = str(error) or type(error).__name__
    return APIConnectionError(f"the connection to {call.url} failed: {what}", request_id=call.request_id)


def request_id_of(response: aiohttp.ClientResponse, call: Call) -> str:
    """The server's, or ours if it gave none."""
    return response.headers.get(REQUEST_ID_HEADER, call.request_id)


class Body:
    """The bytes of an answer as they come, pulled: a reader that stops reading stops the server's writes."""

    def __init__(self, response: aiohttp.ClientResponse, call: Call) -> None:
        self.response = response
        self._call = call
        self._broken: APIConnectionError | None = None

    async def read(self) -> bytes:
        """What has arrived; b"" at the proper end.

        Raises:
            APIConnectionError: it broke off; APITimeoutError: silence for too long, or the total is over.
        """
        if self._broken is not None:
            raise self._broken
        try:
            async with asyncio.timeout_at(self._call.end_by_s):
                return await self.response.content.readany()
        except (aiohttp.ClientError, OSError) as error:  # TimeoutError is an OSError
            self._broken = connection_error(error, self._call)
            if rest := self._rest():
                return rest
            raise self._broken from error

    async def finish(self) -> None:
        """After the last event: give the connection back if the body ends now, else close it."""
        try:
            async with asyncio.timeout(_DRAIN_S):
                await read_whole(self.response, self._call, _MAX_ERROR_BYTES)
        except (TimeoutError, APIError):
            self.close()

    def close(self) -> None:
        """Close the TCP connection unless the body has ended: that is how a server learns to stop."""
        self.response.close()

    def _rest(self) -> bytes:
        # aiohttp raises what broke the connection before it hands out what had come by then: the error event
        # of a failing server would be lost behind its own disconnect.
        content = self.response.content
        content.set_exception(None)  # type: ignore[arg-type]
        return content.read_nowait()


async def read_whole(response: aiohttp.ClientResponse, call: Call, max_bytes: int = MAX_REPLY_BYTES) -> bytes:
    """A body to its end; the connection goes back to the pool, or is closed if that end is not reached.

    Raises:
        ReplyTooLargeError: above max_bytes.
        APIConnectionError: as Body.read.
    """
    parts: list[bytes] = []
    num_bytes = 0
    body = Body(response, call)
    try:
        while data := await body.read():
            parts.append(data)
            if (num_bytes := num_bytes + len(data)) > max_bytes:
                raise ReplyTooLargeError(f"the reply is larger than {max_bytes} bytes", request_id=call.request_id)
    except BaseException:
        body.close()
        raise
    response.release()
    return b"".join(parts)


def _is_too_late(call: Call, delay_s: float) -> bool:
    return call.begin_by_s is not None and asyncio.get_running_loop().time() + delay_s >= call.begin_by_s


def _make_session() -> aiohttp.ClientSession:
    trace = aiohttp.TraceConfig()
    trace.on_connection_reuseconn.append(_note_reuse)
    return aiohttp.ClientSession(
        # aiohttp's 100 connections are 100 streams, and the next one waits without a word.
        connector=aiohttp.TCPConnector(limit=0),
        timeout=ClientTimeout(total=None, sock_connect=5.0),  # its 300 s would end long streams; each call has its own
        trace_configs=[trace],
        max_line_size=_MAX_HEADER_BYTES,
        max_field_size=_MAX_HEADER_BYTES,
        cookie_jar=aiohttp.DummyCookieJar(),
    )


async def _note_reuse(session: aiohttp.ClientSession, context: Any, params: object) -> None:
    if isinstance(context.trace_request_ctx, _Trace):  # a WebSocket has none
        context.trace_request_ctx.reused = True
