"""Health, readiness, metrics, and the ways a server ends: SIGTERM, a second one, the engine's death, a taken port."""

import asyncio
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from asyncllm import __version__
from asyncllm.errors import EngineDead, EngineStuck
from asyncllm.server import app, garbage
from asyncllm.server.settings import Settings
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer

from ..fakes import engine_config, scripted_llm
from ..text import toys
from .conftest import BOTH, CHAT, HI, MODEL, Serve, Served, endless, until

QUICK = Settings(drain_s=20)
STREAM = json.dumps({"messages": HI, "stream": True, "max_tokens": 20}).encode()


@asynccontextmanager
async def process(tokenizer: Tokenizer, settings: Settings) -> AsyncIterator[tuple[Served, "asyncio.Task[int]"]]:
    """serve() as the command runs it, but in this process, with its signals."""
    urls: asyncio.Queue[str] = asyncio.Queue()
    async with (
        scripted_llm(tokenizer, ChatTemplate(toys.CHATML), endless, engine_config()) as (llm, runner),
        aiohttp.ClientSession() as session,
    ):
        serving = asyncio.create_task(app.serve(llm, port=0, settings=settings, on_ready=urls.put_nowait))
        served = Served(await urls.get(), llm, runner, session)
        try:
            yield served, serving
        finally:
            runner.let_go()
        await asyncio.wait_for(serving, timeout=20)


async def running_stream(served: Served) -> Any:
    """A stream whose first token has come, while the engine stands still."""
    served.runner.hold(permits=3)
    raw = await served.connect()
    await raw.send(CHAT, STREAM)
    await raw.events(1)
    return raw


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_all_that_lives_is_looked_through_only_while_nobody_waits(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(garbage, "LOOK_S", 0.001)
    before = gc.get_threshold()
    async with process(tokenizer, QUICK) as (served, serving):
        raw = await running_stream(served)
        gc.collect()  # little is unfrozen now: by default some thousands of objects more would start another
        num = gc.get_stats()[2]["collections"]
        kept: list[list[int]] = []
        for _ in range(50):
            kept += [[] for _ in range(5_000)]
            await asyncio.sleep(0)
        assert gc.get_stats()[2]["collections"] == num
        served.runner.let_go()
        await until(lambda: gc.get_stats()[2]["collections"] > num)
        raw.leave()
        terminate()
    assert (serving.result(), gc.get_threshold()) == (app.EXIT_OK, before)


async def test_sigterm_drains(tokenizer: Tokenizer) -> None:
    async with process(tokenizer, QUICK) as (served, serving):
        raw = await running_stream(served)
        assert (await served.get("/ready"))[0] == 200
        terminate()
        await until(lambda: served.llm.draining)
        status, body = await served.get("/ready")
        assert (status, body["error"]["code"]) == (503, "draining")
        assert (await served.get("/health"))[0] == 200
        refused = await served.chat()
        assert (refused.status, refused.error["code"]) == (503, "draining")
        assert int(refused.headers["Retry-After"]) > 0
        served.runner.let_go()
        rest = await raw.rest()
        assert b"data: [DONE]\n\n" in rest
        assert b'"finish_reason":"length"' in rest
        assert await serving == app.EXIT_OK
        raw.leave()


async def test_what_outlives_the_drain_is_told(tokenizer: Tokenizer) -> None:
    async with process(tokenizer, Settings(drain_s=0.05)) as (served, serving):
        raw = await running_stream(served)
        terminate()
        rest = await raw.rest()
        assert b'"code":"draining"' in rest
        assert b"[DONE]" not in rest
        assert await serving == app.EXIT_OK
        raw.leave()


async def test_a_second_signal_stops_at_once(tokenizer: Tokenizer) -> None:
    async with process(tokenizer, QUICK) as (served, serving):
        raw = await running_stream(served)
        terminate()
        await until(lambda: served.llm.draining)
        terminate()
        assert b'"code":"draining"' in await raw.rest()
        assert await serving == app.EXIT_STOPPED_AT_ONCE
        raw.leave()


async def test_sigterm_with_nothing_to_do(tokenizer: Tokenizer) -> None:
    async with process(tokenizer, QUICK) as (_, serving):
        terminate()
        assert await serving == app.EXIT_OK


async def test_the_engines_death_ends_the_process(tokenizer: Tokenizer) -> None:
    async with process(tokenizer, QUICK) as (served, serving):
        raw = await running_stream(served)

        def die(batch: object) -> None:
            raise EngineDead("the device is gone")

        served.runner.on_result = die
        served.runner.let_go()
        assert b'"code":"engine_dead"' in await raw.rest()
        assert await serving == EngineDead.exit_code
        raw.leave()


async def test_life_1_a_stuck_step_is_told_and_ends_the_process(tokenizer: Tokenizer, capfd: Any, caplog: Any) -> None:
    never = threading.Event()

    def stick(batch: object) -> None:
        never.wait(30)

    async with process(tokenizer, Settings(watchdog_s=0.3)) as (served, serving):
        served.runner.on_result = stick
        raw = await served.connect()
        await raw.send(CHAT, STREAM)
        assert b"no step has ended for 0.3 s" in await raw.rest()
        assert await serving == EngineStuck.exit_code
        never.set()
        raw.leave()
    assert "Thread 0x" in capfd.readouterr().err and "the stacks are above" in caplog.text


@BOTH
async def test_a_dead_engine_is_seen_everywhere(serve: Serve, stream: bool) -> None:
    async with serve(endless) as served:

        def die(batch: object) -> None:
            raise EngineDead("the device is gone")

        served.runner.on_result = die
        answer = await served.chat(stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "engine_dead")
        for path in ("/health", "/ready"):
            status, body = await served.get(path)
            assert (status, body["error"]["code"]) == (503, "engine_dead")
        assert (await served.chat(stream=stream)).status == 503
        assert served.llm.dead is not None and served.llm.dead.__traceback__ is None  # no answer adds to it


async def test_a_taken_port_is_said(serve: Serve) -> None:
    async with serve() as served:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
                await app.serve(served.llm, port=port)


async def test_ready_says_when_the_queue_is_full(serve: Serve) -> None:
    async with serve(endless, max_running=1, max_waiting=1) as served:
        served.runner.hold()
        asking = [asyncio.create_task(served.chat()) for _ in range(2)]
        await until(lambda: served.llm.num_live == 2)
        status, body = await served.get("/ready")
        assert (status, body["error"]["code"]) == (503, "queue_full")
        assert (await served.get("/health"))[0] == 200
        assert (await served.chat()).error["code"] == "queue_full"
        served.runner.let_go()
        assert [(await one).status for one in asking] == [200, 200]


async def test_models_and_version(serve: Serve) -> None:
    async with serve() as served:
        status, models = await served.get("/v1/models")
        assert (status, models["object"]) == (200, "list")
        [model] = models["data"]
        assert model["id"] == model["root"] == MODEL
        assert model["max_model_len"] == served.llm.limits.max_model_len
        assert await served.get(f"/v1/models/{MODEL}") == (200, model)
        assert (await served.get("/v1/models/org%2Fname"))[1]["error"]["code"] == "model_not_found"
        assert await served.get("/version") == (200, {"version": __version__})


async def test_metrics_agree_with_usage(serve: Serve) -> None:
    async with serve("Hello there.") as served:
        before = await served.metrics()
        assert all(value == 0 for name, value in before.items() if not name.endswith(("pages_total", "tasks")))
        answers = [await served.chat(), await served.chat(stream=True), await served.complete(max_tokens=2)]
        await served.chat(n=129)  # refused: never a sequence
        await served.idle()
        after = await served.metrics()
        assert after['asyncllm_requests_finished_total{reason="stop"}'] == 2
        assert after['asyncllm_requests_finished_total{reason="length"}'] == 1
        assert after["asyncllm_prompt_tokens_total"] == sum(answer.usage["prompt_tokens"] for answer in answers)
        assert after["asyncllm_output_tokens_total"] == sum(answer.usage["completion_tokens"] for answer in answers)
        assert after["asyncllm_kv_pages_total"] == served.llm.stats.pages_total > 0


async def test_metrics_show_what_runs_and_waits(serve: Serve) -> None:
    async with serve(endless, max_running=1, max_model_len=8192, num_pages=2000, page_size=16) as served:
        asking = [asyncio.create_task(served.chat(max_tokens=8000)) for _ in range(3)]
        await until(lambda: (served.llm.stats.num_running, served.llm.stats.num_waiting) == (1, 2))
        metrics = await served.metrics()
        assert metrics["asyncllm_requests_running"] == 1
        assert metrics["asyncllm_requests_waiting"] == 2
        assert metrics["asyncllm_requests_live"] == 3
        assert metrics["asyncllm_kv_pages_used"] > 0
        for one in asking:
            one.cancel()
        await served.idle()
        assert (await served.metrics())['asyncllm_requests_finished_total{reason="abort"}'] == 3


async def test_an_unexpected_error_tells_nothing_and_is_logged_once(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve() as served:

        def broken(*args: object) -> None:
            raise KeyError("/secret/path")

        monkeypatch.setattr(served.llm, "submit", broken)
        answer = await served.chat()
        assert (answer.status, answer.error["type"]) == (500, "server_error")
        assert b"secret" not in answer.raw
        assert len(caplog.records) == 1


def test_the_floors_load_neither_torch_nor_transformers() -> None:
    code = (
        "import sys, asyncllm.wire.requests, asyncllm.text.chat, asyncllm.server.app\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
