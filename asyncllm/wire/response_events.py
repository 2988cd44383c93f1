"""The events of one response, numbered, as bytes for either transport; and the response object itself.

Any thread. It never knows sockets, tokens or the engine.

    created · in_progress · for each item: output_item.added, its parts and deltas, their ends, output_item.done ·
    completed, incomplete or failed

Which events there are, and their numbers, follows from the pieces alone: whoever keeps those can say any event again.
"""

import base64
from typing import Any, Protocol

import msgspec
import orjson

from .frames import LONG_FRAME, SHORT_FRAME, TEXT_HEAD, text_frame
from .items import CALL, CONTENT, REASONING, Item, Items, Logprobs, Piece, call_id, hex_of
from .names import RESPONSE_NAMES, Names


class Framing(Protocol):
    """How one transport carries an event."""

    def event(self, kind: bytes, number: int, body: bytes) -> bytes:
        """`body` is the event's JSON object without its closing brace."""


class EventStream:
    """Server-sent events. With ids, for readers that come back with Last-Event-ID; openai's own chokes on those
    where an id stands without data, so its routes have none."""

    def __init__(self, *, with_ids: bool = False) -> None:
        self._with_ids = with_ids

    def event(self, kind: bytes, number: int, body: bytes) -> bytes:
        if self._with_ids and number >= 0:
            return b"id: %d\nevent: %b\ndata: %b}\n\n" % (number, kind, body)
        return b"event: %b\ndata: %b}\n\n" % (kind, body)


class SocketFrames:
    """WebSocket frames of one lane, whose name each event repeats; the default lane has none."""

    __slots__ = ("_end",)

    def __init__(self, stream_id: str | None) -> None:
        self._end = b"}" if stream_id is None else b',"stream_id":%b}' % orjson.dumps(stream_id)

    def event(self, kind: bytes, number: int, body: bytes) -> bytes:
        num_bytes = len(body) + len(self._end)
        if SHORT_FRAME <= num_bytes < LONG_FRAME:  # nearly always: in one copy
            return b"".join((TEXT_HEAD, num_bytes.to_bytes(2), body, self._end))
        return text_frame(body + self._end)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ended."""

    status: str  # completed, incomplete, failed or cancelled
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_reasoning_tokens: int = 0
    reason: str | None = None  # of incomplete
    error: dict[str, Any] | None = None  # of failed
    stop_string: str | None = None  # that ended it
    calls: bool = False  # it ends in calls of tools, all of them whole
    is_warm_up: bool = False  # nothing was to be said

    @property
    def event(self) -> str:
        """Cancelled is told as incomplete: openai's clients know no event of that name."""
        return "response.incomplete" if self.status == "cancelled" else f"response.{self.status}"

    @property
    def is_silent(self) -> bool:
        """Whether it may have no item at all, where another has an empty message."""
        return self.is_warm_up or self.status == "failed"

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a response is known by from its first event to its last."""

    id: str
    created_at: int
    model: str
    echo: dict[str, Any]  # what the request said, as responses repeat it
    call_id_chars: int | None = None
    encrypts: bool = False  # reasoning comes in a form to be sent back, too

    @property
    def names(self) -> Names:
        return RESPONSE_NAMES

    @property
    def num_chars(self) -> int:
        return len(orjson.dumps(self.echo))

    def script(self, framing: Framing) -> "Events":
        """Its events, from the first."""
        return Events(self, framing)

    def whole(self, outcome: Outcome | None, pieces: list[Piece]) -> dict[str, Any]:
        """The response object, finished or not."""
        return self.of_items(outcome, Items(pieces).all if outcome is not None else [])

    def of_items(self, outcome: Outcome | None, items: list[Item]) -> dict[str, Any]:
        """The same, its pieces gathered already."""
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": "in_progress" if outcome is None else outcome.status,
            "error": None if outcome is None else outcome.error,
            "incomplete_details": None if outcome is None or outcome.reason is None else {"reason": outcome.reason},
            "model": self.model,
            "output": [] if outcome is None else self._output(outcome, items),
            "usage": None if outcome is None else outcome.usage(),
            **self.echo,
        }

    def item_id(self, item: Item) -> str:
        return f"{_FORMS[item.kind].prefix}_{hex_of(self.id, item.index)}"

    def item(self, item: Item, status: str) -> dict[str, Any]:
        """One item of the output; without its text while it is open."""
        form, is_open = _FORMS[item.kind], status == "in_progress"
        whole: dict[str, Any] = {"id": self.item_id(item), "type": form.type, "status": status}
        content = [] if is_open else [_part(item.kind, item.text, item.logprobs)]
        if item.kind == CALL:
            own = call_id(self.id, item.index, self.call_id_chars)
            return whole | {"call_id": own, "name": item.name, "arguments": "" if is_open else item.text}
        if item.kind == CONTENT:
            return whole | {"role": "assistant", "content": content}
        encrypted = {"encrypted_content": encrypted_reasoning(item.text)} if self.encrypts and not is_open else {}
        return whole | {"summary": [], "content": content} | encrypted

    def _output(self, outcome: Outcome, items: list[Item]) -> list[dict[str, Any]]:
        if not items:
            return [] if outcome.is_silent else [self.item(Item(CONTENT, 0), _item_status(outcome))]
        return [*[self.item(item, "completed") for item in items[:-1]], self.item(items[-1], _item_status(outcome))]


class _Form(msgspec.Struct, frozen=True):
    """How one kind of item is told."""

    prefix: str
    type: str
    event: str


_FORMS = {
    CONTENT: _Form("msg", "message", "response.output_text"),
    REASONING: _Form("rs", "reasoning", "response.reasoning_text"),
    CALL: _Form("fc", "function_call", "response.function_call_arguments"),
}


class Script(Protocol):
    """One answer's events in the words of one API: the same pieces make the same events each time."""

    def opening(self) -> list[bytes]:
        """What is said before the answer's first word."""

    def say(self, kind: str, text: str, logprobs: Logprobs | None = None) -> list[bytes]:
        """The events of the next piece."""

    def more(self, text: str) -> bytes:
        """The one event of a piece of the last one's kind, as nearly all are; it has no log probabilities."""

    def closing(self, outcome: Outcome) -> list[bytes]:
        """What follows the last piece."""


class Events:
    """One response's Script in one framing."""

    __slots__ = ("_delta", "_delta_head", "_delta_kind", "_event", "_head", "_items", "_number", "_parts", "_said_by")

    def __init__(self, head: Head, framing: Framing) -> None:
        self._head = head
        self._event = framing.event
        self._number = 0
        self._items = Items()
        self._said_by = ""  # the kind of piece that continues the open item
        self._delta_kind = self._delta_head = self._delta = b""  # the template of its events
        self._parts: list[str] = []

    def opening(self) -> list[bytes]:
        response = self._head.of_items(None, [])
        return [self._make(kind, response=response) for kind in ("response.created", "response.in_progress")]

    def say(self, kind: str, text: str, logprobs: Logprobs | None = None) -> list[bytes]:
        if kind == self._said_by and logprobs is None:
            return [self.more(text)]
        events = self._end_item("completed") if kind != self._said_by else []
        if self._items.add(kind, text, logprobs):
            events += self._begin_item()
        return events if kind == CALL else [*events, self._say_delta(text, logprobs)]

    def more(self, text: str) -> bytes:
        self._parts.append(text)
        number = self._number
        self._number = number + 1
        body = b'%b%b,"sequence_number":%d' % (self._delta, orjson.dumps(text), number)
        return self._event(self._delta_kind, number, body)

    def closing(self, outcome: Outcome) -> list[bytes]:
        """A failed response is closed by one event, whatever was open; so is a warm-up, where nothing is."""
        events: list[bytes] = []
        if not outcome.is_silent:
            if self._items.open is None:
                self._items.all.append(Item(CONTENT, 0))
                events += self._begin_item()
            events += self._end_item(_item_status(outcome))
        return [*events, self._make(outcome.event, response=self._head.of_items(outcome, self._items.all))]

    def progress(self, queue_position: int | None, num_prompt_tokens: int, num_computed_tokens: int) -> bytes:
        """Ours, on request: not numbered, as it is not said again."""
        kind = "response.progress"
        body = {"type": kind, "response_id": self._head.id, "queue_position": queue_position}
        body |= {"input_tokens": num_prompt_tokens, "computed_tokens": num_computed_tokens}
        return self._event(kind.encode(), -1, orjson.dumps(body)[:-1])

    def _begin_item(self) -> list[bytes]:
        item = self._items.all[-1]
        form, place = _FORMS[item.kind], self._place(item)
        self._said_by, self._parts = item.said_by, item.parts
        kind = f"{form.event}.delta"
        self._delta_kind = kind.encode()
        self._delta_head = orjson.dumps({"type": kind, **place})[:-1]
        self._delta = self._delta_head + (b',"logprobs":[],"delta":' if item.kind == CONTENT else b',"delta":')
        added = self._head.item(item, "in_progress")
        events = [self._make("response.output_item.added", output_index=item.index, item=added)]
        if item.kind != CALL:
            events.append(self._make("response.content_part.added", **place, part=_part(item.kind, "", [])))
        return events

    def _say_delta(self, text: str, logprobs: Logprobs | None = None) -> bytes:
        number = self._number
        self._number += 1
        delta = self._delta
        if logprobs:
            delta = b'%b,"logprobs":%b,"delta":' % (self._delta_head, orjson.dumps(logprobs))
        body = b'%b%b,"sequence_number":%d' % (delta, orjson.dumps(text), number)
        return self._event(self._delta_kind, number, body)

    def _end_item(self, status: str) -> list[bytes]:
        if (item := self._items.open) is None:
            return []
        form, place, text = _FORMS[item.kind], self._place(item), item.text
        if item.kind == CALL:
            events = [self._make(f"{form.event}.done", **place, name=item.name, arguments=text)]
        else:
            logprobs: dict[str, Any] = {"logprobs": item.logprobs} if item.kind == CONTENT else {}
            events = [
                self._make(f"{form.event}.done", **place, text=text, **logprobs),
                self._make("response.content_part.done", **place, part=_part(item.kind, text, item.logprobs)),
            ]
        done = self._head.item(item, status)
        return [*events, self._make("response.output_item.done", output_index=item.index, item=done)]

    def _place(self, item: Item) -> dict[str, Any]:
        part = {} if item.kind == CALL else {"content_index": 0}
        return {"item_id": self._head.item_id(item), "output_index": item.index} | part

    def _make(self, kind: str, **fields: Any) -> bytes:
        number = self._number
        self._number += 1
        body = orjson.dumps({"type": kind, **fields, "sequence_number": number})
        return self._event(kind.encode(), number, body[:-1])


def all_events(script: Script, pieces: list[Piece], outcome: Outcome | None) -> list[bytes]:
    """Every event so far, by number."""
    said = script.opening()
    for piece in pieces:
        said += script.say(piece.kind, piece.text, piece.logprobs)
    return said if outcome is None else said + script.closing(outcome)


def error_frame(status: int, error: bytes, stream_id: str | None) -> bytes:
    """A request's error on a socket that stays open. `error` is the body of an HTTP answer."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return text_frame(orjson.dumps({"type": "error", "status": status, **lane, "error": orjson.loads(error)["error"]}))


def encrypted_reasoning(text: str) -> str:
    """What a client that keeps its own history sends back. Nothing is secret here: it is merely opaque."""
    return base64.b64encode(text.encode()).decode()


def decrypted_reasoning(opaque: str) -> str:
    """
    Raises:
        ValueError: it was not made by encrypted_reasoning().
    """
    return base64.b64decode(opaque, validate=True).decode()


def _item_status(outcome: Outcome) -> str:
    return "completed" if outcome.status == "completed" else "incomplete"


def _part(kind: str, text: str, logprobs: Logprobs) -> dict[str, Any]:
    if kind == REASONING:
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
