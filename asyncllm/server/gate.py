"""What stands before and behind every handler: body limits, request ids, and errors as OpenAI has them.

Loop thread. It never knows what a route does.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web

from ..errors import AsyncLLMError, BodyTooLarge, InvalidRequest
from ..llm import AsyncLLM
from ..types import EngineLimits
from ..wire.errors import error_body, error_reply
from .rates import RATES
from .settings import Settings

log = logging.getLogger(__name__)

SETTINGS = web.AppKey("settings", Settings)
LLM = web.AppKey("llm", AsyncLLM)
REQUEST_ID_HEADER = "X-Request-Id"
_REQUEST_ID = web.RequestKey("request_id", str)
MAX_REQUEST_ID_CHARS = 128
_SMALL_BODY_BYTES = 1 << 20  # decoded within 40 ms, whatever it holds
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def read_request(request: web.Request) -> bytes:
    """read_body(), of what the engine would have to answer; where it cannot, nothing is read or decoded for it.

    Raises:
        QueueFull, Draining, EngineDead: not now. And as read_body.
    """
    request.app[LLM].check_open()
    return await read_body(request)


async def read_body(request: web.Request) -> bytes:
    """The whole JSON body, within the server's limits of size and time.

    Raises:
        BodyTooLarge: by Content-Length before a byte is read, or while reading.
        RateLimited: the caller has asked too often.
        web.HTTPException: 400 for a body that broke off or is framed wrongly, 403 from a foreign page, 415 for another
            content type, 408 for a body that is too slow.
    """
    settings = request.app[SETTINGS]
    check_origin(request)
    request.app[RATES].spend()
    _check_content_type(request)
    if (request.content_length or 0) > settings.max_body_bytes:
        raise _too_large(settings)
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(text=f"the body did not arrive within {settings.body_timeout_s:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(settings) from None
    except web.RequestPayloadError:
        raise web.HTTPBadRequest(text="the body could not be read: it broke off or is framed wrongly") from None
    check_density(body, request.app[LLM].limits)
    return body


def check_density(body: bytes, limits: EngineLimits) -> None:
    """Refuse a body of more values than any prompt that fits could need, before decoding holds the loop for them.

    Text decodes in 1 ms a MB, small objects in 35: a million empty messages took 10 s. Counting takes 0.5.

    Raises:
        InvalidRequest: it holds too many objects or values.
    """
    if len(body) > _SMALL_BODY_BYTES:
        for mark, most, what in ((b"{", limits.max_model_len, "objects"), (b",", 4 * limits.max_model_len, "values")):
            if body.count(mark) > _SMALL_BODY_BYTES // 4 + most:
                raise InvalidRequest(f"the body holds more {what} than a prompt that fits the context could")


def request_id(request: web.Request) -> str:
    """The client's id if it is safe to repeat, else one of ours. A label for people: never a key of anything."""
    if (known := request.get(_REQUEST_ID)) is None:
        theirs = request.headers.get(REQUEST_ID_HEADER, "")
        is_sane = 0 < len(theirs) <= MAX_REQUEST_ID_CHARS and theirs.isascii() and theirs.isprintable()
        request[_REQUEST_ID] = known = theirs if is_sane else f"req_{secrets.token_hex(12)}"
    return known


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: streams and plain answers alike pass here."""
    response.headers[REQUEST_ID_HEADER] = request_id(request)
    response.headers["Server"] = "asyncllm"  # aiohttp's default tells every version there is


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every exception becomes the error object; aiohttp's own 404, 405 and 413 would be text/plain."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        # A route keeps aiohttp's 404 or 405, and their frames the route: together they would wait for the collector.
        return _http_error(request, error.with_traceback(None))
    except ConnectionError:
        # The client left. Raised on, aiohttp would log it as an error of ours; this answer, nginx's number for
        # it, finds the connection closed and goes nowhere.
        return web.Response(status=499)
    except Exception as error:
        return error_response(error)


def check_origin(request: web.Request) -> None:
    """Refuse what a foreign web page makes its reader's browser send, but those allowed; only browsers name an Origin.

    Raises:
        web.HTTPForbidden: the page is not of this server.
    """
    origin: str | None = request.headers.get("Origin")
    try:
        is_ours = origin is None or urlsplit(origin).netloc == request.host
        is_ours = is_ours or origin in request.app[SETTINGS].access.origins
    except ValueError:  # no address at all
        is_ours = False
    if not is_ours:
        raise web.HTTPForbidden(text="this page is not of this server")


def json_response(body: dict[str, Any]) -> web.Response:
    """An answer that is a JSON object."""
    return web.Response(body=orjson.dumps(body), content_type="application/json")


def error_response(error: Exception) -> web.Response:
    """The whole answer for an error; logs it if it is a bug of ours."""
    if not isinstance(error, AsyncLLMError):
        log.error("unexpected error in a handler", exc_info=error)
    status, body, headers = error_reply(error)
    return _json(status, body, headers)


def _http_error(request: web.Request, error: web.HTTPException) -> web.StreamResponse:
    if error.status < 400:
        raise error
    ours = error.status in (400, 403, 408, 415)  # raised here, with a sentence
    message = error.text if ours else f"{error.reason}: {request.method} {request.path[:200]}{_hint(request, error)}"
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    headers = {name: error.headers[name] for name in ("Allow", "Sec-WebSocket-Version") if name in error.headers}
    code = error.reason.lower().replace(" ", "_")
    response = _json(error.status, error_body(message or error.reason, kind, code=code), headers)
    if error.status in (400, 408):
        response.force_close()  # the rest of the body may come yet, and is no request
    return response


def _hint(request: web.Request, error: web.HTTPException) -> str:
    if error.status == 405:
        return f"; it takes {error.headers['Allow']}"
    paths = {resource.canonical for resource in request.app.router.resources()}
    return f"; it is /v1{request.path} here" if f"/v1{request.path}" in paths else ""


def _json(status: int, body: bytes, headers: dict[str, str]) -> web.Response:
    return web.Response(status=status, body=body, headers=headers, content_type="application/json")


def _too_large(settings: Settings) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {settings.max_body_bytes} bytes")


def _check_content_type(request: web.Request) -> None:
    """JSON in UTF-8, plain. A form, text/plain or no type at all is what a foreign web page can send unasked."""
    if "Content-Encoding" in request.headers:
        raise web.HTTPUnsupportedMediaType(text="Content-Encoding is not supported; send the body as it is")
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text="Content-Type must be application/json")
    if (request.charset or "utf-8").lower() not in ("utf-8", "utf8", "us-ascii"):
        raise web.HTTPUnsupportedMediaType(text="JSON is UTF-8; another charset is not supported")
