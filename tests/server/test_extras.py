"""What chat takes beyond OpenAI's fields does the same over responses, by HTTP and WebSocket, and over messages."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from asyncllm import build
from asyncllm import config as configs
from asyncllm.server.app import listening
from asyncllm.text.grammars import Masker
from asyncllm.wire.requests import CommonFields

from ..text import toys
from ..tiny import EOS_ID, make_checkpoint
from .conftest import BOTH, CHAT, HI, Serve, Served, endless, until

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
WORD = {"type": "object", "properties": {"a": {"enum": ["b"]}}, "required": ["a"], "additionalProperties": False}
FOR_EVER = {"logit_bias": {str(EOS_ID): 100}}  # the end is all that the model says
DRAWN = {"temperature": 1.9, "seed": 5}
# A field's value, and the fields beside which it shows.
EXTRAS: dict[str, tuple[Any, dict[str, Any]]] = {
    "temperature": (1.9, {"seed": 5}), "top_p": (0.3, DRAWN), "top_k": (2, DRAWN), "min_p": (0.5, DRAWN),
    "seed": (6, {"temperature": 1.9}), "min_tokens": (4, FOR_EVER),
    "stop_token_ids": ([70], {"logit_bias": {"70": 100}}),
    "ignore_eos": (True, FOR_EVER), "skip_special_tokens": (False, FOR_EVER | {"ignore_eos": True}),
    "presence_penalty": (2, {}), "frequency_penalty": (2, {}), "repetition_penalty": (1.9, {}),
    "logit_bias": ({"70": 100}, {}), "allowed_token_ids": ([70, 71], {}), "bad_words": (["four"], {}),
    "include_stop_str_in_output": (True, {"logit_bias": {"70": 100}, "stop_token_ids": [70]}),
    "structured_outputs": ({"choice": ["yes", "no"]}, {}), "guided_json": (WORD, {}), "guided_regex": ("[0-9]{3}", {}),
    "guided_choice": (["yes", "no"], {}), "guided_grammar": ('start: "a" "b"', {}), "json_schema": (WORD, {}),
    "regex": ("[0-9]{3}", {}), "ebnf": ('root ::= "a" "b"', {}),
}  # fmt: skip
TERMS = {"priority", "cache_salt", "timeout"}  # below

Said = tuple[str, int]  # a text, and how many tokens it took
Ask = Callable[..., Coroutine[Any, Any, Said]]


def of_response(response: Any) -> Said:
    texts = [part["text"] for item in response["output"] for part in item["content"]]
    return "".join(texts), response["usage"]["output_tokens"]


class Routes:
    """One question by every route."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.url, self.session = url, session

    async def post(self, path: str, body: Any) -> Any:
        async with self.session.post(self.url + path, json={"temperature": 0} | body) as response:
            assert response.status == 200, await response.text()
            return await response.json()

    async def chat(self, **fields: Any) -> Said:
        answer = await self.post(CHAT, {"messages": HI, "max_tokens": 12} | fields)
        return answer["choices"][0]["message"]["content"], answer["usage"]["completion_tokens"]

    async def responses(self, **fields: Any) -> Said:
        return of_response(await self.post(RESPONSES, {"input": "hi", "max_output_tokens": 12} | fields))

    async def messages(self, **fields: Any) -> Said:
        answer = await self.post(MESSAGES, {"messages": HI, "max_tokens": 12} | fields)
        return "".join([block["text"] for block in answer["content"]]), answer["usage"]["output_tokens"]

    async def socket(self, **fields: Any) -> Said:
        body = {"type": "response.create", "input": "hi", "max_output_tokens": 12, "temperature": 0} | fields
        async with self.session.ws_connect(self.url + RESPONSES) as socket:
            await socket.send_str(json.dumps(body))
            while (event := await socket.receive_json())["type"] not in ("response.completed", "response.incomplete"):
                assert event["type"] != "error", event
        return of_response(event["response"])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", "float32", seed=3)


@asynccontextmanager
async def routes_to(checkpoint: Path) -> AsyncIterator[Routes]:
    config = configs.make(model=str(checkpoint), device="cpu", threads=1, max_model_len=256, served_model_name="tiny")
    async with (
        build.serving(config) as llm,
        listening(llm, port=0) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Routes(url, session)


@pytest.fixture
async def routes(checkpoint: Path) -> AsyncIterator[Routes]:
    async with routes_to(checkpoint) as routes:
        yield routes


async def test_the_models_defaults_hold_on_every_route(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", "qwen3", "float32", seed=3)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": 2, "temperature": 1.9, "top_p": 0.01}')
    async with routes_to(checkpoint) as routes:
        likeliest = await routes.chat()
        for ask in (routes.chat, routes.responses, routes.messages, routes.socket):
            assert await ask(temperature=None, seed=1) == likeliest, ask
            assert await ask(temperature=None, seed=1, top_p=1) != likeliest, ask
        response = await routes.post(RESPONSES, {"input": "hi", "max_output_tokens": 1, "temperature": None})
        assert (response["temperature"], response["top_p"]) == (1.9, 0.01)


def test_no_extra_is_forgotten() -> None:
    assert set(CommonFields.__struct_fields__) == set(EXTRAS) | TERMS


async def test_an_extra_does_what_it_does_in_chat(routes: Routes) -> None:
    for name, (value, beside) in EXTRAS.items():
        expected = await routes.chat(**beside, **{name: value})
        assert expected != await routes.chat(**beside), name
        for ask in (routes.responses, routes.messages, routes.socket):
            assert await ask(**beside, **{name: value}) == expected, (name, ask)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"presence_penalty": 3}, "presence_penalty"), ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"guided_regex": "("}, "guided_regex"), ({"regex": "a", "guided_choice": ["b"]}, "regex"),
        ({"min_tokens": 20}, "min_tokens"), ({"seed": "1"}, "seed"), ({"n": 2}, "n"), ({"echo": True}, "echo"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"), ({"return_token_ids": True}, "return_token_ids"),
        ({"request_id": "x"}, "request_id"), ({"best_of": 2}, "best_of"), ({"logprobs": 2}, "logprobs"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"add_generation_prompt": False}, "add_generation_prompt"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
)  # fmt: skip
async def test_what_is_wrong_or_means_nothing_there_is_named(serve: Serve, fields: Any, param: str) -> None:
    async with serve() as served:
        limits = {RESPONSES: {"input": "hi", "max_output_tokens": 12}, MESSAGES: {"messages": HI, "max_tokens": 12}}
        for path, body in limits.items():
            async with served.session.post(served.url + path, json=body | fields) as response:
                error = (await response.json())["error"]
            told = error["param"] if path == RESPONSES else error["message"].split(":")[0]
            assert (response.status, told) == (400, param), error
        async with served.session.ws_connect(served.url + RESPONSES) as socket:
            await socket.send_str(json.dumps({"type": "response.create", "input": "hi"} | fields | limits[RESPONSES]))
            assert (await socket.receive_json())["error"]["param"] == param


async def test_a_refusal_speaks_of_the_fields_that_were_sent(serve: Serve) -> None:
    async with serve() as served:
        form = {"type": "json_schema", "name": "x", "schema": {"type": 3}}
        told = await served.post(RESPONSES, {"input": "hi", "text": {"format": form}})
        assert told.error["message"].startswith("'text.format.schema' cannot be used")
        told = await served.post(RESPONSES, {"input": "hi", "text": {"format": {"type": "json_object"}}, "regex": "a"})
        assert told.error["message"] == "'text.format' and 'regex' demand two forms of one answer"
        tool = {"type": "function", "name": "x"}
        told = await served.post(RESPONSES, {"input": "hi", "tools": [tool], "tool_choice": tool | {"name": "prompt"}})
        assert told.error["message"] == "no tool has the name 'prompt'"
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [tool, tool | {"name": "max_tokens"}]}
        told = await served.post(RESPONSES, {"input": "hi", "tools": [tool], "tool_choice": choice})
        assert told.error["message"] == "no tool has the name 'max_tokens'"
        assert told.error["param"] == "tool_choice.tools[1].name"
        told = await served.post(RESPONSES, {"input": "hi", "min_tokens": 9, "max_output_tokens": 3})
        assert told.error["message"] == "'min_tokens' 9 is above 'max_output_tokens' 3"
        told = await served.post(RESPONSES, {"input": "hi", "max_output_tokens": -1})
        assert told.error["message"] == "'max_output_tokens' must be at least 1, got -1"


@BOTH
async def test_so_does_what_ends_an_answer(serve: Serve, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    monkeypatch.setattr(Masker, "accept", lambda self, tokens: [False] * len(tokens))
    async with serve() as served:
        form = {"type": "json_schema", "name": "x", "schema": {"type": "integer"}}
        asked = {
            "text.format.schema": (RESPONSES, {"input": "hi", "text": {"format": form}}),
            "output_config.format.schema": (
                MESSAGES, {"messages": HI, "max_tokens": 9, "output_config": {"format": form}},
            ),
        }  # fmt: skip
        for field, (path, body) in asked.items():
            async with served.session.post(served.url + path, json=body | {"stream": stream}) as response:
                told = await response.text()
            assert f"'{field}' cannot be kept to any further" in told and "response_format" not in told


async def test_reasoning_is_left_out_or_left_in_and_variables_reach_the_template(serve: Serve) -> None:
    async with serve("<think>hm</think>So.", template=toys.TOOLS, max_model_len=2048, num_pages=600) as served:

        async def told(**fields: Any) -> list[tuple[str, str]]:
            answer = await served.post(RESPONSES, {"input": "hi", "temperature": 0} | fields)
            return [(item["type"], item["content"][0]["text"]) for item in answer.body["output"]]

        assert await told() == [("reasoning", "hm"), ("message", "So.")]
        assert await told(include_reasoning=False) == [("message", "So.")]
        assert await told(separate_reasoning=False) == [("message", "<think>hm</think>So.")]
        lengths = [
            (await served.post(f"{RESPONSES}/input_tokens", {"input": "hi"} | fields)).body["input_tokens"]
            for fields in ({}, {"chat_template_kwargs": {"enable_thinking": False}})
        ]
        assert lengths[0] < lengths[1]  # an empty block


async def test_tokens_may_be_named_by_their_ids(serve: Serve) -> None:
    async with serve("So.") as served:
        fields = {"include": ["message.output_text.logprobs"], "return_tokens_as_token_ids": True}
        answer = await served.post(RESPONSES, {"input": "hi", "temperature": 0} | fields)
        told = answer.body["output"][0]["content"][0]["logprobs"]
        assert [one["token"] for one in told] == [
            f"token_id:{i}" for i in [*served.tokenizer.encode("So."), toys.EOS_ID]
        ]


# -- when, and beside whom --

ASKS = {
    RESPONSES: {"input": "hi", "max_output_tokens": 5},
    MESSAGES: {"messages": HI, "max_tokens": 5},
}
BOTH = pytest.mark.parametrize("path", ASKS)


async def wait_in_line(served: Served, path: str, **fields: Any) -> "asyncio.Task[Any]":
    count = served.llm.num_live
    task = asyncio.create_task(served.post(path, ASKS[path] | fields))
    await until(lambda: served.llm.num_live == count + 1)
    return task


@BOTH
async def test_the_lower_priority_goes_first(serve: Serve, path: str) -> None:
    async with serve(endless, max_running=1) as served:
        served.runner.hold()
        order: list[str] = []
        tasks = []
        for name, priority in (("running", 0), ("later", 5), ("sooner", -5)):
            tasks.append(await wait_in_line(served, path, priority=priority))
            tasks[-1].add_done_callback(lambda _, name=name: order.append(name))
            await until(lambda: bool(served.runner.batches))  # the first is in before the others come
        served.runner.let_go()
        await asyncio.gather(*tasks)
        assert order == ["running", "sooner", "later"]


@BOTH
async def test_a_timeout_before_the_first_token_is_a_408(serve: Serve, path: str) -> None:
    async with serve(endless, max_running=1) as served:
        served.runner.hold()
        first = await wait_in_line(served, path)
        late = await wait_in_line(served, path, timeout=0.001)
        loop = asyncio.get_running_loop()
        passed_s = loop.time() + 0.001
        await until(lambda: loop.time() > passed_s)
        served.runner.let_go()
        assert ((await first).status, (await late).status) == (200, 408)


@BOTH
async def test_prefixes_are_shared_under_one_salt_alone(serve: Serve, path: str) -> None:
    async with serve(endless, max_model_len=512, num_pages=200) as served:

        async def num_cached(salt: str) -> int:
            long = {"input": "x" * 200} if path == RESPONSES else {"messages": [{"role": "user", "content": "x" * 200}]}
            usage = (await served.post(path, ASKS[path] | long | {"cache_salt": salt})).body["usage"]
            cached = usage["input_tokens_details"]["cached_tokens"] if path == RESPONSES else None
            return int(usage["cache_read_input_tokens"] if cached is None else cached)

        assert [bool(await num_cached(salt)) for salt in ("a", "b", "a")] == [False, False, True]


async def test_what_is_elsewhere_is_pointed_to(serve: Serve) -> None:
    async with serve() as served:
        told = {}
        for path in ("/models", "/chat/completions", "/v1/chat/completions", "/nowhere"):
            status, body = await served.get(path)
            told[path] = status, body["error"]["message"]
        assert told["/models"] == (404, "Not Found: GET /models; it is /v1/models here")
        assert told["/chat/completions"][1].endswith("; it is /v1/chat/completions here")
        assert told["/v1/chat/completions"] == (405, "Method Not Allowed: GET /v1/chat/completions; it takes POST")
        assert told["/nowhere"] == (404, "Not Found: GET /nowhere")
