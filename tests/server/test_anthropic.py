"""/v1/messages and /v1/messages/count_tokens: Anthropic's words for the same answers."""

import json
from typing import Any

import msgspec
import orjson
import pytest

from asyncllm.errors import InvalidRequest
from asyncllm.wire import schemas
from asyncllm.wire.anthropic import ANTHROPIC, MessagesRequest, decode_messages, template_messages
from asyncllm.wire.anthropic_events import MessageHead
from asyncllm.wire.items import Piece
from asyncllm.wire.requests import ChatRequest, CompletionRequest
from asyncllm.wire.response_events import EventStream, Outcome, all_events
from asyncllm.wire.sse import Decoder
from asyncllm.wire.unserved import ANTHROPIC_LABELS

from ..text import toys
from .conftest import BOTH, HI, MODEL, Serve, Served, endless

PATH = "/v1/messages"


async def ask(served: Served, **fields: Any) -> dict[str, Any]:
    """One answer, whole or put together from its events, which are checked for their order."""
    body = {"model": MODEL, "messages": HI, "max_tokens": 64, "temperature": 0} | fields
    async with served.session.post(served.url + PATH, json=body) as response:
        assert response.status == 200, await response.text()
        assert response.headers["request-id"] == response.headers["X-Request-Id"]
        raw = await response.read()
    return put_together(raw) if body.get("stream") else json.loads(raw)


def put_together(raw: bytes) -> dict[str, Any]:
    events = [(event.type, json.loads(event.data)) for event in Decoder().feed(raw)]
    assert [kind for kind, _ in events] == [body["type"] for _, body in events]
    (_, start), *middle, (_, delta), (last, _) = events
    assert (start["type"], delta["type"], last) == ("message_start", "message_delta", "message_stop")
    message: dict[str, Any] = start["message"]
    inputs: dict[int, str] = {}
    for kind, event in middle:
        if kind == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
        elif kind == "content_block_delta":
            assert event["index"] == len(message["content"]) - 1
            field, text = [item for item in event["delta"].items() if item[0] != "type"][0]
            if field == "partial_json":
                inputs[event["index"]] = inputs.get(event["index"], "") + text
            else:
                message["content"][-1][field] += text
    for index, text in inputs.items():
        message["content"][index]["input"] = json.loads(text)
    return message | delta["delta"] | {"usage": delta["usage"]}


async def test_whole_and_streamed_are_the_same(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served:
        whole = await ask(served)
        msgspec.convert(whole, schemas.AnthropicMessage)
        assert whole["content"] == [{"type": "text", "text": "Hello ďábelské 😀."}]
        assert (whole["stop_reason"], whole["stop_sequence"], whole["model"]) == ("end_turn", None, MODEL)
        streamed = await ask(served, stream=True)
        names = ("input_tokens", "cache_read_input_tokens")
        prompts = [sum([one["usage"][name] for name in names]) for one in (whole, streamed)]
        assert prompts == [(await served.chat()).usage["prompt_tokens"]] * 2
        assert streamed["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
        for one in (whole, streamed):
            one.pop("usage"), one.pop("id")
        assert streamed == whole


@BOTH
async def test_why_it_stopped(serve: Serve, stream: bool) -> None:
    async with serve(endless) as served:
        cut = await ask(served, max_tokens=5, stream=stream)
        assert (cut["stop_reason"], cut["content"][0]["text"]) == ("max_tokens", "abcde")
        assert cut["usage"]["output_tokens"] == 5
        stopped = await ask(served, stop_sequences=["zz", "def"], stream=stream)
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "def")
        assert stopped["content"][0]["text"] == "abc"
        assert (await ask(served, max_tokens=10**6, stream=stream))["stop_reason"] == "model_context_window_exceeded"


async def test_what_is_read_from_the_cache_stands_beside_the_input(serve: Serve) -> None:
    async with serve("Hi.") as served:
        first, second = await ask(served), await ask(served)
        assert first["usage"]["cache_read_input_tokens"] == 0 < second["usage"]["cache_read_input_tokens"]
        together = second["usage"]["input_tokens"] + second["usage"]["cache_read_input_tokens"]
        assert together == first["usage"]["input_tokens"]


async def test_tokens_are_counted_as_the_answer_counts_them(serve: Serve) -> None:
    async with serve() as served:
        body = {"messages": HI, "system": [{"type": "text", "text": "Be brief."}]}
        counted = (await served.post(f"{PATH}/count_tokens", body)).body
        assert counted == {"input_tokens": (await ask(served, **body))["usage"]["input_tokens"]}


def turns(*messages: Any, **fields: Any) -> list[dict[str, Any]]:
    body = {"max_tokens": 1, "messages": [{"role": role, "content": content} for role, content in messages]} | fields
    return template_messages(decode_messages(json.dumps(body).encode()))


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def test_messages_become_turns() -> None:
    assert turns(("user", "a"), ("user", [text("b"), text("c")]), system="s") == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb\nc"},
    ]
    document = {"type": "document", "title": "T", "source": {"type": "text", "media_type": "text/plain", "data": "d"}}
    nested = {"type": "document", "source": {"type": "content", "content": [text("e")]}}
    assert turns(("user", [document, nested, text("f")])) == [{"role": "user", "content": "T\nd\ne\nf"}]
    assert turns(("user", "a"), ("system", "now"), ("user", "b"))[1] == {"role": "system", "content": "now"}


def test_tool_use_and_its_result() -> None:
    use = {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Brno"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [text("sunny")]}
    failed = {"type": "tool_result", "tool_use_id": "t2", "content": "no such city", "is_error": True}
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    assert turns(
        ("user", "weather?"), ("assistant", [thought, text("Let me see."), use]), ("user", [result, failed, text("?")])
    )[1:] == [
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Brno"}}}
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no such city"},
        {"role": "user", "content": "?"},
    ]


SAID = [
    ("reasoning", "Hm"), ("reasoning", "."), ("content", "Let me see."),
    ("call", "weather"), ("arguments", '{"city":'), ("arguments", ' "Brno"}'), ("call", "now"), ("arguments", "{}"),
]  # fmt: skip
PIECES = [Piece(kind, text) for kind, text in SAID]


def written(message: dict[str, Any]) -> Any:
    return orjson.loads(orjson.dumps(message))


@pytest.mark.parametrize("arguments", ['{"a":' * 300 + "1" + "}" * 300, '{"n": ' + "9" * 40 + "}"])
def test_whatever_a_model_writes_is_written(arguments: str) -> None:
    head = MessageHead(id="msg_1", model="m", num_prompt_tokens=3)
    whole = orjson.dumps(head.whole(Outcome(status="completed"), [Piece("call", "f"), Piece("arguments", arguments)]))
    assert arguments.encode() in whole


def test_reasoning_and_calls_in_events_and_whole() -> None:
    head = MessageHead(id="msg_1", model="m", num_prompt_tokens=3)
    outcome = Outcome(status="completed", num_prompt_tokens=3, num_output_tokens=9, calls=True)
    whole = written(head.whole(outcome, PIECES))
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use", "tool_use"]
    assert whole["content"][2]["input"] == {"city": "Brno"}
    assert whole["content"][0]["signature"] and whole["stop_reason"] == "tool_use"
    assert put_together(b"".join(all_events(head.script(EventStream()), PIECES, outcome))) == whole
    cut = Outcome(status="incomplete", reason="max_output_tokens")
    assert written(head.whole(cut, PIECES[:5]))["content"] == whole["content"][:2]  # half an input is none to act on


WEATHER = {"name": "get_weather", "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}}}
CALL = '<think>hm</think>So:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
LONG = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}


@BOTH
async def test_a_model_thinks_and_calls(serve: Serve, stream: bool) -> None:
    async with serve(CALL, template=toys.TOOLS, **LONG) as served:
        fields = {"tools": [WEATHER], "max_tokens": 200, "stream": stream}
        message = await ask(served, **fields)
        thought, said, call = message["content"]
        assert (thought["thinking"], said["text"], message["stop_reason"]) == ("hm", "So:", "tool_use")
        assert (call["name"], call["input"]) == ("get_weather", {"city": "Brno"})
        result = {"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}
        talk = [*HI, {"role": "assistant", "content": message["content"]}, {"role": "user", "content": [result]}]
        again = await ask(served, **fields, messages=talk)
        assert again["usage"]["input_tokens"] + again["usage"]["cache_read_input_tokens"] == (
            await served.post(f"{PATH}/count_tokens", {"messages": talk, "tools": [WEATHER]})
        ).body["input_tokens"]
        untold = await ask(served, **fields, thinking={"type": "adaptive", "display": "omitted"})
        assert [block["type"] for block in untold["content"]] == ["text", "tool_use"]
        cut = await ask(served, **fields | {"max_tokens": message["usage"]["output_tokens"] - 20, "stream": False})
        assert [cut["stop_reason"], *[block["type"] for block in cut["content"]]] == ["max_tokens", "thinking", "text"]
        plain = await ask(served, **fields, tool_choice={"type": "none"})
        assert (plain["stop_reason"], "<tool_call>" in plain["content"][1]["text"]) == ("end_turn", True)


@BOTH
async def test_an_answer_keeps_to_its_format_and_a_call_can_be_demanded(serve: Serve, stream: bool) -> None:
    schema = {"type": "object", "properties": {"name": {"enum": ["Ada", "Bob"]}}, "required": ["name"]}
    form = {"format": {"type": "json_schema", "schema": schema | {"additionalProperties": False}}}
    async with serve(endless, **LONG) as served:
        message = await ask(served, stream=stream, output_config=form)
        assert json.loads(message["content"][0]["text"])["name"] in ("Ada", "Bob")
        fields = {"tools": [WEATHER], "max_tokens": 500, "stream": stream}
        for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "get_weather"}):
            demanded = await ask(served, **fields, tool_choice=choice)
            assert (demanded["stop_reason"], demanded["content"][-1]["type"]) == ("tool_use", "tool_use")


async def test_a_message_is_gone_on_from(serve: Serve) -> None:
    prefilled = [*HI, {"role": "assistant", "content": "Hello"}]
    async with serve(" there.") as served:
        message = await ask(served, messages=prefilled)
        assert message["content"][0]["text"] == " there."
        chat = {"messages": prefilled, "continue_final_message": True}
        assert message["usage"]["input_tokens"] == (await served.post("/tokenize", chat)).body["count"]


async def test_thinking_is_told_to_the_template(serve: Serve) -> None:
    async with serve(template=toys.TOOLS, **LONG) as served:
        body = {"messages": HI, "thinking": {"type": "disabled"}}
        without = (await served.post(f"{PATH}/count_tokens", body)).body["input_tokens"]
        for fields in ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, {"output_config": {"effort": "max"}}):
            assert (await served.post(f"{PATH}/count_tokens", body | {"thinking": None} | fields)).body[
                "input_tokens"
            ] < without  # which has an empty block


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"messages": []}, "messages"), ({"messages": None}, "messages"), ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": None}, "max_tokens"), ({"temperature": 3}, "temperature"), ({"system": 3}, "system"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [*HI, {"role": "assistant", "content": ""}]}, "messages[1]"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]},
         "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f"}]}]},
         "messages[0].content[0].input"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x", "name": "f", "input": {}}]}]},
         "messages[0]"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"), ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"output_config": {"effort": "low"}}, "output_config.effort"), ({"thinking": {"type": "x"}}, "thinking.type"),
        ({"tools": [WEATHER | {"name": "a b"}]}, "tools[0].name"),
        ({"tools": [WEATHER | {"type": "x"}]}, "tools[0].type"), ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {"type": "string"}}]}, "tools[0].input_schema.type"),
        ({"tools": [{"name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 1}}}}, "output_config.format.schema"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.type"), ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
    ],
)  # fmt: skip
async def test_refusals_are_in_anthropics_shape(serve: Serve, fields: dict[str, Any], where: str) -> None:
    async with serve() as served:
        body = {"messages": HI, "max_tokens": 3, "stream": True} | fields
        async with served.session.post(served.url + PATH, json=body, headers={"X-Request-Id": "mine"}) as response:
            told = await response.json()
        msgspec.convert(told, schemas.AnthropicError)
        assert (response.status, told["error"]["type"], told["request_id"]) == (400, "invalid_request_error", "mine")
        assert told["error"]["message"].startswith(f"{where}: ")


async def test_other_failures_too(serve: Serve) -> None:
    async with serve(max_running=1, max_waiting=0) as served:
        async with served.session.get(served.url + PATH) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")
        body = {"model": "no-such", "messages": HI, "max_tokens": 3}
        async with served.session.post(served.url + PATH, json=body) as response:
            assert (response.status, (await response.json())["error"]["type"]) == (404, "not_found_error")
        served.runner.hold()
        streaming = body | {"model": MODEL, "stream": True}
        async with served.session.post(served.url + PATH, json=streaming) as first:
            async with served.session.post(served.url + PATH, json=streaming) as response:
                assert (response.status, (await response.json())["error"]["type"]) == (503, "overloaded_error")
                assert response.headers["Retry-After"]

            def fail(batch: object) -> None:
                raise RuntimeError("no")

            served.runner.on_result = fail
            served.runner.let_go()
            *_, last = Decoder().feed(await first.read())
        assert (last.type, json.loads(last.data)["error"]["type"]) == ("error", "api_error")


async def test_whoever_leaves_ends_the_answer(serve: Serve) -> None:
    async with serve(endless, max_model_len=2100, num_pages=4000, page_size=16) as served:
        body = {"messages": HI, "max_tokens": 2000, "stream": True}
        async with served.session.post(served.url + PATH, json=body) as response:
            await response.content.readany()
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1


def test_every_field_of_anthropics_types_is_served_a_label_or_refused() -> None:
    anthropic = pytest.importorskip("anthropic")
    from anthropic.types import message_count_tokens_params, message_create_params
    from anthropic.types.beta import message_create_params as beta

    assert anthropic.__version__
    known = set(MessagesRequest.__struct_fields__) | ANTHROPIC_LABELS | set(ANTHROPIC.table)
    for params in (
        message_create_params.MessageCreateParamsStreaming,
        message_create_params.MessageCreateParamsNonStreaming,
        message_count_tokens_params.MessageCountTokensParams,
        beta.MessageCreateParamsStreaming,
    ):
        assert set(params.__annotations__) - known == set()
    assert not set(MessagesRequest.__struct_fields__) & (ANTHROPIC_LABELS | set(ANTHROPIC.table))


def test_every_field_of_chat_and_completions_is_served_a_label_or_refused() -> None:
    theirs = {*ChatRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert theirs - set(MessagesRequest.__struct_fields__) - ANTHROPIC_LABELS - set(ANTHROPIC.table) == set()


@pytest.mark.parametrize("name", sorted(ANTHROPIC.table))
def test_what_is_not_served_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode_messages(json.dumps({"messages": HI, "max_tokens": 1, name: {"asks": "for something"}}).encode())
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("arguments", "is_input"),
    [('{"z": 1e999}', True), ('{"z": "\\ud800"}', True),
     ('{"z": 1,}', False), ("{'z': 1}", False), ('{"z": NaN}', False)],
)  # fmt: skip
async def test_tool_use_says_that_there_is_an_input(serve: Serve, arguments: str, is_input: bool) -> None:
    """Streamed or whole, and whatever Python's readers of JSON can hold."""
    said = f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>'
    async with serve(said, template=toys.TOOLS, **LONG) as served:
        body = {"messages": HI, "max_tokens": 200, "tools": [WEATHER]}
        async with served.session.post(served.url + PATH, json=body) as response:
            raw = await response.text()
        async with served.session.post(served.url + PATH, json=body | {"stream": True}) as response:
            streamed = await response.text()
    reason = '"stop_reason":"tool_use"' if is_input else '"stop_reason":"end_turn"'
    assert reason in raw and reason in streamed
    assert (f'"input":{arguments}' in raw) == is_input
