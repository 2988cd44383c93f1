"""One TCP connection at the door: how long it may take to say what it wants, how many there may be, and what is
answered where it does not speak HTTP.

Loop thread. It never knows routes; from the first whole head on aiohttp's protocol does the work.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web

from ..wire.errors import error_body
from .settings import Settings

log = logging.getLogger(__name__)

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FILES_SHARE = 0.8  # of the file descriptors may be connections: the rest is for what else opens one
_FILES_UNKNOWN = 1024


class Doors:
    """The open connections of one server: a protocol factory that counts."""

    def __init__(self, make: Callable[["Doors"], "Door"], settings: Settings) -> None:
        self.num_open = 0
        self.max_open = settings.max_connections or int(FILES_SHARE * _max_files())
        self.settings = settings
        self._make = make

    def __call__(self) -> "Door":
        return self._make(self)


class Door(web.RequestHandler):
    """aiohttp's protocol of one connection, with a bound on unfinished heads and errors as OpenAI has them."""

    __slots__ = ("_doors", "_head_timer", "_turned_away")

    def __init__(self, doors: Doors, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._doors = doors
        self._head_timer: asyncio.TimerHandle | None = None
        self._turned_away = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if self._doors.num_open >= self._doors.max_open:
            self._turn_away(transport)
            return
        self._doors.num_open += 1
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._turned_away:
            return
        self._doors.num_open -= 1
        self._head_came()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            return
        super().data_received(data)
        if self._request_in_progress or self._messages or self._upgraded:
            self._head_came()
        elif data and self._head_timer is None:  # the first bytes of a request on a connection that was idle
            self._await_head()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp could not read, or our own bug outside of every handler."""
        if status >= 500:
            log.error("unexpected error outside of the handlers", exc_info=exc)
        else:
            log.info("malformed HTTP from %s: %s", request.remote, type(exc).__name__)  # its words may be a prompt's
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; another cannot be sent")
        response = web.Response(status=status, body=_body(status), content_type="application/json")
        response.headers["Server"] = "asyncllm"
        response.force_close()
        return response

    def _await_head(self) -> None:
        self._head_timer = self._loop.call_later(self._doors.settings.header_timeout_s, self._give_up)

    def _head_came(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _give_up(self) -> None:
        self._head_timer = None
        if self.transport is not None:
            self.transport.write(_plain_reply(408, "Request Timeout", _body(408)))
            self.force_close()

    def _turn_away(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._turned_away = True
        transport.write(_plain_reply(503, "Service Unavailable", _body(503), b"Retry-After: 1\r\n"))
        transport.close()


_TOLD = {
    400: ("the request is not valid HTTP/1.1", "invalid_request_error", "malformed_http"),
    408: ("the request's head did not arrive in time", "invalid_request_error", "request_timeout"),
    500: ("internal error; the server's log has the details", "server_error", None),
    503: ("too many connections are open; try again later", "server_error", "too_many_connections"),
}


def _body(status: int) -> bytes:
    message, kind, code = _TOLD[status if status in _TOLD else 400]
    return error_body(message, kind, code=code)


def _plain_reply(status: int, reason: str, body: bytes, headers: bytes = b"") -> bytes:
    """For a connection that has no request to answer."""
    head = f"HTTP/1.1 {status} {reason}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + headers + b"Connection: close\r\n\r\n" + body


def _max_files() -> int:
    return _FILES_UNKNOWN if resource is None else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
