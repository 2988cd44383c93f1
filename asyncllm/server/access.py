"""Who may come in: Host, Origin and API key, asked of every request before it is routed.

Loop thread. It never knows what a request wants: only where it says it comes from, and with which key.
"""

import ipaddress
import math
import re
from collections.abc import Awaitable, Callable

from aiohttp import HttpVersion10, HttpVersion11, web

from ..errors import AsyncLLMError, BodyTooLarge, InvalidRequest
from ..types import CALLER, Caller
from .anthropic import in_its_words
from .gate import SETTINGS, add_request_id, error_response
from .keys import find_key
from .settings import Settings

LOOPBACK_NAMES = ("localhost",)
_OPEN_PATHS = ("/health", "/ready")  # who watches a server has no key of it
_CORS_METHODS = "GET, POST, DELETE"
_CORS_HEADERS = "Authorization, Content-Type, X-Api-Key, X-Request-Id, X-Request-Timeout"
_HEADER_NAMES = re.compile(r"[a-z0-9-]{1,64}( *, *[a-z0-9-]{1,64}){0,63}", re.IGNORECASE)
_CORS_MAX_AGE_S = "600"
_HOST = re.compile(r"(?:\[(?P<address>[0-9a-f:.%a-z]+)\]|(?P<name>[a-z0-9._~-]+))(?::[0-9]*)?", re.IGNORECASE)
_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?")


AnyHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


class Unauthorized(AsyncLLMError):
    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"


class Forbidden(AsyncLLMError):
    status = 403
    type = "invalid_request_error"
    code = "forbidden"


class ExpectationFailed(AsyncLLMError):
    status = 417
    type = "invalid_request_error"
    code = "expectation_failed"


class Misframed(InvalidRequest):
    """A proxy in front may have read another request than this one: the connection is closed behind the answer."""


def guarded(handler: AnyHandler, settings: Settings) -> AnyHandler:
    """Around a whole application: what is refused here never meets its routes."""

    async def guard(request: web.BaseRequest) -> web.StreamResponse:
        assert isinstance(request, web.Request)
        try:
            _check_framing(request)
            if (preflight := _preflight(request, settings)) is not None:
                return preflight
            check_host(request, settings)
            CALLER.set(Caller(name=_caller(request, settings), timeout_s=_timeout_s(request)))
            _check_expectation(request, settings)
        except AsyncLLMError as error:
            return await _refusal(request, error)
        return await handler(request)

    return guard


def _check_framing(request: web.Request) -> None:
    """
    Raises:
        Misframed: the HTTP is none that is spoken here; the body's coding is not; or the target names a host, and Host
            does not name it to the letter.
    """
    if request.version not in (HttpVersion10, HttpVersion11):
        raise Misframed("a request is HTTP/1.1")
    coding = request.headers.get("Transfer-Encoding")
    if coding is not None and (coding.lower() != "chunked" or request.version != HttpVersion11):
        raise Misframed("Transfer-Encoding may only be chunked, in HTTP/1.1")
    is_absolute = not request.raw_path.startswith(("/", "*"))
    if is_absolute and request.url.raw_authority.lower() != request.headers.get("Host", "").lower():
        raise Misframed("the request's target and its Host header name different hosts")


def check_host(request: web.Request, settings: Settings) -> None:
    """A page whose name was made to point here (DNS rebinding) sends its own name as Host: an address needs no name.

    Raises:
        InvalidRequest: there is no Host, or there are two.
        Forbidden: this name is not among those served.
    """
    hosts = request.headers.getall("Host", [])
    if len(hosts) > 1 or (not hosts and request.version == HttpVersion11):
        raise InvalidRequest("a request has one Host header")
    if settings.access.hosts is None or not hosts:
        return
    name = _host_name(hosts[0])
    if name not in settings.access.hosts and not _is_address(name):
        raise Forbidden("this server is not known by that Host; --allowed-host adds one")


def _host_name(host: str) -> str:
    """Without its port; "" if it is no name at all."""
    match = _HOST.fullmatch(host)
    return "" if match is None else (match["address"] or match["name"]).lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _caller(request: web.Request, settings: Settings) -> str:
    """The name of the key that the request brings; "" where none is asked for.

    Raises:
        Unauthorized: no key, two, or a wrong one.
    """
    if not settings.access.keys or request.raw_path in _OPEN_PATHS:
        return ""
    key = find_key(settings.access.keys, _offered(request).encode("utf-8", "surrogateescape"))
    if key is None:
        raise Unauthorized("a valid API key is needed, as Authorization: Bearer KEY")
    return key.name if len(settings.access.keys) > 1 else ""  # one alone has nobody to leave room to


def _offered(request: web.Request) -> str:
    """The key in the one header that may bring it: OpenAI's clients have a Bearer, Anthropic's x-api-key."""
    headers = request.headers
    name = "Authorization" if "Authorization" in headers else "x-api-key"
    values = headers.getall(name, [])
    if len(values) != 1:
        return ""
    scheme, _, key = values[0].partition(" ") if name == "Authorization" else ("bearer", "", values[0])
    return key.strip() if scheme.lower() == "bearer" else ""


def _timeout_s(request: web.Request) -> float | None:
    """X-Request-Timeout: after so many seconds the client has no use for the answer.

    Raises:
        InvalidRequest: it is no number of seconds.
    """
    if not (values := request.headers.getall("X-Request-Timeout", [])):
        return None
    text = ", ".join(values)  # two are no number
    if not _SECONDS.fullmatch(text) or not 0 < (timeout_s := float(text)) < math.inf:
        raise InvalidRequest("X-Request-Timeout must be a number of seconds above 0", "X-Request-Timeout")
    return timeout_s


def _check_expectation(request: web.Request, settings: Settings) -> None:
    """Before aiohttp says 100 Continue.

    Raises:
        ExpectationFailed, BodyTooLarge: the body need not be sent.
    """
    if (expected := request.headers.get("Expect")) is None:
        return
    if expected.lower() != "100-continue":
        raise ExpectationFailed("Expect may only be 100-continue")
    if (request.content_length or 0) > settings.max_body_bytes:
        raise BodyTooLarge(f"the body is larger than {settings.max_body_bytes} bytes")


async def _refusal(request: web.Request, error: AsyncLLMError) -> web.StreamResponse:
    response = error_response(error)
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    await add_request_id(request, response)  # no application has it yet
    if request.body_exists or isinstance(error, Misframed):
        response.force_close()  # what follows is a body nobody reads, and no request
    return in_its_words(request, response)


# -- CORS, off unless origins are named --


def _preflight(request: web.Request, settings: Settings) -> web.Response | None:
    """A browser's question for an allowed page, which comes without a key."""
    origin = request.headers.get("Origin")
    is_question = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not is_question or origin not in settings.access.origins:
        return None
    # OpenAI's and Anthropic's clients bring a dozen of their own, others with each version: a page that may ask may so.
    asked = request.headers.get("Access-Control-Request-Headers", "")
    headers = _cors_headers(origin) | {
        "Access-Control-Allow-Methods": _CORS_METHODS,
        "Access-Control-Allow-Headers": asked if _HEADER_NAMES.fullmatch(asked) else _CORS_HEADERS,
        "Access-Control-Max-Age": _CORS_MAX_AGE_S,
    }
    return web.Response(status=204, headers=headers)


async def allow_origin(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: an allowed page may read the answer."""
    if (origin := request.headers.get("Origin")) in request.app[SETTINGS].access.origins:
        response.headers.update(_cors_headers(origin))


def _cors_headers(origin: str) -> dict[str, str]:
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Expose-Headers": "X-Request-Id, Request-Id, Retry-After",
        "Vary": "Origin",
    }
