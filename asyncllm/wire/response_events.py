"""The events of one response, numbered, as bytes for either transport; and the response object itself.

Any thread. It never knows sockets, tokens or the engine.

    0 created · 1 in_progress · 2 output_item.added · 3 content_part.added · 4 + i the i-th piece of text ·
    then output_text.done · content_part.done · output_item.done · completed, incomplete or failed

So an event's number says what it holds, and whoever keeps the pieces can say any of them again.
"""

from typing import Any, Protocol

import msgspec
import orjson

from .frames import text_frame

NUM_OPENING = 4


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

    def __init__(self, stream_id: str | None) -> None:
        self._end = b"}" if stream_id is None else b',"stream_id":%b}' % orjson.dumps(stream_id)

    def event(self, kind: bytes, number: int, body: bytes) -> bytes:
        return text_frame(body + self._end)


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """How a response ended."""

    status: str  # completed, incomplete, failed or cancelled
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    reason: str | None = None  # of incomplete
    error: dict[str, Any] | None = None  # of failed

    @property
    def event(self) -> str:
        """Cancelled is told as incomplete: openai's clients know no event of that name."""
        return "response.incomplete" if self.status == "cancelled" else f"response.{self.status}"

    def usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self.num_prompt_tokens + self.num_output_tokens,
        }


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """What a response is known by from its first event to its last."""

    id: str
    item_id: str
    created_at: int
    model: str
    echo: dict[str, Any]  # what the request said, as responses repeat it

    def whole(self, outcome: Outcome | None, text: str) -> dict[str, Any]:
        """The response object, finished or not."""
        item_status = "completed" if outcome is not None and outcome.status == "completed" else "incomplete"
        has_item = outcome is not None and (bool(text) or outcome.status != "failed")
        return {
            "id": self.id,
            "object": "response",
            "created_at": self.created_at,
            "status": "in_progress" if outcome is None else outcome.status,
            "error": None if outcome is None else outcome.error,
            "incomplete_details": None if outcome is None or outcome.reason is None else {"reason": outcome.reason},
            "model": self.model,
            "output": [self.item(item_status, text)] if has_item else [],
            "usage": None if outcome is None else outcome.usage(),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
            "text": {"format": {"type": "text"}},
            "truncation": "disabled",
            **self.echo,
        }

    def item(self, status: str, text: str | None) -> dict[str, Any]:
        """The one message of the output; without content while it is open."""
        content = [] if text is None else [_part(text)]
        return {"id": self.item_id, "type": "message", "status": status, "role": "assistant", "content": content}


class Events:
    """One response's events in one framing."""

    def __init__(self, head: Head, framing: Framing) -> None:
        self._head = head
        self._event = framing.event
        body = {"type": "response.output_text.delta", **self._place(), "content_index": 0, "logprobs": []}
        self._delta = orjson.dumps(body)[:-1] + b',"delta":'

    def opening(self, number: int) -> bytes:
        """One of the four before the text."""
        if number < 2:
            kind = ("response.created", "response.in_progress")[number]
            return self._make(number, kind, response=self._head.whole(None, ""))
        if number == 2:
            item = self._head.item("in_progress", None)
            return self._make(number, "response.output_item.added", output_index=0, item=item)
        return self._make(number, "response.content_part.added", **self._place(), content_index=0, part=_part(""))

    def delta(self, index: int, text: str) -> bytes:
        """The index-th piece of text: nearly every event there is."""
        number = NUM_OPENING + index
        body = b'%b%b,"sequence_number":%d' % (self._delta, orjson.dumps(text), number)
        return self._event(b"response.output_text.delta", number, body)

    def closing(self, num_pieces: int, text: str, outcome: Outcome) -> list[bytes]:
        """What follows the text; a failed response is closed by one event, whatever was open."""
        number = num_opening(num_pieces, outcome) + num_pieces
        last = {"response": self._head.whole(outcome, text)}
        if outcome.status == "failed":
            return [self._make(number, outcome.event, **last)]
        place = {**self._place(), "content_index": 0}
        item = last["response"]["output"][0]
        return [
            self._make(number, "response.output_text.done", **place, text=text, logprobs=[]),
            self._make(number + 1, "response.content_part.done", **place, part=_part(text)),
            self._make(number + 2, "response.output_item.done", output_index=0, item=item),
            self._make(number + 3, outcome.event, **last),
        ]

    def progress(self, queue_position: int | None, num_prompt_tokens: int, num_computed_tokens: int) -> bytes:
        """Ours, on request: not numbered, as it is not said again."""
        return self._make(
            -1,
            "response.progress",
            response_id=self._head.id,
            queue_position=queue_position,
            input_tokens=num_prompt_tokens,
            computed_tokens=num_computed_tokens,
        )

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._head.item_id, "output_index": 0}

    def _make(self, number: int, kind: str, **fields: Any) -> bytes:
        numbered = {} if number < 0 else {"sequence_number": number}
        return self._event(kind.encode(), number, orjson.dumps({"type": kind, **fields, **numbered})[:-1])


def num_opening(num_pieces: int, outcome: Outcome | None) -> int:
    """How many events stand before the text: a response that failed without any has no item either."""
    return 2 if not num_pieces and (outcome is None or outcome.status == "failed") else NUM_OPENING


def error_frame(status: int, error: bytes, stream_id: str | None) -> bytes:
    """A request's error on a socket that stays open. `error` is the body of an HTTP answer."""
    lane = {} if stream_id is None else {"stream_id": stream_id}
    return text_frame(orjson.dumps({"type": "error", "status": status, **lane, "error": orjson.loads(error)["error"]}))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
