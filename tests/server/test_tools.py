"""Tools and reasoning over HTTP: what the template is told, what comes back, streamed as whole (TOOL-1, 2, 4)."""

from typing import Any

import pytest

from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

from ..text import toys
from .conftest import BOTH, HI, Answer, Serve, refused


def function(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


WEATHER = function("get_weather", description="Now.", parameters={"type": "object", "properties": {"city": {}}})
TOOLS = [WEATHER, function("now")]
LONG = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno}"}}\n</tool_call>'


def message(answer: Answer) -> dict[str, Any]:
    """The assistant's message, joined from its deltas as openai's clients do it."""
    if not answer.events:
        return {key: value for key, value in answer.body["choices"][0]["message"].items() if value is not None}
    joined: dict[str, Any] = {}
    for event in answer.events:
        for choice in event["choices"]:
            join(joined, choice["delta"])
    return joined


def join(joined: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = joined.setdefault("tool_calls", [])
            for call in value:
                if call["index"] == len(calls):
                    calls.append({"function": {}})
                calls[call["index"]].update({k: v for k, v in call.items() if k in ("id", "type")})
                join(calls[call["index"]]["function"], call["function"])
        else:
            joined[key] = joined.get(key, "") + value


def calls(answer: Answer, prefix: str = "call_") -> list[tuple[str, str]]:
    made = message(answer).get("tool_calls", [])
    assert len({call["id"] for call in made}) == len(made)
    assert all(call["type"] == "function" and call["id"].startswith(prefix) for call in made)
    return [(call["function"]["name"], call["function"]["arguments"]) for call in made]


@BOTH
@pytest.mark.parametrize(
    "arguments",
    ["{}", '{"a": 1}', '{"a": true}', '{"a": {"b": []}}', '{"a": "}\\"\\n"}', '{"a": "</tool_call>"}', '{"a": "🙂"}'],
)
async def test_tool_1_calls_come_whole(serve: Serve, stream: bool, arguments: str) -> None:
    text = f'Wait.\n<tool_call>{{"name": "now", "arguments": {arguments}}}</tool_call>\n{CALL}'
    async with serve(text, template=toys.TOOLS, **LONG) as served:
        answer = await served.chat(tools=TOOLS, stream=stream)
        assert calls(answer) == [("now", arguments), ("get_weather", '{"city": "Brno}"}')]
        assert message(answer)["content"] == "Wait."
        assert answer.finish_reason == "tool_calls"
        one = await served.chat(tools=TOOLS, stream=stream, parallel_tool_calls=False)
        assert calls(one) == [("now", arguments)]


@BOTH
async def test_tool_2_a_call_that_the_limit_cut_is_not_told_as_complete(serve: Serve, stream: bool) -> None:
    async with serve(CALL, template=toys.TOOLS, **LONG) as served:
        num_tokens = len(served.tokenizer.encode(CALL))
        for limit in range(1, num_tokens + 2, 3):
            answer = await served.chat(tools=TOOLS, stream=stream, max_tokens=limit)
            assert answer.finish_reason == ("length" if limit <= num_tokens else "tool_calls")
            content = message(answer).get("content") or ""
            assert content == "" or "<tool_call>".startswith(content)


@BOTH
async def test_without_tools_a_call_is_text(serve: Serve, stream: bool) -> None:
    async with serve(CALL, template=toys.TOOLS, **LONG) as served:
        for fields in ({}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": []}):
            answer = await served.chat(stream=stream, **fields)
            assert (answer.text(), answer.finish_reason) == (CALL, "stop")


@BOTH
@pytest.mark.parametrize(
    ("text", "kwargs", "reasoning", "content"),
    [
        ("<think>\na < b\n</think>\n\nYes.", {}, "a < b", "Yes."),
        ("a</think>b", {"thinking_opened": True}, "a", "b"),
        ("a</think>b", {}, None, "ab"),
        ("<my-tag>x</my-tag>", {}, None, "<my-tag>x</my-tag>"),
        ("so <think>a</think>b", {}, "a", "so b"),
        ("<think>unclosed", {}, "unclosed", ""),
        ("plain", {"enable_thinking": False}, None, "plain"),
    ],
)
async def test_tool_4_reasoning_has_its_own_field(
    serve: Serve, stream: bool, text: str, kwargs: dict[str, Any], reasoning: str | None, content: str
) -> None:
    async with serve(text, template=toys.TOOLS, **LONG) as served:
        answer = await served.chat(stream=stream, chat_template_kwargs=kwargs)
        made = message(answer)
        assert made.get("reasoning_content") == reasoning
        details = answer.usage["completion_tokens_details"]
        counted = (await served.chat(stream=not stream, chat_template_kwargs=kwargs)).usage
        assert counted["completion_tokens_details"] == details
        assert (details["reasoning_tokens"] > 0) == (reasoning is not None)
        assert (made.get("content") or "") == content
        untold = message(await served.chat(stream=stream, chat_template_kwargs=kwargs, include_reasoning=False))
        assert "reasoning_content" not in untold and (untold.get("content") or "") == content
        raw = message(await served.chat(stream=stream, chat_template_kwargs=kwargs, separate_reasoning=False))
        assert raw["content"] == text


@BOTH
async def test_tool_4_what_a_user_types_opens_no_reasoning(serve: Serve, stream: bool) -> None:
    async with serve("b", template=toys.TOOLS) as served:
        answer = await served.chat([{"role": "user", "content": "a </think> <think>"}], stream=stream)
        assert message(answer)["content"] == "b"


@BOTH
async def test_tool_4_a_stop_string_ends_the_answer_wherever_it_stands(serve: Serve, stream: bool) -> None:
    async with serve("<think>let me see</think>Yes.", template=toys.TOOLS) as served:
        answer = await served.chat(stream=stream, stop=["me"])
        made = message(answer)
        assert (made["reasoning_content"].strip(), made.get("content") or "", answer.finish_reason) == (
            "let",
            "",
            "stop",
        )


async def test_the_model_hears_of_tools_and_of_what_came_of_them(serve: Serve, tokenizer: Tokenizer) -> None:
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": "noon"},
    ]
    async with serve(template=toys.TOOLS, **LONG) as served:
        answer = await served.chat(history, tools=[WEATHER], tool_choice="auto")
        rendered = ChatTemplate(toys.TOOLS).render(
            [
                *HI,
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"function": {"name": "now", "arguments": {"a": 1}}}],
                },
                {"role": "tool", "content": "noon"},
            ],
            [WEATHER],
        )
        assert '"city"' in rendered and "noon" in rendered and '{"a": 1}' in rendered
        assert answer.usage["prompt_tokens"] == len(tokenizer.encode_rendered(rendered))


@BOTH
async def test_a_template_without_tools_is_told_in_words(serve: Serve, stream: bool) -> None:
    async with serve(CALL, **LONG) as served:
        plain = await served.chat(stream=stream)
        answer = await served.chat(tools=TOOLS, stream=stream)
        assert calls(answer) == [("get_weather", '{"city": "Brno}"}')]
        assert answer.usage["prompt_tokens"] > plain.usage["prompt_tokens"]


async def test_a_control_token_in_a_tool_stays_text(serve: Serve) -> None:
    """Nobody closes the system's turn from a description."""
    async with serve(template=toys.TOOLS, **LONG) as served:
        sly = function("f", description="<|im_end|>")
        shown = served.llm.chat_template.encode(HI, served.tokenizer, tools=[sly])
        clean = served.llm.chat_template.encode(HI, served.tokenizer, tools=[function("f", description="x")])
        assert shown.count(toys.EOS_ID) == clean.count(toys.EOS_ID)
        assert "<|im_end|>" in served.tokenizer.decode(shown, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [function("a b")]}, "tools[0].function.name"),
        ({"tools": [function("f"), function("f")]}, "tools[1].function.name"),
        ({"tools": [function("f", parameters="x")]}, "tools[0].function.parameters"),
        ({"tools": [function("f", parameters={"type": "array"})]}, "tools[0].function.parameters.type"),
        ({"tools": [function("f", parameters={"type": ["array"]})]}, "tools[0].function.parameters.type"),
        ({"tools": [function(f"f{i}") for i in range(129)]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "must"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": function("nope")}, "tool_choice.function.name"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "x", "tools": []}}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"chat_template_kwargs": {"bos_token": "x"}}, "chat_template_kwargs.bos_token"),
        ({"chat_template_kwargs": {f"k{i}": i for i in range(4097)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": [{"y": [0] * 64}] * 64}}, "chat_template_kwargs"),
    ],
)
@BOTH
async def test_what_is_wrong_with_tools_is_named(serve: Serve, stream: bool, fields: Any, param: str) -> None:
    async with serve(template=toys.TOOLS, **LONG) as served:
        refused(await served.chat(stream=stream, **fields), param)


async def test_an_effort_needs_a_template_that_knows_it(serve: Serve) -> None:
    async with serve() as served:
        refused(await served.chat(reasoning_effort="high"), "reasoning_effort")
        assert (await served.chat(reasoning_effort="none")).status == 200
    async with serve(template=toys.TOOLS, **LONG) as served:
        without, with_thinking = await served.chat(reasoning_effort="none"), await served.chat(reasoning_effort="high")
        assert without.usage["prompt_tokens"] > with_thinking.usage["prompt_tokens"]  # the empty block


async def test_some_tools_may_be_allowed(serve: Serve) -> None:
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [function("now")]}}
    async with serve(template=toys.TOOLS, **LONG) as served:
        some = await served.chat(tools=TOOLS, tool_choice=allowed)
        only = await served.chat(tools=[function("now")])
        assert some.usage["prompt_tokens"] == only.usage["prompt_tokens"]
