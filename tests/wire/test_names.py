"""Fields by the names of each API, in errors that were made without knowing which it is."""

import pytest

from asyncllm.errors import AsyncLLMError, Field, InvalidRequest
from asyncllm.wire.names import RESPONSE_NAMES, Names, message_names

MESSAGE_NAMES = message_names("thinking", 3)


@pytest.mark.parametrize(
    ("chats", "in_responses", "in_messages"),
    [
        ("max_tokens", "max_output_tokens", "max_tokens"), ("max_tokens_x", "max_tokens_x", "max_tokens_x"),
        ("prompt", "input", "messages"), ("messages[0].role", "input[0].role", "messages[0].role"),
        ("stop[1]", "stop[1]", "stop_sequences[1]"), ("stop_token_ids[0]", "stop_token_ids[0]", "stop_token_ids[0]"),
        ("reasoning_effort", "reasoning.effort", "thinking"), ("json_schema", "json_schema", "json_schema"),
        ("continue_final_message", "continue_final_message", "messages[2]"),
        ("response_format", "text.format", "output_config.format"),
        ("response_format.json_schema.schema", "text.format.schema", "output_config.format.schema"),
        ("tools", "tools", "tools"), ("tools[12].function.name", "tools[12].name", "tools[12].name"),
        ("tools[0].function.parameters.x", "tools[0].parameters.x", "tools[0].input_schema.x"),
        ("tool_choice", "tool_choice", "tool_choice"),
        ("tool_choice.function.name", "tool_choice.name", "tool_choice.name"),
        ("tool_choice.allowed_tools.mode", "tool_choice.mode", "tool_choice.allowed_tools.mode"),
        ("tool_choice.tools[1].function.name", "tool_choice.tools[1].name", "tool_choice.tools[1].function.name"),
        ("chat_template_kwargs.messages", "chat_template_kwargs.messages", "chat_template_kwargs.messages"),
    ],
)  # fmt: skip
def test_each_api_has_its_own(chats: str, in_responses: str, in_messages: str) -> None:
    assert (RESPONSE_NAMES.of(chats), MESSAGE_NAMES.of(chats)) == (in_responses, in_messages)


def test_a_sentence_tells_of_fields_by_those_names_and_of_nothing_else() -> None:
    error = InvalidRequest.of("min_tokens", "9 is above ", Field("max_tokens"), ", says 'max_tokens'")
    error.code = "its own"
    told = error.renamed(RESPONSE_NAMES.of)
    assert str(told) == "'min_tokens' 9 is above 'max_output_tokens', says 'max_tokens'"
    assert (told.param, told.code) == ("min_tokens", "its own")
    assert str(error) == "'min_tokens' 9 is above 'max_tokens', says 'max_tokens'"  # as it may be told elsewhere, too
    assert str(told.renamed(MESSAGE_NAMES.of)) == str(told)


def test_what_has_no_field_is_as_it_was() -> None:
    bare, other = InvalidRequest("the body: 'prompt'"), AsyncLLMError("'prompt'")
    assert (str(bare.renamed(RESPONSE_NAMES.of)), bare.param) == ("the body: 'prompt'", None)
    assert other.renamed(RESPONSE_NAMES.of) is other
    assert Names({}).of("prompt[1]") == "prompt[1]" and Names({"prompt": "prompt[4]"}).of("prompt[1]") == "prompt[4][1]"
