"""A live answer's text in the wire's pieces: parted into what it says, with the log probabilities of its tokens.

Loop thread. It never knows clients, nor how a piece is told.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile

from ..stream import Stream
from ..text.pieces import Kind, Piece
from ..types import Logprob, TokenSpan
from ..wire import items
from .parting import Parting, reasoning_tokens

TellLogprobs = Callable[[Sequence[Logprob]], items.Logprobs]


class PieceReader:
    """Reads one stream. The same pieces come of it joined, whenever they are taken."""

    def __init__(self, stream: Stream, parting: Parting | None, tell_logprobs: TellLogprobs | None) -> None:
        self._stream = stream
        self._parser = None if parting is None else parting.new_parser()
        self._tells_reasoning = parting is None or parting.tells_reasoning
        self._tell_logprobs = tell_logprobs
        self._tokens = _Tokens()
        self._num_chars = 0  # of the answer's text
        self._num_said = self._num_reasoned = 0  # of these, in pieces, and in reasoning
        self._last = Kind.CONTENT
        if tell_logprobs is not None:
            stream.track_spans()

    @property
    def has_whole_calls(self) -> bool:
        return self._parser is not None and self._parser.has_whole_calls

    def num_reasoning_tokens(self, num_output_tokens: int) -> int:
        """How many of so many tokens, which have all been taken, are reasoning."""
        return reasoning_tokens(num_output_tokens, self._num_reasoned, self._num_said)

    def take(self) -> list[items.Piece]:
        """What has been said since, as far as it is certain; the rest too once the stream has ended."""
        ended, pieces = self._stream.ended, []
        for piece in self._parted(self._take_text(), ended):
            self._count(piece)
            if self._tells_reasoning or piece.kind is not Kind.REASONING:
                pieces.append(self._told(piece))
        if ended and self._last is Kind.CONTENT and (silent := self._tokens.last_silent()):
            pieces.append(self._content("", silent))
        return pieces

    def _take_text(self) -> str:
        if self._tell_logprobs is None:
            return self._stream.take_text()
        text, spans = self._stream.take_spans()
        self._tokens.add(spans)
        return text

    def _parted(self, text: str, ended: bool) -> list[Piece]:
        start = self._num_chars
        self._num_chars += len(text)
        if self._parser is None:
            return [Piece(Kind.CONTENT, text, start)] if text else []
        return [*self._parser.push(text), *(self._parser.finish() if ended else ())]

    def _count(self, piece: Piece) -> None:
        self._last = piece.kind
        self._num_said += len(piece.text)
        self._num_reasoned += len(piece.text) if piece.kind is Kind.REASONING else 0

    def _told(self, piece: Piece) -> items.Piece:
        if piece.kind is not Kind.CONTENT or self._tell_logprobs is None:
            return items.Piece(piece.kind.value, piece.text)
        return self._content(piece.text, self._tokens.of(piece.start, piece.start + len(piece.text)))

    def _content(self, text: str, logprobs: Sequence[Logprob]) -> items.Piece:
        assert self._tell_logprobs is not None
        return items.Piece(items.CONTENT, text, self._tell_logprobs(logprobs))


class _Tokens:
    """The tokens of one answer, until the text that they wrote is told.

    A token belongs to the text in which one of its characters stands, to the first if there are several; one that
    wrote none, to the character that follows it.
    """

    def __init__(self) -> None:
        self._waiting: deque[TokenSpan] = deque()

    def add(self, tokens: Iterable[TokenSpan]) -> None:
        self._waiting += tokens

    def of(self, start: int, end: int) -> list[Logprob]:
        """Those of the text [start, end). Ask in the order of the text: whatever stands before is let go."""
        entries = []
        while self._waiting and self._waiting[0].start < end:
            token = self._waiting.popleft()
            if max(token.end, token.start + 1) > start:
                entries.append(token.logprob)
        return entries

    def last_silent(self) -> list[Logprob]:
        """Of an answer that is over, those that wrote nothing and are followed by nothing, as EOS."""
        last = list(takewhile(lambda token: token.start == token.end, reversed(self._waiting)))
        return [token.logprob for token in reversed(last)]
