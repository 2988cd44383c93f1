"""Answers parted into reasoning, content and calls: every form, what only looks like one, and every cut."""

import json
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text.answer import AnswerForm, AnswerParser, Said, joined
from asyncllm.text.pieces import Kind, Piece
from asyncllm.text.reasoning import TAGS, Splitter
from asyncllm.text.tools import FORMS, CallParser

NAMES = frozenset(("f", "get_weather"))
# TOOL-1: what was lost in the last piece, or taken for the end.
ARGUMENTS: list[dict[str, Any]] = [
    {}, {"a": 1}, {"a": True}, {"a": None}, {"a": {}}, {"a": {"b": [1, {"c": "}"}]}}, {"a": []}, {"a": ""},
    {"a": "}"}, {"a": '"'}, {"a": '\\"}'}, {"a": "\n"}, {"a": "🙂 é"}, {"a": "</tool_call>"}, {"a": "<tool_call>"},
    {"a": "[TOOL_CALLS]"}, {"a": "</think>"}, {"a": "x" * 300, "b": -1.5e3},
]  # fmt: skip


def parser(form: str | None, tags: str | None = None, *, is_open: bool = False, **options: Any) -> AnswerParser:
    splitter = Splitter(TAGS[tags], is_open=is_open) if tags else None
    return AnswerParser(splitter, CallParser(FORMS[form], NAMES) if form else None, **options)


def whole(text: str, form: str | None, tags: str | None = None, **options: Any) -> Said:
    return parser(form, tags, **options).whole(text)


def in_pieces(texts: list[str], one: AnswerParser) -> Said:
    pieces: list[Piece] = []
    for text in texts:
        pieces += one.push(text)
    pieces += one.finish()
    stand_where_they_say(pieces, "".join(texts))
    return joined(pieces)


def stand_where_they_say(pieces: list[Piece], text: str) -> None:
    """To the letter, and content in its order: whoever knows where a token stands knows whose it is."""
    behind = 0
    for kind, said, start in pieces:
        if kind in (Kind.CONTENT, Kind.REASONING):
            assert text[start : start + len(said)] == said
        if kind is Kind.CONTENT:
            assert start >= behind
            behind = start + len(said)


def written(form: str, *calls: tuple[str, dict[str, Any]], indent: int | None = None) -> str:
    """These calls as a model of this family writes them."""
    texts = [json.dumps(arguments, ensure_ascii=False, indent=indent) for _, arguments in calls]
    objects = [f'{{"name": "{name}", "arguments": {text}}}' for (name, _), text in zip(calls, texts, strict=True)]
    match form:
        case "hermes":
            return "\n".join([f"<tool_call>\n{one}\n</tool_call>" for one in objects])
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"
        case "mistral-named":
            return "".join([f"[TOOL_CALLS]{name}[ARGS]{text}" for (name, _), text in zip(calls, texts, strict=True)])
        case "llama3":
            return "<|python_tag|>" + "; ".join([one.replace("arguments", "parameters", 1) for one in objects])
    return objects[0] if len(objects) == 1 else f"[{', '.join(objects)}]"


@pytest.mark.parametrize("form", ["hermes", "mistral", "mistral-named", "llama3", "json"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=str)
def test_tool_1_arguments_come_out_as_they_were_written(form: str, arguments: dict[str, Any]) -> None:
    calls = [("get_weather", arguments), ("f", {"b": 2})]
    for text in (written(form, *calls), written(form, *calls, indent=1)):
        one = parser(form.removesuffix("-named"))
        said = one.whole(text)
        assert [(name, json.loads(written)) for name, written in said.calls] == calls
        assert (said.content, one.has_whole_calls) == ("", True)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>'),
        ("hermes", '<tool_call> {"name":"f","arguments":"{\\"a\\": 1}"}}\n</tool_call>'),
        ("hermes", '<tool_call>[{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]</tool_call>'),
        ("hermes", '<tool_call>{"name":"f","arguments":{"a": 1}}'),
        ("mistral", '[TOOL_CALLS]f{"a": 1}'),
        ("mistral", '[TOOL_CALLS] f[CALL_ID]abcdefghi[ARGS] {"a": 1}'),
        ("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}'),
        ("llama3", ' {"name": "f", "parameters": {"a": 1}} '),
        ("llama3", '{"type": "function", "name": "f", "parameters": {"a": 1}}'),
        ("json", '\n[\n{"parameters": {"a": 1}, "id": 7, "name": "f"}\n]\n'),
        ("json", '{"function": "f", "arguments": {"a": 1}}'),
    ],
)
def test_the_ways_in_which_models_write_one_call(form: str, text: str) -> None:
    one = parser(form)
    assert one.whole(text) == Said(content="", reasoning="", calls=(("f", '{"a": 1}'),))
    assert one.has_whole_calls


@pytest.mark.parametrize("arguments", ["", ', "arguments": {}', ', "arguments": null', ', "arguments": ""'])
def test_tool_1_a_call_without_arguments_has_an_empty_object(arguments: str) -> None:
    said = whole(f'<tool_call>{{"name": "f"{arguments}}}</tool_call>', "hermes")
    assert said.calls == (("f", "{}"),)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", "Write <tool_call> to call."),
        ("hermes", 'a  <tool_call>{"nam": 1}</tool_calls> b'),
        ("hermes", "1 < 2 and <tool_cal"),
        ("hermes", " \n"),
        ("mistral", "[TOOL_CALLS] is a token"),
        ("json", '{"name": "Bob", "age": 3}'),
        ("json", '{"age": 3}'),
        ("json", '{"name'),
        ("json", "[1, 2]"),
        ("json", "plain"),
        ("llama3", "<|python_tag|>print(1)"),
    ],
)
def test_what_is_no_call_stays_content_to_the_letter(form: str, text: str) -> None:
    assert whole(text, form) == Said(content=text, reasoning="", calls=())


def test_a_call_that_breaks_behind_its_name_is_told_but_not_as_whole() -> None:
    one = parser("llama3")
    assert one.whole('{"name": "f", oops}').calls == (("f", ""),)
    assert not one.has_whole_calls


def test_content_stands_around_calls_without_their_white_space() -> None:
    text = f"Let me see. \n\n{written('hermes', ('f', {}))}\n\nDone."
    assert whole(text, "hermes") == Said(content="Let me see.Done.", reasoning="", calls=(("f", "{}"),))
    assert whole(f"{written('mistral', ('f', {}))} Done.", "mistral").content == "Done."
    assert whole(f"{written('json', ('f', {}))} Done.", "json").content == "Done."


def test_tool_2_a_call_is_whole_with_its_last_brace_and_not_before() -> None:
    for form in ("hermes", "mistral", "mistral-named", "llama3", "json"):
        text = written(form, ("f", {"a": "x}"}))
        last_brace = text.rindex("}")
        for end in range(len(text)):
            one = parser(form.removesuffix("-named"))
            one.whole(text[:end])
            assert one.has_whole_calls == (end > last_brace), text[:end]


def test_a_second_call_is_not_told_where_one_is_allowed() -> None:
    text = f"a {written('hermes', ('f', {'a': 1}), ('get_weather', {}))} b"
    said = whole(text, "hermes", one_call=True)
    assert said == Said(content="ab", reasoning="", calls=(("f", '{"a": 1}'),))


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("a</think>b", False, "", "ab"),
        ("a</think>b", True, "a", "b"),
        ("<think>a</think>\nb", False, "a", "b"),
        ("<think>\na\n</think>\n\nb\n", False, "a", "b\n"),
        ("no tags", False, "", "no tags"),
        ("<my-tag>x</my-tag>", False, "", "<my-tag>x</my-tag>"),
        ("<my-tag>x</my-tag>", True, "<my-tag>x</my-tag>", ""),
        ("a < b", False, "", "a < b"),
        ("a <think", False, "", "a <think"),
        ("text before <think>r</think>c", False, "r", "text before c"),
        ("<think>1</think>a<think>2</think>b", False, "12", "ab"),
        ("<think>unclosed \n", False, "unclosed \n", ""),
        ("\n<think></think>", False, "", "\n"),
        ("<think><think>a</think>", False, "<think>a", ""),
    ],
)
def test_tool_4_reasoning_is_told_from_the_answer(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert whole(text, None, "think", is_open=is_open) == Said(content=content, reasoning=reasoning, calls=())


def test_calls_in_reasoning_are_reasoning() -> None:
    call = written("hermes", ("f", {}))
    said = whole(f"<think>I could {call}</think>{call}", "hermes", "think")
    assert said == Said(content="", reasoning=f"I could {call}", calls=(("f", "{}"),))


# -- every cut --

FRAGMENTS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>",
    "<", "</", "[", "]", "{", "}", '"', "\\", ",", ";", ":", " ", "\n", "f", "name", '"name": "f"', '"arguments": ',
    '{"name": "f", "arguments": {', '"parameters": "{}"', "null", "1", "🙂", "plain text", "x" * 70, " " * 1100,
)  # fmt: skip
FORM_NAMES = (None, "hermes", "mistral", "llama3", "json")


def random_text(rng: random.Random, form: str | None) -> str:
    """Now and then well formed, else whatever comes."""
    parts = rng.choices(FRAGMENTS, k=rng.choice((0, 0, 2, 12)))
    for _ in range(rng.randrange(3)):
        calls = [(rng.choice(("f", "g")), rng.choice(ARGUMENTS)) for _ in range(rng.randrange(1, 3))]
        parts.insert(rng.choice((0, len(parts))), written(rng.choice((form or "json", "mistral-named")), *calls))
    if rng.random() < 0.3:
        parts = ["<think>", *rng.choices(FRAGMENTS, k=3), "</think>", *parts]
    return "".join(parts)


def random_cut(rng: random.Random, text: str) -> list[str]:
    ends = sorted(rng.choices(range(len(text) + 1), k=rng.choice((1, 3, 10, 40))))
    return [text[start:end] for start, end in zip([0, *ends], [*ends, len(text)], strict=True)]


def test_5000_randomly_cut_streams_make_the_same_whole() -> None:
    """Also TOOL-1's and TOOL-4's: deltas joined equal the whole parse."""
    rng = random.Random(5000)
    num_calls = num_reasoned = 0
    for _ in range(5000):
        form, tags, is_open = rng.choice(FORM_NAMES), rng.choice((None, "think")), rng.random() < 0.3
        text = random_text(rng, form)
        expected = whole(text, form, tags, is_open=is_open)
        one = parser(form, tags, is_open=is_open)
        assert in_pieces(random_cut(rng, text), one) == expected, (form, tags, text)
        num_calls += len(expected.calls)
        num_reasoned += bool(expected.reasoning)
    assert num_calls > 2000 and num_reasoned > 1000  # the texts are worth cutting


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=8), st.sampled_from(FORM_NAMES), st.booleans())
def test_letter_by_letter_is_the_whole(fragments: list[str], form: str | None, is_open: bool) -> None:
    text = "".join(fragments)
    one, other = parser(form, "think", is_open=is_open), parser(form, "think", is_open=is_open)
    assert in_pieces(list(text), one) == other.whole(text)
    assert one.has_whole_calls == other.has_whole_calls


def test_pieces_go_out_as_soon_as_they_are_certain() -> None:
    one = parser("hermes", "think")
    assert one.push("<think>so") == [Piece(Kind.REASONING, "so", start=7)]
    assert one.push("</thi") == []
    assert one.push("nk>Yes") == [Piece(Kind.CONTENT, "Yes", start=17)]
    assert one.push(' <tool_call>{"name": "f", ') == [Piece(Kind.CALL, "f")]
    assert one.push('"arguments": {"a') == [Piece(Kind.ARGUMENTS, '{"a')]
    assert one.push('": 1}}</tool_call>') == [Piece(Kind.ARGUMENTS, '": 1}')]


# -- the forms of models --


@pytest.mark.parametrize(
    ("template", "tags", "form"),
    [
        ("{{ messages }}", None, "hermes"),
        ("{% if tools %}<tool_call>{% endif %}<think>", "think", "hermes"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}[THINK]", "magistral", "mistral"),
        ("{% if tools %}<|python_tag|>{% endif %}", None, "llama3"),
        ("{% if tools %}{{ tools | tojson }}{% endif %}</think>", "think", "json"),
        ("{% if tools %}<tool_call><function=x>{% endif %}", None, None),
    ],
)
def test_the_template_shows_the_form(template: str, tags: str | None, form: str | None) -> None:
    found = AnswerForm.of(template)
    assert (found.tags, found.calls) == (TAGS.get(tags or ""), FORMS.get(form or ""))


def test_a_flag_beats_the_template() -> None:
    assert AnswerForm.of("<think>", tool_parser="mistral", reasoning_parser="none").calls == FORMS["mistral"]
    assert AnswerForm.of("<think>", tool_parser="none", reasoning_parser="none") == AnswerForm()


def test_mistral_call_ids_are_nine_letters() -> None:
    assert FORMS["mistral"].call_id("0123456789abcdef") == "012345678"
    assert FORMS["hermes"].call_id("0123456789abcdef") == "call_0123456789abcdef"
