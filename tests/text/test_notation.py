"""What users write as grammars: what could not be acted on is named, and errors come without the engine's insides."""

import json
from typing import Any

import pytest

from asyncllm.text.notation import idle_part, in_words, is_ebnf


@pytest.mark.parametrize(
    ("source", "named"),
    [
        ('start[temperature=0.5]: "a"', "temperature"),
        ('start: x\nx[max_tokens=3, temperature=0.7]: /[0-9]+/', "temperature"),
        ('start: x\nx [ capture ]: "a"', "capture"),
        ('start: x\nx[capture="y"]: "a"', "capture"),
        ('start: x\nx[stop_capture="q", stop="b"]: /.*/', "stop_capture"),
        ('start: %lark { start: x\nx[temperature=1]: "a" }', "temperature"),
        ('start: "a" <|im_end|>', "<|im_end|>"),
        ("start: <[3]>", "<[3]>"),
        ('start: "a" @body', "@body"),
        ('%llguidance {"temperature": 1}\nstart: "a"', "temperature"),
        ('start: %json {"x-guidance": {"white": 1}}', "white"),
        ('start: %json {"x-guidance": {"lenient": 1}, "oneOf": [{"x-guidance": {}}]}', "below the root"),
        ('start: "%json" %json{"properties": {"a": {"x\\u002dguidance": {}}}}', "below the root"),
        ('start: x %json {}\nx: %json {"$defs": {"x-guidance": {"items": {"x-guidance": 1}}}}', "below the root"),
        ('start: %json {"x-guidance": ' + "[" * 60_000, "nested too deeply"),
        ('start: %json {"x-guidance": ' + "1" * 5000, "too large a number"),
    ],
)
def test_what_would_have_no_effect_is_named(source: str, named: str) -> None:
    assert named in idle_part(source)


@pytest.mark.parametrize(
    "source",
    [
        'start: "[temperature=1]: <a> @b"',
        "start: /x[temperature=1]:<a>@b/",
        'start: x // [capture]: <a>\nx: "\\"<" "a"',
        'start: x [y] (x)~2\nx: "a"\ny: /b/i',
        'start: x\nx[stop="b", max_tokens=3, lazy, suffix="c"]: /.*/',
        '%llguidance {"allow_initial_skip": true}\n%ignore / /\nstart: "a"',
        "%llguidance {}\nstart: %json {\"x-guidance\": {\"whitespace_flexible\": false}, \"enum\": [1]}",
        'start: %json {"properties": {"x-guidance": {"const": {"x-guidance": 1}}}, "required": ["x-guidance"]}',
        'start: %json true "%json" // %json {"items": {"x-guidance": 1}}',
        "%llguidance {",
        "",
    ],
)
def test_what_has_an_effect_or_is_text_passes(source: str) -> None:
    assert idle_part(source) == ""


def test_nested_options_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they end or not; each of them read to its end would be quadratic."""
    places: list[int] = []

    class Decoder(json.JSONDecoder):
        def raw_decode(self, s: str, idx: int = 0) -> tuple[Any, int]:
            places.append(idx)
            return super().raw_decode(s, idx)

    monkeypatch.setattr(json, "JSONDecoder", Decoder)
    nested = "start: %json " + '{"x-guidance":' * 300
    assert idle_part(nested) == ""
    assert len(places) == 1
    assert "knows no option 'x-guidance'" in idle_part(nested + "1" + "}" * 300)
    assert len(places) == 2


@pytest.mark.parametrize(
    ("source", "ebnf"),
    [
        ('root ::= "a"', True), ("# note\n  my-rule ::= x", True), ('start[lazy]: "::="', False), ('start: "a"', False),
        ('start: x\nx: "\n::= b"', False), ("", False),
    ],
)  # fmt: skip
def test_the_notation_is_told_by_how_rules_are_written(source: str, ebnf: bool) -> None:
    assert is_ebnf(source) == ebnf


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("NoExtensionBias\n<non-verbose/>", "no text fits it"),
        ("ParserTooComplex", "it is too complex to follow: too many of its rules may apply at once"),
        ("at 1(8): unknown name: \"b\"\n   1 | start: b\n              ^\n", 'line 1, column 8: unknown name: "b"'),
        (
            'at 1(8): invalid regex "(" (in regex): regex parse error:\n    (\n    ^\nerror: unclosed group\n'
            "   1 | start: /(/\n              ^\n",
            "line 1, column 8: unclosed group",
        ),
        ("Unknown format: foo", "Unknown format: foo"),
    ],
)
def test_reasons_are_told_without_insides(reason: str, told: str) -> None:
    assert in_words(reason) == told
    assert in_words(reason, has_places=False) == told.removeprefix("line 1, column 8: ")
