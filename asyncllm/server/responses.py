"""POST /v1/responses, streamed and whole; what can be asked of a response by its id; coming back to its events.

Loop thread. It never knows token ids' meaning, steps or pages.
"""

import asyncio

from aiohttp import web

from ..errors import InvalidRequest
from ..wire.obfuscation import Obfuscated
from ..wire.requests import wants_obfuscation
from ..wire.response_events import EventStream, Framing
from ..wire.response_input import as_items
from ..wire.responses import decode_response
from .completions import check_model
from .events import EventResponse, Outflow
from .gate import LLM, json_response, read_body, read_request
from .kept import RESPONSES
from .live import LiveResponse


async def create(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses."""
    body = decode_response(await read_request(request))
    check_model(request.app[LLM], body.model)
    live = await request.app[RESPONSES].start(body)
    return await answer(request, live, stream=body.stream is True, pads=wants_obfuscation(body.stream_options))


async def answer(
    request: web.Request, live: LiveResponse, *, stream: bool, pads: bool = False
) -> web.StreamResponse:
    """All of it as events, or as one object. It ends with its client, unless that may come back.

    Raises:
        AsyncLLMError: what ended it.
    """
    if stream:
        return await _stream(request, live, pads=pads)
    try:
        await asyncio.wait([live.over])  # over itself would be cancelled with this handler
    finally:
        if not live.over.done():
            live.cancel()
    if live.error is not None:
        raise live.error
    return json_response(live.whole())


async def input_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/input_tokens: how long the prompt of such a response would be."""
    llm = request.app[LLM]
    body = decode_response(await read_body(request))
    check_model(llm, body.model)
    num_tokens = await request.app[RESPONSES].count(body)
    return json_response({"object": "response.input_tokens", "input_tokens": num_tokens})


async def retrieve(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}; with ?stream=true its events, behind ?starting_after=."""
    live = _live(request)
    if _flag(request, "stream"):
        after = _number(request.query.get("starting_after"), "starting_after")
        live.check_after(after, "starting_after")
        return await _stream(request, live, after=after, pads=_flag(request, "include_obfuscation"))
    return json_response(live.whole())


async def input_items(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}/input_items: what it answers, its past included; the last first unless ?order=asc."""
    live = _live(request)
    items = as_items(live.past, live.id)
    if _choice(request, "order", ("desc", "asc")) == "desc":
        items.reverse()
    limit = _number(request.query.get("limit", "20"), "limit")
    if not 1 <= limit <= 100:
        raise InvalidRequest("'limit' is 1 to 100", "limit")
    ids = [item["id"] for item in items]
    if (after := request.query.get("after")) is not None:
        if after not in ids:
            raise InvalidRequest("there is no item of that id", "after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first_id, last_id = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    told = {"object": "list", "data": page, "first_id": first_id, "last_id": last_id}
    return json_response(told | {"has_more": len(items) > limit})


async def events(request: web.Request) -> web.StreamResponse:
    """GET /v1/responses/{id}/events: as an EventSource wants it, with ids, and resumed behind Last-Event-ID."""
    after = _number(request.headers.get("Last-Event-ID"), "Last-Event-ID")
    live, pads = _live(request), _flag(request, "include_obfuscation")
    live.check_after(after, "Last-Event-ID")
    return await _stream(request, live, after=after, with_ids=True, pads=pads)


async def cancel(request: web.Request) -> web.StreamResponse:
    """POST /v1/responses/{id}/cancel: a second time, or after the end, it changes nothing."""
    live = _live(request)
    live.cancel()
    return json_response(live.whole())


async def delete(request: web.Request) -> web.StreamResponse:
    """DELETE /v1/responses/{id}."""
    live = _live(request)
    request.app[RESPONSES].forget(live)
    return json_response({"id": live.id, "object": "response", "deleted": True})


class EventSink:
    """An event stream as a Sink. The last events are left for the task, which closes the body with them."""

    def __init__(self, response: EventResponse, framing: Framing) -> None:
        self.framing = framing
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.give_patience = response.give_patience
        self._response = response
        self._rest = b""

    @property
    def outflow(self) -> Outflow | None:
        return self._response.outflow

    def write(self, data: bytes) -> None:
        if self._response.begun:
            self._response.write(data)
        else:
            self._rest += data

    def take(self) -> bytes:
        """What waits for the task: the first events, and the last."""
        rest, self._rest = self._rest, b""
        return rest

    def end(self, data: bytes) -> None:
        self._rest += data
        if not self.over.done():
            self.over.set_result(None)

    def replaced(self) -> None:
        """Ends without a terminal event: the reader sees that it has not got the whole."""
        self.end(b"")

    def cut_off(self) -> None:
        self._response.cut_off()
        self.end(b"")


async def _stream(
    request: web.Request, live: LiveResponse, *, after: int = -1, with_ids: bool = False, pads: bool = False
) -> web.StreamResponse:
    response = EventResponse(request, {"X-Response-Id": live.id})
    framing = EventStream(with_ids=with_ids)
    sink = EventSink(response, Obfuscated(framing) if pads else framing)
    try:
        with response:
            live.attach(sink, after)  # before anything is awaited: from here on detach() ends it
            if not sink.over.done():
                await response.begin()
                response.write(sink.take())
                await response.comment_until(sink.over)
            return await response.end(sink.take())
    finally:
        live.detach(sink)


def _live(request: web.Request) -> LiveResponse:
    return request.app[RESPONSES].get(request.match_info["id"])


def _flag(request: web.Request, name: str) -> bool:
    value = request.query.get(name, "").lower()
    if value not in ("", "true", "1", "false", "0"):
        raise InvalidRequest(f"'{name}' is true or false", name)
    return value in ("true", "1")


def _choice(request: web.Request, name: str, choices: tuple[str, ...]) -> str:
    value: str = request.query.get(name, choices[0])
    if value not in choices:
        raise InvalidRequest(f"{name!r} is {' or '.join(choices)}", name)
    return value


def _number(text: str | None, name: str) -> int:
    if not text:
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidRequest(f"'{name}' must be a number", name)
    return int(text)
