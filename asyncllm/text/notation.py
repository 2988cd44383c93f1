"""Grammars as users write them, and llguidance's words about them as users can read them.

Any thread. It never knows what a grammar is for. What llguidance would take and not act on is found here: a record of
what a rule matched that nobody is told, a temperature that nobody samples by, an option that is none.
"""

import json
import re
from typing import Any

# Every pattern here is linear in the text, which may be 65,536 characters of anything.
_EBNF = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)
# Strings, patterns and comments of Lark: what looks like an annotation in there is none.
_QUOTED = re.compile(r'"(?:\\.|[^"\\\n])*"?|//[^\n]*|#[^\n]*|/(?:\\.|[^/\\\n])+/?')
_ATTRIBUTES = re.compile(r"\w\s*\[([^\[\]]*)\]\s*:")  # of a rule: they stand before its colon
_TOKEN = re.compile(r"<[^<>\s]*>")
_REFERENCE = re.compile(r"@\w+")
_DIRECTIVE = re.compile(rf"{_QUOTED.pattern}|(?P<keyword>%llguidance|%json)\s*")

_IDLE_ATTRIBUTES = ("temperature", "capture", "stop_capture")
_OF_GRAMMARS = ("no_forcing", "allow_initial_skip", "allow_invalid_utf8")
_OF_SCHEMAS = (
    "whitespace_flexible", "whitespace_pattern", "item_separator", "key_separator", "coerce_one_of", "lenient",
    "json_allowed_escapes", "json_allow_general_unicode_escapes",
)  # fmt: skip
_NAMES_TO_SCHEMAS = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_DATA = ("const", "enum", "default", "examples")


def is_ebnf(source: str) -> bool:
    """Whether its rules are written with ::=, as llama.cpp's are; else they are Lark's."""
    return _EBNF.search(source) is not None


def idle_part(source: str) -> str:
    """What of a Lark grammar could not be acted on, and why; "" if there is nothing."""
    bare = _QUOTED.sub(lambda quoted: " " * len(quoted[0]) if quoted[0][0] in "/#" else '""', source)
    for attributes in _ATTRIBUTES.finditer(bare):
        names = [one.partition("=")[0].strip() for one in attributes[1].split(",")]
        for name in names:
            if name in _IDLE_ATTRIBUTES:
                return f"the attribute {name!r} of a rule has no effect here; leave it out"
    if token := _TOKEN.search(bare):
        return f"{token[0][:80]} names a token: write its text"
    if reference := _REFERENCE.search(bare):
        return f"{reference[0][:80]} names another grammar, of which there are none"
    return _idle_option(source)


def _idle_option(source: str) -> str:
    read, at = json.JSONDecoder().raw_decode, 0
    while found := _DIRECTIVE.search(source, at):
        at, keyword = found.end(), found["keyword"]
        if keyword is None:
            continue
        try:
            value, at = read(source, at)
        except json.JSONDecodeError:
            return ""  # llguidance will say so
        except (ValueError, RecursionError):
            return f"{keyword} is nested too deeply, or holds too large a number"
        reason = _unknown(keyword, value, _OF_GRAMMARS) if keyword == "%llguidance" else _idle_in_schema(value)
        if reason:
            return reason
    return ""


def _idle_in_schema(schema: Any) -> str:
    """Of a schema in Lark, whose root alone may say how it is read."""
    if not isinstance(schema, dict):
        return ""
    if reason := _unknown("x-guidance", schema.get("x-guidance"), _OF_SCHEMAS):
        return reason
    below = {keyword: value for keyword, value in schema.items() if keyword != "x-guidance"}
    return "'x-guidance' has no effect below the root of a schema; leave it out" if holds_options(below) else ""


def json_holds_options(source: str) -> bool:
    """holds_options(), of a schema's text; False of one that is none, which llguidance will say."""
    if "x-guidance" not in source and "\\" not in source:  # nearly always
        return False
    try:
        return holds_options(json.loads(source))
    except (ValueError, RecursionError):
        return False


def holds_options(schema: Any) -> bool:
    """Whether it says anywhere how it is to be read: as a keyword, not as the name of a property or within data."""
    left = [schema]  # however deep
    while left:
        one = left.pop()
        if isinstance(one, list):
            left += one
        elif isinstance(one, dict):
            if "x-guidance" in one:
                return True
            for keyword, value in one.items():
                if keyword in _NAMES_TO_SCHEMAS and isinstance(value, dict):
                    left += value.values()
                elif keyword not in _DATA:
                    left.append(value)
    return False


def _unknown(keyword: str, options: Any, known: tuple[str, ...]) -> str:
    unknown = [name for name in options if name not in known] if isinstance(options, dict) else []
    return f"{keyword} knows no option {unknown[0][:80]!r}, but {', '.join(known)}" if unknown else ""


# -- what llguidance says --

_MAX_REASON_CHARS = 4000
_WORDS = {
    "NoExtension": "no text fits it",
    "NoExtensionBias": "no text fits it",
    "LexerTooComplex": "it is too complex to follow: its patterns need too many states",
    "ParserTooComplex": "it is too complex to follow: too many of its rules may apply at once",
    "MaxTokensTotal": "its max_tokens are used up",
    "MaxTokensParser": "its max_tokens are used up",
    "InternalError": "it cannot be followed",
    "Cancelled": "it cannot be followed",
}
_EXCERPT = re.compile(r"^ *(?:\d+ \| .*|\^)\n?", re.MULTILINE)
_PLACE = re.compile(r"^(?:at )?(\d+)\((\d+)\): ")
# Patterns' errors are told with the pattern, for a terminal; other errors with what is inside of llguidance.
_REPHRASED = (
    (_EXCERPT, ""),
    (re.compile(r"regex parse error:.*?^error: ", re.MULTILINE | re.DOTALL), ""),
    (re.compile(r'^invalid regex ".*?" \(in regex\): ', re.DOTALL), ""),
    (
        re.compile(r"lookarounds not supported yet; .*", re.DOTALL),
        r"look-around is not supported: no \\b, and ^ and $ at the ends alone",
    ),
    (
        re.compile(r"oneOf constraints are not supported\. .*", re.DOTALL),
        "oneOf is kept to only where no two of its schemas fit one value; anyOf is in any case",
    ),
)


def in_words(reason: str, *, has_places: bool = True) -> str:
    """Why a grammar cannot be used, without what only llguidance knows of. Places are those of its own text."""
    if len(reason) > _MAX_REASON_CHARS:  # it repeats what it is about
        reason = f"{reason[: _MAX_REASON_CHARS // 2]} ... {reason[-_MAX_REASON_CHARS // 2 :]}"
    text = reason.partition("<non-verbose/>")[0].strip()
    if (word := text.partition("\n")[0]) in _WORDS:
        return _WORDS[word]
    place = _PLACE.match(text)
    text = text[place.end() :] if place else text
    for pattern, words in _REPHRASED:
        text = pattern.sub(words, text)
    text = text.strip()
    return f"line {place[1]}, column {place[2]}: {text}" if place and has_places else text
