"""A model's reasoning, told from its answer by the tags around it, however the text is cut into pieces.

Loop thread, one per answer. It never knows tokens, requests or the engine.

Wherever a tag stands it counts and is never shown: a block in the middle is reasoning, a closing tag without its
opening one is dropped. White space inside a block's edges, and behind a block, belongs to the tags. A block that
is not closed is reasoning to the end.
"""

import msgspec

from .pieces import Kind, Piece, Pieces, find_first, shown_len, trimmed_len


class Tags(msgspec.Struct, frozen=True):
    """What a model writes around its reasoning."""

    open: str
    close: str

    def is_open(self, prompt_end: str) -> bool:
        """Whether the prompt's own last word opens the block, as some templates do: the answer begins inside."""
        return prompt_end.rstrip().endswith(self.open)


TAGS = {"think": Tags("<think>", "</think>"), "magistral": Tags("[THINK]", "[/THINK]")}


def detect(template: str) -> str | None:
    """The name of the tags that a chat template shows its model to use, or None."""
    return next((name for name, tags in TAGS.items() if tags.open in template or tags.close in template), None)


class Splitter:
    """Cuts one answer."""

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._tags = tags
        self._either = (tags.open, tags.close)
        self._pieces = Pieces()
        self._num_chars = 0  # of the answer so far; the held ones are its last
        self._held = ""
        self._inside = is_open
        self._at_edge = is_open  # just behind a tag: white space is not shown

    def push(self, text: str) -> list[Piece]:
        """What these characters say for certain."""
        start = self._num_chars
        self._num_chars += len(text)
        if not self._inside and not self._held and not self._at_edge and not self._may_hold(text):  # nearly always
            return [Piece(Kind.CONTENT, text, start)] if text else []
        self._held += text
        while self._step():
            pass
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """What was held back: no tag came of it."""
        self._say(Kind.REASONING if self._inside else Kind.CONTENT, len(self._held))
        return self._pieces.take()

    def _may_hold(self, text: str) -> bool:
        return self._tags.open[0] in text

    def _step(self) -> bool:
        """Show what can be shown of the held text. True if a tag was passed, and there may be more."""
        if self._at_edge:
            self._held = self._held.lstrip()
            self._at_edge = not self._held
        return self._step_inside() if self._inside else self._step_outside()

    def _step_inside(self) -> bool:
        at = self._held.find(self._tags.close)
        shown = at if at >= 0 else shown_len(self._held, (self._tags.close,))
        self._say(Kind.REASONING, trimmed_len(self._held[:shown]))
        return at >= 0 and self._pass(self._tags.close)

    def _step_outside(self) -> bool:
        found = find_first(self._held, self._either)
        shown = found[0] if found else shown_len(self._held, self._either)
        self._say(Kind.CONTENT, shown)
        return found is not None and self._pass(found[1])

    def _pass(self, tag: str) -> bool:
        """The tag that stands next, and the white space before it."""
        self._held = self._held.lstrip().removeprefix(tag) if self._inside else self._held.removeprefix(tag)
        self._inside = tag == self._tags.open
        self._at_edge = True
        return True

    def _say(self, kind: Kind, count: int) -> None:
        """The first so many of the held characters."""
        self._pieces.say(kind, self._held[:count], self._num_chars - len(self._held))
        self._held = self._held[count:]
