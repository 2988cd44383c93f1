"""Token ids to text as they arrive, never half a character.

Loop thread, one per sequence. It never knows stop strings, requests or the engine.

The rule for broken text, the same streamed or not: what cannot become valid UTF-8 is U+FFFD at once;
a tail that is the beginning of a character is held (at most 3 bytes) and, if the sequence ends there,
is one U+FFFD at finish().
"""

from codecs import utf_8_decode
from collections.abc import Iterable, Sequence
from typing import Protocol

from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from ..errors import AsyncLLMError

MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """Incremental text of one sequence."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete; "" while a character is open."""

    def push_one(self, token_id: int) -> str:
        """push() of a single id, as nearly all are."""

    def finish(self) -> str:
        """What is still held, as it must be shown: "" or one U+FFFD."""


class TableDetokenizer:
    """By an id -> bytes table. Holds at most 3 bytes whatever the ids, where DecodeStream holds a run of
    invalid ones for ever, and takes two thirds of its time (1.0 against 1.5 us a token).
    """

    __slots__ = ("_num_ids", "_spell", "_tail")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._spell = table.__getitem__
        self._num_ids = len(table)
        self._tail = b""

    def push(self, token_ids: Iterable[int]) -> str:
        try:
            data = b"".join(map(self._spell, token_ids))
        except IndexError:  # an id beyond the vocabulary, as padded logits could draw, spells nothing
            data = b"".join([self._spell(i) for i in token_ids if i < self._num_ids])
        if not self._tail and data.isascii():
            return data.decode()
        data = self._tail + data
        text, used = utf_8_decode(data, "replace", False)
        self._tail = data[used:]
        return text

    def push_one(self, token_id: int) -> str:
        if not self._tail and token_id < self._num_ids and (data := self._spell(token_id)).isascii():
            return data.decode()
        return self.push((token_id,))

    def finish(self) -> str:
        text, _ = utf_8_decode(self._tail, "replace", True)
        self._tail = b""
        return text


class StreamDetokenizer:
    """By the library's DecodeStream, for decoders that look at more than one token (WordPiece, CTC, ...).

    DecodeStream waits for ever while its text ends in U+FFFD; after MAX_HELD_TOKENS the held ids are
    decoded as they are and a new stream begins.
    """

    __slots__ = ("_backend", "_held", "_skip", "_stream")

    def __init__(self, backend: Backend, skip_special_tokens: bool) -> None:
        self._backend = backend
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def push(self, token_ids: Iterable[int]) -> str:
        return "".join([self.push_one(token_id) for token_id in token_ids])

    def push_one(self, token_id: int) -> str:
        try:
            text = self._stream.step(self._backend, token_id)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the library panics, some decoders by their configuration; no Exception, that
            raise AsyncLLMError(f"token id {token_id} cannot be decoded") from error
        if text is not None:
            self._held.clear()
            return str(text)
        self._held.append(token_id)
        return self._flush() if len(self._held) > MAX_HELD_TOKENS else ""

    def finish(self) -> str:
        held, self._held = self._held, []
        return "\ufffd" if held and self._backend.decode(held, skip_special_tokens=self._skip) else ""

    def _flush(self) -> str:
        held, self._held = self._held, []
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        return str(self._backend.decode(held, skip_special_tokens=self._skip))
