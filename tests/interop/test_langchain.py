"""LangChain's ChatOpenAI."""

import asyncio
from typing import Literal

import pytest

pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict

from ..server.conftest import MODEL, Serve


async def test_invoke_stream_and_batch(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served:
        chat = ChatOpenAI(model=MODEL, base_url=served.url + "/v1", api_key="-", temperature=0, max_retries=0)
        answer = await chat.ainvoke("hi")
        assert answer.content == "Hello ďábelské 😀."
        assert answer.response_metadata["finish_reason"] == "stop"
        assert answer.usage_metadata["output_tokens"] > 0
        assert "".join([chunk.content async for chunk in chat.astream("hi")]) == answer.content
        answers = await asyncio.gather(*[chat.ainvoke("hi") for _ in range(4)])
        assert {one.content for one in answers} == {answer.content}
        await chat.root_async_client.close()


async def test_responses(serve: Serve) -> None:
    async with serve("Hello there.") as served:
        chat = ChatOpenAI(
            model=MODEL, base_url=served.url + "/v1", api_key="-", use_responses_api=True, max_retries=0
        )
        assert (await chat.ainvoke("hi")).text == "Hello there."
        assert "".join([chunk.text async for chunk in chat.astream("hi")]) == "Hello there."
        await chat.root_async_client.close()


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Literal["Ada", "Bob"]


@pytest.mark.parametrize("responses", [False, True])
async def test_tools_and_structured_output(serve: Serve, responses: bool) -> None:
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Brno"}}\n</tool_call>'
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
    async with serve(call, max_model_len=2048, num_pages=600) as served:
        chat = ChatOpenAI(
            model=MODEL, base_url=served.url + "/v1", api_key="-", max_retries=0, use_responses_api=responses
        )
        bound = chat.bind_tools([tool])
        whole = await bound.ainvoke("hi")
        gathered = None
        async for chunk in bound.astream("hi"):
            gathered = chunk if gathered is None else gathered + chunk
        for answer in (whole, gathered):
            [made] = answer.tool_calls
            assert (made["name"], made["args"]) == ("get_weather", {"city": "Brno"})
        assert isinstance(await chat.with_structured_output(Person, method="json_schema").ainvoke("hi"), Person)
        await chat.root_async_client.close()
