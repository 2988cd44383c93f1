"""The properties of fuzz.py under hypothesis: row 54. Coverage-led and longer: make fuzz."""

import json

import hypothesis.strategies as st
import pytest
from hypothesis import example, given, settings

from asyncllm.logs import escaped

from .fuzz import check_all, check_sse

FIELDS = (
    "messages", "prompt", "input", "role", "content", "max_tokens", "temperature", "stop", "stream", "type", "text",
    "tools", "n", "logit_bias", "stream_options", "response_id", "stream_id", "starting_after", "model", "seed",
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.sampled_from(FIELDS),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=6),
    max_leaves=20,
)
LINES = st.lists(
    st.sampled_from([b"data: x", b"data:", b"data", b": c", b"event: e", b"id: 1", b"id: \0", b"retry: 5", b"\xff"])
    | st.binary(max_size=12),
    max_size=12,
)


@given(LINES, st.lists(st.sampled_from([b"\n", b"\r", b"\r\n", b"\n\n"]), min_size=12, max_size=12))
@settings(max_examples=300, deadline=None)
def test_sse_is_the_same_however_it_is_cut(lines: list[bytes], ends: list[bytes]) -> None:
    check_sse(b"".join(line + end for line, end in zip(lines, ends, strict=False)))


@given(VALUES.map(json.dumps).map(str.encode) | st.binary(max_size=200))
@example(b"[" * 10_000)
@example(b'{"messages":' + b'{"a":' * 10_000)
@example(b"9" * 10_000)
@settings(max_examples=400, deadline=None)
def test_json_is_a_request_or_is_refused(data: bytes) -> None:
    check_all(data)


@given(st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_a_log_line_is_one_line(text: str) -> None:
    shown = escaped(text)
    assert len(shown.splitlines()) <= 1 and shown.encode("utf-8").isascii() or "\x1b" not in shown
    assert not any(ord(letter) < 32 or 0x7F <= ord(letter) < 0xA0 for letter in shown)


@pytest.mark.parametrize("text", ["a\nb", "a\u2028b", "\x1b[31m", "a\u202eb", "\x85", "\ud800"])
def test_what_a_terminal_would_obey_is_escaped(text: str) -> None:
    assert escaped(text).isprintable()
