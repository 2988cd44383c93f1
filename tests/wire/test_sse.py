"""The event-stream decoder to the letter of the WHATWG specification, however the bytes are cut."""

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncllm.wire import sse
from asyncllm.wire.sse import Decoder, Event, EventTooLarge

CASES: list[tuple[bytes, list[Event]]] = [
    (b"data: a\n\n", [Event("a")]),
    (b"data:a\n\ndata:  b\n\n", [Event("a"), Event(" b")]),
    (b"data: a\r\n\r\ndata: b\r\rdata: c\n\n", [Event("a"), Event("b"), Event("c")]),
    (b"\xef\xbb\xbfdata: bom\n\n", [Event("bom")]),
    (b"\xef\xbb\xbf\xef\xbb\xbfdata: two\n\n", []),
    (b"data: YHOO\ndata: +2\ndata: 10\n\n", [Event("YHOO\n+2\n10")]),
    (b": comment\n\n:\n\ndata: x\n\n", [Event("x")]),
    (b"id: 7\n\nretry: 1000\n\nevent: e\n\n", []),
    (b"id: 7\ndata: x\n\ndata: y\n\nid\ndata: z\n\n", [Event("x", id="7"), Event("y", id="7"), Event("z")]),
    (b"id: a\0b\ndata: x\n\n", [Event("x")]),
    (b"event: error\ndata: {}\n\ndata: {}\n\n", [Event("{}", "error"), Event("{}")]),
    (b"data\n\ndata:\n\ndata: \n\n", []),
    (b"data\ndata\n\n", [Event("\n")]),
    (b"Data: no\nfoo: bar\ndata : no\ndata: yes\n\n", [Event("yes")]),
    (b"data: unfinished", []),
    (b"data: unfinished\n", []),
    ("data: ďá😀\n\n".encode(), [Event("ďá😀")]),
    (b"data: \xff\n\n", [Event("\ufffd")]),
    (b"data: a:b: c\n\n", [Event("a:b: c")]),
]


def decode(data: bytes, cuts: list[int]) -> list[Event]:
    decoder = Decoder()
    events: list[Event] = []
    edges = [0, *sorted(cuts), len(data)]
    for start, end in zip(edges, edges[1:], strict=False):
        events += decoder.feed(data[start:end])
    return events


@pytest.mark.parametrize(("data", "events"), CASES)
def test_the_specification(data: bytes, events: list[Event]) -> None:
    assert decode(data, []) == events
    assert decode(data, list(range(len(data)))) == events


@given(data=st.data(), case=st.sampled_from(CASES))
def test_cuts_do_not_matter(data: st.DataObject, case: tuple[bytes, list[Event]]) -> None:
    assert decode(case[0], data.draw(st.lists(st.integers(0, len(case[0]))))) == case[1]


@given(texts=st.lists(st.text(st.characters(exclude_characters="\r\n\0", exclude_categories=["Cs"]), min_size=1)))
def test_what_is_encoded_is_decoded(texts: list[str]) -> None:
    data = b"".join(sse.encode(text.encode()) for text in texts)
    assert [event.data for event in decode(data, [])] == texts


@given(noise=st.binary(max_size=200))
def test_noise_is_never_an_error(noise: bytes) -> None:
    assert decode(noise, [50, 100]) == decode(noise, [])


def test_retry_is_digits_only() -> None:
    decoder = Decoder()
    decoder.feed(b"retry: soon\nretry: 1x\nretry: \xd9\xa3\nretry:\n")
    assert decoder.retry_ms is None
    decoder.feed(b"retry: 1500\n")
    assert decoder.retry_ms == 1500


def test_a_giant_line_arrives_whole_and_a_larger_one_is_refused() -> None:
    line = b"x" * 5_000_000
    decoder = Decoder()
    events = decoder.feed(b"data: ")
    for start in range(0, len(line), 1000):
        events += decoder.feed(line[start : start + 1000])
    assert decoder.feed(b"\n\n") == [Event(line.decode())]
    assert events == []
    with pytest.raises(EventTooLarge):
        for _ in range(100):
            decoder.feed(b"x" * 1_000_000)


def test_many_lines_of_one_event_are_bounded_too() -> None:
    decoder = Decoder(max_event_bytes=1000)
    with pytest.raises(EventTooLarge):
        for _ in range(100):
            decoder.feed(b"data: 0123456789\n")


@pytest.mark.parametrize("large", [b"data: " + b"x" * 200, b"data: " + b"x" * 200 + b"\n\ndata: never\n\n"])
def test_events_before_a_too_large_one_in_the_same_read_are_not_lost(large: bytes) -> None:
    with pytest.raises(EventTooLarge) as caught:
        Decoder(max_event_bytes=100).feed(b"data: a\n\nid: 1\ndata: b\n\n" + large)
    assert caught.value.events == [Event("a"), Event("b", id="1")]


def test_a_large_event_takes_a_few_times_its_size() -> None:
    data = b"data: " + b"x" * 5_000_000 + b"\n\n"
    decoder = Decoder()
    tracemalloc.start()
    try:
        events = [event for at in range(0, len(data), 65536) for event in decoder.feed(data[at : at + 65536])]
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(events[0].data) == 5_000_000
    assert peak_bytes < 5 * len(data)
