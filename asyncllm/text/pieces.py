"""What an answer's text is made of, in the order in which it was said: content, reasoning, calls of tools.

Loop thread. It never knows who cut the text, how, or who reads it.
"""

import enum
from typing import NamedTuple

MAX_HELD_SPACE = 1024  # characters of white space that may still belong to a tag; of a longer run the last so many


class Kind(enum.Enum):
    CONTENT = "content"
    REASONING = "reasoning"
    CALL = "call"  # its text is the function's name
    ARGUMENTS = "arguments"  # a piece of the last call's arguments, as JSON


class Piece(NamedTuple):
    kind: Kind
    text: str
    start: int = 0  # of content and reasoning: its place in the answer's text, in characters


class Pieces:
    """Gathers what is said, neighbours of one kind joined; of a call's arguments too, but never two calls, nor text
    around a gap."""

    def __init__(self) -> None:
        self._pieces: list[Piece] = []

    def say(self, kind: Kind, text: str, start: int = 0) -> None:
        if self._pieces and self._goes_on(self._pieces[-1], kind, start):
            self._pieces[-1] = self._pieces[-1]._replace(text=self._pieces[-1].text + text)
        elif text:
            self._pieces.append(Piece(kind, text, start))

    def take(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    @staticmethod
    def _goes_on(last: Piece, kind: Kind, start: int) -> bool:
        if last.kind is not kind or kind is Kind.CALL:
            return False
        return kind is Kind.ARGUMENTS or last.start + len(last.text) == start


def find_first(text: str, tags: tuple[str, ...]) -> tuple[int, str] | None:
    """Where the first of these tags begins, and which it is."""
    found = [(at, tag) for tag in tags if (at := text.find(tag)) >= 0]
    return min(found, default=None)


def shown_len(text: str, tags: tuple[str, ...]) -> int:
    """How much of text without a whole tag can be shown, whatever follows: its end may begin one."""
    start = max(0, len(text) - max(map(len, tags)) + 1)
    for at in range(start, len(text)):
        if any(tag.startswith(text[at:]) for tag in tags):
            return at
    return len(text)


def trimmed_len(text: str) -> int:
    """How much of it stands before its white space at the end, which a tag behind it would swallow."""
    return max(len(text.rstrip()), len(text) - MAX_HELD_SPACE)
