"""StopMatcher against the obvious: look at every end position, first end wins, longest stop at that end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.text.stop import StopMatcher

LETTERS = st.text("ab", max_size=30)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def reference(text: str, stops: list[str]) -> tuple[str, str | None]:
    for end in range(len(text) + 1):
        if ending := [stop for stop in stops if text[:end].endswith(stop)]:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


def could_become_a_stop(tail: str, stops: list[str]) -> bool:
    return any(len(tail) < len(stop) and stop.startswith(tail) for stop in stops)


@given(text=LETTERS, stops=STOPS, data=st.data())
def test_equals_the_reference_however_the_text_is_cut(text: str, stops: list[str], data: st.DataObject) -> None:
    expected, expected_stop = reference(text, stops)
    matcher = StopMatcher(stops)
    shown, matched, rest = "", None, text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        piece, matched = matcher.push(rest[:size])
        shown, rest = shown + piece, rest[size:]
        assert expected.startswith(shown)
        if matched is None:
            held = text[len(shown) : len(text) - len(rest)]
            assert held == "" or could_become_a_stop(held, stops)
    assert (shown + matcher.finish(), matched) == (expected, expected_stop)


def test_nothing_is_shown_after_a_match() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("one END two") == ("one ", "END")
    assert matcher.push("three") == ("", "END")
    assert matcher.finish() == ""


def test_a_near_miss_arrives_whole() -> None:
    matcher = StopMatcher(["abcdX"])
    assert matcher.push("abc") == ("", None)
    assert matcher.push("dY") == ("abcdY", None)


def test_of_two_complete_at_once_the_one_that_began_first_wins() -> None:
    assert StopMatcher(["b", "ab", "xab"]).push("--xab") == ("--", "xab")


def test_of_nested_stops_the_one_complete_first_wins() -> None:
    assert StopMatcher(["abc", "b"]).push("abc") == ("a", "b")


def test_stops_over_characters_of_several_bytes() -> None:
    matcher = StopMatcher(["👩‍👧"])
    assert matcher.push("x👩\u200d") == ("x", None)
    assert matcher.push("👧y") == ("", "👩‍👧")


@pytest.mark.parametrize("text", ["", "a", "anything at all"])
def test_without_stops_nothing_is_held(text: str) -> None:
    assert StopMatcher(()).push(text) == (text, None)


def test_work_is_linear_in_the_text_whatever_the_stop() -> None:
    class Counting(StopMatcher):
        steps = 0

        def _advance(self, char: str) -> None:
            Counting.steps += 1
            super()._advance(char)

    matcher = Counting(["a" * 500 + "b"])
    shown = "".join(matcher.push("a")[0] for _ in range(5_000))
    assert len(shown) == 4_500
    assert Counting.steps == 5_000
