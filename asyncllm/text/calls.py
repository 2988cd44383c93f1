"""One call of a tool as a model writes it, read while it arrives: its name, and its arguments as they come.

Loop thread, one per call. It never knows what stands around a call, or whose it is.

What the model wrote for arguments is passed on to the letter, so the pieces' sum depends on no cut. Structure
alone is followed: a call is whole when its last brace has come.
"""

import re
from collections.abc import Callable
from typing import Protocol

import msgspec

from .pieces import Kind

Say = Callable[[Kind, str], None]

_IN_STRING = re.compile(r'["\\]')
_STRUCTURE = re.compile(r'["{}\[\],\s]')
_NAME_KEYS = ("name", "function")
_ARGUMENT_KEYS = ("arguments", "parameters")
_MAX_NAME_CHARS = 256
_NAME = re.compile(r"[\w.-]+")
_NAME_SO_FAR = re.compile(r"\s*[\w.-]*\s*(\[.*)?", re.DOTALL)


class ValueEnd:
    """Finds the end of a JSON value that begins with the first character it is shown."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str, at: int) -> int:
        """The index behind the value's last character, or -1 if it goes on."""
        while 0 <= at < len(text):
            if self._in_string:
                at = self._pass_string(text, at)
                if self._depth == 0 and at >= 0 and not self._in_string:
                    return at
                continue
            if (match := _STRUCTURE.search(text, at)) is None:
                return -1
            at = match.end()
            if match[0] == '"':
                self._in_string = True
            elif match[0] in "{[":
                self._depth += 1
            elif self._depth == 0:  # a number or a word, ended by what stands behind it
                return match.start()
            elif match[0] in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return at
        return -1

    def _pass_string(self, text: str, at: int) -> int:
        """To behind the string's end, or the next escape; -1 if the text ends before."""
        if self._escaped:
            self._escaped = False
            return at + 1
        if (match := _IN_STRING.search(text, at)) is None:
            return -1
        self._escaped = match[0] == "\\"
        self._in_string = self._escaped
        return match.end()


class Reader(Protocol):
    """Reads one call. Where it turns out to be none, `raw` is what was taken for one."""

    announced: bool  # its name is known, and said
    whole: bool
    raw: str

    def push(self, text: str) -> str | None:
        """Take text: None while the call goes on, else the text behind it, or behind what broke it."""


class ObjectReader:
    """{"name": ..., "arguments": {...}}, in any order; also "parameters", OpenAI's nesting under "function", and
    arguments that are JSON in a string. With `known`, other names make it no call but an object."""

    def __init__(self, say: Say, known: frozenset[str] | None = None) -> None:
        self.announced = False
        self.whole = False
        self.raw = ""
        self._say = say
        self._known = known
        self._over = False
        self._state: Callable[[str, int], int] = self._before
        self._end = ValueEnd()
        self._parts: list[str] = []  # of the key or value being read
        self._key = ""
        self._depth = 0
        self._arguments: str | None = None  # before the name came
        self._has_arguments = False

    def push(self, text: str) -> str | None:
        at = 0
        while at < len(text) and not self._over:
            at = self._state(text, at)
        if not self.announced:
            self.raw += text[:at]
        return text[at:] if self._over else None

    # Each state takes text from `at` and returns how far it came.

    def _before(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] != "{":
            return self._break(at)
        self._state = self._between
        return at + 1

    def _between(self, text: str, at: int) -> int:
        if text[at] == "}":
            return self._close(at)
        if text[at] == '"':
            self._begin(self._read_key)
            return at
        return at + 1 if text[at].isspace() or text[at] == "," else self._break(at)

    def _read_key(self, text: str, at: int) -> int:
        end = self._end.find(text, at)
        self._parts.append(text[at:] if end < 0 else text[at:end])
        if end < 0:
            return len(text)
        self._key = _string("".join(self._parts)) or ""
        self._state = self._behind_key
        return end

    def _behind_key(self, text: str, at: int) -> int:
        if text[at] == ":":
            self._state = self._before_value
            return at + 1
        return at + 1 if text[at].isspace() else self._break(at)

    def _before_value(self, text: str, at: int) -> int:
        if text[at].isspace():
            return at + 1
        if text[at] in ",}]":
            return self._break(at)
        if self._key == "function" and text[at] == "{":
            self._depth += 1
            self._state = self._between
            return at + 1
        is_arguments = self._key in _ARGUMENT_KEYS and not self._has_arguments
        self._begin(self._pass_arguments if is_arguments and self.announced and text[at] == "{" else self._read_value)
        return at

    def _pass_arguments(self, text: str, at: int) -> int:
        end = self._end.find(text, at)
        self._say(Kind.ARGUMENTS, text[at:] if end < 0 else text[at:end])
        if end < 0:
            return len(text)
        self._has_arguments = True
        self._state = self._between
        return end

    def _read_value(self, text: str, at: int) -> int:
        end = self._end.find(text, at)
        self._parts.append(text[at:] if end < 0 else text[at:end])
        if end < 0:
            return len(text)
        self._state = self._between
        return self._take_value("".join(self._parts), end)

    def _take_value(self, value: str, end: int) -> int:
        if self._key in _NAME_KEYS and not self.announced:
            name = _string(value)
            if not name or (self._known is not None and name not in self._known):
                return self._break(end)
            self._announce(name)
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._arguments = _arguments(value)
            if self.announced:
                self._say(Kind.ARGUMENTS, self._arguments)
        return end

    def _announce(self, name: str) -> None:
        self.announced = True
        self._say(Kind.CALL, name)
        if self._arguments is not None:
            self._say(Kind.ARGUMENTS, self._arguments)

    def _close(self, at: int) -> int:
        if self._depth:
            self._depth -= 1
            return at + 1
        self._over, self.whole = True, self.announced
        if self.whole and not self._has_arguments:
            self._say(Kind.ARGUMENTS, "{}")
        return at + 1

    def _begin(self, state: Callable[[str, int], int]) -> None:
        self._state, self._end, self._parts = state, ValueEnd(), []

    def _break(self, at: int) -> int:
        self._over = True
        return at


class NamedReader:
    """name{...}, as Mistral's newer models write it, with or without [CALL_ID]id and [ARGS] between the two."""

    def __init__(self, say: Say) -> None:
        self.announced = False
        self.whole = False
        self.raw = ""
        self._say = say
        self._end = ValueEnd()

    def push(self, text: str) -> str | None:
        if self.announced:
            return self._pass_arguments(text, 0)
        before = len(self.raw)
        self.raw += text
        at = self.raw.find("{", 0, _MAX_NAME_CHARS)
        if at < 0:
            may_be = len(self.raw) < _MAX_NAME_CHARS and _NAME_SO_FAR.fullmatch(self.raw)
            return None if may_be else self._break()
        name = self.raw[:at].split("[ARGS]")[0].split("[CALL_ID]")[0].strip()
        if not _NAME.fullmatch(name):
            return self._break()
        self.announced = True
        self._say(Kind.CALL, name)
        return self._pass_arguments(text, at - before)

    def _pass_arguments(self, text: str, at: int) -> str | None:
        end = self._end.find(text, at)
        self._say(Kind.ARGUMENTS, text[at:] if end < 0 else text[at:end])
        self.whole = end >= 0
        return text[end:] if self.whole else None

    def _break(self) -> str:
        raw, self.raw = self.raw, ""
        return raw


def _string(value: str) -> str | None:
    """The JSON string that this is, or None."""
    try:
        return msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return None


def _arguments(value: str) -> str:
    """Arguments that are no plain object: null is none, a string may hold the object."""
    if value == "null":
        return "{}"
    inner = _string(value)
    if inner is not None and inner.lstrip().startswith("{"):
        return inner
    return value if inner is None or inner.strip() else "{}"
