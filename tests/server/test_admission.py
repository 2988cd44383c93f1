"""The queue's bounds, and what is said to who is sent away: before anything is computed for him."""

import asyncio

import msgspec
import pytest

from asyncllm.errors import QueueFull
from asyncllm.types import CALLER, Caller

from .conftest import BOTH, Serve, Served, endless, until

LONG = {"max_model_len": 8192, "num_pages": 4000, "page_size": 16}


async def fill(served: Served, count: int, **fields: object) -> list["asyncio.Task[object]"]:
    """So many requests of 10 tokens that do not end."""
    before = served.llm.num_live
    tasks = [asyncio.create_task(served.complete([5] * 10, max_tokens=8000, **fields)) for _ in range(count)]
    await until(lambda: served.llm.num_live == before + count)
    return tasks


async def leave(tasks: list["asyncio.Task[object]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@BOTH
async def test_a_full_queue_by_requests(serve: Serve, stream: bool) -> None:
    async with serve(endless, **LONG, max_running=2, max_waiting=3) as served:
        tasks = await fill(served, 5)
        answer = await served.complete("x", stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await served.get("/ready"))[0] == 503 and (await served.get("/health"))[0] == 200
        await leave(tasks)
        await served.idle()
        assert (await served.get("/ready"))[0] == 200


@BOTH
async def test_a_full_queue_by_tokens(serve: Serve, stream: bool) -> None:
    async with serve(endless, **LONG, max_running=1, max_waiting=64) as served:
        served.llm.limits = msgspec.structs.replace(served.llm.limits, max_waiting_tokens=25)
        tasks = await fill(served, 1)
        await until(lambda: served.llm.stats.num_running == 1)
        tasks += await fill(served, 2)  # 20 tokens wait
        await until(lambda: served.llm.stats.num_waiting_tokens == 20)
        answer = await served.complete([5] * 6, stream=stream)
        assert (answer.status, answer.error["code"]) == (503, "queue_full")
        assert "prompts of 20 tokens are waiting" in answer.error["message"]
        tasks += [asyncio.create_task(served.complete([5] * 5, max_tokens=8000))]
        await until(lambda: served.llm.stats.num_waiting_tokens == 25)
        await leave(tasks)
        await served.idle()
        assert served.llm.stats.num_waiting_tokens == 0
        big = await served.complete([5] * 1000, max_tokens=1)  # alone, whatever fits the pool may wait
        assert big.status == 200


async def test_tokens_still_in_the_inbox_count(serve: Serve) -> None:
    async with serve(endless, **LONG, max_running=1, max_waiting=64) as served:
        served.runner.hold()
        tasks = await fill(served, 1)
        sent = served.llm.admission.num_sent_tokens
        tasks += await fill(served, 5)
        assert served.llm.admission.num_sent_tokens == sent + 50
        for wrong in ({"temperature": 3}, {"prompt": [5] * 20_000}, {"stop_token_ids": [10**6]}):
            assert (await served.complete(**({"prompt": "x"} | wrong))).status == 400
        assert served.llm.admission.num_sent_tokens == sent + 50  # what is refused was never sent
        served.runner.let_go()
        await leave(tasks)
        await served.idle()


@BOTH
async def test_a_clients_own_deadline(serve: Serve, stream: bool) -> None:
    async with serve(endless, **LONG) as served:
        headers = {"X-Request-Timeout": "0.05"}
        answer = await served.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 8000, "stream": stream}, headers=headers
        )
        assert (answer.status, answer.finish_reason) == (200, "length") and 0 < len(answer.text()) < 8000
        async with served.session.post(
            served.url + "/v1/completions", json={"prompt": "x"},
            headers=[("X-Request-Timeout", "5"), ("X-Request-Timeout", "1")],
        ) as twice:  # fmt: skip
            assert twice.status == 400
        for nonsense in ("0", "-1", "nan", "inf", "soon", "1_0", "9" * 400):
            answer = await served.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout": nonsense})
            assert (answer.status, answer.error["param"]) == (400, "X-Request-Timeout")
        await served.idle()


async def test_a_deadline_in_the_queue_does_no_work(serve: Serve) -> None:
    async with serve(endless, **LONG, max_running=1) as served:
        tasks = await fill(served, 1)
        await until(lambda: served.llm.stats.num_running == 1)
        steps = len(served.runner.batches)
        answer = await served.post("/v1/completions", {"prompt": "x"}, headers={"X-Request-Timeout": "0.05"})
        assert answer.status >= 400 and answer.error["message"]
        slots = {row.slot for batch in served.runner.batches[steps:] for row in batch.new_rows}
        assert slots == set()
        await leave(tasks)
        await served.idle()


async def test_a_caller_leaves_places_to_others(serve: Serve) -> None:
    """Whoever has more here than is left free gets no more; a caller without any gets in."""
    async with serve(endless, **LONG, max_running=4, max_waiting=16) as served:
        CALLER.set(Caller(name="heavy"))
        streams = [await served.llm.generate([5] * 10, max_tokens=8000) for _ in range(11)]  # of 20
        with pytest.raises(QueueFull, match="requests of this key are here already"):
            await served.llm.generate([5] * 10, max_tokens=8000)
        CALLER.set(Caller(name="light"))
        streams.append(await served.llm.generate([5] * 10, max_tokens=8000))
        for stream in streams:
            stream.abort()
        await served.idle()
        assert not served.llm.admission.num_live_of


async def test_callers_share_no_pages(serve: Serve) -> None:
    async with serve("Hi.") as served:
        cached = []
        for name, salt in (("a", ""), ("a", ""), ("b", ""), ("b", ""), ("", ""), ("", ""), ("", "a\n")):
            CALLER.set(Caller(name=name))
            answer = await (await served.llm.generate([5] * 30, max_tokens=1, cache_salt=salt)).result()
            cached.append(answer.num_cached_tokens > 0)
        assert cached == [False, True, False, True, False, True, False]


async def test_the_rate_is_known_only_while_others_wait(serve: Serve) -> None:
    async with serve("Hi.", max_running=1, max_waiting=64) as served:
        assert served.llm.admission.expected_wait_s == 0
        for _ in range(20):
            await served.complete(max_tokens=1)
        assert served.llm.admission.expected_wait_s == 0  # nobody has waited: this was no measure of what it can do
        served.runner.hold()
        tasks = [asyncio.create_task(served.complete(max_tokens=1)) for _ in range(60)]
        await until(lambda: served.llm.num_live == 60)
        served.runner.hold(permits=40)
        await until(lambda: 0 < served.llm.num_live < 40)
        assert served.llm.admission.expected_wait_s > 0
        served.runner.let_go()
        await asyncio.gather(*tasks)
        await served.idle()
