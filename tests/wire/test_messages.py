"""Messages of a chat request: what the template gets of them, and what is refused by name."""

from typing import Any

import pytest

from asyncllm.wire.messages import template_messages

from .test_requests import DEEP, HI, chat, refusal


def read(*messages: dict[str, Any]) -> list[dict[str, Any]]:
    return template_messages(chat(messages=list(messages)).messages)


def test_roles_and_their_words() -> None:
    given = [{"role": role, "content": role} for role in ("system", "developer", "user", "assistant", "tool")]
    assert [message["role"] for message in read(*given)] == ["system", "system", "user", "assistant", "tool"]
    assert [message["content"] for message in read(*given)] == [message["content"] for message in given]


@pytest.mark.parametrize("role", ["User", "SYSTEM", "assistent", "", "function"])
def test_an_unknown_role_is_named(role: str) -> None:
    param, message = refusal(read, *HI, {"role": role, "content": "x"})
    assert param == "messages[1].role"
    assert "assistant" in message


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_by_a_line_feed(role: str) -> None:
    parts = [{"type": "text", "text": "ALPHA"}, {"type": "text", "text": "BETA"}]
    assert read({"role": role, "content": parts}) == read({"role": role, "content": "ALPHA\nBETA"})


@pytest.mark.parametrize(
    "part",
    [{"type": "image_url", "image_url": {"url": "http://x"}}, {"type": "text"}, {"type": "bogus", "text": "x"},
     {"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}, {"type": "input_audio"}],
)  # fmt: skip
def test_a_part_that_is_no_text_is_named(part: dict[str, Any]) -> None:
    param, _ = refusal(read, *HI, {"role": "user", "content": [{"type": "text", "text": "x"}, part]})
    assert param == "messages[1].content[1]"


def test_empty_content_is_content() -> None:
    assert read({"role": "user", "content": ""})[0]["content"] == ""
    assert read({"role": "user", "content": []})[0]["content"] == ""


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_content_may_be_null_only_beside_tool_calls(role: str) -> None:
    assert refusal(read, {"role": role, "content": None})[0] == "messages[0].content"
    assert refusal(read, {"role": role})[0] == "messages[0].content"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
@pytest.mark.parametrize("arguments", ['{"city": "Paris"}', {"city": "Paris"}])
def test_tool_calls_pass_to_the_template(content: dict[str, Any], arguments: Any) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    history = [*HI, {"role": "assistant", "tool_calls": [call], **content}]
    history += [{"role": "tool", "tool_call_id": "c1", "content": "sunny"}]
    _, assistant, tool = read(*history)
    function = {"name": "weather", "arguments": {"city": "Paris"}}
    assert assistant["tool_calls"] == [{"id": "c1", "type": "function", "function": function}]
    assert (assistant["content"], tool["tool_call_id"], tool["content"]) == ("", "c1", "sunny")


DEEP_TEXT = DEEP.decode()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [("{broken", "{broken"), ("", {}), (None, {}), ("{}", {}), (DEEP_TEXT, DEEP_TEXT), ('{"a": NaN}', '{"a": NaN}')],
    ids=range(6),
)
def test_arguments_a_model_got_wrong_stay_as_they_were(arguments: Any, expected: Any) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    [message] = read({"role": "assistant", "content": "x", "tool_calls": [call]})
    assert message["tool_calls"][0]["function"]["arguments"] == expected


def test_what_a_message_may_not_bring() -> None:
    assert refusal(read)[0] == "messages"
    assert refusal(read, {"role": "assistant", "content": "x", "audio": {"id": "a"}})[0] == "messages[0].audio"
    function_call = {"name": "f", "arguments": "{}"}
    message = {"role": "assistant", "content": "x", "function_call": function_call}
    assert refusal(read, message)[0] == "messages[0].function_call"
    call = {"function": {"name": "f"}}
    assert refusal(read, {"role": "user", "content": "x", "tool_calls": [call]})[0] == "messages[0].tool_calls"
    assert read({"role": "assistant", "content": "x", "audio": None, "tool_calls": []})[0]["content"] == "x"


def test_a_refusal_and_reasoning_are_kept() -> None:
    assert read({"role": "assistant", "refusal": "no"})[0]["content"] == "no"
    part = {"type": "refusal", "refusal": "no"}
    assert read({"role": "assistant", "content": [part]})[0]["content"] == "no"
    [message] = read({"role": "assistant", "content": "x", "reasoning_content": "why", "name": "Bob"})
    assert (message["reasoning_content"], message["name"]) == ("why", "Bob")
