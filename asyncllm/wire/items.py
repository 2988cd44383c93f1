"""What an answer says, piece by piece, gathered into items: texts, reasoning, and calls of tools.

Any thread. It never knows how the text was cut into pieces, or which API tells it.
"""

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

# The kinds of pieces. A call's text is the function's name; arguments belong to the call before them.
CONTENT, REASONING, CALL, ARGUMENTS = "content", "reasoning", "call", "arguments"
Logprobs = list[dict[str, Any]]  # of tokens, as the wire has them


class Piece(msgspec.Struct, frozen=True, gc=False):
    """As it was said. Long answers keep thousands, which no collection need look at."""

    kind: str
    text: str
    logprobs: Logprobs | None = None  # of content, where they were asked for


class Item(msgspec.Struct):
    """One thing said; its text grows."""

    kind: str  # content, reasoning or call
    index: int
    name: str = ""  # of a call
    parts: list[str] = msgspec.field(default_factory=list)
    logprobs: Logprobs = msgspec.field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def said_by(self) -> str:
        """The kind of piece that continues it."""
        return ARGUMENTS if self.kind == CALL else self.kind


class Items:
    """The items of one answer, from its pieces."""

    def __init__(self, pieces: Iterable[Piece] = ()) -> None:
        self.all: list[Item] = []
        for piece in pieces:
            self.add(piece.kind, piece.text, piece.logprobs)

    @property
    def open(self) -> Item | None:
        return self.all[-1] if self.all else None

    def add(self, kind: str, text: str, logprobs: Logprobs | None = None) -> bool:
        """Take a piece. True if an item begins with it."""
        item = self.open
        begins = item is None or item.said_by != kind
        if begins:
            item = Item(kind, len(self.all), name=text if kind == CALL else "")
            self.all.append(item)
        if kind != CALL:
            assert item is not None
            item.parts.append(text)
            item.logprobs += logprobs or ()
        return begins


def hex_of(name: str, index: int) -> str:
    """A random-looking id for an answer's index-th item, the same each time it is told."""
    return hashlib.blake2b(f"{name} {index}".encode(), digest_size=12).hexdigest()


def call_id(name: str, index: int, num_chars: int | None) -> str:
    """The id that a tool's result comes back with. Some models' templates insist on a length."""
    random_hex = hex_of(name, index)
    return f"call_{random_hex}" if num_chars is None else random_hex[:num_chars]


def said(pieces: Iterable[Piece], name: str, call_id_chars: int | None = None) -> dict[str, object]:
    """The whole as an assistant's message, as chat templates read it."""
    items = Items(pieces).all
    message: dict[str, object] = {"role": "assistant", "content": joined(items, CONTENT)}
    if reasoning := joined(items, REASONING):
        message["reasoning_content"] = reasoning
    if calls := [_call(item, name, call_id_chars) for item in items if item.kind == CALL]:
        message["tool_calls"] = calls
    return message


def joined(items: Iterable[Item], kind: str) -> str:
    """All text of one kind."""
    return "".join([item.text for item in items if item.kind == kind])


def _call(item: Item, name: str, num_chars: int | None) -> dict[str, object]:
    function = {"name": item.name, "arguments": arguments_object(item.text)}
    return {"id": call_id(name, item.index, num_chars), "type": "function", "function": function}


def arguments_object(text: str) -> object:
    """A call's arguments as an object; text that is none stays what the model wrote."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return text
