"""One SSE response: opened with its first event, closed whole or broken off, never left half said.

Loop thread. It never knows what the events say.
"""

import asyncio
import contextlib
import socket

from aiohttp import web

from ..wire.errors import error_event
from .gate import SETTINGS

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",  # nginx would hold the tokens back
}
# A transport pauses at 64 KiB and resumes at 16: with no more than this in it, it is not paused and a
# write cannot wait, so the timer (2 us) is spared.
_NEVER_PAUSED_BYTES = 16 << 10
# The kernel's own 2.5 MB would hide a reader that does not read from us.
_KERNEL_BUFFER_BYTES = 128 << 10


class EventResponse:
    """Writes a request's events. Nothing is sent before the first, so an early error can still be plain JSON."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._response = web.StreamResponse(headers=HEADERS)
        self._send_timeout_s = request.app[SETTINGS].send_timeout_s
        self.begun = False

    async def write(self, data: bytes) -> None:
        """Send events: one write a call.

        Raises:
            ConnectionError: the client is gone, or has not read for send_timeout_s and was cut off.
        """
        if not self.begun:
            await self._begin()
        if self._buffered() + len(data) <= _NEVER_PAUSED_BYTES:
            await self._response.write(data)
            return
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._response.write(data)
        except TimeoutError:
            raise self._cut_off() from None

    async def end(self, data: bytes) -> web.StreamResponse:
        """Send the last events and the terminator of the body in one write.

        Raises:
            ConnectionError: as write.
        """
        if not self.begun:
            await self._begin()
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._response.write_eof(data)
        except TimeoutError:
            raise self._cut_off() from None
        return self._response

    async def fail(self, error: Exception) -> web.StreamResponse:
        """Send the error as an event, then close without the terminator: a clean end would read as an answer."""
        await self.write(error_event(error))
        if (transport := self._request.transport) is not None:
            transport.close()
        return self._response

    async def _begin(self) -> None:
        self.begun = True
        transport = self._request.transport
        peer = None if transport is None else transport.get_extra_info("socket")
        if peer is not None:
            with contextlib.suppress(OSError):  # closed in this moment: the first write says so
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _KERNEL_BUFFER_BYTES)
        await self._response.prepare(self._request)

    def _buffered(self) -> int:
        transport = self._request.transport
        return 0 if transport is None else transport.get_write_buffer_size()

    def _cut_off(self) -> ConnectionError:
        if (transport := self._request.transport) is not None:
            transport.abort()
        return ConnectionResetError("the client did not read")
