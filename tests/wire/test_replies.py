"""Answers as OpenAI's own types read them, and errors as its clients do."""

import json
from typing import Any

import pytest
from openai.types import Completion as OpenAICompletion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from asyncllm import errors
from asyncllm.types import Completion, FinishReason
from asyncllm.wire import replies
from asyncllm.wire.errors import error_event, error_reply
from asyncllm.wire.replies import Chunks, Head, Usage
from asyncllm.wire.sse import Decoder

HEAD = Head("id-1", 1234, 'a "quoted" näme')
ANSWER = Completion(
    text='é "x"\n',
    token_ids=(1, 2, 3),
    finish_reason=FinishReason.STOP,
    stop_reason=None,
    num_prompt_tokens=5,
    num_cached_tokens=4,
)
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 3,
    "total_tokens": 8,
    "prompt_tokens_details": {"cached_tokens": 4},
    "completion_tokens_details": {"reasoning_tokens": 0},
}


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(event.data) for event in Decoder().feed(data)]


def test_chat_reply() -> None:
    body = json.loads(replies.chat_reply(HEAD, [ANSWER]))
    message = {"role": "assistant", "content": ANSWER.text, "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    assert body == {
        "id": "id-1",
        "object": "chat.completion",
        "created": 1234,
        "model": HEAD.model,
        "choices": [choice],
        "usage": USAGE,
    }
    ChatCompletion.model_validate(body, strict=True)


def test_completion_reply_of_several_prompts() -> None:
    body = json.loads(replies.completion_reply(HEAD, [ANSWER, ANSWER]))
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, ANSWER.text), (1, ANSWER.text)]
    assert body["usage"]["total_tokens"] == 16
    assert body["object"] == "text_completion"
    OpenAICompletion.model_validate(body, strict=True)


def test_chat_chunks() -> None:
    chunks = replies.chat_chunks(HEAD)
    data = chunks.text('é"\n') + chunks.text("b") + chunks.finish(FinishReason.LENGTH)
    first, second, last = [event["choices"][0] for event in events(data)]
    assert first["delta"] == {"role": "assistant", "content": 'é"\n'}
    assert second["delta"] == {"content": "b"}
    assert last == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    for event in events(data):
        assert (event["id"], event["created"], event["model"]) == (HEAD.id, HEAD.created, HEAD.model)
        ChatCompletionChunk.model_validate(event, strict=True)


def test_completion_chunks() -> None:
    chunks = replies.completion_chunks(HEAD, 3)
    data = chunks.text("a") + chunks.finish(FinishReason.STOP)
    assert [event["choices"] for event in events(data)] == [
        [{"index": 3, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 3, "text": "", "logprobs": None, "finish_reason": "stop"}],
    ]
    # Their type wants a reason in every event, which no server (theirs least) sends before the last.
    OpenAICompletion.model_validate(events(data)[-1], strict=True)


def test_an_answer_without_text_still_opens_its_choice() -> None:
    opening, last = events(replies.chat_chunks(HEAD).finish(FinishReason.STOP))
    assert opening["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert opening["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "stop"
    assert len(events(replies.completion_chunks(HEAD).finish(FinishReason.STOP))) == 1


@pytest.mark.parametrize("make", [replies.chat_chunks, replies.completion_chunks])
def test_usage_in_every_chunk_only_when_given(make: Any) -> None:
    chunks: Chunks = make(HEAD)
    plain = events(chunks.text("a") + chunks.finish(FinishReason.STOP))
    assert all("usage" not in event for event in plain)
    usage = Usage(5, 4, 3)
    counted = events(chunks.text("a", usage) + chunks.finish(FinishReason.STOP, usage))
    assert [event["usage"] for event in counted] == [USAGE, USAGE]


def test_the_usage_chunk() -> None:
    [event] = events(replies.usage_chunk(HEAD, "chat.completion.chunk", Usage(5, 4, 3)))
    assert (event["choices"], event["usage"]) == ([], USAGE)
    ChatCompletionChunk.model_validate(event, strict=True)


@pytest.mark.parametrize(
    ("error", "status", "expected", "retry_after"),
    [
        (errors.InvalidRequest("no", "n"), 400, ("no", "invalid_request_error", "n", None), None),
        (errors.ContextTooLong("long"), 400, ("long", "invalid_request_error", None, "context_length_exceeded"), None),
        (errors.ModelNotFound("m", "model"), 404, ("m", "invalid_request_error", "model", "model_not_found"), None),
        (errors.BodyTooLarge("b"), 413, ("b", "invalid_request_error", None, "body_too_large"), None),
        (errors.QueueFull("q"), 503, ("q", "server_error", None, "queue_full"), "1"),
        (errors.Draining("d"), 503, ("d", "server_error", None, "draining"), "5"),
        (errors.EngineDead("e"), 503, ("e", "server_error", None, "engine_dead"), "10"),
        (errors.StepFailed("s"), 500, ("s", "server_error", None, "step_failed"), None),
    ],
)
def test_errors(error: Exception, status: int, expected: tuple[Any, ...], retry_after: str | None) -> None:
    got_status, body, headers = error_reply(error)
    assert got_status == status
    assert json.loads(body) == {"error": dict(zip(("message", "type", "param", "code"), expected, strict=True))}
    assert headers.get("Retry-After") == retry_after
    [event] = events(error_event(error))
    assert event == json.loads(body)


def test_a_bug_of_ours_tells_nothing() -> None:
    status, body, _ = error_reply(KeyError("/secret/path"))
    assert status == 500
    assert b"secret" not in body
