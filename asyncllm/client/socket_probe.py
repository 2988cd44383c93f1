"""Responses over WebSockets under a stopwatch: OpenAI's Responses mode, some lanes a socket.

A load process's loop. It never knows plans, percentiles or what was said.

Times are taken in data_received, as over HTTP (probe.py): aiohttp's own client would add a task's wake-up.
"""

import asyncio
import base64
import os
import ssl
import time
from typing import cast

import msgspec

from ..wire import frames
from .probe import Answer
from .tally import Measured, Tally, decode


class Ask:
    """One response that is waited for."""

    def __init__(self, measured: Measured) -> None:
        self.tally = Tally(measured)
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end(self) -> None:
        self.tally.finish()
        if not self.over.done():
            self.over.set_result(None)


class Upgrade:
    """A server's answer to the wish for a WebSocket."""

    def __init__(self) -> None:
        self._head = b""
        self._measured = Measured()
        self._refusal: Answer | None = None

    def feed(self, data: bytes, now_s: float) -> bytes | None:
        """What follows the server's agreement; None while that has not come.

        Raises:
            ValueError: it refuses, and says why.
        """
        if self._refusal is None:
            self._head += data
            head, end, rest = self._head.partition(b"\r\n\r\n")
            if not end:
                return None
            if head.startswith(b"HTTP/1.1 101 "):
                return rest
            self._refusal, data = Answer(self._measured), self._head
        if self._refusal.feed(data, now_s):
            raise ValueError(self._measured.error or "the upgrade was answered as if it were a request")
        return None


class Socket(asyncio.Protocol):
    """A socket; in each of its lanes one response after another. What is asked before the upgrade waits for it."""

    def __init__(self, head: bytes) -> None:
        self.is_open = True
        self._head = head
        self._transport: asyncio.Transport | None = None
        self._upgrade: Upgrade | None = Upgrade()  # None: agreed to
        self._frames = frames.FrameReader()
        self._asks: dict[str | None, Ask] = {}
        self._unsent: list[bytes] = []

    async def ask(self, body: bytes, lane: str | None, measured: Measured) -> None:
        """Ask for a response, and wait for its end."""
        self._asks[lane] = ask = Ask(measured)
        if lane is not None:
            body = b'%b,"stream_id":%b}' % (body[:-1], msgspec.json.encode(lane))
        self._unsent.append(frames.masked_frame(body))
        if self._upgrade is None:
            self._send()
        await ask.over

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass
        key = base64.b64encode(os.urandom(16))
        self._transport.write(b"%b\r\nSec-WebSocket-Key: %b\r\n\r\n" % (self._head, key))

    def connection_lost(self, error: Exception | None) -> None:
        self.fail("the connection was closed")

    def data_received(self, data: bytes) -> None:
        now_s = time.monotonic()
        try:
            for opcode, payload in self._frames.feed(self._upgraded(data, now_s)):
                self._take(opcode, payload, now_s)
        except (ValueError, msgspec.DecodeError) as error:
            self.fail(str(error))

    def fail(self, message: str) -> None:
        """The socket is of no more use, nor is what was asked of it."""
        self.is_open = False
        asks, self._asks = self._asks, {}
        for ask in asks.values():
            ask.tally.fail(message)
            ask.end()
        if self._transport is not None:
            self._transport.close()

    def close(self) -> None:
        if self._upgrade is None and self._transport is not None:
            self._transport.write(frames.masked_frame((1000).to_bytes(2), frames.CLOSE))
        self.fail("closed by this side")

    def _upgraded(self, data: bytes, now_s: float) -> bytes:
        """What of it are frames."""
        if self._upgrade is None:
            return data
        if (rest := self._upgrade.feed(data, now_s)) is None:
            return b""
        self._upgrade = None
        self._send()
        return rest

    def _send(self) -> None:
        if self._transport is not None and self.is_open:
            self._transport.write(b"".join(self._unsent))
        self._unsent.clear()

    def _take(self, opcode: int, payload: bytes, now_s: float) -> None:
        if opcode == frames.TEXT:
            self._event(payload, now_s)
        elif opcode == frames.PING and self._transport is not None:
            self._transport.write(frames.masked_frame(payload, frames.PONG))
        elif opcode == frames.CLOSE:
            self.fail(f"the server closed the socket with {int.from_bytes(payload[:2])}")

    def _event(self, payload: bytes, now_s: float) -> None:
        said = decode(payload)
        ask = self._asks.get(said.stream_id)
        if ask is not None:
            ask.tally.take(said, now_s)
            if ask.tally.done:
                del self._asks[said.stream_id]
                ask.end()
        elif said.type == "error":  # about the socket, or about what could not be told to be whose
            self.fail(f"an error of no lane: {payload[:200].decode('utf-8', 'replace')}")


class SocketPool:
    """Sockets to one server: a free lane, or a new socket; never a wait for a lane."""

    def __init__(self, host: str, port: int, tls: ssl.SSLContext | None, head: bytes, num_lanes: int) -> None:
        self._where = (host, port)
        self._tls = tls
        self._head = head
        self._names = [f"lane-{i}" for i in range(num_lanes)] if num_lanes > 1 else [None]
        self._sockets: list[Socket] = []
        self._free: list[tuple[Socket, str | None]] = []
        self._connecting: set[asyncio.Task[None]] = set()

    async def ask(self, request: bytes, planned_s: float) -> Measured:
        """Send one response.create; whatever goes wrong is in the Measured."""
        measured = Measured(planned_s=planned_s, sent_s=time.monotonic())
        socket, lane = self._take()
        await socket.ask(request, lane, measured)
        self._free.append((socket, lane))
        return measured

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()

    def _take(self) -> tuple[Socket, str | None]:
        while self._free:
            if (free := self._free.pop())[0].is_open:
                return free
        socket = Socket(self._head)
        self._sockets.append(socket)
        task = asyncio.create_task(self._connect(socket))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        self._free += [(socket, name) for name in reversed(self._names)]
        return self._free.pop()

    async def _connect(self, socket: Socket) -> None:
        host, port = self._where
        try:
            await asyncio.get_running_loop().create_connection(lambda: socket, host, port, ssl=self._tls)
        except OSError as error:
            socket.fail(str(error) or type(error).__name__)
