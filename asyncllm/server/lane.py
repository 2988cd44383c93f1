"""One lane of a socket: what it was asked for, in order, and the response that runs in it, whose Sink it is.

Loop thread. It never knows frames that come in, nor the other lanes.
"""

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from ..errors import AsyncLLMError, InvalidRequest
from ..wire.obfuscation import Obfuscated
from ..wire.requests import StreamOptions, wants_obfuscation
from ..wire.response_events import Framing, SocketFrames
from ..wire.responses import Update, decode_attach, decode_response
from .completions import check_model
from .events import Outflow
from .live import LiveResponse

if TYPE_CHECKING:  # which makes its lanes
    from .websocket import Connection


class SocketLimit(InvalidRequest):
    """What one socket may have; its code says which."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


class Order:
    """A create or an attach, waiting its turn or running."""

    def __init__(self, kind: str, message: bytes) -> None:
        self.kind = kind
        self.message = message
        self.cancelled = False
        self.update: Update | None = None  # what those say together that came before it ran, checked as they came

    def take_update(self) -> Update | None:
        update, self.update = self.update, None
        return update


class Lane:
    """One line of responses, in order, as the Sink of the one that runs."""

    __slots__ = (
        "_connection", "_order", "_over", "_task", "cut_off", "framing", "give_patience", "outflow", "queue",
        "running", "stream_id", "write",
    )  # fmt: skip

    def __init__(self, connection: "Connection", stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.framing: Framing = SocketFrames(stream_id)  # of what runs
        self.queue: deque[Order] = deque()
        self.running: LiveResponse | None = None
        self.write = connection.push
        self.outflow: Outflow | None = connection.outflow
        self.give_patience = connection.give_patience
        self.cut_off = connection.cut_off
        self._connection = connection
        self._task: asyncio.Task[None] | None = None
        self._over: asyncio.Future[None] | None = None
        self._order: Order | None = None

    def put(self, kind: str, message: bytes) -> None:
        self.queue.append(Order(kind, message))
        if self._task is None:
            self._start()

    def _start(self) -> None:
        self._connection.num_busy += 1
        self._task = asyncio.create_task(self._work())
        self._task.add_done_callback(self._rest)  # also where it is cancelled before it begins

    @property
    def coming(self) -> Order | None:
        """What will run next, if nothing runs; it may be at work already, and not have its response yet."""
        if self.running is not None and self.running.outcome is None:
            return None
        if self._order is not None and self.running is None:
            return self._order
        return self.queue[0] if self.queue else None

    def cancel(self) -> None:
        """What runs here, or will next."""
        if (order := self.coming) is not None:
            order.cancelled = True
        elif self.running is not None:
            self.running.cancel()

    def end(self, data: bytes) -> None:
        """Of the Sink: the terminal event."""
        try:
            self.write(data)
        finally:
            if self._over is not None and not self._over.done():
                self._over.set_result(None)

    def replaced(self) -> None:
        """Of the Sink: another connection has attached to what ran here."""
        taken = SocketLimit("response_taken", "another connection follows this response")
        self._connection.refuse(taken, self.stream_id)
        self.end(b"")

    def lost(self, *, said_goodbye: bool) -> None:
        self.queue.clear()
        if self.running is not None:
            self.running.detach(self, for_good=said_goodbye)
        if self._task is not None:
            self._task.cancel()

    async def _work(self) -> None:
        """Run what is queued, one after the other; the writing is done by callbacks meanwhile."""
        while self.queue:
            async with self._connection.active:
                if self.queue:
                    await self._run(self.queue.popleft())

    def _rest(self, task: "asyncio.Task[None]") -> None:
        self._task = None
        self._connection.num_busy -= 1
        if self.queue and not task.cancelled():  # put between its last look and this callback
            self._start()
        self._connection.lane_rests()

    async def _run(self, order: Order) -> None:
        self._order = order
        try:
            await (self._create(order) if order.kind == "response.create" else self._attach(order))
        except Exception as error:
            self._connection.refuse(error, self.stream_id)
        finally:
            if self.running is not None:
                self.running.detach(self)  # where following it has failed: it would go on talking
            self.running = self._order = None

    async def _create(self, order: Order) -> None:
        connection = self._connection
        body = decode_response(order.message)
        check_model(connection.llm, body.model)
        if (update := order.take_update()) is not None:  # a moment later it could be some tokens ahead
            update.change(body)
        live = await connection.responses.start(body, connection)
        await self._follow(live, -1, order, body.stream_options)

    async def _attach(self, order: Order) -> None:
        attach = decode_attach(order.message)
        live = self._connection.responses.get(attach.response_id)
        after = -1 if attach.starting_after is None else attach.starting_after
        await self._follow(live, after, order, attach.stream_options)

    async def _follow(self, live: LiveResponse, after: int, order: Order, options: StreamOptions | None) -> None:
        frames = SocketFrames(self.stream_id)
        self.framing = Obfuscated(frames) if wants_obfuscation(options) else frames
        live.check_after(after, "starting_after")
        self._over = asyncio.get_running_loop().create_future()
        self.running = live
        if (update := order.take_update()) is not None:
            try:
                self._connection.apply(live, update)
            except AsyncLLMError as error:  # of the update alone
                self._connection.refuse(error, self.stream_id)
        live.attach(self, after)
        if order.cancelled:
            live.cancel()
        await self._over
