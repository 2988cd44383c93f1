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
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Self

import aiohttp
import msgspec

from .accumulate import ResponseAccumulator
from .errors import APIError, WebSocketClosedError, WebSocketQueueFullError, event_error
from .http import Call, Http
from .lane import Lane, Limits
from .message_stream import StreamManager
from .replies import Response, ResponseEvent
from .retries import Retries
from .stream import Stream, event_reader

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")



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
    if message.type is aiohttp.WSMsgType.CLOSE:
        return WebSocketClosedError(message.data or 1005, reason)  # 0: a close frame without a code
    return WebSocketClosedError(socket.close_code or 1006, reason)


async def _quietly(sending: Coroutine[Any, Any, None]) -> None:
    try:
        await sending
    except APIError:
        pass  # the socket is closed, and with it everything that could be cancelled
