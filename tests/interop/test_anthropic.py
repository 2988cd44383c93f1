"""The anthropic package: whole, streamed, counted, refused, left."""

from typing import Any, Literal

import pytest

pytest.importorskip("anthropic")

import anthropic
from pydantic import BaseModel, ConfigDict

from ..server.conftest import HI, MODEL, Serve, Served, endless
from ..text import toys


def client_of(served: Served) -> Any:
    return anthropic.AsyncAnthropic(base_url=served.url, api_key="-", max_retries=0)


async def test_messages_whole_and_streamed(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served, client_of(served) as client:
        fields = {"model": MODEL, "max_tokens": 64, "messages": HI, "system": "Be kind."}
        whole = await client.messages.create(**fields)
        assert (whole.content[0].text, whole.stop_reason) == ("Hello ďábelské 😀.", "end_turn")
        assert whole._request_id.startswith("req_")
        anthropic.types.Message.model_validate(whole.model_dump(), strict=True)
        async with client.messages.stream(**fields) as stream:
            assert "".join([text async for text in stream.text_stream]) == whole.content[0].text
            final = await stream.get_final_message()
        assert (final.content[0].text, final.stop_reason) == (whole.content[0].text, "end_turn")
        assert final.usage.output_tokens == whole.usage.output_tokens
        again = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": "And?"}]
        assert (await client.messages.create(**fields | {"messages": again})).stop_reason == "end_turn"
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).display_name == MODEL
        counted = await client.messages.count_tokens(model=MODEL, messages=HI, system="Be kind.")
        assert counted.input_tokens == whole.usage.input_tokens


async def test_stops_and_refusals(serve: Serve) -> None:
    async with serve(endless) as served, client_of(served) as client:
        fields: dict[str, Any] = {"model": MODEL, "max_tokens": 64, "messages": HI}
        stopped = await client.messages.create(**fields, stop_sequences=["def"])
        assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "def")
        assert (await client.messages.create(**fields | {"max_tokens": 3})).stop_reason == "max_tokens"
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**fields, extra_body={"temperature": 9})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(**fields | {"model": "no-such"})


async def test_leaving_a_stream_ends_it(serve: Serve) -> None:
    async with serve(endless, max_model_len=2100, num_pages=4000, page_size=16) as served, client_of(served) as client:
        async with client.messages.stream(model=MODEL, max_tokens=2000, messages=HI) as stream:
            async for _ in stream.text_stream:
                break
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Bob"]


async def test_structured_output(serve: Serve) -> None:
    async with serve(endless, **LONG) as served, client_of(served) as client:
        message = await client.messages.parse(model=MODEL, max_tokens=64, messages=HI, output_format=Person)
        assert isinstance(message.parsed_output, Person)


CALL = '<think>hm</think>So:<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
LONG = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}


async def test_thinking_and_tools(serve: Serve) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 200, "messages": HI}
    fields["tools"] = [{"name": "get_weather", "description": "Now.", "input_schema": schema}]
    async with serve(CALL, template=toys.TOOLS, **LONG) as served, client_of(served) as client:
        whole = await client.messages.create(**fields, thinking={"type": "enabled", "budget_tokens": 1024})
        async with client.messages.stream(**fields) as stream:
            final = await stream.get_final_message()
        for message in (whole, final):
            thought, said, call = message.content
            assert (thought.thinking, said.text, message.stop_reason) == ("hm", "So:", "tool_use")
            assert (call.name, call.input) == ("get_weather", {"city": "Brno"})
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
        talk = [*HI, final.to_param(), {"role": "user", "content": [result]}]
        assert (await client.messages.create(**fields | {"messages": talk})).usage.input_tokens > 0
