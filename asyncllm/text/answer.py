"""An answer's text, parted into reasoning, content and calls while it arrives; and the forms of one model's answers.

Loop thread, a parser per answer. It never knows tokens, requests or the engine.
"""

from collections import deque
from collections.abc import Iterable, Iterator

import msgspec

from ..errors import InvalidRequest
from . import reasoning, tools
from .pieces import Kind, Piece
from .reasoning import Splitter, Tags
from .tools import CallParser, Form


class Said(msgspec.Struct, frozen=True):
    """A whole answer. Calls are names and arguments, in the order of the text."""

    content: str
    reasoning: str
    calls: tuple[tuple[str, str], ...]


class AnswerForm(msgspec.Struct, frozen=True):
    """How one model writes what is not plain content; None: it does not, or in a form unknown here."""

    tags: Tags | None = None
    calls: Form | None = None

    @classmethod
    def of(cls, template: str, *, tool_parser: str = "auto", reasoning_parser: str = "auto") -> "AnswerForm":
        """As a chat template shows it, or as the names say."""
        tags = reasoning.detect(template) if reasoning_parser == "auto" else reasoning_parser
        form = tools.detect(template) if tool_parser == "auto" else tool_parser
        return cls(reasoning.TAGS.get(tags or ""), tools.FORMS.get(form or ""))

    def parser(
        self,
        prompt_end: str,
        names: frozenset[str] | None = None,
        *,
        one_call: bool = False,
        parts_reasoning: bool = True,
    ) -> "AnswerParser | None":
        """For one answer behind a prompt that ends so, which may call `names`. None: it is content, whatever it says.

        Raises:
            InvalidRequest: tools for a model whose calls would not be found.
        """
        if names and self.calls is None:
            raise InvalidRequest("this model writes calls in a form unknown here, or is served without tools", "tools")
        splitter = calls = None
        if self.tags is not None and parts_reasoning:
            splitter = Splitter(self.tags, is_open=self.tags.is_open(prompt_end))
        if names and self.calls is not None:
            calls = CallParser(self.calls, names)
        return AnswerParser(splitter, calls, one_call=one_call) if splitter or calls else None

    def markers(self, *, calls: bool) -> tuple[str, ...]:
        """What the parsers must see where it is a special token."""
        tags = () if self.tags is None else (self.tags.open, self.tags.close)
        return tags + (self.calls.markers if calls and self.calls is not None else ())


class AnswerParser:
    """Parts one answer. Every cut of its text makes the same whole."""

    def __init__(self, splitter: Splitter | None, calls: CallParser | None, *, one_call: bool = False) -> None:
        self._splitter = splitter
        self._calls = calls
        self._one_call = one_call
        self._num_calls = 0
        self._num_chars = 0
        self._places = _Places()

    @property
    def has_whole_calls(self) -> bool:
        """Whether the answer calls, and none of its calls is broken off."""
        return self._calls is not None and 0 < self._calls.num_calls == self._calls.num_whole

    def push(self, text: str) -> list[Piece]:
        """What these characters say for certain."""
        start = self._num_chars
        self._num_chars += len(text)
        pieces = [Piece(Kind.CONTENT, text, start)] if self._splitter is None else self._splitter.push(text)
        return pieces if self._calls is None else self._with_calls(pieces, self._calls)

    def finish(self) -> list[Piece]:
        """The rest: the answer is over."""
        pieces = [] if self._splitter is None else self._splitter.finish()
        if self._calls is None:
            return pieces
        return self._with_calls(pieces, self._calls) + self._allowed(self._calls.finish())

    def whole(self, text: str) -> Said:
        """All of an answer at once."""
        return joined([*self.push(text), *self.finish()])

    def _with_calls(self, pieces: list[Piece], calls: CallParser) -> list[Piece]:
        parted: list[Piece] = []
        for piece in pieces:
            if piece.kind is Kind.CONTENT:
                self._places.add(piece)
                parted += self._allowed(calls.push(piece.text))
            else:
                parted.append(piece)
        return parted

    def _allowed(self, pieces: list[Piece]) -> list[Piece]:
        """Where one call is allowed, a second is not told."""
        allowed = [piece for piece in pieces if self._may_tell(piece)] if self._one_call else pieces
        return [placed for piece in allowed for placed in self._places.placed(piece)]

    def _may_tell(self, piece: Piece) -> bool:
        self._num_calls += piece.kind is Kind.CALL
        return self._num_calls <= 1 or piece.kind is Kind.CONTENT


class _Places:
    """Where in the answer its content stands: the parser of calls counts the content alone, which has gaps."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._runs: deque[tuple[int, int]] = deque()  # without a gap: its start in the content, and in the answer

    def add(self, piece: Piece) -> None:
        """More content, by its place in the answer."""
        if not self._runs or piece.start - self._runs[-1][1] != self._num_chars - self._runs[-1][0]:
            self._runs.append((self._num_chars, piece.start))
        self._num_chars += len(piece.text)

    def placed(self, piece: Piece) -> Iterator[Piece]:
        """A piece by its place in the content: the same by its place in the answer, cut where a gap is. In order."""
        if piece.kind is not Kind.CONTENT:
            yield piece
            return
        text, at = piece.text, piece.start
        while text:
            while len(self._runs) > 1 and self._runs[1][0] <= at:
                self._runs.popleft()
            run, place = self._runs[0]
            count = self._runs[1][0] - at if len(self._runs) > 1 else len(text)
            yield Piece(piece.kind, text[:count], place + at - run)
            text, at = text[count:], at + count


def joined(pieces: Iterable[Piece]) -> Said:
    """The whole of what was said in pieces."""
    texts: dict[Kind, list[str]] = {Kind.CONTENT: [], Kind.REASONING: []}
    calls: list[tuple[str, list[str]]] = []
    for kind, text, _ in pieces:
        if kind is Kind.CALL:
            calls.append((text, []))
        elif kind is Kind.ARGUMENTS:
            calls[-1][1].append(text)
        else:
            texts[kind].append(text)
    return Said(
        content="".join(texts[Kind.CONTENT]),
        reasoning="".join(texts[Kind.REASONING]),
        calls=tuple([(name, "".join(arguments)) for name, arguments in calls]),
    )
