"""Every field of a responses request, as openai's package types it: its effect is seen, it is a label, or refused
(which tests/wire/test_responses.py sees)."""

from collections.abc import Callable
from typing import Any

import pytest
from openai.types.responses import response_create_params

from asyncllm.wire.responses import RESPONSES, ResponseRequest
from asyncllm.wire.unserved import LABELS

from ..text import toys
from .conftest import Serve, Served, endless

PATH = "/v1/responses"
ROOMY = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}
NOW = {"type": "function", "name": "now", "parameters": {"type": "object", "properties": {}}}
ENDLESS = {"max_output_tokens": 30}
Answer = dict[str, Any]


def text(answer: Answer) -> str:
    return "".join([part["text"] for item in answer["output"] if "role" in item for part in item["content"]])


def longer(answer: Answer, plain: Answer) -> bool:
    return bool(answer["usage"]["input_tokens"] > plain["usage"]["input_tokens"])


# A field's value, and what shows in the answer beside a plain one that it had its effect.
EFFECTS: dict[str, tuple[Any, Callable[[Answer, Answer], bool]]] = {
    "instructions": ("Be brief.", longer),
    "max_output_tokens": (3, lambda answer, plain: answer["usage"]["output_tokens"] == 3),
    "max_tool_calls": (2, lambda answer, plain: answer["max_tool_calls"] == 2),  # of tools that there are none of
    "metadata": ({"a": "b"}, lambda answer, plain: answer["metadata"] == {"a": "b"}),
    "parallel_tool_calls": (False, lambda answer, plain: answer["parallel_tool_calls"] is False),
    "reasoning": ({"effort": "none"}, lambda answer, plain: answer["reasoning"]["effort"] == "none"),
    "store": (False, lambda answer, plain: answer["store"] is False),
    "temperature": (1.5, lambda answer, plain: answer["temperature"] == 1.5),
    "text": ({"format": {"type": "json_object"}}, lambda answer, plain: text(answer).startswith("{")),
    "tool_choice": ("none", lambda answer, plain: answer["tool_choice"] == "none"),
    "tools": ([NOW], longer),
    "top_p": (0.5, lambda answer, plain: answer["top_p"] == 0.5),
    "truncation": ("auto", lambda answer, plain: answer["truncation"] == "auto"),
}
# What has a test of its own.
ELSEWHERE = {"input", "model", "stream", "stream_options", "previous_response_id", "include", "top_logprobs"}


async def ask(served: Served, **fields: Any) -> Answer:
    answer = await served.post(PATH, {"input": "hi", "temperature": 0} | ENDLESS | fields)
    assert answer.status == 200, answer.body
    return dict(answer.body)


def test_no_field_is_forgotten() -> None:
    fields = set(response_create_params.ResponseCreateParamsStreaming.__annotations__)
    assert fields - set(RESPONSES.table) - LABELS == (set(EFFECTS) | ELSEWHERE) - LABELS
    assert set(EFFECTS) | ELSEWHERE <= set(ResponseRequest.__struct_fields__)


@pytest.mark.parametrize("name", EFFECTS)
async def test_a_served_field_has_its_effect(serve: Serve, name: str) -> None:
    value, shows = EFFECTS[name]
    async with serve(endless, template=toys.CHATML, **ROOMY) as served:
        plain, answer = await ask(served), await ask(served, **{name: value})
        assert shows(answer, plain) and not shows(plain, plain)


@pytest.mark.parametrize("name", sorted(LABELS - set(EFFECTS)))
async def test_a_label_changes_nothing(serve: Serve, name: str) -> None:
    async with serve(endless, **ROOMY) as served:
        plain, answer = await ask(served), await ask(served, **{name: "x"})
        assert (text(answer), answer["usage"]["output_tokens"]) == (text(plain), plain["usage"]["output_tokens"])
