"""The grammar of a model's whole answer: reasoning first if it reasons, then calls, or what the request demands.

Any thread. It never knows tokens' numbers but those of special ones, nor how a grammar is compiled. What it lets
through is what tools.py and reasoning.py read; its Lark is llguidance's.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ..types import GrammarSpec
from .answer import AnswerForm
from .reasoning import Tags
from .tools import Form

MAX_CALLS = 16  # a weak model would go on to its limit
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
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
) -> GrammarSpec | None:
    """What all of an answer behind this prompt must look like; None: it is free.

    With functions that it may call, and a demand, it does the one or the other.
    """
    if spec is None and not must_call:
        return None
    answers, rules = [] if spec is None else ["@body"], []
    if functions and form.calls is not None:
        answers.append("calls")
        rules = _calls(form.calls, literal, functions, 1 if one_call else MAX_CALLS)
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


def _calls(form: Form, literal: Literal, functions: Sequence[Function], most: int) -> list[str]:
    """The rule `calls`, and what it is made of."""
    names = [f"f{i}" for i in range(len(functions))]
    more = "" if most == 1 else f"{{0,{most - 1}}}"
    if form.named and form.writes_names:
        rules = [_named(form, literal, name, function) for name, function in zip(names, functions, strict=True)]
        calls = f"call (call){more}" if more else "call"
    else:
        rules = [_object(form, name, function) for name, function in zip(names, functions, strict=True)]
        calls = _list(form, literal, more)
    return [f"calls: {calls}", f"call: {' | '.join(names)}", *rules]


def _list(form: Form, literal: Literal, more: str) -> str:
    """Objects in the form's brackets."""
    several = f'call (", " call){more}' if more else "call"
    if form.close is not None and form.open is not None:
        one = f'{literal(form.open)} "\\n" call "\\n" {literal(form.close)}'
        return f'{one} ("\\n" {one}){more}' if more else one
    if form.open is not None:
        return f'{literal(form.open)} "[" {several} "]"'
    if form.joined_by:
        return f"call ({json.dumps(form.joined_by)} call){more}" if more else "call"
    return f'call | "[" {several} "]"' if more else "call"


def _object(form: Form, rule: str, function: Function) -> str:
    name, _ = function
    opening = f'{{"name": {json.dumps(name)}, "{form.arguments_key}": '
    return f'{rule}: {json.dumps(opening)} %json {_schema(function)} "}}"'


def _named(form: Form, literal: Literal, rule: str, function: Function) -> str:
    assert form.open is not None
    return f"{rule}: {literal(form.open)} {json.dumps(function[0])} {literal('[ARGS]')} %json {_schema(function)}"


def _schema(function: Function) -> str:
    """Of the arguments. Keys that it does not name are not invented; nor is white space without an end."""
    _, parameters = function
    schema = {"additionalProperties": False} | (parameters or _NO_PARAMETERS)
    return json.dumps(schema | {"x-guidance": _WHITE_SPACE})
