"""LlamaIndex's OpenAILike, run by a Python that has it: `with_llamaindex.py URL MODEL`. An assertion fails the run."""

import asyncio
import json
import sys
from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

TEXT = "Hello ďábelské 😀."


def get_weather(city: str) -> str:
    """The weather in a city."""
    return f"sunny in {city}"


async def main(url: str, model: str) -> None:
    fields = {"model": model, "api_base": f"{url}/v1", "api_key": "-", "temperature": 0, "max_retries": 0}
    chat = OpenAILike(**fields, is_chat_model=True, is_function_calling_model=True)
    messages = [ChatMessage(role="user", content="hi")]
    assert (await chat.achat(messages)).message.content == TEXT
    assert chat.complete("hi").text == TEXT
    streamed = [part.delta or "" async for part in await chat.astream_chat(messages)]
    assert "".join(streamed) == TEXT, streamed
    legacy = OpenAILike(**fields, is_chat_model=False, max_tokens=60)
    assert (await legacy.acomplete("hi")).text == TEXT
    assert "".join([part.delta or "" async for part in await legacy.astream_complete("hi")]) == TEXT
    await refused(OpenAILike(**fields | {"model": "no-such"}, is_chat_model=True))
    tool = FunctionTool.from_defaults(get_weather)
    for allow_parallel in (True, False):
        called = await chat.achat_with_tools(
            [tool], user_msg="weather? CALL", allow_parallel_tool_calls=allow_parallel
        )
        [call] = chat.get_tool_calls_from_response(called)
        assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Brno"})
    parts = [part async for part in await chat.astream_chat_with_tools([tool], user_msg="weather? CALL")]
    [call] = chat.get_tool_calls_from_response(parts[-1])
    assert (call.tool_name, call.tool_kwargs) == ("get_weather", {"city": "Brno"})


    left = await chat.astream_chat([ChatMessage(role="user", content="ENDLESS")])
    await anext(left)
    await left.aclose()
    answer = await chat.as_structured_llm(Person).achat(messages)
    assert answer.raw.name in ("Ada", "Bob"), answer
    legal = await chat.achat(messages, response_format=RESPONSE_FORMAT)
    assert json.loads(legal.message.content)["name"] in ("Ada", "Bob")


class Person(BaseModel):
    name: Literal["Ada", "Bob"]


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Bob"]}},
    "required": ["name"],
    "additionalProperties": False,
}
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}


async def refused(chat: OpenAILike) -> None:
    try:
        await chat.acomplete("hi")
    except Exception as error:
        assert "no-such" in str(error), error
        return
    raise AssertionError("a model that is not served was answered for")


asyncio.run(main(*sys.argv[1:]))
