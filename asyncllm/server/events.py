"""One SSE response: opened with its first event, closed whole or broken off, never left half said.

Loop thread. It never knows what the events say.

Between the first event and the last no task wakes up: write() puts a framed chunk into the transport from
whatever callback has one. aiohttp's own write() costs 4 us more for its coroutine and drains only what is
paused; how full the transport is, and for how long, is looked at here.
"""

import asyncio
import contextlib
import os
import socket
import sys
from typing import Self
from weakref import WeakSet

from aiohttp import HttpVersion11, web

from ..clock import CLOCK
from ..wire.errors import error_event
from .gate import LLM, SETTINGS
from .settings import Settings

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx would hold the tokens back
}
# With more than this in the transport text is gathered, not written: about 70 events.
FULL_BYTES = 16 << 10
# The kernel's own 2.5 MB would hide a reader that does not read from us.
_KERNEL_BUFFER_BYTES = 128 << 10
_KEEP_ALIVE = b": keep-alive\n\n"
_CHUNK_HEADS = tuple([b"%x\r\n" % num_bytes for num_bytes in range(1024)])


class Outflow:
    """What one client's transport takes, and how long it has taken nothing."""

    __slots__ = ("__weakref__", "_fd", "_full_since_s", "_settings", "may_be_full", "transport")

    def __init__(self, transport: asyncio.Transport, settings: Settings) -> None:
        self.transport = transport
        self.may_be_full = True  # the last write has left something, or it is not known: has_room() tells
        self._settings = settings
        self._full_since_s = 0.0
        # Of a plain socket: what TLS has to say goes through its transport, and Windows has other descriptors.
        self._fd = -1
        if os.name == "posix" and transport.get_extra_info("sslcontext") is None:
            if (peer := transport.get_extra_info("socket")) is not None:
                self._fd = peer.fileno()
        tune(transport, settings)

    def write(self, data: bytes) -> None:
        """transport.write(), by a way that is 1 us shorter where nothing waits in it, which is nearly always."""
        transport = self.transport
        if transport.is_closing():  # its descriptor may be another client's already
            return
        if self._fd >= 0 and not transport.get_write_buffer_size():
            try:
                num = os.write(self._fd, data)
            except OSError:  # full, or broken: the transport finds out itself, and knows what to do
                num = 0
            if num == len(data):
                self.may_be_full, self._full_since_s = False, 0.0
                return
            data = data[num:]
        self.may_be_full = True
        transport.write(data)

    def has_room(self) -> bool:
        """Whether text may be written; if not, give_patience() is to be called. For each token it is asked only where
        may_be_full."""
        if self.transport.get_write_buffer_size() > FULL_BYTES:
            return False
        self._full_since_s = 0.0
        return True

    def cut_off(self) -> None:
        """Close at once: what is unsent is lost."""
        self.transport.abort()

    def give_patience(self, num_unread_bytes: int) -> None:
        """There is no room. A client that reads nothing for send_timeout_s, or leaves more than max_unread_bytes
        waiting, is cut off: an event to say so would not fit either."""
        now_s = CLOCK.now_s()
        self._full_since_s = self._full_since_s or now_s
        waited_s = now_s - self._full_since_s
        if waited_s > self._settings.send_timeout_s or num_unread_bytes > self._settings.max_unread_bytes:
            self.cut_off()


class Outflows:
    """Every Outflow of this server, for as long as somebody writes to it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: WeakSet[Outflow] = WeakSet()

    def __repr__(self) -> str:
        return f"Outflows({len(self._open)}, {self.num_unsent_bytes} bytes unsent)"

    @property
    def num_unsent_bytes(self) -> int:
        """What their transports hold: written, and not taken by the kernel."""
        return sum([outflow.transport.get_write_buffer_size() for outflow in self._open])

    def open(self, transport: asyncio.Transport) -> Outflow:
        outflow = Outflow(transport, self._settings)
        self._open.add(outflow)
        return outflow


OUTFLOWS = web.AppKey("outflows", Outflows)


def tune(transport: asyncio.Transport, settings: Settings) -> None:
    """Bound what the kernel buffers, and have it find out about peers that are gone without a word."""
    peer = transport.get_extra_info("socket")
    if peer is None or peer.family not in (socket.AF_INET, socket.AF_INET6):
        return
    with contextlib.suppress(OSError):  # closed in this moment: the first write says so
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
        if sys.platform == "linux":
            # Unacknowledged, or a window of nought: both end here. Silent: three unanswered probes.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(settings.peer_timeout_s * 1000))
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, int(settings.peer_timeout_s / 2)))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, max(1, int(settings.peer_timeout_s / 6)))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class EventResponse:
    """Writes a request's events. Nothing is sent before begin(), so an early error can still be plain JSON; one that
    leaves its context later cannot, and closes the connection."""

    __slots__ = ("_chunked", "_pace", "_request", "_response", "_settings", "begun", "outflow")

    def __init__(self, request: web.Request, headers: dict[str, str] | None = None) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=HEADERS | (headers or {}))
        self._settings = request.app[SETTINGS]
        self._pace = request.app[LLM].pace
        self.outflow: Outflow | None = None  # from begin() on
        self._chunked = False
        self.begun = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        if kind is not None and self.begun:
            self.cut_off()

    async def begin(self) -> None:
        """Send the headers. Idempotent.

        Raises:
            ConnectionError: the client is gone.
        """
        if self.begun:
            return
        if (transport := self._request.transport) is None:
            raise ConnectionResetError("the client has left")
        self.outflow = self._request.app[OUTFLOWS].open(transport)
        if self._request.version < HttpVersion11:
            self._response.force_close()  # without chunks nothing else ends it
        await self._response.prepare(self._request)
        self._chunked = self._response.headers.get("Transfer-Encoding") == "chunked"  # not for HTTP/1.0
        self.begun = True

    def give_patience(self, num_unread_bytes: int) -> None:
        """As Outflow's."""
        if self.outflow is not None:
            self.outflow.give_patience(num_unread_bytes)

    def write(self, data: bytes) -> None:
        """Send events, in one write, from any callback. To a client that is gone: nothing."""
        assert (outflow := self.outflow) is not None, "begin() comes first"
        if not (num_bytes := len(data)):  # an empty chunk would end the body
            return
        if self._chunked:
            head = _CHUNK_HEADS[num_bytes] if num_bytes < len(_CHUNK_HEADS) else b"%x\r\n" % num_bytes
            data = b"".join((head, data, b"\r\n"))
        self._pace.write((outflow, data))

    async def end(self, data: bytes) -> web.StreamResponse:
        """Send the last events and the terminator of the body in one write.

        Raises:
            ConnectionError: the client is gone, or has not read for send_timeout_s and was cut off.
        """
        await self.begin()
        try:
            async with asyncio.timeout(self._settings.send_timeout_s):
                await self._response.write_eof(data)
        except TimeoutError:
            self.cut_off()
            raise ConnectionResetError("the client did not read") from None
        return self._response

    async def fail(self, error: Exception, data: bytes = b"") -> web.StreamResponse:
        """Send the error as an event behind the last data, then close without the terminator: a clean end would
        read as an answer."""
        await self.begin()
        self.write(data + error_event(error))
        if (transport := self._request.transport) is not None:
            transport.close()
        return self._response

    def cut_off(self) -> None:
        """Close the connection at once, in the middle of whatever it says."""
        if (transport := self._request.transport) is not None:
            transport.abort()

    async def comment_until(self, over: "asyncio.Future[None]") -> None:
        """Wait; with sse_comment_s a comment goes out as often, for proxies that take silence for death."""
        every_s = self._settings.sse_comment_s
        while not over.done():
            await asyncio.wait([over], timeout=every_s or None)
            if not over.done() and every_s:
                await self.begin()
                if self.outflow is None or self.outflow.has_room():
                    self.write(_KEEP_ALIVE)
