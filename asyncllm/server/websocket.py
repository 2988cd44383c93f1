"""GET /v1/responses, upgraded: OpenAI's Responses mode, many responses over one socket by lanes.

Loop thread. It never knows how a response comes about; a lane is its Sink.

    -> response.create, response.cancel, response.update, response.attach     <- response.* events, error

Longer than most: a socket, its lanes and what they queue end in each other's ways, and are read together.
"""

import asyncio
import copy
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from functools import partial

from aiohttp import WSCloseCode, WSMsgType, web

from ..errors import AsyncLLMError, Draining, InvalidRequest, QueueFull
from ..llm import AsyncLLM
from ..wire.errors import error_reply
from ..wire.obfuscation import Obfuscated
from ..wire.requests import StreamOptions, wants_obfuscation
from ..wire.response_events import Framing, SocketFrames, error_frame
from ..wire.responses import (
    ResponseRequest,
    Update,
    check_stream_id,
    decode_attach,
    decode_cancel,
    decode_envelope,
    decode_response,
    decode_update,
)
from .completions import check_model
from .events import OUTFLOWS, Outflow
from .gate import LLM, SETTINGS, check_density, check_origin
from .kept import RESPONSES, ResponseNotFound, Responses
from .live import LiveResponse
from .rates import RATES, Rates
from .settings import Settings

log = logging.getLogger(__name__)

_CLOSE_S = 2.0  # for the other side's half of the closing handshake


class SocketLimit(InvalidRequest):
    """What one socket may have; its code says which."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


async def upgrade(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses: a socket's life. Refused before the upgrade, while there is a status to say it with."""
    settings, sockets = request.app[SETTINGS], request.app[SOCKETS]
    check_origin(request)
    sockets.check_open()
    socket = web.WebSocketResponse(
        autoclose=False,  # it takes codes that nobody may send
        compress=False,  # a deflate for each token
        decode_text=False,
        heartbeat=settings.heartbeat_s,
        max_msg_size=settings.max_body_bytes + 1,  # the first size that is refused
        timeout=_CLOSE_S,
    )
    if not socket.can_prepare(request).ok:
        raise web.HTTPUpgradeRequired(text="GET /v1/responses is a WebSocket; for one response, POST it")
    await socket.prepare(request)
    if (transport := request.transport) is None:
        return socket
    outflow = request.app[OUTFLOWS].open(transport)
    connection = Connection(request.app[LLM], request.app[RESPONSES], settings, socket, outflow, request.app[RATES])
    sockets.add(connection)
    try:
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await connection.take(message.data)
            elif message.type is WSMsgType.BINARY:
                connection.refuse(SocketLimit("binary_not_supported", "a message is a text frame of JSON"), None)
        if not socket.closed:  # theirs came first
            await socket.close(code=_answer(socket.close_code), drain=False)
    finally:
        sockets.discard(connection)
        connection.lost(socket.close_code)
    return socket


def _answer(code: int | None) -> int:
    """To a close with this code, or none. Codes that are for oneself, or that nobody has assigned, are not sent."""
    may_be_sent = not code or (code != WSCloseCode.ABNORMAL_CLOSURE and code < 5000)
    return WSCloseCode.OK if may_be_sent else WSCloseCode.PROTOCOL_ERROR


class Sockets:
    """The open sockets of this server."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self._llm = llm
        self._settings = settings
        self._open: set[Connection] = set()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def num_unsent_bytes(self) -> int:
        return sum([connection.num_unsent_bytes for connection in self._open])

    def check_open(self) -> None:
        """
        Raises:
            QueueFull, Draining, EngineDead: no more sockets now.
        """
        if self._llm.dead is not None:
            raise copy.copy(self._llm.dead)
        if self._llm.draining:
            raise Draining("the server is stopping")
        if len(self._open) >= self._settings.max_sockets:
            raise QueueFull(f"{len(self._open)} sockets are open; try again later")

    def add(self, connection: "Connection") -> None:
        self._open.add(connection)

    def discard(self, connection: "Connection") -> None:
        self._open.discard(connection)

    async def drain_with(self, llm: AsyncLLM) -> None:
        """When the server drains, close each socket as its last response ends: 1001, come back elsewhere."""
        await llm.wait_draining()
        for connection in list(self._open):
            connection.drain()

    async def close(self) -> None:
        await asyncio.gather(*[connection.close(WSCloseCode.GOING_AWAY) for connection in list(self._open)])


SOCKETS = web.AppKey("sockets", Sockets)


async def draining(app: web.Application) -> AsyncIterator[None]:
    """cleanup_ctx: watches for the drain while the server lives."""
    watching = asyncio.create_task(app[SOCKETS].drain_with(app[LLM]))
    yield
    watching.cancel()
    await asyncio.wait([watching])


class Connection:
    """One socket: its lanes, and the frames that go out in one write a step, however many lanes had something."""

    def __init__(
        self,
        llm: AsyncLLM,
        responses: Responses,
        settings: Settings,
        socket: web.WebSocketResponse,
        outflow: Outflow,
        rates: Rates,
    ) -> None:
        self.dirty = False
        self.llm = llm
        self.responses = responses
        self.active = asyncio.Semaphore(settings.max_active_per_socket)
        self._settings = settings
        self._socket = socket
        self._rates = rates
        self._outflow = outflow
        self.has_room = self._outflow.has_room
        self._frames: list[bytes] = []
        self._num_bytes = 0
        self.num_busy = 0  # lanes at work
        self._lanes: dict[str | None, Lane] = {}
        self._opened_s = time.monotonic()
        self._draining = False
        self._closing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"Connection({len(self._lanes)} lanes, {self._num_bytes} bytes unsent)"

    # -- out --

    @property
    def num_unsent_bytes(self) -> int:
        """Beside what the transport holds."""
        return self._num_bytes

    def give_patience(self, num_unread_bytes: int) -> None:
        self._outflow.give_patience(self._num_bytes + num_unread_bytes)

    def push(self, frames: bytes) -> None:
        """Send frames with whatever else this step has for this socket: at once, if no other lane could have any."""
        if self._outflow.transport.is_closing():
            return
        if self.num_busy <= 1 and not self._frames:
            self.llm.pace.write(self._outflow.transport, frames)
            return
        self._frames.append(frames)
        self._num_bytes += len(frames)
        if not self.dirty:
            self.llm.pace.mark(self, at_once=True)

    def flush(self) -> bool:
        if not self.has_room():
            self._outflow.give_patience(self._num_bytes)
            return False
        data = self._frames[0] if len(self._frames) == 1 else b"".join(self._frames)
        self._frames, self._num_bytes = [], 0
        if data and not self._outflow.transport.is_closing():
            self.llm.pace.write(self._outflow.transport, data)
        return True

    def cut_off(self) -> None:
        """Of the Reader: the socket is gone with all its lanes."""
        self._outflow.cut_off()

    def refuse(self, error: Exception, stream_id: str | None) -> None:
        """An error frame; the socket stays open, if it can be said."""
        if not isinstance(error, AsyncLLMError):
            log.error("unexpected error on a socket", exc_info=error)
        status, body, _ = error_reply(error)
        try:
            self.push(error_frame(status, body, stream_id))
        except Exception:  # or the client would wait for what nobody says
            log.exception("unexpected error while refusing, on a socket that is cut off")
            self.cut_off()

    # -- in --

    async def take(self, message: bytes) -> None:
        """One message of the client's."""
        stream_id = None
        try:
            check_density(message, self.llm.limits)
            envelope = decode_envelope(message)
            stream_id = check_stream_id(envelope.stream_id)
            self._dispatch(envelope.type, stream_id, message)
        except Exception as error:
            if isinstance(error, InvalidRequest) and not _is_utf8(message):
                await self.close(WSCloseCode.INVALID_TEXT)
            else:
                self.refuse(error, stream_id)

    def _dispatch(self, kind: str, stream_id: str | None, message: bytes) -> None:
        match kind:
            case "response.create" | "response.attach":
                self._check_room()
                self._rates.spend()
                self._lane(stream_id).put(kind, message)
            case "response.cancel":
                self._cancel(stream_id, decode_cancel(message).response_id)
            case "response.update":
                self._update(stream_id, message)
            case _:
                raise SocketLimit("unknown_event_type", f"unknown event type {kind[:80]!r}")

    def _check_room(self) -> None:
        if self.llm.draining:
            raise Draining("the server is stopping")
        if time.monotonic() - self._opened_s > self._settings.socket_lifetime_s:
            raise SocketLimit("websocket_connection_limit_reached", "this socket is old; open another one")
        if sum([len(lane.queue) for lane in self._lanes.values()]) >= self._settings.max_queued_per_socket:
            raise SocketLimit("websocket_queue_full", "too many requests are waiting on this socket")

    def _lane(self, stream_id: str | None) -> "Lane":
        lane = self._lanes.get(stream_id)
        if lane is None:
            if stream_id is not None and len(self._lanes.keys() - {None}) >= self._settings.max_lanes:
                message = f"a socket has at most {self._settings.max_lanes} named lanes"
                raise SocketLimit("websocket_stream_limit_reached", message)
            lane = self._lanes[stream_id] = Lane(self, stream_id)
        return lane

    def _cancel(self, stream_id: str | None, response_id: str | None) -> None:
        """What runs in the lane, or the response of that id. One that has ended is no news; one unknown is."""
        if response_id is not None:
            self.responses.get(response_id).cancel()
        elif (lane := self._lanes.get(stream_id)) is not None:
            lane.cancel()

    def _update(self, stream_id: str | None, message: bytes) -> None:
        """What runs in the lane, or will next; or the response of that id."""
        update = decode_update(message)
        lane = self._lanes.get(stream_id)
        if update.response_id is not None:
            self.apply(self.responses.get(update.response_id), update)
        elif lane is not None and (order := lane.coming) is not None:
            order.updates.append(update)
        else:
            self.apply(None if lane is None else lane.running, update)

    def apply(self, live: LiveResponse | None, update: Update) -> None:
        """
        Raises:
            InvalidRequest: naming the field, or saying that nothing runs.
        """
        if live is None or live.request_id is None or not self.llm.update(live.request_id, **update.changes()):
            raise ResponseNotFound("no response to update is running", "response_id")

    # -- the end --

    def drain(self) -> None:
        """Close when nothing runs any more."""
        self._draining = True
        self.lane_rests()

    def lane_rests(self) -> None:
        if self._draining and self._closing is None and not self.num_busy:
            self._closing = asyncio.create_task(self.close(WSCloseCode.GOING_AWAY))

    async def close(self, code: int) -> None:
        self.flush()
        await self._socket.close(code=code)

    def lost(self, close_code: int | None) -> None:
        """The socket is gone: its responses end, but resumable ones whose client did not say goodbye."""
        for lane in self._lanes.values():
            lane.lost(said_goodbye=close_code in (WSCloseCode.OK, WSCloseCode.GOING_AWAY) and not self._draining)
        self.responses.disown(self)


class Order:
    """A create or an attach, waiting its turn or running."""

    def __init__(self, kind: str, message: bytes) -> None:
        self.kind = kind
        self.message = message
        self.cancelled = False
        self.updates: list[Update] = []  # that came before it ran


class Lane:
    """One line of responses, in order, as the Sink of the one that runs."""

    def __init__(self, connection: Connection, stream_id: str | None) -> None:
        self.stream_id = stream_id
        self.framing: Framing = SocketFrames(stream_id)  # of what runs
        self.queue: deque[Order] = deque()
        self.running: LiveResponse | None = None
        self.write = connection.push
        self.has_room = connection.has_room
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
        self.write(data)
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
        self._settle(order, partial(self._change, body))  # a moment later it could be some tokens ahead
        live = await connection.responses.start(body, connection)
        await self._follow(live, -1, order, body.stream_options)

    def _settle(self, order: Order, apply: Callable[[Update], None]) -> None:
        """Whatever updates came before it ran; an error is of its update alone."""
        updates, order.updates = order.updates, []
        for update in updates:
            try:
                apply(update)
            except AsyncLLMError as error:
                self._connection.refuse(error, self.stream_id)

    def _change(self, body: ResponseRequest, update: Update) -> None:
        self._connection.llm.check_update(**update.changes())
        update.change(body)

    async def _attach(self, order: Order) -> None:
        attach = decode_attach(order.message)
        live = self._connection.responses.get(attach.response_id)
        after = -1 if attach.starting_after is None else attach.starting_after
        await self._follow(live, after, order, attach.stream_options)

    async def _follow(self, live: LiveResponse, after: int, order: Order, options: StreamOptions | None) -> None:
        frames = SocketFrames(self.stream_id)
        self.framing = Obfuscated(frames) if wants_obfuscation(options) else frames
        self._over = asyncio.get_running_loop().create_future()
        self.running = live
        self._settle(order, partial(self._connection.apply, live))
        live.attach(self, after)
        if order.cancelled:
            live.cancel()
        await self._over


def _is_utf8(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True
