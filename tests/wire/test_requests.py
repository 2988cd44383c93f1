"""Request bodies: what is served maps, what is not is refused by name, what is wrong is named."""

import typing
from typing import Any

import msgspec
import pytest
from openai.types import chat as chat_kinds
from openai.types import completion_create_params, shared_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_create_params

from asyncllm.errors import InvalidRequest
from asyncllm.types import SamplingParams
from asyncllm.wire import formats, requests, tools
from asyncllm.wire.messages import FunctionCall, Message, Part, ToolCall, template_messages
from asyncllm.wire.requests import ChatRequest, CompletionRequest, StreamOptions
from asyncllm.wire.unserved import CHAT_ALONE, LABELS, UNSERVED

HI = [{"role": "user", "content": "hi"}]
DEEP = b"[" * 100_000 + b"]" * 100_000


def chat(**fields: Any) -> ChatRequest:
    return requests.decode_chat(msgspec.json.encode({"messages": HI} | fields))


def completion(**fields: Any) -> CompletionRequest:
    return requests.decode_completion(msgspec.json.encode({"prompt": "x"} | fields))


def refusal(call: Any, *args: Any, **kwargs: Any) -> tuple[str | None, str]:
    with pytest.raises(InvalidRequest) as caught:
        call(*args, **kwargs)
    assert caught.value.status == 400
    return caught.value.param, str(caught.value)


def openai_fields(*param_types: Any) -> set[str]:
    return {name for kind in param_types for name in typing.get_type_hints(kind)}


# -- the whole of OpenAI's reference --


@pytest.mark.parametrize(
    ("struct", "params"),
    [
        (ChatRequest, chat_create_params.CompletionCreateParamsStreaming),
        (ChatRequest, chat_create_params.CompletionCreateParamsNonStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsStreaming),
        (CompletionRequest, completion_create_params.CompletionCreateParamsNonStreaming),
    ],
)
def test_every_field_of_openai_is_served_a_label_or_refused(struct: Any, params: Any) -> None:
    known = set(struct.__struct_fields__) | LABELS | set(UNSERVED)
    assert openai_fields(params) - known == set()


def test_every_stream_option_of_openai_is_known() -> None:
    assert openai_fields(ChatCompletionStreamOptionsParam) <= set(StreamOptions.__struct_fields__)


def test_nothing_is_both_served_and_refused() -> None:
    served = set(ChatRequest.__struct_fields__) | set(CompletionRequest.__struct_fields__)
    assert not served & set(UNSERVED)
    assert not served & LABELS
    assert not LABELS & set(UNSERVED)


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_an_unserved_field_is_refused_by_name(name: str) -> None:
    value = {"asks": "for something"}
    for decode in (chat, completion):
        param, message = refusal(decode, **{name: value})
        assert param == name
        assert f"'{name}'" in message


@pytest.mark.parametrize("name", sorted(CHAT_ALONE))
def test_what_chat_alone_serves_completions_refuse(name: str) -> None:
    assert refusal(completion, **{name: {"asks": "for something"}})[0] == name
    for value in (None, *CHAT_ALONE[name]):
        completion(**{name: value})


@pytest.mark.parametrize("name", sorted(UNSERVED))
def test_a_value_that_asks_for_nothing_is_accepted(name: str) -> None:
    for value in (None, "", [], {}, *UNSERVED[name]):
        chat(**{name: value})
        completion(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True), ("n", "1"), ("n", 1.5), ("best_of", 3), ("logprobs", 0), ("logprobs", 5), ("top_logprobs", False),
        ("modalities", ["audio"]), ("logit_bias", {"5": "x"}),
        ("echo", True), ("suffix", "x"), ("chat_template", "{{ 1 }}"), ("verbosity", "high"),
    ],
)  # fmt: skip
def test_values_that_ask_for_something(name: str, value: Any) -> None:
    assert refusal(chat, **{name: value})[0] == name


def test_neutral_numbers_may_be_floats() -> None:
    chat(presence_penalty=0.0, frequency_penalty=-0.0, repetition_penalty=1.0)


def test_labels_and_unknown_fields_change_nothing() -> None:
    labelled = chat(**dict.fromkeys(LABELS, "x"), foo=1, reasoning={"effort": "high"})
    assert requests.chat_params(labelled) == requests.chat_params(chat())


# -- what is served --


def test_every_served_field_reaches_sampling_params() -> None:
    fields: dict[str, Any] = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 7, "stop": ["a", "b"],
        "stop_token_ids": [3], "ignore_eos": True, "skip_special_tokens": False, "max_tokens": 9, "n": 3,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2, "logit_bias": {"7": -1},
        "allowed_token_ids": [7, 8], "bad_words": ["x"], "include_stop_str_in_output": True, "prompt_logprobs": 2,
    }  # fmt: skip
    tuples = {name: tuple(fields[name]) for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")}
    expected = SamplingParams(**(fields | tuples | {"logit_bias": {7: -1.0}}))
    assert requests.chat_params(chat(**fields)) == expected
    assert requests.completion_params(completion(**fields)) == expected


def test_null_is_absence() -> None:
    optional = [name for name in ChatRequest.__struct_fields__ if name != "messages"]
    assert chat(**dict.fromkeys(optional)) == chat()
    optional = [name for name in CompletionRequest.__struct_fields__ if name != "prompt"]
    assert completion(**dict.fromkeys(optional)) == completion()


def test_limits_of_tokens() -> None:
    assert requests.chat_params(chat()).max_tokens is None
    assert requests.completion_params(completion()).max_tokens == 16
    assert requests.completion_params(completion(min_tokens=20)).max_tokens == 20
    assert requests.chat_params(chat(max_tokens=32, max_completion_tokens=1)).max_tokens == 1
    assert requests.chat_params(chat(max_tokens=32)).max_tokens == 32
    assert refusal(requests.chat_params, chat(max_completion_tokens=0))[0] == "max_completion_tokens"
    assert refusal(requests.chat_params, chat(max_tokens=-1))[0] == "max_tokens"


@pytest.mark.parametrize("temperature", [0, -0.0, 1e-45, 1e-8])
def test_a_temperature_of_nearly_nothing_is_greedy(temperature: float) -> None:
    params = requests.chat_params(chat(temperature=temperature))
    assert str(params.temperature) == "0.0"


def test_stops() -> None:
    assert requests.chat_params(chat(stop="a")).stop == ("a",)
    assert requests.chat_params(chat(stop=[])).stop == ()


def test_stream_options() -> None:
    assert requests.wants_usage(chat()) == (False, False)
    assert requests.wants_usage(chat(stream_options={"include_usage": False, "x": 1})) == (False, False)
    assert requests.wants_usage(chat(stream_options={"include_usage": True, "include_obfuscation": True})) == (
        True,
        False,
    )


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]), ("", [""]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]),
        (["a"] * 64, ["a"] * 64),
    ],
)  # fmt: skip
def test_prompts(prompt: Any, expected: list[Any]) -> None:
    assert requests.completion_prompts(completion(prompt=prompt)) == expected


@pytest.mark.parametrize(
    ("prompt", "param"),
    [([], "prompt"), ([[]], "prompt[0]"), ([[1], []], "prompt[1]"), (["a", 1], "prompt"), (["a"] * 65, "prompt")],
)
def test_prompts_that_are_none(prompt: Any, param: str) -> None:
    assert refusal(requests.completion_prompts, completion(prompt=prompt))[0] == param


# -- what is wrong --


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "0.7"}, "temperature"), ({"temperature": True}, "temperature"), ({"top_k": 1.5}, "top_k"),
        ({"top_k": 2**63}, "top_k"), ({"seed": 10**30}, "seed"), ({"seed": "100"}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"stop": [1]}, "stop[0]"), ({"model": 5}, "model"), ({"stop_token_ids": [True]}, "stop_token_ids[0]"),
        ({"stop_token_ids": [2**64]}, "stop_token_ids[0]"), ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": None}, "messages"), ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [*HI, {"role": 7}]}, "messages[1].role"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content[0]"),
        ({"stream_options": {"include_usage": "x"}}, "stream_options.include_usage"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named(fields: dict[str, Any], param: str) -> None:
    assert refusal(chat, **fields)[0] == param


@pytest.mark.parametrize(
    ("prompt", "param"),
    [(None, "prompt"), (5, "prompt"), ([1.5], "prompt[0]"), ([True], "prompt[0]"), ([2**63], "prompt[0]"),
     ([[1], [2**64]], "prompt[1][0]"), ([None], "prompt[0]"), ({}, "prompt")],
)  # fmt: skip
def test_a_prompt_of_a_wrong_type_is_named(prompt: Any, param: str) -> None:
    assert refusal(completion, prompt=prompt)[0] == param


def test_the_models_defaults_fill_what_is_left_open() -> None:
    defaults = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.1}
    for make, decoded in ((requests.chat_params, chat), (requests.completion_params, completion)):
        params = make(decoded(), defaults)
        assert {name: getattr(params, name) for name in defaults} == defaults
        params = make(decoded(temperature=1, top_k=0, top_p=None), defaults)
        assert (params.temperature, params.top_k, params.top_p) == (1, 0, 0.95)
        greedy = make(decoded(temperature=0, top_p=0.5), defaults)  # no cut but the one it asks for
        assert (greedy.temperature, greedy.top_k, greedy.top_p, greedy.min_p) == (0, 0, 0.5, 0)
        assert greedy.repetition_penalty == 1.1
        assert make(decoded()) == make(decoded(), {})


def test_a_missing_field_is_named() -> None:
    assert refusal(requests.decode_chat, b"{}")[0] == "messages"
    assert refusal(requests.decode_completion, b"{}") == ("prompt", "'prompt' is missing")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{bad", b"[]", b"null", b'"x"', b'{"model":', b'\xef\xbb\xbf{"messages":[]}', b'{"messages":[]} x',
        '{"messages":[]}'.encode("utf-16"), b'{"messages":[{"role":"user","content":"\xff"}]}',
        b'{"messages":[{"role":"user","content":"\\ud800"}]}', b'{"messages":[],"top_p":NaN}',
        b'{"messages":[],"top_p":Infinity}', b'{"messages":[],"top_p":-Infinity}', b'{"messages":[],"top_p":1e999}',
        b'{"messages":[],"seed":' + b"9" * 5000 + b"}", b'{"messages":[],"tools":[1,,2]}',
        b'{"messages":[],"tools":"\xff"}', b'{"messages":[],"x":' + DEEP + b"}",
        b'{"messages":[],"tools":' + DEEP + b"}",
        b'{"messages":[{"role":"user","content":' + DEEP + b"}]}", DEEP,
    ],
)  # fmt: skip
def test_broken_bodies_are_the_clients_fault(body: bytes) -> None:
    refusal(requests.decode_chat, body)


def test_of_a_field_given_twice_the_last_counts() -> None:
    assert requests.decode_completion(b'{"prompt":"a","prompt":"b"}').prompt == "b"


# -- and what lies within its fields --

PART_LABELS = {"prompt_cache_breakpoint"}  # every prefix is cached


@pytest.mark.parametrize(
    ("struct", "params"),
    [
        (Message, chat_kinds.ChatCompletionDeveloperMessageParam),
        (Message, chat_kinds.ChatCompletionSystemMessageParam),
        (Message, chat_kinds.ChatCompletionUserMessageParam), (Message, chat_kinds.ChatCompletionAssistantMessageParam),
        (Message, chat_kinds.ChatCompletionToolMessageParam), (Part, chat_kinds.ChatCompletionContentPartTextParam),
        (Part, chat_kinds.ChatCompletionContentPartRefusalParam),
        (ToolCall, chat_kinds.ChatCompletionMessageFunctionToolCallParam),
        (FunctionCall, chat_kinds.chat_completion_message_function_tool_call_param.Function),
        (tools.Tool, chat_kinds.ChatCompletionFunctionToolParam), (tools.Function, shared_params.FunctionDefinition),
        (tools.ToolChoice, chat_kinds.ChatCompletionNamedToolChoiceParam),
        (tools.ToolChoice, chat_kinds.ChatCompletionAllowedToolChoiceParam),
        (tools.AllowedTools, chat_kinds.ChatCompletionAllowedToolsParam),
        (formats.ResponseFormat, shared_params.ResponseFormatJSONSchema),
        (formats.JsonSchema, shared_params.response_format_json_schema.JSONSchema),
        (requests.StreamOptions, chat_kinds.ChatCompletionStreamOptionsParam),
    ],
)  # fmt: skip
def test_every_field_of_a_served_kind_is_known(struct: Any, params: Any) -> None:
    assert openai_fields(params) - PART_LABELS <= set(struct.__struct_fields__)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *[({"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}, "messages[0].content[0]")
          for kind in ("image_url", "input_audio", "file")],
        ({"messages": [{"role": "function", "name": "f", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "assistant", "audio": {"id": "x"}}]}, "messages[0].audio"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "id": "x", "custom": {"name": "f"}}]}]},
         "messages[0].tool_calls[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}],
          "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice"),
    ],
)  # fmt: skip
def test_every_other_kind_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    def served() -> None:
        request = requests.decode_chat(msgspec.json.encode({"messages": [{"role": "user", "content": "x"}]} | fields))
        template_messages(request.messages)
        tools.tool_use(request.tools, request.tool_choice, request.parallel_tool_calls)

    assert refusal(served)[0] == param
