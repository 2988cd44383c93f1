"""Control tokens belong to the template: what a user types is text, whatever it looks like.

Any thread (frozen after start). It never knows token models, requests or jinja.

Before rendering, each control token's text inside a message is broken by a mark, a character that no
message holds; after rendering, what still reads as a control token was put there by the template.
Comparing the text with and without the message (as a sanitiser of the finished prompt must) loses
where the two came from; a mark does not.
"""

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ..errors import InvalidRequest

# Noncharacters: Unicode keeps them out of interchanged text, so the first one nearly always serves.
MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
# Keys of our own messages; any other key (a tool's argument names) is a user's text like the values.
_OWN_KEYS = frozenset(("role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments"))


class ControlToken(msgspec.Struct, frozen=True):
    id: int
    text: str
    eats_left: bool = False  # white space before it belongs to it
    eats_right: bool = False


class ControlTokens:
    """The control tokens of one vocabulary, ready to be found in text."""

    def __init__(self, tokens: list[ControlToken]) -> None:
        tokens = [token for token in tokens if len(token.text) > 1]  # one character cannot be broken
        self._by_text = {token.text: token for token in tokens}
        texts = sorted(self._by_text, key=len, reverse=True)  # the longest wins, as in the library
        self._pattern = re.compile("|".join(map(re.escape, texts)) or "(?!)")
        self._heads = tuple({text[:2] for text in texts})  # a C scan that spares nearly every message the regex
        self._openings = tuple({text[:i] for text in texts for i in range(1, len(text))})
        self._closings = tuple({text[i:] for text in texts for i in range(1, len(text))})

    def mark(self, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
        """The messages with every control token's text broken, and the mark that breaks it ("" if none).

        Raises:
            InvalidRequest: control tokens' text in messages that also hold every possible mark.
        """
        strings = list(_strings(messages))
        if not any(self._is_suspect(string) for string in strings):
            return messages, ""
        mark = next((mark for mark in MARKS if not any(mark in string for string in strings)), None)
        if mark is None:
            raise InvalidRequest("the messages hold too many Unicode noncharacters (U+FDD0 to U+FDEF)", "messages")
        return [_map_message(message, lambda string: self._break(string, mark)) for message in messages], mark

    def split(self, text: str) -> Iterator[str | int]:
        """The text between control tokens, and their ids, in order."""
        start = 0
        eaten = False
        for match in self._pattern.finditer(text):
            token = self._by_text[match[0]]
            if piece := _trim(text[start : match.start()], left=eaten, right=token.eats_left):
                yield piece
            yield token.id
            start, eaten = match.end(), token.eats_right
        if piece := _trim(text[start:], left=eaten, right=False):
            yield piece

    def _is_suspect(self, string: str) -> bool:
        """Whether it holds a control token, or could make one together with what stands beside it."""
        if any(head in string for head in self._heads) and self._pattern.search(string):
            return True
        core = string.strip()
        return core.endswith(self._openings) or core.startswith(self._closings)

    def _break(self, string: str, mark: str) -> str:
        string = self._pattern.sub(lambda match: match[0][0] + mark + match[0][1:], string)
        core = string.strip()
        if not core.endswith(self._openings) and not core.startswith(self._closings):
            return string
        # Inside the white space, so that a template that trims meets the mark where the text begins.
        left, right = string[: len(string) - len(string.lstrip())], string[len(string.rstrip()) :]
        return left + mark + core + mark + right


def _trim(text: str, *, left: bool, right: bool) -> str:
    text = text.lstrip() if left else text
    return text.rstrip() if right else text


def _strings(value: Any) -> Iterator[str]:
    """Every string that came with the messages, roles (which we know) excepted."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            if key not in _OWN_KEYS:
                yield key
            if key != "role":
                yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def _map_message(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {
            key if key in _OWN_KEYS else change(key): inner if key == "role" else _map_message(inner, change)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_map_message(inner, change) for inner in value]
    return value
