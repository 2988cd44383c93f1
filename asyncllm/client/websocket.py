"""Many generations over one socket: OpenAI's Responses mode, its lanes, and our extensions of it.

The client's loop. It never knows HTTP bodies, or what is in an event beyond its type, lane and response.

    -> {"type": "response.create", "stream_id": "a", ...}     <- response.* events, each with "stream_id": "a"
    -> {"type": "response.cancel" | "response.update", "stream_id": "a", ...}         ours, not OpenAI's
    -> {"type": "response.attach", "stream_id": "a", "response_id": ..., "starting_after": sequence_number}

One task reads and sorts by lane. A lane buffers up to its bound and then fails alone: making the socket
wait for one slow reader would stop all others. Within a lane one response runs at a time.
"""

import asyncio
import copy
import re
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

import aiohttp
import msgspec

from ..wire.sse import MAX_EVENT_BYTES
from .accumulate import ResponseAccumulator, StreamManager
from .errors import APIError, APITimeoutError, WebSocketClosedError, WebSocketQueueFullError, event_error
from .http import Call, Http, Retries
from .replies import Response, ResponseEvent
from .stream import TERMINAL_EVENTS, Stream, event_reader

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_OPENERS = ("response.create", "response.attach")  # what a lane is busy with until a terminal event


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a session may hold."""

    max_event_bytes: int = MAX_EVENT_BYTES  # of one frame: the terminal one repeats the whole answer
    max_bytes_per_lane: int = 16 << 20  # unread; about 80,000 tokens
    max_lanes: int = 32  # with a name; OpenAI's own limit


class Lane:
    """One line of responses, in order, beside the other lanes. One reader.

    Raises, in recv and whatever reads:
        WebSocketClosedError: with the close code.
        WebSocketQueueFullError: this lane's reader fell behind; its response was cancelled.
    """

    def __init__(self, session: "Session", stream_id: str | None) -> None:
        self.stream_id = stream_id
        self._session = session
        self._events: deque[tuple[ResponseEvent, int]] = deque()
        self._num_bytes = 0
        self._error: APIError | None = None
        self._reader: asyncio.Future[None] | None = None
        self._busy = False  # a response has been asked for, and its end has not come
        self._begun = False  # and its first event has
        self._skipping = False  # nobody wants the rest of it

    def __repr__(self) -> str:
        return f"Lane({self.stream_id!r}, {'busy' if self._busy else 'idle'}, {self._num_bytes} bytes unread)"

    @property
    def busy(self) -> bool:
        return self._busy

    # -- towards the server --

    async def send(self, event: dict[str, Any]) -> None:
        """Send one client event on this lane.

        Raises:
            RuntimeError: a second response.create while one is running here.
            WebSocketClosedError: the socket is closed. Whether an event before it arrived is not known, so
                nothing is sent again.
        """
        if event.get("type") in _OPENERS:
            if self._busy:
                raise RuntimeError(f"{self!r} has a response running; read it to its end, or use another lane")
            self._busy, self._begun, self._skipping, self._error = True, False, False, None
        lane = {} if self.stream_id is None else {"stream_id": self.stream_id}
        await self._session.send(event | lane)

    async def create(self, **fields: Any) -> Stream[ResponseEvent]:
        """Ask for a response; the same Stream as over SSE."""
        await self.send({"type": "response.create", **fields})
        return Stream(LaneSource(self, self._session.read_timeout_s))

    def stream(self, **fields: Any) -> StreamManager[ResponseEvent, ResponseEvent, Response]:
        """As create(), adding up: `async with lane.stream(input=...) as s`."""
        return StreamManager(partial(self.create, **fields), ResponseAccumulator())

    async def attach(self, response_id: str, starting_after: int | None = None) -> Stream[ResponseEvent]:
        """Go on with a response whose connection was lost, behind the last sequence_number that was read."""
        event = {"type": "response.attach", "response_id": response_id}
        await self.send(event if starting_after is None else event | {"starting_after": starting_after})
        return Stream(LaneSource(self, self._session.read_timeout_s))

    async def update(self, **changes: Any) -> None:
        """Change max_output_tokens, stop or temperature of the response that runs here."""
        await self.send({"type": "response.update", **changes})

    async def cancel(self) -> None:
        """End the response that runs here. Its terminal event comes as always."""
        if self._busy:
            await self.send({"type": "response.cancel"})

    def abandon(self, response_id: str | None = None) -> asyncio.Task[None] | None:
        """Cancel, and drop what is unread and what may still come. The task that sends it, if anything runs.

        Decided now, not when it is sent: by then the lane may have another response. That one's create is
        behind this cancel on the wire.
        """
        self._events.clear()
        self._num_bytes = 0
        self._skipping = self._busy
        if not self._busy:
            return None
        event = {"type": "response.cancel"} | ({"response_id": response_id} if response_id else {})
        return self._session.send_soon(self.send(event))

    # -- from the server --

    async def recv(self) -> ResponseEvent:
        """The next event, error events included. A wait that is cancelled loses none."""
        while not self._events:
            if self._error is not None:
                raise copy.copy(self._error)
            await self._wait()
        event, num_bytes = self._events.popleft()
        self._num_bytes -= num_bytes
        return event

    async def get_final_response(self) -> Response:
        """Read what is left of the running response, and return it: completed, incomplete or failed.

        Raises:
            APIError: an error event.
        """
        while True:
            event = await self.recv()
            if event.type == "error":
                raise event_error(event.to_dict())
            if event.type in TERMINAL_EVENTS:
                return event.response or Response()

    def deliver(self, event: ResponseEvent, num_bytes: int) -> None:
        """Take one event from the session's reader."""
        skipped = self._skipping
        if self._ends_response(event):
            self._busy = self._skipping = False
        self._begun = True
        if skipped or self._error is not None:
            return
        self._events.append((event, num_bytes))
        self._num_bytes += num_bytes
        if self._num_bytes > self._session.limits.max_bytes_per_lane:
            self._overflow()
        self._wake()

    def fail(self, error: APIError) -> None:
        """Nothing more comes; what has come can still be read."""
        self._busy = False
        if self._error is None:
            self._error = error
        self._wake()

    def _ends_response(self, event: ResponseEvent) -> bool:
        # An error after the response has begun is about something else: an update or a cancel too late.
        return event.type in TERMINAL_EVENTS or (event.type == "error" and not self._begun)

    def _overflow(self) -> None:
        limit = self._session.limits.max_bytes_per_lane
        self._error = WebSocketQueueFullError(f"{self!r} was not read: more than {limit} bytes are waiting")
        self.abandon()

    async def _wait(self) -> None:
        if self._reader is not None:
            raise RuntimeError("a lane has one reader; two are waiting")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class LaneSource:
    """One response of a lane, for a Stream."""

    response = None

    def __init__(self, lane: Lane, read_timeout_s: float | None) -> None:
        self.request_id: str | None = None  # the response's id: a WebSocket has no headers for each
        self._lane = lane
        self._read_timeout_s = read_timeout_s
        self._begun = False
        self._ended = False

    async def next(self) -> ResponseEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._recv()
        if event.type == "error" and not self._begun:  # later ones are about an update or a cancel: handed on
            self._ended = True
            raise event_error(event.to_dict())
        self._begun = True
        if event.response is not None:
            self.request_id = event.response.id
        self._ended = event.type in TERMINAL_EVENTS
        return event

    async def _recv(self) -> ResponseEvent:
        try:
            async with asyncio.timeout(self._read_timeout_s):
                return await self._lane.recv()
        except TimeoutError:
            raise APITimeoutError(f"no event within {self._read_timeout_s:g} s") from None

    async def aclose(self) -> None:
        if (sending := self._abandon()) is not None:
            await asyncio.wait([sending])

    def drop(self) -> None:
        self._abandon()

    def _abandon(self) -> asyncio.Task[None] | None:
        if self._ended:
            return None
        self._ended = True
        return self._lane.abandon(self.request_id)


class Session:
    """One open socket. Made by `client.responses.connect()`."""

    def __init__(
        self, socket: aiohttp.ClientWebSocketResponse, limits: Limits, read_timeout_s: float | None
    ) -> None:
        self.limits = limits
        self.read_timeout_s = read_timeout_s
        self.default = Lane(self, None)
        self._socket = socket
        self._lanes: dict[str, Lane] = {}
        self._own: set[str] = set()  # lanes of create(), used again and again
        self._closed: WebSocketClosedError | None = None
        self._sending: set[asyncio.Task[None]] = set()
        self._reading = asyncio.create_task(self._read())

    def __repr__(self) -> str:
        return f"Session({'open' if self._closed is None else self._closed}, {len(self._lanes)} lanes)"

    def lane(self, stream_id: str) -> Lane:
        """The lane of that name, made at its first use.

        Raises:
            ValueError: a name the wire does not take.
            WebSocketQueueFullError: max_lanes names are in use.
        """
        if not _STREAM_ID.fullmatch(stream_id):
            raise ValueError(f"a stream_id has 1 to 256 of A-Z a-z 0-9 _ . -, got {stream_id[:80]!r}")
        if stream_id not in self._lanes:
            if len(self._lanes) >= self.limits.max_lanes:
                raise WebSocketQueueFullError(f"all {self.limits.max_lanes} lanes of this session are in use")
            self._lanes[stream_id] = lane = Lane(self, stream_id)
            if self._closed is not None:
                lane.fail(self._closed)
        return self._lanes[stream_id]

    async def create(self, **fields: Any) -> Stream[ResponseEvent]:
        """Ask for a response beside all others, on a lane of its own.

        Raises: as lane() and Lane.send.
        """
        return await self._free_lane().create(**fields)

    def stream(self, **fields: Any) -> StreamManager[ResponseEvent, ResponseEvent, Response]:
        """As create(), adding up: `async with session.stream(input=...) as s`."""
        return StreamManager(partial(self.create, **fields), ResponseAccumulator())

    async def send(self, event: dict[str, Any]) -> None:
        """Send one event as it is.

        Raises:
            WebSocketClosedError: the socket is closed.
        """
        if self._closed is not None:
            raise copy.copy(self._closed)
        try:
            await self._socket.send_str(msgspec.json.encode(event).decode())
        except (ConnectionError, aiohttp.ClientError) as error:
            raise WebSocketClosedError(self._socket.close_code or 1006, str(error)) from None

    def send_soon(self, sending: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """For those who cannot wait, or may be cancelled while they do."""
        task = asyncio.create_task(_quietly(sending))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
        return task

    async def aclose(self) -> None:
        """Close the socket, which cancels every response. Idempotent."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        await self._socket.close()
        self._end(WebSocketClosedError(1000, "closed by this side"))

    close = aclose

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    def _free_lane(self) -> Lane:
        for stream_id in self._own:
            if not (lane := self._lanes[stream_id]).busy:
                lane.abandon()
                return lane
        stream_id = f"own-{len(self._own)}"
        lane = self.lane(stream_id)
        self._own.add(stream_id)
        return lane

    async def _read(self) -> None:
        try:
            while (message := await self._socket.receive()).type is aiohttp.WSMsgType.TEXT:
                self._dispatch(event_reader.read(message.data), len(message.data))
            self._end(_closed(self._socket, message))
        except APIError as error:
            self._end(WebSocketClosedError(1002, str(error)))
            await self._socket.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)

    def _dispatch(self, event: ResponseEvent, num_bytes: int) -> None:
        if event.stream_id is not None:
            if (lane := self._lanes.get(event.stream_id)) is not None:
                lane.deliver(event, num_bytes)
            return
        self.default.deliver(event, num_bytes)
        if event.type == "error" and _is_about_all(event):
            for lane in self._lanes.values():
                lane.fail(event_error(event.to_dict()))

    def _end(self, error: WebSocketClosedError) -> None:
        if self._closed is None:
            self._closed = error
            for lane in (self.default, *self._lanes.values()):
                lane.fail(error)


class SessionManager:
    """What `connect()` returns: `async with` opens the socket, and closes it at the end."""

    def __init__(self, http: Http, make_call: Callable[[], Call], retries: Retries, limits: Limits) -> None:
        self._http = http
        self._make_call = make_call
        self._retries = retries
        self._limits = limits
        self._session: Session | None = None

    async def __aenter__(self) -> Session:
        call = self._make_call()
        socket = await self._http.upgrade(call, self._retries, self._limits.max_event_bytes)
        self._session = Session(socket, self._limits, call.timeout.read)
        return self._session

    async def __aexit__(self, *exc_info: object) -> None:
        if self._session is not None:
            await self._session.aclose()


def _is_about_all(event: ResponseEvent) -> bool:
    fields = event.error if isinstance(event.error, dict) else {}
    return str(fields.get("code", "")).startswith("websocket_connection")


def _closed(socket: aiohttp.ClientWebSocketResponse, message: aiohttp.WSMessage) -> WebSocketClosedError:
    if message.type is aiohttp.WSMsgType.BINARY:
        return WebSocketClosedError(1003, "the server sent a binary frame")
    reason = message.extra if isinstance(message.extra, str) else ""
    return WebSocketClosedError(socket.close_code or 1006, reason)


async def _quietly(sending: Coroutine[Any, Any, None]) -> None:
    try:
        await sending
    except APIError:
        pass  # the socket is closed, and with it everything that could be cancelled
