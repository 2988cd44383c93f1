"""Grammars compiled, tried out beforehand in a process of their own, and framed by reasoning and calls."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import GrammarUnchecked, InvalidRequest
from asyncllm.text.answer import AnswerForm
from asyncllm.text.forcing import forced
from asyncllm.text.grammars import CHECK_S, Check, Grammars
from asyncllm.text.reasoning import TAGS
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.text.tools import FORMS
from asyncllm.types import GrammarSpec

from . import toys

DIGITS = GrammarSpec("regex", "[0-9]+", "regex")
POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
FUNCTIONS = [("point", POINT), ("now", None)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(toys.byte_level(tmp_path_factory.mktemp("toy")))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars.of(tokenizer, tokenizer.vocab_size)
    assert made is not None
    yield made
    made.close()


def takes(grammars: Grammars, tokenizer: Tokenizer, spec: GrammarSpec | None, text: str) -> bool:
    """Whether this can be an answer, whole."""
    assert spec is not None
    matcher = grammars.compile(spec).matcher()
    ids = tokenizer.encode_rendered(text)
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    assert grammars.find(DIGITS) is None
    grammar = grammars.compile(DIGITS)
    assert grammar is grammars.compile(DIGITS) is grammars.find(DIGITS)
    assert grammar.failure(grammar.matcher()).param == "regex"
    grammar.wear_out()
    assert grammars.find(DIGITS) is None and grammars.compile(DIGITS) is not grammar


def test_what_is_kept_is_bounded_in_number_and_in_size(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    specs = [GrammarSpec("regex", f"[0-9]{{{i + 1}}}") for i in range(66)]
    for spec in specs:
        grammars.compile(spec)
    assert grammars.find(specs[1]) is None and grammars.find(specs[2]) and grammars.find(specs[-1])
    monkeypatch.setattr("asyncllm.text.grammars._MAX_CACHED_CHARS", 20)
    grammars.compile(DIGITS)
    assert grammars.find(specs[-1]) and grammars.find(specs[2]) is grammars.find(specs[-2]) is None


def test_a_tokenizer_without_spellings_has_no_grammars(tmp_path: Path) -> None:
    assert Grammars.of(Tokenizer.from_folder(toys.word_piece(tmp_path)), 6) is None


def test_an_impossible_grammar_is_told_with_its_field_and_its_reason(grammars: Grammars) -> None:
    with pytest.raises(InvalidRequest, match="unclosed group") as caught:
        grammars.compile(GrammarSpec("regex", "(", "guided_regex"))
    assert caught.value.param == "guided_regex"


def test_who_tries_for_too_long_is_stopped_and_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asyncllm.text.grammars._PATIENCE", 60)  # of a busy machine
    check = Check(seconds=0.5)
    slow = "start: T\nT: " + " & ".join([f"/(.*{i}.*)/" for i in range(300)])
    assert check.ask(GrammarSpec("lark", slow)) == ("", "it takes too long, or too much memory, to compile")
    patient = Check()
    grammar, reason = patient.ask(DIGITS)
    assert json.loads(grammar)["grammars"] and not reason
    patient.close()
    check.close()


def test_who_died_while_nobody_asked_is_replaced_and_no_grammar_blamed() -> None:
    check = Check()
    for _ in range(3):
        assert check.ask(DIGITS)[1] == ""
        assert check._process is not None
        check._process.kill()
        check._process.wait()
    assert check.ask(DIGITS)[1] == ""
    check.close()


@pytest.mark.parametrize("spec", [DIGITS, GrammarSpec("choice", json.dumps(["a" * (1 << 20)]))])
def test_who_is_stopped_is_replaced_and_no_grammar_blamed(spec: GrammarSpec) -> None:
    """Also where the pipe is too small for the question."""
    check = Check()
    assert check.ask(DIGITS)[1] == "" and check._process is not None
    check._process.send_signal(signal.SIGSTOP)
    check._seconds = 0.1
    with pytest.raises(GrammarUnchecked, match="sent again"):
        check.ask(spec)
    check._seconds = CHECK_S
    assert check.ask(DIGITS)[1] == ""
    check.close()


def framed(form: str | None, tags: str | None = None, *, end: str = "", spec: Any = None, **calls: Any) -> Any:
    answer = AnswerForm(TAGS[tags] if tags else None, FORMS[form] if form else None)
    return forced(answer, json.dumps, end, spec, **calls)


@pytest.mark.parametrize(
    ("form", "one", "two"),
    [
        ("hermes", '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "{one}\n{one}"),
        ("mistral", '[TOOL_CALLS][{"name": "point", "arguments": {"x": 1}}]', ""),
        ("mistral_named", "[TOOL_CALLS]now[ARGS]{}", "{one}{one}"),
        ("llama3", '{"name": "point", "parameters": {"x":\n  -7}}', "{one}; {one}"),
        ("json", '{"name": "now", "arguments": {}}', "[{one}, {one}]"),
    ],
)
def test_demanded_calls_are_those_that_the_parser_reads(
    grammars: Grammars, tokenizer: Tokenizer, form: str, one: str, two: str
) -> None:
    several = framed(form, functions=FUNCTIONS, must_call=True)
    single = framed(form, functions=FUNCTIONS, must_call=True, one_call=True)
    two = two.replace("{one}", one)
    for spec in (several, single):
        assert takes(grammars, tokenizer, spec, one)
        assert not takes(grammars, tokenizer, spec, "no call")
        assert not takes(grammars, tokenizer, spec, one.replace("now", "then").replace("point", "then"))
    if two:
        assert takes(grammars, tokenizer, several, two) and not takes(grammars, tokenizer, single, two)
    names = frozenset(("point", "now"))
    for text in filter(None, (one, two)):
        parser = AnswerForm(None, FORMS[form]).parser("", names)
        assert parser is not None and len(parser.whole(text).calls) == 1 + (text == two) and parser.has_whole_calls


def test_what_may_be_called_and_what_is_demanded_are_alternatives(grammars: Grammars, tokenizer: Tokenizer) -> None:
    spec = framed("hermes", spec=DIGITS, functions=FUNCTIONS)
    assert takes(grammars, tokenizer, spec, "123")
    assert takes(grammars, tokenizer, spec, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>')
    assert not takes(grammars, tokenizer, spec, "no")


@pytest.mark.parametrize(
    ("form", "call", "wrong"),
    [
        ("hermes", '<tool_call>\n{"name": "point", "arguments": {"x": 1}}\n</tool_call>', "<tool_call>{"),
        ("mistral", '[TOOL_CALLS][{"name": "point", "arguments": {"x": 1}}]', "[TOOL_CALLS]{"),
        ("mistral_named", '[TOOL_CALLS]point[ARGS]{"x": 1}', "[TOOL_CALLS]then"),
        ("llama3", '{"name": "point", "parameters": {"x": 1}}', '{"name": "then"'),
    ],
)
def test_strict_tools_leave_text_free_and_keep_calls_to_their_schemas(
    grammars: Grammars, tokenizer: Tokenizer, form: str, call: str, wrong: str
) -> None:
    spec = framed(form, functions=FUNCTIONS, strict=True)
    for text in ("", "Hello <b> [1] {x}", call):
        assert takes(grammars, tokenizer, spec, text), text
    for text in (wrong, call.replace("1", '"one"')):
        assert not takes(grammars, tokenizer, spec, text), text
    if form != "llama3":
        assert takes(grammars, tokenizer, spec, f"I call {call} and {call}.")
        assert not takes(grammars, tokenizer, spec, f"I call {wrong}")


def test_a_schema_of_parts_is_not_closed(grammars: Grammars, tokenizer: Tokenizer) -> None:
    parts = {"allOf": [POINT, {"type": "object", "properties": {"y": {"type": "integer"}}}], "properties": {}}
    spec = framed("json", functions=[("f", parts)], must_call=True, one_call=True)
    assert takes(grammars, tokenizer, spec, '{"name": "f", "arguments": {"x": 1, "y": 2}}')


@pytest.mark.parametrize(
    ("end", "text", "fits"),
    [
        ("<think>\n", "so < what</think>\n\n42", True),
        ("<think>\n", "42", False),
        ("assistant\n", "<think>so</think>42", True),
        ("assistant\n", "42", True),
        ("assistant\n", "so</think>42", False),
        ("<think>\n\n</think>\n\n", "42", True),
        ("<think>\n\n</think>\n\n", "<think></think>42", False),
    ],
)
def test_reasoning_comes_first(grammars: Grammars, tokenizer: Tokenizer, end: str, text: str, fits: bool) -> None:
    assert takes(grammars, tokenizer, framed(None, "think", end=end, spec=DIGITS), text) == fits


def test_nothing_is_demanded_of_a_free_answer() -> None:
    assert framed("hermes", "think", functions=FUNCTIONS) is None
    assert framed("hermes", spec=DIGITS) == DIGITS


def test_special_tokens_are_named_by_their_number(grammars: Grammars, tokenizer: Tokenizer) -> None:
    assert tokenizer.literal("<|im_start|>") == "<[1]>" and tokenizer.literal("<think>") == '"<think>"'
    spec = GrammarSpec("lark", f'start: {tokenizer.literal("<|im_start|>")} "x"')
    assert takes(grammars, tokenizer, spec, "<|im_start|>x")
