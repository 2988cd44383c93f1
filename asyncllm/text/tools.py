"""The forms in which models write calls of tools, and the parser that finds them in text that arrives in pieces.

Loop thread, a parser per answer. It never knows tokens, requests or the engine.

What looks like a call and turns out to be none is content, to the letter. White space around calls is not shown.
"""

from collections.abc import Callable

import msgspec

from .calls import NamedReader, ObjectReader, Reader
from .pieces import Kind, Piece, Pieces, find_first, shown_len, trimmed_len

_MAX_STRAY_CHARS = 64  # between a call and its closing tag: a brace too many, not an answer
_SEPARATORS = " \t\r\n,;]"

State = Callable[[], bool]


class Form(msgspec.Struct, frozen=True):
    """How one family of models writes calls."""

    open: str | None  # None: the answer as a whole is the call
    close: str | None = None
    named: bool = False  # also name{...}, beside objects and lists of them
    skipped: str = ""  # may stand before a whole answer that is a call
    id_chars: int | None = None  # Mistral's templates insist on ids of 9 letters
    # -- where calls are demanded, how they are to be written --
    arguments_key: str = "arguments"
    joined_by: str = ""  # whole answers; else several are a list
    writes_names: bool = False

    @property
    def is_list(self) -> bool:
        """Whether one opening tag is for all calls."""
        return self.open is not None and self.close is None and not self.writes_names

    @property
    def markers(self) -> tuple[str, ...]:
        """Text that the parser must see where it is a special token."""
        return tuple(tag for tag in (self.open, self.close, self.skipped) if tag)

    def call_id(self, random_hex: str) -> str:
        return f"call_{random_hex}" if self.id_chars is None else random_hex[: self.id_chars]


FORMS = {
    "hermes": Form("<tool_call>", "</tool_call>"),
    "mistral": Form("[TOOL_CALLS]", named=True, id_chars=9),
    "mistral_named": Form("[TOOL_CALLS]", named=True, id_chars=9, writes_names=True),
    "llama3": Form(None, skipped="<|python_tag|>", arguments_key="parameters", joined_by="; "),
    "json": Form(None),
}


def detect(template: str) -> str | None:
    """The name of the form that a chat template teaches its model; None where it knows tools in a form we do not."""
    if "tools" not in template:
        return "hermes"  # told by us, in the system message
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else "hermes"
    if "[TOOL_CALLS]" in template:
        return "mistral_named" if "[ARGS]" in template else "mistral"
    if "<|python_tag|>" in template or '"parameters":' in template:
        return "llama3"
    return None if "tool_calls_begin" in template or "<|channel|>" in template else "json"


class CallParser:
    """Finds the calls in one answer. A whole answer that is an object calls only what is in `names`: else it is JSON
    that somebody asked for."""

    def __init__(self, form: Form, names: frozenset[str]) -> None:
        self.num_calls = 0
        self.num_whole = 0  # of these, the ones whose last brace has come
        self._form = form
        self._known = names if form.open is None else None
        self._pieces = Pieces()
        self._num_chars = 0  # of the content so far; the held ones are its last
        self._held = ""
        self._state = self._in_text if form.open is not None else self._at_start
        self._opening = ""  # what led into the call that is read
        self._in_list = False
        self._at_edge = False  # behind a call: white space is not shown
        self._reader: Reader = ObjectReader(self._pieces.say)

    def push(self, text: str) -> list[Piece]:
        """What these characters say for certain."""
        self._num_chars += len(text)
        self._held += text
        while self._held and self._state():
            pass
        return self._pieces.take()

    def finish(self) -> list[Piece]:
        """What was held back; but no call that was cut before its name."""
        rest, self._held = self._held, ""
        if self._state == self._in_call and self._form.open is None and not self._reader.announced:
            self._say(self._opening + self._reader.raw)
        elif self._state == self._behind_call:
            rest = rest.lstrip(_SEPARATORS)
            self._say("" if (self._form.close or "").startswith(rest) else rest)
        elif self._state != self._behind_tag:
            self._say(rest)
        return self._pieces.take()

    # Each state takes from the held text; True if another look at the rest may find more.

    def _in_text(self) -> bool:
        assert self._form.open is not None
        if self._at_edge:
            self._held = self._held.lstrip()
            self._at_edge = not self._held
        at = self._held.find(self._form.open)
        before = self._held[: at if at >= 0 else shown_len(self._held, (self._form.open,))]
        shown = trimmed_len(before)
        text, self._held = self._cut(shown)
        self._say(text)
        if at < 0:
            return False
        self._opening, self._held = self._cut(at - shown + len(self._form.open))
        self._state = self._behind_tag
        return True

    def _at_start(self) -> bool:
        """Of a whole answer: is it a call?"""
        core = self._held.lstrip()
        if not core or (len(core) < len(self._form.skipped) and self._form.skipped.startswith(core)):
            return False
        core = core.removeprefix(self._form.skipped).lstrip() if self._form.skipped else core
        if not core:
            return False
        self._opening, self._held = self._cut(len(self._held) - len(core))
        self._state = self._behind_tag
        return True

    def _behind_tag(self) -> bool:
        """What kind of call begins here, if one does."""
        core = self._held.lstrip()
        inner = core[1:].lstrip() if core.startswith("[") else core
        if not inner:
            return False
        self._in_list = inner is not core
        if inner[0] == "{":
            self._begin(ObjectReader(self._pieces.say, self._known), len(self._held) - len(inner))
        elif self._form.named and not self._in_list:
            self._begin(NamedReader(self._pieces.say), len(self._held) - len(core))
        else:
            self._say(self._opening)
            self._state = self._as_text()
        return True

    def _begin(self, reader: Reader, skipped: int) -> None:
        opening, self._held = self._cut(skipped)
        self._opening += opening
        self._reader, self._state = reader, self._in_call

    def _in_call(self) -> bool:
        was_announced = self._reader.announced
        rest = self._reader.push(self._held)
        self.num_calls += self._reader.announced and not was_announced
        self._held = rest or ""
        if rest is None:
            return False
        self.num_whole += self._reader.whole
        if self._reader.announced:
            self._opening, self._state = "", self._behind_call
        else:
            self._say(self._opening + self._reader.raw)
            self._state = self._as_text()
        return True

    def _behind_call(self) -> bool:
        """Another call of a list, the closing tag, or text."""
        several = self._in_list or self._form.open is None
        core = self._held.lstrip(_SEPARATORS if several else None)
        if not core:
            return False
        if several and core[0] == "{":
            self._begin(ObjectReader(self._pieces.say, self._known), len(self._held) - len(core))
            return True
        if self._form.close is not None and (done := self._find_close(core)) is not None:
            return done
        self._held, self._at_edge, self._state = core, True, self._as_text()
        return True

    def _find_close(self, core: str) -> bool | None:
        """The closing tag, soon behind the call, or another opening one in its place. False: it may still come."""
        assert self._form.open is not None and self._form.close is not None
        found = find_first(core[:_MAX_STRAY_CHARS], (self._form.close, self._form.open))
        if found is None:
            return None if len(core) >= _MAX_STRAY_CHARS else False
        at, tag = found
        self._held = core[at + len(tag) :] if tag == self._form.close else core[at:]
        self._at_edge, self._state = True, self._in_text
        return True

    def _as_text(self) -> State:
        return self._in_text if self._form.open is not None else self._in_plain

    def _in_plain(self) -> bool:
        """A whole answer that is no call, or goes on behind its calls."""
        text, self._held = self._held, ""
        self._say(text)
        return False

    def _cut(self, at: int) -> tuple[str, str]:
        return self._held[:at], self._held[at:]

    def _say(self, text: str) -> None:
        """What stands right before the held text."""
        self._pieces.say(Kind.CONTENT, text, self._num_chars - len(self._held) - len(text))
