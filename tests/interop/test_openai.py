"""The openai package's responses: whole, streamed, kept, resumed; its WebSocket connection and its lane session."""

import asyncio
from typing import Any, Literal

import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict

from ..server.conftest import HI, MODEL, Serve, Served, endless
from ..text import toys

LONG = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}
ROOMY = {"max_model_len": 2100, "num_pages": 4000, "page_size": 16}


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="-", max_retries=0)


async def test_chat_completions_and_models(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served, client_of(served) as client:
        whole = await client.chat.completions.create(model=MODEL, messages=HI, temperature=0)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello ďábelské 😀.", "stop")
        usage = {"include_usage": True}
        stream = await client.chat.completions.create(model=MODEL, messages=HI, stream=True, stream_options=usage)
        chunks = [chunk async for chunk in stream]
        assert "".join([one.choices[0].delta.content or "" for one in chunks[:-1]]) == "Hello ďábelské 😀."
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
        async with client.chat.completions.stream(model=MODEL, messages=HI) as helper:
            assert (await helper.get_final_completion()).choices[0].message.content == "Hello ďábelské 😀."
        text = await client.completions.create(model=MODEL, prompt="hi", max_tokens=100)
        assert text.choices[0].text == "Hello ďábelské 😀."
        assert [model.id async for model in client.models.list()] == [MODEL]


async def test_responses_whole_and_streamed(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served, client_of(served) as client:
        whole = await client.responses.create(model=MODEL, input="hi", instructions="Be kind.", temperature=0)
        assert (whole.output_text, whole.status) == ("Hello ďábelské 😀.", "completed")
        assert whole.usage is not None and whole.usage.total_tokens > whole.usage.output_tokens > 0
        Response.model_validate(whole.model_dump(), strict=True)
        counted = await client.responses.input_tokens.count(model=MODEL, input="hi", instructions="Be kind.")
        assert counted.input_tokens == whole.usage.input_tokens
        stream = await client.responses.create(model=MODEL, input="hi", stream=True)
        texts = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(texts) == whole.output_text
        async with client.responses.stream(model=MODEL, input=[{"role": "user", "content": "hi"}]) as helper:
            async for _ in helper:
                pass
            assert (await helper.get_final_response()).output_text == whole.output_text


async def test_a_conversation_by_previous_response_id(serve: Serve) -> None:
    async with serve("Hello.") as served, client_of(served) as client:
        first = await client.responses.create(model=MODEL, input="hi")
        second = await client.responses.create(model=MODEL, input="and?", previous_response_id=first.id)
        assert second.previous_response_id == first.id
        assert (await client.responses.retrieve(first.id)).output_text == "Hello."
        await client.responses.delete(first.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(first.id)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.responses.create(model=MODEL, input="x", previous_response_id=first.id)
        assert caught.value.code == "previous_response_not_found"


async def test_reasoning_and_tools_in_responses(serve: Serve) -> None:
    answer = '<think>hm</think>So:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tools: Any = [{"type": "function", "name": "get_weather", "parameters": parameters, "strict": False}]
    fields: dict[str, Any] = {"model": MODEL, "tools": tools}
    async with serve(answer, template=toys.TOOLS, **LONG) as served, client_of(served) as client:
        whole = await client.responses.create(**fields, input="hi", include=["reasoning.encrypted_content"])
        Response.model_validate(whole.model_dump(), strict=True)
        async with client.responses.stream(**fields, input="hi") as stream:
            deltas = [event.delta async for event in stream if event.type == "response.function_call_arguments.delta"]
            final = await stream.get_final_response()
        for response in (whole, final):
            thought, said, call = response.output
            assert (thought.content[0].text, said.content[0].text, call.name) == ("hm", "So:", "get_weather")
            assert call.arguments == "".join(deltas) == '{"city": "Brno"}'
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        kept = await client.responses.create(**fields, input=[result], previous_response_id=final.id)
        talk: Any = [{"role": "user", "content": "hi"}, *final.output, result]
        spelled = await client.responses.create(**fields, input=talk)
        assert kept.usage.input_tokens == spelled.usage.input_tokens
        items = [item async for item in client.responses.input_items.list(kept.id, limit=2, order="asc")]
        assert [item.type for item in items][-2:] == ["function_call", "function_call_output"]


async def test_chat_with_tools(serve: Serve) -> None:
    answer = 'So:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
    tools: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}]
    fields: Any = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "tools": tools}
    async with serve(answer, template=toys.TOOLS, **LONG) as served, client_of(served) as client:
        whole = (await client.chat.completions.create(**fields)).choices[0]
        async with client.chat.completions.stream(**fields) as stream:
            final = (await stream.get_final_completion()).choices[0]
        for choice in (whole, final):
            assert (choice.message.content, choice.finish_reason) == ("So:", "tool_calls")
            assert choice.message.tool_calls[0].function.arguments == '{"city": "Brno"}'


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Bob"]
    age: Literal[7, 77]


async def test_structured_output(serve: Serve) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    async with serve(endless, **LONG) as served, client_of(served) as client:
        chat = await client.chat.completions.parse(model=MODEL, messages=messages, response_format=Person)
        response = await client.responses.parse(model=MODEL, input="hi", text_format=Person)
        for parsed in (chat.choices[0].message.parsed, response.output_parsed):
            assert isinstance(parsed, Person)
        async with client.responses.stream(model=MODEL, input="hi", text_format=Person) as stream:
            assert (await stream.get_final_response()).output_parsed == response.output_parsed


async def test_resuming_and_cancelling_by_its_own_calls(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, client_of(served) as client:
        served.runner.hold(permits=8)
        extra = {"resumable": True}
        stream = await client.responses.create(model=MODEL, input="hi", stream=True, extra_body=extra)
        text, number, response_id = "", -1, ""
        while not text:
            event = await anext(stream)
            number = event.sequence_number
            response_id = event.response.id if event.type == "response.created" else response_id
            text += event.delta if event.type == "response.output_text.delta" else ""
        await stream.close()
        again = await client.responses.retrieve(response_id, stream=True, starting_after=number)
        served.runner.let_go()
        cancelling = None
        async for event in again:
            assert event.sequence_number == (number := number + 1)
            if event.type == "response.output_text.delta":
                text += event.delta
                cancelling = cancelling or asyncio.create_task(client.responses.cancel(response_id))
        assert cancelling is not None and (await cancelling).status == "cancelled"
        assert event.type == "response.incomplete" and event.response.output_text == text


async def test_refusals_are_its_own_errors(serve: Serve) -> None:
    tools: Any = [{"type": "web_search"}]
    async with serve() as served, client_of(served) as client:
        for fields, param in (({"tools": tools}, "tools[0].type"), ({"background": True}, "background")):
            with pytest.raises(openai.BadRequestError) as caught:
                await client.responses.create(model=MODEL, input="hi", **fields)
            assert caught.value.param == param


async def test_its_websocket_connection(serve: Serve) -> None:
    pytest.importorskip("websockets")
    async with serve("Hello there.") as served, client_of(served) as client, client.responses.connect() as connection:
        previous = None
        for _ in range(3):
            await connection.response.create(model=MODEL, input="hi", previous_response_id=previous)
            texts = []
            async for event in connection:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
                elif event.type == "response.completed":
                    previous = event.response.id
                    break
            assert "".join(texts) == "Hello there."
        await connection.response.create(model=MODEL, input="hi", background=True)
        error = await connection.recv()
        assert error.type == "error" and error.error.param == "background"


async def test_its_lane_session(serve: Serve) -> None:
    pytest.importorskip("websockets")
    from openai.lib.responses_websocket import AsyncResponsesWebSocketSession, ResponsesWebSocketLimits

    limits = ResponsesWebSocketLimits(
        max_lanes=8, max_events_per_lane=128, max_events=512, max_bytes_per_lane=1 << 24, max_bytes=1 << 25
    )
    async with serve("Hello there.") as served, client_of(served) as client, client.responses.connect() as connection:
        async with AsyncResponsesWebSocketSession(connection, limits=limits) as session:
            lanes = [session.lane(f"lane-{i}") for i in range(4)]
            for lane in lanes:
                await lane.send({"type": "response.create", "model": MODEL, "input": "hi"})
            finals = await asyncio.gather(*[lane.get_final_response() for lane in lanes])
            assert [final.output_text for final in finals] == ["Hello there."] * 4
