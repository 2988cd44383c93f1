"""Public bug reports about limits and inputs, as tests: see the case ids."""

import asyncio
import json
import math
from typing import Any

import pytest

from asyncllm.server.settings import Settings
from asyncllm.wire.requests import MAX_PROMPTS

from .conftest import BOTH, CHAT, HI, MODEL, TEXT, Answer, Serve, endless, refused

# -- SAMP-7 --


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_samp_7_odd_numbers(serve: Serve, path: str) -> None:
    async with serve() as served:
        body = {"messages": HI, "prompt": "hi"}

        async def ask(name: str, value: Any) -> Answer:
            text = json.dumps(body | {name: 0}).replace(f'"{name}": 0', f'"{name}": {value}')
            return await served.post(path, data=text.encode())

        for value in ("1e-4", "1e-8", "1e-45", "0", "-0.0", "2", "1"):
            answer = await ask("temperature", value)
            assert (answer.status, answer.text()) == (200, "Hello there.")
        for name, values in {
            "temperature": ("-1", "2.01", "100", "1e308", '"1"', "true"),
            "top_p": ("1.0001", "-0.1", '"1"', "2"),
            "min_p": ("1.0001", "-0.1", '"nan"'),
        }.items():
            for value in values:
                refused(await ask(name, value), name)
        for name in ("temperature", "top_p", "min_p", "presence_penalty"):
            for value in ("NaN", "Infinity", "-Infinity", "1e999"):
                answer = await ask(name, value)
                assert answer.status == 400
                assert answer.error["message"]
        for name, value in (("top_p", "0"), ("top_p", "1e-9"), ("top_p", "1"), ("min_p", "1"), ("min_p", "0")):
            assert (await ask(name, value)).status == 200
        await served.alive()


async def test_samp_7_a_tiny_temperature_reaches_the_engine_as_greedy(serve: Serve) -> None:
    async with serve() as served:
        await served.complete(temperature=1e-45)
        [new_row] = [row for batch in served.runner.batches for row in batch.new_rows]
        assert new_row.temperature == 0
        assert math.copysign(1, new_row.temperature) == 1


# -- LIM-1, LIM-3, LIM-4 --


@BOTH
@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_lim_1_max_tokens(serve: Serve, path: str, stream: bool) -> None:
    async with serve(endless, max_model_len=64) as served:
        names = ("max_tokens", "max_completion_tokens") if path == CHAT else ("max_tokens",)
        body = {"messages": HI, "prompt": "hi", "stream": stream, "stream_options": {"include_usage": True}}
        for name in names:
            for value in (0, -1, 1.5, "5", True):
                refused(await served.post(path, body | {name: value}), name)
            for value in (None, 1, 64, 65, 10**12):
                answer = await served.post(path, body | {name: value})
                usage = answer.usage
                room = 64 - usage["prompt_tokens"]
                default = room if path == CHAT else 16
                assert usage["completion_tokens"] == (default if value is None else min(value, room))
                assert answer.finish_reason == "length"
        if path == CHAT:
            answer = await served.post(path, body | {"max_tokens": 32, "max_completion_tokens": 1})
            assert answer.usage["completion_tokens"] == 1
        await served.idle()


@BOTH
async def test_lim_3_prompts_around_the_context(serve: Serve, stream: bool) -> None:
    length = 64
    async with serve(endless, max_model_len=length) as served:
        letter = served.tokenizer.encode("0")
        assert len(letter) == 1

        async def texts(num: int) -> list[Answer]:
            text = await served.complete("0a" * (num // 2) + "0" * (num % 2), stream=stream, max_tokens=None)
            ids = await served.complete(letter * num, stream=stream, max_tokens=None)
            return [text, ids]

        good = asyncio.create_task(served.chat(stream=stream))
        for answer in await texts(length - 1):
            assert (answer.status, answer.finish_reason) == (200, "length")
            assert answer.usage == answer.usage | {"prompt_tokens": length - 1, "completion_tokens": 1}
        for num in (length, length + 1, 2 * length, 100 * length):
            for answer in await texts(num):
                refused(answer, "prompt")
                assert answer.error["code"] == "context_length_exceeded"
                assert answer.error["message"].startswith("This model's maximum context length is ")
            answer = await served.chat([{"role": "user", "content": "0a" * num}], stream=stream)
            assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert (await good).status == 200
        fitting_alone = await served.complete(letter * (length - 3), stream=stream, max_tokens=50)
        assert fitting_alone.usage["completion_tokens"] == 3  # shortened to fit
        await served.alive()
        await served.idle()


@BOTH
async def test_lim_4_empty_prompts(serve: Serve, stream: bool) -> None:
    async with serve() as served:
        for prompt in ("", [""], [], [[]], None, ["a", "", "b"]):
            answer = await served.complete(prompt, stream=stream)
            assert answer.status == 400
            assert answer.error["param"].startswith("prompt")
        answer = await served.post(TEXT, {"stream": stream})
        refused(answer, "prompt")
        for prompt in (" ", "\u200b"):
            assert (await served.complete(prompt, stream=stream)).status == 200
        for messages in ([], None):
            refused(await served.post(CHAT, {"messages": messages, "stream": stream}), "messages")
        refused(await served.post(CHAT, {"stream": stream}), "messages")
        for message in ({"role": "user", "content": ""}, {"role": "user", "content": []}):
            assert (await served.chat([message], stream=stream)).status == 200
        for role in ("system", "assistant"):
            assert (await served.chat([{"role": role, "content": "x"}], stream=stream)).status == 200
        await served.alive()


# -- IN-1, IN-4, IN-5, IN-6 --

BROKEN = (
    b"{bad", b"", b"[]", b"null", b'"x"', b'{"model":', '{"prompt": "é"}'.encode("utf-16"), b'{"prompt": "\xe9"}',
    b'\xef\xbb\xbf{"prompt": "x"}', b'{"prompt": "x", "stream": "yes"}', b'{"prompt": "\\ud800"}',
)  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_in_1_broken_bodies(serve: Serve, path: str) -> None:
    async with serve() as served:
        for _ in range(10):
            for body in BROKEN:
                answer = await served.post(path, data=body)
                assert (answer.status, answer.error["type"]) == (400, "invalid_request_error")
                assert "Traceback" not in answer.error["message"]
        await served.alive()
        assert served.llm.num_live == 0


async def test_in_1_content_types(serve: Serve) -> None:
    async with serve() as served:
        body = json.dumps({"prompt": "hi"}).encode()
        for headers in (
            {"Content-Type": "text/plain"},
            {"Content-Type": "application/x-www-form-urlencoded"},
            {"Content-Type": "application/json; charset=latin1"},
            {"Content-Encoding": "gzip"},
        ):
            answer = await served.post(TEXT, data=body, headers=headers)
            assert answer.status == 415
            assert answer.error["type"] == "invalid_request_error"
        for kind in ("application/json; charset=utf-8", "Application/JSON"):
            assert (await served.post(TEXT, data=body, headers={"Content-Type": kind})).status == 200
        raw = await served.connect()
        raw.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert await raw.status() == 415  # no content type at all: a foreign page can send that unasked
        raw.leave()
        foreign = {"Content-Type": "application/json", "Origin": "http://evil.example"}
        for headers in (foreign, foreign | {"Origin": "http://["}):
            assert (await served.post(TEXT, data=body, headers=headers)).status == 403


@pytest.mark.parametrize(
    "body",
    [
        '{"messages": [' + ",".join(['{"role":"user","content":""}'] * 200_000) + "]}",
        '{"messages": [{"role": "user", "content": "x"}], "stop": [' + ",".join(['"a"'] * 600_000) + "]}",
        json.dumps({"messages": [{"role": "user", "content": ""}] * 5000}),
        json.dumps({"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2000}]}),
    ],
    ids=["objects", "values", "messages", "parts"],
)
async def test_conc_1_more_elements_than_a_prompt_needs_are_refused(serve: Serve, body: str) -> None:
    async with serve() as served:
        answer = await served.post(CHAT, data=body.encode(), headers={"Content-Type": "application/json"})
        assert answer.status == 400 and answer.error["type"] == "invalid_request_error"


async def test_in_1_methods_and_paths(serve: Serve) -> None:
    async with serve() as served:
        for method, path, status in (
            ("GET", CHAT, 405), ("PUT", TEXT, 405), ("POST", "/health", 405), ("DELETE", "/v1/models", 405),
            ("GET", "/", 404), ("POST", "/v1/nothing", 404), ("GET", "/v1/models/a/b", 404),
            ("GET", "/%0d%0aX: y", 404),
        ):  # fmt: skip
            async with served.session.request(method, served.url + path) as response:
                answer = Answer(response.status, response.headers, await response.read())
            assert answer.status == status
            assert answer.error["type"] == "invalid_request_error"
            assert ("Allow" in answer.headers) == (status == 405)


async def test_in_4_long_but_legal_bodies_are_read(serve: Serve) -> None:
    async with serve() as served:
        for size in (900_000, 1_100_000, 5_000_000):
            body = json.dumps({"prompt": "hi", "padding": "x" * size}).encode()
            assert (await served.post(TEXT, data=body)).status == 200


async def test_in_4_a_body_over_the_limit_is_refused_early(serve: Serve) -> None:
    async with serve(settings=Settings(max_body_bytes=100_000)) as served:
        raw = await served.connect()
        await raw.send(TEXT, b'{"prompt": "', "Content-Length: 200000000\r\n")
        assert await raw.status() == 413  # though hardly a byte has come
        raw.leave()

        async def chunks() -> Any:
            for _ in range(200):
                yield b" " * 10_000

        answer = await served.post(TEXT, data=chunks())
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        await served.alive()


async def test_in_4_a_body_that_never_comes_is_given_up(serve: Serve) -> None:
    async with serve(settings=Settings(body_timeout_s=0.05)) as served:
        raw = await served.connect()
        await raw.send(TEXT, b'{"prompt": "hi"', "Content-Length: 1000\r\n")
        assert await raw.status() == 408
        assert b'"code":"request_timeout"' in await raw.rest()  # and the connection is closed
        raw.leave()


async def test_in_4_a_body_that_breaks_off(serve: Serve) -> None:
    async with serve() as served:
        raw = await served.connect()
        await raw.send(TEXT, b'{"prompt": "hi"', "Content-Length: 1000\r\n")
        raw.leave()
        await served.alive()


async def test_in_5_unknown_models(serve: Serve) -> None:
    async with serve() as served:
        for path in (CHAT, TEXT):
            body = {"messages": HI, "prompt": "hi"}
            for model in ("no-such", "", "../x", MODEL + "x"):
                answer = await served.post(path, body | {"model": model})
                assert (answer.status, answer.error["code"]) == (404, "model_not_found")
            refused(await served.post(path, body | {"model": 5}), "model")
            for fields in ({}, {"model": None}, {"model": MODEL}):
                answer = await served.post(path, body | fields)
                assert (answer.status, answer.body["model"]) == (200, MODEL)


async def test_in_5_fields_work_or_are_refused_by_name(serve: Serve) -> None:
    async with serve("Hello there.") as served:
        for name, value in {
            "prediction": {"type": "content"}, "suffix": "x", "functions": [{}], "audio": {"voice": "x"},
        }.items():  # fmt: skip
            refused(await served.chat(**{name: value}), name)
            refused(await served.complete(**{name: value}), name)
        for name, value in {
            "user": "u",
            "metadata": {"a": "b"},
            "service_tier": "auto",
            "store": True,
            "foo": 1,
        }.items():
            assert (await served.chat(**{name: value})).text() == "Hello there."
        assert (await served.chat(tool_choice="none", n=1, logit_bias={})).text() == "Hello there."
        assert (await served.chat(max_tokens=3)).usage["completion_tokens"] == 3
        assert (await served.chat(max_completion_tokens=3)).usage["completion_tokens"] == 3
        assert (await served.chat(stop="there")).text() == "Hello "


async def test_in_5_a_seed_reaches_the_engine(serve: Serve) -> None:
    async with serve() as served:
        for seed in (7, 7, 8):
            await served.complete(seed=seed, temperature=1)
        seeds = [row.seed for batch in served.runner.batches for row in batch.new_rows]
        assert seeds[0] == seeds[1] != seeds[2]


async def test_in_6_token_ids_outside_the_vocabulary(serve: Serve) -> None:
    async with serve() as served:
        size = served.llm.limits.vocab_size
        for prompt, param in {
            (size,): "prompt[0]", (1, -1): "prompt[1]", (2**31,): "prompt[0]", (2**63,): "prompt[0]",
            (1.5,): "prompt[0]", (True,): "prompt[0]",
        }.items():  # fmt: skip
            refused(await served.complete(list(prompt)), param)
        refused(await served.complete([[1, 2], [size]]), "prompt[1][0]")
        assert (await served.complete([size - 1])).status == 200
        for ids, param in (
            ([size], "stop_token_ids[0]"),
            ([1, -1], "stop_token_ids[1]"),
            ([2**63], "stop_token_ids[0]"),
        ):
            refused(await served.complete(stop_token_ids=ids, min_tokens=5), param)
        for bias in ({"-1": 1}, {str(size): 1}, {"abc": 1}, {"1": 101}, {"1": "x"}):
            refused(await served.complete(logit_bias=bias), "logit_bias")
        assert served.llm.num_live == 0
        await served.alive()


async def test_in_6_too_many_prompts(serve: Serve) -> None:
    async with serve(max_waiting=MAX_PROMPTS) as served:
        refused(await served.complete(["a"] * 100_000), "prompt")
        answer = await served.complete(["a"] * MAX_PROMPTS, max_tokens=1)
        assert [choice["index"] for choice in answer.body["choices"]] == list(range(MAX_PROMPTS))


async def test_a_full_queue_refuses_the_whole_request(serve: Serve) -> None:
    async with serve(endless, max_running=1, max_waiting=2) as served:
        answer = await served.complete(["a"] * 5)
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert answer.headers["Retry-After"] == "1"
        await served.idle()
