"""An answer in Anthropic's words: a message whole, or its events; and errors as its clients read them.

Any thread. It never knows sockets, tokens or the engine. Made from pieces as response_events.py is.
"""

import json
from typing import Any

import msgspec
import orjson

from .items import CALL, REASONING, Item, Items, Logprobs, Piece, call_id, hex_of
from .names import Names
from .response_events import Framing, Outcome

_ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    408: "timeout_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class MessageHead(msgspec.Struct, frozen=True, kw_only=True):
    """What a message is known by from its first event to its last."""

    id: str
    model: str
    num_prompt_tokens: int
    fills_context: bool = False  # its limit is the context's, not the request's
    call_id_chars: int | None = None
    names: Names = Names({})  # of the request's fields

    @property
    def num_chars(self) -> int:
        return 0  # it is not kept

    def script(self, framing: Framing) -> "MessageEvents":
        """Its events, from the first."""
        return MessageEvents(self, framing)

    def whole(self, outcome: Outcome | None, pieces: list[Piece]) -> dict[str, Any]:
        """The message object. A call whose input is no object, cut off or written wrongly, is none to act on, and left
        out."""
        items = Items(pieces).all
        told = [item for item in items if item.kind != CALL or _has_input(item)]
        usage = _usage(outcome or Outcome(status="in_progress", num_prompt_tokens=self.num_prompt_tokens))
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": [self.block(item, whole=True) for item in told],
            **self.stop(outcome, items),
            "usage": usage,
        }

    def block(self, item: Item, *, whole: bool) -> dict[str, Any]:
        """One content block; without its text while it is open."""
        text = item.text if whole else ""
        if item.kind == CALL:
            own = call_id(self.id, item.index, self.call_id_chars)
            # As the model wrote it: whatever its depth and its numbers, it is JSON.
            return {"type": "tool_use", "id": own, "name": item.name, "input": orjson.Fragment(text or "{}")}
        if item.kind == REASONING:
            return {"type": "thinking", "thinking": text, "signature": self.signature(item) if whole else ""}
        return {"type": "text", "text": text}

    def signature(self, item: Item) -> str:
        """Clients send it back and some insist on one; it proves nothing here."""
        return hex_of(self.id, item.index)

    def stop(self, outcome: Outcome | None, items: list[Item]) -> dict[str, str | None]:
        """Why it ended. By tool_use there is a call to act on, streamed or whole."""
        if outcome is None:
            return {"stop_reason": None, "stop_sequence": None}
        if outcome.status == "incomplete":
            reason = "model_context_window_exceeded" if self.fills_context else "max_tokens"
            return {"stop_reason": reason, "stop_sequence": None}
        if outcome.stop_string is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": outcome.stop_string}
        calls = outcome.calls and any(_has_input(item) for item in items if item.kind == CALL)
        return {"stop_reason": "tool_use" if calls else "end_turn", "stop_sequence": None}


class MessageEvents:
    """One message's Script."""

    def __init__(self, head: MessageHead, framing: Framing) -> None:
        self._head = head
        self._framing = framing
        self._items = Items()
        self._said_by = ""  # the kind of piece that continues the open block
        self._delta = b""  # the template of its events

    def opening(self) -> list[bytes]:
        return [self._make("message_start", message=self._head.whole(None, []))]

    def say(self, kind: str, text: str, logprobs: Logprobs | None = None) -> list[bytes]:
        if kind == self._said_by:
            return [self.more(text)]
        events = self._end_block()
        self._items.add(kind, text)
        events.append(self._begin_block())
        return events if kind == CALL else [*events, self._say_delta(text)]

    def more(self, text: str) -> bytes:
        self._items.all[-1].parts.append(text)
        return self._say_delta(text)

    def closing(self, outcome: Outcome) -> list[bytes]:
        """A failure is told by one event, whatever was open."""
        if outcome.status == "failed":
            message = (outcome.error or {}).get("message", "internal error")
            return [self._make("error", error={"type": "api_error", "message": message})]
        delta = self._make("message_delta", delta=self._head.stop(outcome, self._items.all), usage=_usage(outcome))
        return [*self._end_block(), delta, self._make("message_stop")]

    def _begin_block(self) -> bytes:
        item = self._items.all[-1]
        self._said_by = item.said_by
        kind, field = _DELTAS[item.kind]
        delta = {"type": kind, field: ""}
        body = orjson.dumps({"type": "content_block_delta", "index": item.index, "delta": delta})
        self._delta = body[: -len(b'""}}')]
        return self._make("content_block_start", index=item.index, content_block=self._head.block(item, whole=False))

    def _say_delta(self, text: str) -> bytes:
        return self._framing.event(b"content_block_delta", -1, b"%b%b}" % (self._delta, orjson.dumps(text)))

    def _end_block(self) -> list[bytes]:
        if (item := self._items.open) is None:
            return []
        events = [self._make("content_block_stop", index=item.index)]
        if item.kind == REASONING:
            signature = {"type": "signature_delta", "signature": self._head.signature(item)}
            events.insert(0, self._make("content_block_delta", index=item.index, delta=signature))
        return events

    def _make(self, kind: str, **fields: Any) -> bytes:
        return self._framing.event(kind.encode(), -1, orjson.dumps({"type": kind, **fields})[:-1])


_DELTAS = {"content": ("text_delta", "text"), "reasoning": ("thinking_delta", "thinking")}
_DELTAS[CALL] = ("input_json_delta", "partial_json")


def _has_input(call: Item) -> bool:
    """Python's own reader: the others refuse numbers and surrogates that they cannot hold, which clients may."""
    try:
        return isinstance(json.loads(call.text or "{}", parse_constant=_refuse), dict)
    except (ValueError, RecursionError):
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def error_body(status: int, openai: bytes, request_id: str) -> bytes:
    """The same error for Anthropic's clients: `openai` is the body that OpenAI's would get."""
    told = orjson.loads(openai)["error"]
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    message = f"{told['param']}: {told['message']}" if told["param"] else told["message"]
    error = {"type": kind, "message": message}
    return orjson.dumps({"type": "error", "error": error, "request_id": request_id})


def _usage(outcome: Outcome) -> dict[str, Any]:
    """Anthropic counts what was read from the cache beside the input, not in it."""
    return {
        "input_tokens": outcome.num_prompt_tokens - outcome.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": outcome.num_cached_tokens,
        "output_tokens": outcome.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": outcome.num_reasoning_tokens},
    }
