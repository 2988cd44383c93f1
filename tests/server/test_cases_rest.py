"""Cases of no other file: deep nesting, and leaving in the middle of a prefill (IN-2, ABORT-3)."""

import asyncio
import io
import json
from typing import Any

import pytest

from .conftest import CHAT, HI, TEXT, Serve, Served, until

BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI, "max_tokens": 2},
    TEXT: {"prompt": "hi", "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": HI, "max_tokens": 2},
    "/tokenize": {"prompt": "hi"},
}
TOOL = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}, "name": "f", "parameters": "DEEP"}
PLACES: list[dict[str, Any]] = [
    {"unknown": "DEEP"}, {"tools": "DEEP"}, {"tools": [TOOL]}, {"tools": [{"name": "f", "input_schema": "DEEP"}]},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": "DEEP"}}},
    {"text": {"format": {"type": "json_schema", "name": "x", "schema": "DEEP"}}},
    {"messages": [{"role": "user", "content": "DEEP"}]}, {"input": "DEEP"}, {"metadata": "DEEP"}, {"stop": "DEEP"},
    {"chat_template_kwargs": {"x": "DEEP"}}, {"logit_bias": "DEEP"},
]  # fmt: skip


def nested(body: dict[str, Any], depth: int, opening: str, closing: str) -> bytes:
    return json.dumps(body).replace('"DEEP"', opening * depth + "1" + closing * depth).encode()


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}")])
async def test_in_2_deep_nesting_is_answered_or_refused(serve: Serve, path: str, opening: str, closing: str) -> None:
    async with serve("Hi.", max_model_len=8192, num_pages=2100, max_step_tokens=8192) as served:
        for place in PLACES:
            for depth in (50, 240, 260, 300, 400, 500, 1000, 3000, 100_000):
                data = nested(BODIES[path] | place, depth, opening, closing)
                async with served.session.post(
                    served.url + path, data=io.BytesIO(data), headers={"Content-Type": "application/json"}
                ) as response:
                    assert response.status in (200, 400), (place, depth, await response.text())
        await served.alive()


async def test_in_2_deep_nesting_over_a_socket(serve: Serve) -> None:
    async with serve("Hi.") as served, served.session.ws_connect(served.url + "/v1/responses") as socket:
        for place in PLACES:
            for depth in (260, 400, 1000, 100_000):
                body = {"type": "response.create"} | BODIES["/v1/responses"] | place
                await socket.send_str(nested(body, depth, "[", "]").decode())
                last: dict[str, Any] = {"type": ""}
                while last["type"] not in ("error", "response.completed", "response.incomplete"):
                    last = await socket.receive_json()
        await served.alive()


def letters(context: list[int], prompt_len: int) -> int:
    return 3 + 64 + hash(tuple(context)) % 26


def prompt(number: int, num_tokens: int) -> list[int]:
    return [70 + (number * 7 + i * (number + 1)) % 60 for i in range(num_tokens)]


async def begin(served: Served, number: int) -> "asyncio.Task[Any]":
    before = len(served.runner.batches)
    task = asyncio.create_task(served.complete(prompt(number, 300), stream=number % 2 == 0, max_tokens=5))
    await until(lambda: len(served.runner.batches) > before)
    return task


@pytest.mark.parametrize("page_size", [1, 16, 64])
async def test_abort_3_leaving_in_the_middle_of_a_prefill(serve: Serve, page_size: int) -> None:
    num_pages = 1 + 2500 // page_size
    config = {"page_size": page_size, "num_pages": num_pages, "max_model_len": 512, "max_step_tokens": 24}
    async with serve(letters, **config) as served:
        neighbours = [prompt(100 + i, 20) for i in range(3)]
        solo = [(await served.complete(ids, max_tokens=60)).text() for ids in neighbours]
        alone = [(await served.complete(prompt(number, 300), max_tokens=5)).text() for number in range(14)]
    async with serve(letters, **config) as served:
        running = [asyncio.create_task(served.complete(ids, max_tokens=60)) for ids in neighbours]
        for number in range(14):  # a prefill has some 13 chunks: each is met
            served.runner.hold(permits=number)
            leaving = await begin(served, number)
            await until(lambda: not served.runner.may_finish())
            leaving.cancel()
            served.runner.let_go()
            await asyncio.gather(leaving, return_exceptions=True)
        assert [(await task).text() for task in running] == solo
        await served.idle()
        again = [(await served.complete(prompt(number, 300), max_tokens=5)).text() for number in range(14)]
        assert again == alone
        await served.idle()


@pytest.mark.parametrize("value", ['{"maximum":' + "9" * 40 + "}", '{"a":' * 300 + "1" + "}" * 300, '{"x":1e400}'])
async def test_values_that_json_holds_and_others_do_not(serve: Serve, value: str) -> None:
    """Numbers beyond 64 bits, and nesting that can be read and not be written again."""
    chat_tool, own_tool = {"type": "function", "function": {"name": "f", "parameters": "DEEP"}}, {"name": "f"}
    call = {"type": "tool_use", "id": "c", "name": "f", "input": "DEEP"}
    result = {"type": "tool_result", "tool_use_id": "c"}
    talk = [*HI, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    async with serve("Hi.", max_model_len=4096, num_pages=1100, max_step_tokens=4096) as served:
        for path, fields in (
            (CHAT, {"tools": [chat_tool]}), (CHAT, {"tools": [chat_tool], "tool_choice": "required"}),
            (CHAT, {"chat_template_kwargs": "DEEP"}),
            ("/tokenize", {"prompt": None, "messages": HI, "tools": [chat_tool]}),
            ("/v1/responses", {"tools": [own_tool | {"type": "function", "parameters": "DEEP"}]}),
            ("/v1/messages", {"tools": [own_tool | {"input_schema": "DEEP"}]}), ("/v1/messages", {"messages": talk}),
        ):  # fmt: skip
            data = io.BytesIO(json.dumps(BODIES[path] | fields).replace('"DEEP"', value).encode())
            headers = {"Content-Type": "application/json"}
            async with served.session.post(served.url + path, data=data, headers=headers) as response:
                assert response.status in (200, 400), (path, fields, await response.text())
