"""Responses on the wire: frames, numbered events, and what their requests are checked for."""

import json
from typing import Any

import pytest
from openai.types.responses import (
    Response,
    ResponseStreamEvent,
    function_tool_param,
    response_create_params,
    response_text_config_param,
)
from openai.types.shared_params import reasoning
from pydantic import TypeAdapter

from asyncllm.errors import InvalidRequest
from asyncllm.types import SamplingParams
from asyncllm.wire import responses
from asyncllm.wire.frames import text_frame
from asyncllm.wire.items import Piece
from asyncllm.wire.requests import StreamOptions
from asyncllm.wire.response_events import (
    Events,
    EventStream,
    Head,
    Outcome,
    SocketFrames,
    all_events,
    error_frame,
)
from asyncllm.wire.response_input import input_messages
from asyncllm.wire.responses import RESPONSES, ResponseRequest
from asyncllm.wire.sse import Decoder
from asyncllm.wire.unserved import LABELS

STREAM_EVENT: Any = TypeAdapter(ResponseStreamEvent)
OUTCOMES = [
    Outcome(status="completed", num_output_tokens=3),
    Outcome(status="incomplete", reason="max_output_tokens"),
    Outcome(status="cancelled"),
    Outcome(status="failed", error={"code": "server_error", "message": "no"}),
]


TEXT = [("content", "Hel"), ("content", 'lo "😀"\n')]
CALLS = [
    ("reasoning", "I thi"), ("reasoning", "nk"), ("content", "Let me see."),
    ("call", "weather"), ("arguments", '{"city":'), ("arguments", ' "Brno"}'), ("call", "now"), ("arguments", "{}"),
    ("content", "So."),
]  # fmt: skip


def head() -> Head:
    request = responses.decode_response(b'{"input": "hi", "metadata": {"a": "b"}}')
    return Head(id="resp_1", created_at=5, model="m", echo=responses.echo(request, SamplingParams()))


def script(framing: Any, pieces: list[tuple[str, str]], outcome: Outcome) -> list[bytes]:
    """Every event of a response."""
    return all_events(Events(head(), framing), [Piece(*piece) for piece in pieces], outcome)


def unframed(frame: bytes) -> Any:
    assert frame[0] == 0x81
    size = {126: 2, 127: 8}.get(frame[1], 0)
    length = int.from_bytes(frame[2 : 2 + size]) if size else frame[1]
    payload = frame[2 + size :]
    assert len(payload) == length
    return json.loads(payload)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda outcome: outcome.status)
@pytest.mark.parametrize("pieces", [[], TEXT, CALLS], ids=["silent", "text", "calls"])
def test_events_are_openais_numbered_and_the_same_in_both_framings(pieces: Any, outcome: Outcome) -> None:
    decoder = Decoder()
    events = [event for said in script(EventStream(), pieces, outcome) for event in decoder.feed(said)]
    bodies = [json.loads(event.data) for event in events]
    assert [event.type for event in events] == [body["type"] for body in bodies]
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    for body in bodies:
        STREAM_EVENT.validate_python(body, strict=True)
    Response.model_validate(bodies[-1]["response"], strict=True)
    framed = [unframed(said) for said in script(SocketFrames("a.b"), pieces, outcome)]
    assert framed == [body | {"stream_id": "a.b"} for body in bodies]
    assert [unframed(said) for said in script(SocketFrames(None), pieces, outcome)] == bodies


def test_ids_stand_on_numbered_events_alone() -> None:
    events = Events(head(), EventStream(with_ids=True))
    assert [Decoder().feed(event)[0].id for event in events.opening()] == ["0", "1"]
    [_, _, delta] = [Decoder().feed(event)[0] for event in events.say("content", "x")]
    [progress] = Decoder().feed(events.progress(3, 10, 0))
    assert (delta.id, progress.id) == ("4", "")
    assert json.loads(progress.data)["queue_position"] == 3


@pytest.mark.parametrize("num", [0, 1, 125, 126, 127, 65535, 65536, 70000])
def test_frames_of_every_length(num: int) -> None:
    assert unframed(text_frame(json.dumps("x" * num).encode())) == "x" * num


def test_an_error_frame_names_its_lane() -> None:
    body = b'{"error":{"message":"m","type":"t","param":null,"code":"c"}}'
    error = {"message": "m", "type": "t", "param": None, "code": "c"}
    assert unframed(error_frame(404, body, "a")) == {"type": "error", "status": 404, "stream_id": "a", "error": error}
    assert "stream_id" not in unframed(error_frame(404, body, None))


def test_input_becomes_messages() -> None:
    items = [
        {"role": "developer", "content": "d"},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": t} for t in "ab"]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}], "id": "msg_1"},
    ]
    request = responses.decode_response(json.dumps({"input": items}).encode())
    assert input_messages(request.input) == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c"},
    ]


@pytest.mark.parametrize("value", ["", "a b", "x" * 257, 3, ["a"], "ä", "a\n"])
def test_lanes_names_are_checked(value: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        responses.check_stream_id(value)
    assert (caught.value.code, caught.value.param) == ("invalid_stream_id", "stream_id")


@pytest.mark.parametrize(("decode", "body"), [
    (responses.decode_update, b'{"max_output_tokens": 0}'), (responses.decode_update, b'{"stop": 3}'),
    (responses.decode_attach, b"{}"), (responses.decode_attach, b'{"response_id": "x", "starting_after": "1"}'),
    (responses.decode_cancel, b'{"response_id": 3}'), (responses.decode_envelope, b"[]"),
])  # fmt: skip
def test_messages_are_checked(decode: Any, body: bytes) -> None:
    with pytest.raises(InvalidRequest):
        decode(body)


def test_every_field_of_openais_types_is_served_a_label_or_refused() -> None:
    known = set(ResponseRequest.__struct_fields__) | LABELS | set(RESPONSES.table)
    for params in (
        response_create_params.ResponseCreateParamsStreaming,
        response_create_params.ResponseCreateParamsNonStreaming,
    ):
        assert set(params.__annotations__) - known == set()
    assert not set(ResponseRequest.__struct_fields__) & set(RESPONSES.table)
    served_labels = {"store", "metadata"}  # these have an effect here
    assert set(ResponseRequest.__struct_fields__) & LABELS == served_labels
    assert not LABELS & set(RESPONSES.table)


@pytest.mark.parametrize("name", sorted(RESPONSES.table))
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        responses.decode_response(json.dumps({"input": "x", name: {"asks": "for something"}}).encode())
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("struct", "params"),
    [
        (responses.FunctionTool, function_tool_param.FunctionToolParam),
        (responses.Reasoning, reasoning.Reasoning),
        (responses.TextConfig, response_text_config_param.ResponseTextConfigParam),
        (StreamOptions, response_create_params.StreamOptions),
    ],
)
def test_so_is_every_field_of_what_lies_within(struct: Any, params: Any) -> None:
    without_effect = {"output_schema", "async"}  # of a function: how its client runs it
    assert set(params.__annotations__) - without_effect <= set(struct.__struct_fields__)
