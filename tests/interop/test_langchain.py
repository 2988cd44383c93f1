"""LangChain's ChatOpenAI."""

import asyncio

import pytest

pytest.importorskip("langchain_openai")

from langchain_openai import ChatOpenAI

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
