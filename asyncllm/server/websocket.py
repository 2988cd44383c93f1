"""GET /v1/responses, upgraded: OpenAI's Responses mode, many responses over one socket by lanes.

Loop thread. It never knows how a response comes about.

    -> response.create, response.cancel, response.update, response.attach     <- response.* events, error
"""

import asyncio
import copy
import logging
import time

from aiohttp import HttpVersion11, WSCloseCode, WSMsgType, web

from ..errors import AsyncLLMError, Draining, InvalidRequest, QueueFull
from ..llm import AsyncLLM
from ..wire.errors import error_reply
from ..wire.response_events import error_frame
from ..wire.responses import Update, check_stream_id, decode_cancel, decode_envelope, decode_update
from .events import OUTFLOWS, Outflow
from .gate import LLM, SETTINGS, check_density, check_origin
from .kept import RESPONSES, ResponseNotFound, Responses
from .lane import Lane, SocketLimit
from .live import LiveResponse
from .rates import RATES, Rates
from .settings import Settings

log = logging.getLogger(__name__)

_OPENING = (
    "a WebSocket opens over HTTP/1.1, without a body, with Connection: Upgrade, Sec-WebSocket-Version: 13 and a "
    "Sec-WebSocket-Key of 16 bytes in base64"
)
_CLOSE_S = 2.0  # for the other side's half of the closing handshake


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
    if not _opens(socket, request):
        if request.headers.get("Upgrade", "").lower() == "websocket":
            raise web.HTTPBadRequest(text=_OPENING, headers={"Sec-WebSocket-Version": "13"})
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


def _opens(socket: web.WebSocketResponse, request: web.Request) -> bool:
    """A body would be read as frames by one and as a body by another."""
    try:
        is_whole = socket.can_prepare(request).ok
    except ValueError:  # a key beyond ASCII
        return False
    return is_whole and not request.body_exists and request.version == HttpVersion11


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

    async def drain_with_engine(self) -> None:
        """When the server drains, close each socket as its last response ends: 1001, come back elsewhere."""
        await self._llm.wait_draining()
        for connection in list(self._open):
            connection.drain()

    async def close(self) -> None:
        await asyncio.gather(*[connection.close(WSCloseCode.GOING_AWAY) for connection in list(self._open)])


SOCKETS = web.AppKey("sockets", Sockets)


class Connection:
    """One socket: its lanes, and the frames that go out in one write a step, however many lanes had something."""

    __slots__ = (
        "_closing", "_draining", "_frames", "_lanes", "_num_bytes", "_opened_s", "_pace", "_rates", "_settings",
        "_socket", "active", "dirty", "llm", "num_busy", "outflow", "responses",
    )  # fmt: skip

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
        self._pace = llm.pace
        self.responses = responses
        self.active = asyncio.Semaphore(settings.max_active_per_socket)
        self._settings = settings
        self._socket = socket
        self._rates = rates
        self.outflow = outflow
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
        self.outflow.give_patience(self._num_bytes + num_unread_bytes)

    def push(self, frames: bytes) -> None:
        """Send frames with whatever else this step has for this socket: at once, if no other lane could have any."""
        if self.num_busy <= 1 and not self._frames:
            self._pace.write((self.outflow, frames))
            return
        if self.outflow.transport.is_closing():
            return
        self._frames.append(frames)
        self._num_bytes += len(frames)
        if not self.dirty:
            self._pace.mark(self, at_once=True)

    def flush(self) -> bool:
        if not self.outflow.has_room():
            self.outflow.give_patience(self._num_bytes)
            return False
        data = self._frames[0] if len(self._frames) == 1 else b"".join(self._frames)
        self._frames, self._num_bytes = [], 0
        if data:
            self._pace.write((self.outflow, data))
        return True

    def cut_off(self) -> None:
        """Of the Reader: the socket is gone with all its lanes."""
        self.outflow.cut_off()

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
                self._check_room(len(message))
                self._rates.spend()
                self._lane(stream_id).put(kind, message)
            case "response.cancel":
                self._cancel(stream_id, decode_cancel(message).response_id)
            case "response.update":
                self._update(stream_id, message)
            case _:
                raise SocketLimit("unknown_event_type", f"unknown event type {kind[:80]!r}")

    def _check_room(self, num_bytes: int) -> None:
        if self.llm.draining:
            raise Draining("the server is stopping")
        if time.monotonic() - self._opened_s > self._settings.socket_lifetime_s:
            raise SocketLimit("websocket_connection_limit_reached", "this socket is old; open another one")
        waiting = [len(order.message) for lane in self._lanes.values() for order in lane.queue]
        if len(waiting) >= self._settings.max_queued_per_socket:
            raise SocketLimit("websocket_queue_full", "too many requests are waiting on this socket")
        if waiting and sum(waiting) + num_bytes > self._settings.max_body_bytes:
            raise SocketLimit("websocket_queue_full", "the requests that wait on this socket are too large together")

    def _lane(self, stream_id: str | None) -> Lane:
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
            self.llm.check_update(**update.changes())  # now, and kept as one: they may come without end
            if order.update is None:
                order.update = update
            else:
                update.change(order.update)
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
        said_goodbye = close_code in (WSCloseCode.OK, WSCloseCode.GOING_AWAY) and not self._draining
        for lane in self._lanes.values():
            try:
                lane.lost(said_goodbye=said_goodbye)
            except Exception:  # the others run for nobody too
                log.exception("unexpected error as a lane ends with its socket")
        self._lanes.clear()  # they name it too, and all would wait for the collector
        self.responses.disown(self)


def _is_utf8(message: bytes) -> bool:
    try:
        message.decode()
    except UnicodeDecodeError:
        return False
    return True
