"""What one client's connection takes: in order, whole, and never another client's."""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop

from asyncllm.clock import CLOCK
from asyncllm.server.events import FULL_BYTES, Outflow
from asyncllm.server.settings import Settings

from .conftest import until


@asynccontextmanager
async def connected() -> AsyncIterator[tuple[asyncio.Transport, socket.socket]]:
    """A server's transport, and the client's socket, which blocks."""
    loop = asyncio.get_running_loop()
    transports: asyncio.Queue[Any] = asyncio.Queue()

    class Protocol(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            transports.put_nowait(transport)

    server = await loop.create_server(Protocol, "127.0.0.1", 0)
    try:
        with socket.create_connection(server.sockets[0].getsockname()) as client:
            client.settimeout(20)
            transport = await transports.get()
            yield transport, client
            transport.abort()
    finally:
        server.close()


async def read(client: socket.socket, num: int) -> bytes:
    def whole() -> bytes:
        data = b""
        while len(data) < num and (more := client.recv(num - len(data))):
            data += more
        return data

    return await asyncio.to_thread(whole)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_all_comes_in_order_whoever_writes_and_however_much(run: Any) -> None:
    """Ours and the transport's own writes, more than the kernel takes, in pieces of all sizes."""

    async def main() -> None:
        async with connected() as (transport, client):
            outflow = Outflow(transport, Settings())
            sent, full = b"", False
            for i in range(400):
                data = b"%d," % i * (1 + i * 37 % 2000)
                (transport if i % 7 == 0 else outflow).write(data)
                sent += data
                full |= not outflow.has_room()
            assert full and transport.get_write_buffer_size() > FULL_BYTES
            assert await read(client, len(sent)) == sent
            await until(lambda: not transport.get_write_buffer_size())
            outflow.write(b"more")
            assert outflow.has_room() and not outflow.may_be_full
            assert await read(client, 4) == b"more"

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_nothing_is_written_to_who_has_been_closed(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of its descriptor may be another's by then."""

    async def main() -> None:
        async with connected() as (transport, _):
            outflow = Outflow(transport, Settings())
            outflow.write(b"x")
            outflow.cut_off()
            monkeypatch.setattr(os, "write", lambda fd, data: pytest.fail("written"))
            outflow.write(b"y")

    run(main())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_who_has_left_raises_in_nobody(run: Any) -> None:
    async def main() -> None:
        async with connected() as (transport, client):
            outflow = Outflow(transport, Settings())
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # leaves by RST
            client.close()
            for _ in range(50):
                outflow.write(b"x" * 1000)
            await asyncio.sleep(0.05)
            assert transport.is_closing()

    run(main())


class Wrapped:
    """A transport over TLS, as far as an Outflow looks."""

    def __init__(self, peer: socket.socket) -> None:
        self.written = b""
        self._peer = peer

    def get_extra_info(self, name: str) -> Any:
        return {"socket": self._peer, "sslcontext": ssl.create_default_context()}.get(name)

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: bytes) -> None:
        self.written += data


def test_what_is_wrapped_in_tls_goes_through_it() -> None:
    near, far = socket.socketpair()
    with near, far:
        transport = Wrapped(near)
        Outflow(transport, Settings()).write(b"secret")  # type: ignore[arg-type]
        assert transport.written == b"secret"
        far.setblocking(False)
        with pytest.raises(BlockingIOError):
            far.recv(1)


class Filled(Wrapped):
    """A plain transport that holds as much as it is told to."""

    num_bytes = 0

    def get_extra_info(self, name: str) -> Any:
        return self._peer if name == "socket" else None

    def get_write_buffer_size(self) -> int:
        return self.num_bytes

    def abort(self) -> None:
        pytest.fail("cut off")


def test_who_was_full_once_has_patience_anew_when_full_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though between the two everything went out at once, and nobody asked for room."""
    now_s = 1.0
    monkeypatch.setattr(CLOCK, "now_s", lambda: now_s)
    near, far = socket.socketpair()
    with near, far:
        transport = Filled(near)
        outflow = Outflow(transport, Settings(send_timeout_s=30))  # type: ignore[arg-type]
        for _ in range(3):
            transport.num_bytes = 2 * FULL_BYTES
            outflow.write(b"waits")
            assert not outflow.has_room()
            outflow.give_patience(0)
            transport.num_bytes, now_s = 0, now_s + 100
            outflow.write(b"goes")
            assert not outflow.may_be_full
