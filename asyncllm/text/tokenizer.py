"""Text to token ids and back, by a model folder's tokenizer.json.

Frozen after start: the loop thread uses it, and worker threads for long prompts at the same time
(nothing is set on the library's object after from_folder, so its "Already borrowed" cannot occur).
It never knows requests, the engine or transformers (but for folders without a tokenizer.json).
"""

import json
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend

from ..errors import ContextTooLong, InvalidRequest, ModelError
from .control import ControlToken, ControlTokens
from .detokenizer import Detokenizer, StreamDetokenizer, TableDetokenizer
from .vocabulary import Spec, token_bytes

_NFC_SHRINKS_AT_MOST = 4  # a composed character and the code points that made it


class Tokenizer:
    """One model's vocabulary.

    `encode` and `encode_rendered` let the GIL go while the library works and are safe from any thread.
    """

    def __init__(
        self, backend: Backend, spec: Spec, eos_ids: tuple[int, ...], config: dict[str, Any] | None = None
    ) -> None:
        vocab = backend.get_vocab(with_added_tokens=True)
        added = spec.get("added_tokens") or []
        self.eos_ids = eos_ids
        self.config = config or {}  # tokenizer_config.json
        self.vocab_size = max(vocab.values()) + 1
        self.special_ids = frozenset(token["id"] for token in added if token["special"])
        self.control = ControlTokens([_control_token(token) for token in added if _is_control(token)])
        self._backend = backend
        backend.encode_special_tokens = True  # typed text never becomes a control id; split() puts those in
        self._middle = _middle_backend(backend, spec)
        self._table = token_bytes(spec, vocab)
        self._visible = self._table and _without(self._table, self.special_ids)
        self._tables_showing: dict[frozenset[int], list[bytes]] = {}
        self._most_chars_a_token = _most_chars_a_token(spec, self._table)
        self.start_ids = list(backend.encode_batch_fast([""])[0].ids)  # what encode() puts in front

    @classmethod
    def from_folder(cls, path: str | Path) -> "Tokenizer":
        """Load tokenizer.json and the EOS ids (generation_config, config, tokenizer_config: the first that has some).

        Raises:
            ModelError: no tokenizer in the folder, or one that cannot be read.
        """
        folder = Path(path)
        text = _tokenizer_json(folder)
        try:
            spec = msgspec.json.decode(text)
            backend = Backend.from_str(_with_all_control_special(text, spec))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"the tokenizer of {folder.name} cannot be read: {error}") from error
        return cls(backend, spec, _eos_ids(folder, backend), read_json(folder / "tokenizer_config.json"))

    def __repr__(self) -> str:
        kind = "table" if self._table else "stream"
        return f"<Tokenizer of {self.vocab_size} ids, {len(self.special_ids)} special, decoded by {kind}>"

    def encode(self, text: str, *, add_special_tokens: bool = True, max_len: int | None = None) -> list[int]:
        """The ids of plain text, with the start token where the tokenizer adds one.

        Raises:
            ContextTooLong: more than max_len ids; long before tokenising where the length alone shows it.
            InvalidRequest: the text holds half a surrogate pair, so it is no Unicode.
        """
        self.check_chars(len(text), max_len)
        encoding = _encoding(self._backend, text, add_special_tokens=add_special_tokens)
        _check_len(len(encoding), max_len)  # before .ids, which builds millions of ints under the GIL
        return list(encoding.ids)

    def encode_rendered(self, text: str, *, mark: str = "", max_len: int | None = None) -> list[int]:
        """The ids of a rendered chat template: its control tokens as ids, no start token added to its own.

        `mark` is the character that ControlTokens.mark put into users' look-alikes; it is dropped here.

        Raises:
            ContextTooLong, InvalidRequest: as in encode.
        """
        self.check_chars(len(text) - (text.count(mark) if mark else 0), max_len)
        ids: list[int] = []
        for piece in self.control.split(text):
            if isinstance(piece, int):
                ids.append(piece)
                continue
            backend = self._middle if ids else self._backend
            encoding = _encoding(backend, piece.replace(mark, ""), add_special_tokens=False)
            _check_len(len(ids) + len(encoding), max_len)
            ids += encoding.ids
        _check_len(len(ids), max_len)
        return ids

    def encode_inside(self, text: str) -> list[int]:
        """The ids of text that stands inside a longer one. Any thread."""
        return list(self._middle.encode(text, add_special_tokens=False).ids)

    def literal(self, text: str) -> str:
        """A text as a grammar (Lark) has it: a special token by its number, as its letters would not be it."""
        token_id = self._backend.token_to_id(text)
        if token_id in self.special_ids:
            return f"<[{token_id}]>"
        return json.dumps(text, ensure_ascii=False)

    @property
    def table(self) -> list[bytes] | None:
        """What each id spells, special ones too; None where an id has no spelling of its own."""
        return self._table

    def encode_written(self, text: str, *, add_special_tokens: bool = True, max_len: int | None = None) -> list[int]:
        """The ids of a text whose control tokens are meant: one that somebody has rendered elsewhere.

        Raises:
            ContextTooLong, InvalidRequest: as in encode.
        """
        ids = self.encode_rendered(text, max_len=max_len)
        has_start = not add_special_tokens or ids[: len(self.start_ids)] == self.start_ids
        return ids if has_start else [*self.start_ids, *ids]

    def spellings(self, token_ids: list[int]) -> list[str]:
        """Each id as the vocabulary writes it; "" for those it does not know."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def spell(self, token_id: int) -> bytes:
        """What one id stands for, special ones too; a byte of a character is that byte where the decoder tells."""
        if self._table is not None:
            return self._table[token_id] if token_id < len(self._table) else b""
        return str(self._backend.decode([token_id], skip_special_tokens=False)).encode()

    def word_ids(self, word: str) -> set[tuple[int, ...]]:
        """The ids of a word in the middle of a text, with and without a space before it.

        Raises:
            InvalidRequest: as in encode.
        """
        texts = (word.lstrip(" "), " " + word.lstrip(" "))
        found = {tuple(_encoding(self._middle, text, add_special_tokens=False).ids) for text in texts}
        return found - {()}

    def check_chars(self, num_chars: int, max_len: int | None) -> None:
        """Refuse text that is too long whatever its tokens.

        Raises:
            ContextTooLong: so many characters cannot be max_len tokens.
        """
        if max_len is not None and (num_tokens := self.num_tokens_at_least(num_chars)) > max_len:
            raise context_too_long(max_len, f"at least {num_tokens}")

    def detokenizer(self, *, skip_special_tokens: bool = True, shown: tuple[str, ...] = ()) -> Detokenizer:
        """A fresh incremental detokenizer for one sequence. `shown` are special tokens not to be skipped."""
        ids = [self._backend.token_to_id(text) for text in shown]
        shown_ids = self.special_ids.intersection([token_id for token_id in ids if token_id is not None])
        if self._table is None or self._visible is None:
            return StreamDetokenizer(self._backend, skip_special_tokens and not shown_ids)
        if shown_ids and skip_special_tokens:
            return TableDetokenizer(self._showing(shown_ids))
        return TableDetokenizer(self._visible if skip_special_tokens else self._table)

    def _showing(self, shown_ids: frozenset[int]) -> list[bytes]:
        """The table that skips every special token but these; a model has one or two such sets."""
        assert self._table is not None
        if (table := self._tables_showing.get(shown_ids)) is None:
            table = self._tables_showing[shown_ids] = _without(self._table, self.special_ids - shown_ids)
        return table

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of these ids, by the rules of the incremental one."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return detokenizer.push(token_ids) + detokenizer.finish()

    def num_tokens_at_least(self, num_chars: int) -> int:
        """A lower bound of the tokens that so much text has; 0 when this tokenizer gives none."""
        return -(-num_chars // self._most_chars_a_token) if self._most_chars_a_token else 0


def _encoding(backend: Backend, text: str, *, add_special_tokens: bool) -> Encoding:
    # A batch of one: of the library's calls only the batches let the GIL go.
    try:
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
    except TypeError:
        raise InvalidRequest("the text is not valid Unicode: it holds half of a surrogate pair", "prompt") from None


def context_too_long(max_len: int, counted: int | str) -> ContextTooLong:
    """The error whose opening words LiteLLM and others look for."""
    return ContextTooLong(
        f"This model's maximum context length is {max_len} tokens for a prompt, but this one has {counted}.", "prompt"
    )


def _check_len(num_tokens: int, max_len: int | None) -> None:
    if max_len is not None and num_tokens > max_len:
        raise context_too_long(max_len, num_tokens)


def _is_control(token: Spec) -> bool:
    """Flagged special, or written like a control token: DeepSeek's <|User|> (U+FF5C bars) carries no flag.

    <think> and <tool_call>, unflagged too, stay text that a client may send back in an assistant message.
    """
    text = token["content"]
    return bool(token["special"]) or (text[:2], text[-2:]) in (("<|", "|>"), ("<\uff5c", "\uff5c>"))


def _control_token(token: Spec) -> ControlToken:
    return ControlToken(token["id"], token["content"], token["lstrip"], token["rstrip"])


def _with_all_control_special(text: str, spec: Spec) -> str:
    """tokenizer.json with the flag set on every control token, since the library escapes only flagged ones."""
    added = spec.get("added_tokens") or []
    if all(token["special"] for token in added if _is_control(token)):
        return text
    flagged = [token | {"special": token["special"] or _is_control(token)} for token in added]
    return msgspec.json.encode(spec | {"added_tokens": flagged}).decode()


def _middle_backend(backend: Backend, spec: Spec) -> Backend:
    """The tokenizer for text behind a control token.

    The same one, unless its pre-tokenizer puts a space only before the first word of a whole text:
    then a copy that never does.
    """
    pre_tokenizer = msgspec.json.encode(spec.get("pre_tokenizer"))
    if b'"prepend_scheme":"first"' not in pre_tokenizer:
        return backend
    changed = msgspec.json.decode(pre_tokenizer.replace(b'"prepend_scheme":"first"', b'"prepend_scheme":"never"'))
    copy = Backend.from_str(msgspec.json.encode(spec | {"pre_tokenizer": changed}).decode())
    copy.encode_special_tokens = True
    return copy


def _without(table: list[bytes], hidden: frozenset[int]) -> list[bytes]:
    return [b"" if token_id in hidden else spelled for token_id, spelled in enumerate(table)]


def _most_chars_a_token(spec: Spec, table: list[bytes] | None) -> int:
    """How much text one token can stand for, at most; 0 when that is not known."""
    normalizer = spec.get("normalizer")
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    if table is None or not all(_keeps_length(step) for step in steps):
        return 0
    composes = any(step["type"] == "NFC" for step in steps)
    return max(map(len, table)) * (_NFC_SHRINKS_AT_MOST if composes else 1)


def _keeps_length(step: Spec) -> bool:
    """Whether a normalizer never turns much text into little."""
    if step["type"] == "Replace":
        return len(step["content"]) >= len(step["pattern"].get("String", step["content"] + " "))
    return step["type"] in ("Prepend", "NFC")


def _tokenizer_json(folder: Path) -> str:
    path = folder / "tokenizer.json"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    return _converted(folder)


def _converted(folder: Path) -> str:
    """For folders with only a slow tokenizer: transformers (10 s to import) converts it."""
    if not any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "tokenizer_config.json")):
        raise ModelError(f"{folder.name} has no tokenizer: tokenizer.json is missing")
    try:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # whatever the conversion stumbles over, the reader needs its words
        raise ModelError(
            f"{folder.name} has no tokenizer.json and its tokenizer cannot be converted: {error}"
        ) from error


def _eos_ids(folder: Path, backend: Backend) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        ids = read_json(folder / name).get("eos_token_id")
        if isinstance(ids, int):
            return (ids,)
        if isinstance(ids, list) and ids:
            if not all(isinstance(token_id, int) for token_id in ids):
                raise ModelError(f"{name} names an eos_token_id that is no number: {ids}")
            return tuple(ids)
    token = token_text(read_json(folder / "tokenizer_config.json").get("eos_token"))
    token_id = backend.token_to_id(token) if token else None
    return () if token_id is None else (token_id,)


def token_text(value: Any) -> str | None:
    """A special token as tokenizer_config.json writes it: a string, or an object with its content."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a model folder; {} when there is no such file.

    Raises:
        ModelError: a file that is no JSON object.
    """
    if not path.is_file():
        return {}
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
