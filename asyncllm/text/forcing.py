"""The grammar of a model's whole answer: reasoning first if it reasons, then calls, or what the request demands.

Any thread. It never knows tokens' numbers but those of special ones, nor how a grammar is compiled. What it lets
through is what tools.py and reasoning.py read; its Lark is llguidance's.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..errors import InvalidRequest
from ..types import GrammarSpec
from .answer import AnswerForm
from .notation import holds_options
from .reasoning import Tags
from .tools import Form

MAX_CALLS = 16  # a weak model would go on to its limit
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Where these stand, what an object may have is said elsewhere.
_COMBINED = {"allOf", "anyOf", "oneOf", "$ref", "patternProperties"}
_WHITE_SPACE = {"whitespace_pattern": r"( |\n {0,24}|\n\t{0,8})?"}

Function = tuple[str, dict[str, Any] | None]  # name, schema of its arguments
Literal = Callable[[str], str]  # a text, or the special token that it is, as Lark


def forced(
    form: AnswerForm,
    literal: Literal,
    prompt_end: str,
    spec: GrammarSpec | None,
    functions: Sequence[Function] = (),
    *,
    must_call: bool = False,
    one_call: bool = False,
    strict: bool = False,
) -> GrammarSpec | None:
    """What all of an answer behind this prompt must look like; None: it is free.

    With functions that it may call, and a demand, it does the one or the other. Strict: it says what it likes, but
    where it calls, it keeps to the functions' schemas.
    """
    is_free = spec is None and not must_call
    if is_free and (not strict or form.calls is None):
        return None
    answers, rules = [] if spec is None else ["@body"], []
    if functions and form.calls is not None:
        most = 1 if one_call else MAX_CALLS
        answers.append("free" if is_free else "calls")
        rules = (_free if is_free else _calls)(form.calls, literal, most) + _functions(form.calls, literal, functions)
    start, thoughts = ("", []) if form.tags is None else _thoughts(form.tags, literal, prompt_end)
    if spec is not None and not rules and not start:
        return spec
    lark = "\n".join([f"start: {start}({' | '.join(answers)})", *thoughts, *rules])
    if spec is not None:
        return msgspec.structs.replace(spec, frame=lark)
    return GrammarSpec("lark", lark, "tools")


def _thoughts(tags: Tags, literal: Literal, prompt_end: str) -> tuple[str, list[str]]:
    """What may stand before an answer, and its rules."""
    end = prompt_end.rstrip()
    if end.endswith(tags.close):
        return "", []
    close = literal(tags.close)
    text = r"/(.|\n)*/"
    is_text = close.startswith('"')
    thought = f"thought[suffix={close}]: {text}" if is_text else f"thought: {text} {close}"
    start = "thought gap " if tags.is_open(end) else f"({literal(tags.open)} thought gap)? "
    return start, [thought, r"gap: /\s{0,4}/"]


def _calls(form: Form, literal: Literal, most: int) -> list[str]:
    """The rule `calls`: nothing but them."""
    if form.open is None:
        return [f"calls: {_several(form.joined_by, most)}" if form.joined_by else f"calls: {_one_or_list(most)}"]
    one, joint = f"{literal(form.open)} {_behind_open(form, literal, most)}", '"\\n" ' if form.close else ""
    if form.is_list:
        return [f"calls: {one}"]
    return [f"calls: {one}" + (f" ({joint}{one}){_up_to(most - 1)}" if most > 1 else "")]


def _free(form: Form, literal: Literal, most: int) -> list[str]:
    """The rule `free`: text, in which a call is one."""
    if form.open is None:  # an answer that begins like a call is one
        return [*_calls(form, literal, most), "free: calls | OTHER?", r"OTHER: /\s*[^\s{\[](.|\n)*/"]
    one, opening = _behind_open(form, literal, most), literal(form.open)
    if not opening.startswith('"'):  # a special token, which no text is
        return [f"free: TEXT? ({opening} {one} TEXT?){_up_to(most)}", r"TEXT: /(.|\n)+/"]
    pattern = re.escape(form.open).replace("/", r"\/")
    return [
        f"free: (before {one}){_up_to(most)} TEXT?",
        f"before[suffix={opening}]: /(.|\\n)*/",
        rf"TEXT: /(.|\n)+/ & ~/(.|\n)*{pattern}(.|\n)*/",
    ]


def _behind_open(form: Form, literal: Literal, most: int) -> str:
    """What follows the opening tag."""
    if form.close is not None:
        return f'"\\n" call "\\n" {literal(form.close)}'
    return f'"[" {_several(", ", most)} "]"' if form.is_list else "call"


def _one_or_list(most: int) -> str:
    return "call" if most == 1 else f'call | "[" {_several(", ", most)} "]"'


def _several(joint: str, most: int) -> str:
    return "call" if most == 1 else f"call ({json.dumps(joint)} call){_up_to(most - 1)}"


def _up_to(most: int) -> str:
    return f"{{0,{most}}}"


def _functions(form: Form, literal: Literal, functions: Sequence[Function]) -> list[str]:
    """The rule `call`, and one for each function."""
    rules = []
    for i, (name, parameters) in enumerate(functions):
        schema = f"%json {_schema(parameters)}"
        if form.writes_names:
            rules.append(f"f{i}: {json.dumps(name)} {literal('[ARGS]')} {schema}")
        else:
            opening = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
            rules.append(f'f{i}: {json.dumps(opening)} {schema} "}}"')
    return [f"call: {' | '.join([f'f{i}' for i in range(len(functions))])}", *rules]


def _schema(parameters: dict[str, Any] | None) -> str:
    """Of the arguments. Keys that it does not name are not invented; nor is white space without an end."""
    schema = _NO_PARAMETERS if parameters is None else parameters
    if holds_options(schema):
        raise InvalidRequest("'x-guidance' of a function's parameters has no effect here; leave it out", "tools")
    if schema.get("type") is None or isinstance(schema["type"], list):
        schema = schema | {"type": "object"}  # whatever else it allows: arguments are an object
    if "properties" in schema and not _COMBINED & schema.keys():
        schema = {"additionalProperties": False} | schema
    try:
        return json.dumps(schema | {"x-guidance": _WHITE_SPACE})
    except RecursionError:
        raise InvalidRequest("a function's parameters are nested too deeply", "tools") from None
