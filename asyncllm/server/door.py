"""One TCP connection at the door: how long it may take to say what it wants, how many there may be, and what is
answered where it does not speak HTTP.

Loop thread. It never knows routes; from the first whole head on aiohttp's protocol does the work.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import EMPTY_PAYLOAD, StreamReader, http_parser, web
from aiohttp.http_exceptions import BadHttpMessage, LineTooLong
from aiohttp.web_protocol import _ErrInfo

from ..wire.errors import error_body
from .settings import Settings

log = logging.getLogger(__name__)

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FILES_SHARE = 0.8  # of the file descriptors may be connections: the rest is for what else opens one
_FILES_UNKNOWN = 1024


def check_parser() -> None:
    """
    Raises:
        ValueError: only aiohttp's parser in Python is there, which has let requests be smuggled (CVE-2025-69224).
    """
    if http_parser.HttpRequestParser is http_parser.HttpRequestParserPy:
        raise ValueError("aiohttp is installed without its parser in C: install it from a wheel, or with a compiler")


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

    __slots__ = ("_are_masked", "_body", "_doors", "_head_timer", "_masks", "_turned_away")

    def __init__(self, doors: Doors, manager: web.Server, **kwargs: Any) -> None:
        super().__init__(manager, **kwargs)
        self._doors = doors
        self._head_timer: asyncio.TimerHandle | None = None
        self._masks, self._are_masked = Masks(), True
        self._turned_away = False
        self._body: StreamReader = EMPTY_PAYLOAD  # of the newest request

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
        # What names this connection and is named by it would wait with it for the collector.
        self._body = EMPTY_PAYLOAD
        if hasattr(self, "_data_received_cb"):  # a WebSocket's, in aiohttp 3.14
            self._data_received_cb = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._turned_away:
            return
        if self._upgraded:
            self._take_frames(data)
            return
        super().data_received(data)
        if self._messages:
            message, body = self._messages[-1]
            if isinstance(message, _ErrInfo):
                message.exc.__traceback__ = None  # its frames name the error, and all would wait for the collector
                self._break_body()
            else:
                self._body = body
        if self._upgraded:
            self._masks = Masks()
            self._are_masked = self._masks.are_set(self._message_tail)
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
        body = _body(status)
        if _is_too_large(exc):
            most = f"{self.max_headers} fields, and {self.max_field_size} bytes in a field or a path"
            message = f"the request's head is too large: it has at most {most}"
            status, body = 431, error_body(message, "invalid_request_error", code="head_too_large")
        response = web.Response(status=status, body=body, content_type="application/json")
        response.headers["Server"] = "asyncllm"
        response.force_close()
        return response

    def _break_body(self) -> None:
        """What is no HTTP came inside of a body: its reader hears at once, and gives the one answer to both. aiohttp
        keeps an error behind the request, whose reader would wait for the rest until the time for bodies is over."""
        if self._body.is_eof():  # it came behind a whole request, and is answered behind it
            return
        self._messages.pop()
        self._body.set_exception(web.RequestPayloadError("the body's framing is broken"))
        self._lingering_time = 0.0  # nothing more is read, so there is nothing to wait for
        self.close()

    def _take_frames(self, data: bytes) -> None:
        """Before the upgrade is accepted what comes may be a request, and is: aiohttp keeps it until it knows."""
        self._are_masked = self._are_masked and self._masks.are_set(data)
        if self._are_masked or self._payload_parser is None:
            super().data_received(data)
        elif self.transport is not None:
            self.transport.write(_PROTOCOL_ERROR)
            self.force_close()

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


def _is_too_large(error: BaseException | None) -> bool:
    """Too many fields have no class of their own in aiohttp."""
    return isinstance(error, LineTooLong) or (isinstance(error, BadHttpMessage) and "Too many" in error.message)


class Masks:
    """Whether every frame that comes is masked, as RFC 6455 5.1 has it; aiohttp does not look.

    It reads heads of frames, in whatever pieces they arrive, and counts over what is in them.
    """

    def __init__(self) -> None:
        self._head = b""
        self._num_left = 0  # bytes of the frame at hand

    def are_set(self, data: bytes) -> bool:
        """False from the first head on that says otherwise."""
        at = min(self._num_left, len(data))
        self._num_left -= at
        while at < len(data):
            self._head += data[at : at + 1]
            at += 1
            if len(self._head) < 2:
                continue
            if not self._head[1] & 0x80:
                return False
            if (length := _frame_len(self._head)) is not None:
                self._head = b""
                skipped = min(length, len(data) - at)
                at, self._num_left = at + skipped, length - skipped
        return True


def _frame_len(head: bytes) -> int | None:
    """Mask and payload, once the head is whole."""
    num_extra = {126: 2, 127: 8}.get(head[1] & 0x7F, 0)
    if len(head) < 2 + num_extra:
        return None
    return 4 + (int.from_bytes(head[2:], "big") if num_extra else head[1] & 0x7F)


_PROTOCOL_ERROR = b"\x88\x02\x03\xea"  # a close frame of code 1002
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
