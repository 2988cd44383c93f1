"""Where requests go and with what: one shape for every route, whole or streamed.

The client's loop. It never knows routes or fields.
"""

from typing import Any

import aiohttp
import msgspec

from .errors import APIResponseValidationError, error_fields, event_error
from .http import Call, Http, Timeout, make_call, read_whole, request_id_of
from .replies import Reader, ReplyT
from .retries import Retries
from .stream import Reading, SseSource, Stream, T

_OPTIONS = ("extra_headers", "extra_body", "timeout")  # of a call; everything else goes into its body


class Api(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and with what. Shared by a client and its resources."""

    http: Http
    base_url: str
    headers: dict[str, str]
    timeout: float | Timeout | None
    retries: Retries
    max_event_bytes: int

    async def whole(self, kind: type[ReplyT], method: str, path: str, fields: dict[str, Any] | None = None) -> ReplyT:
        """One whole reply."""
        call = self.call(method, path, fields, stream=False)
        response = await self.http.open(call, self.retries)
        raw = await read_whole(response, call)
        request_id = request_id_of(response, call)
        if "json" not in response.content_type and raw[:1] not in (b"{", b"["):
            message = f"{call.url} answered {response.content_type}, not JSON: is it an API's address?"
            raise APIResponseValidationError(message, body=raw[:500], request_id=request_id)
        return Reader(kind).read(raw, request_id)

    async def stream(self, path: str, fields: dict[str, Any], reading: Reading[T]) -> Stream[T]:
        """One reply as events."""
        call = self.call("POST", path, fields | {"stream": True}, stream=True)
        response = await self.http.open(call, self.retries)
        if response.content_type in ("application/json", "text/html"):
            raise await _no_stream(response, call)
        return Stream(SseSource(response, call, reading, self.max_event_bytes))

    def call(self, method: str, path: str, fields: dict[str, Any] | None, *, stream: bool) -> Call:
        """The request itself; its clock starts now."""
        options = {name: fields.pop(name) for name in _OPTIONS if name in fields} if fields else {}
        timeout = Timeout.of(options.get("timeout", self.timeout), stream=stream)
        headers = self.headers | {"Accept": "text/event-stream" if stream else "application/json"}
        if stream:
            headers["Accept-Encoding"] = "identity"  # a proxy that compresses holds tokens back until a block is full
        body = None
        if fields is not None:
            headers["Content-Type"] = "application/json"
            body = msgspec.json.encode(fields | (options.get("extra_body") or {}))
        headers |= options.get("extra_headers") or {}
        return make_call(method, f"{self.base_url}{path}", headers, body, timeout)

    def root(self) -> "Api":
        """The same without the /v1 at the end: tokenize and its like are outside."""
        return msgspec.structs.replace(self, base_url=self.base_url.removesuffix("/v1"))


async def _no_stream(response: aiohttp.ClientResponse, call: Call) -> Exception:
    """What a server meant that was asked for a stream and answers with something else, and 200."""
    raw = await read_whole(response, call)
    request_id = request_id_of(response, call)
    try:
        body = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        body = raw[:500]
    if error_fields(body).get("message"):
        return event_error(body, request_id)
    message = f"{call.url} was asked for a stream and answered {response.content_type}"
    return APIResponseValidationError(message, body=body, request_id=request_id)
