"""A lane of a WebSocket session: one line of responses, in order; and its responses as Streams.

The client's loop. It never knows sockets, or the other lanes.
"""

import asyncio
import copy
from collections import deque
from collections.abc import Coroutine
from functools import partial
from typing import Any, Protocol

import msgspec

from ..wire.sse import MAX_EVENT_BYTES
from .accumulate import ResponseAccumulator
from .errors import APIError, APITimeoutError, WebSocketQueueFullError, event_error
from .message_stream import StreamManager
from .replies import Response, ResponseEvent
from .stream import TERMINAL_EVENTS, Stream

_OPENERS = ("response.create", "response.attach")  # what a lane is busy with until a terminal event


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What a session may hold."""

    max_event_bytes: int = MAX_EVENT_BYTES  # of one frame: the terminal one repeats the whole answer
    max_bytes_per_lane: int = 16 << 20  # unread; about 80,000 tokens
    max_lanes: int = 32  # with a name; OpenAI's own limit


class Wire(Protocol):
    """What a lane needs of its session."""

    limits: Limits
    read_timeout_s: float | None

    async def send(self, event: dict[str, Any]) -> None: ...

    def send_soon(self, sending: Coroutine[Any, Any, None]) -> asyncio.Task[None]: ...


class Lane:
    """One line of responses, in order, beside the other lanes. One reader.

    Raises, in recv and whatever reads:
        WebSocketClosedError: with the close code.
        WebSocketQueueFullError: this lane's reader fell behind; its response was cancelled.
    """

    def __init__(self, session: Wire, stream_id: str | None) -> None:
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
