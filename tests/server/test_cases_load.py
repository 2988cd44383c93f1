"""Public bug reports about many connections, slow readers and what metrics say of them: see the case ids."""

import asyncio
import json
import resource
import socket
from collections.abc import Iterator

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from asyncllm.pace import GATHER_S, Pace
from asyncllm.server.events import FULL_BYTES
from asyncllm.server.settings import Settings

from .conftest import BOTH, TEXT, Serve, Served, endless, until
from .test_websocket import REQUEST, frame

LONG = {"max_model_len": 2100, "num_pages": 4000, "page_size": 16, "max_running": 50, "max_waiting": 64}


# -- CONC-3 --


@pytest.fixture
def few_descriptors() -> Iterator[int]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
    yield 400
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def test_conc_3_far_more_requests_than_run_at_once_are_answered_or_refused(serve: Serve) -> None:
    num = 400
    async with serve("Hello there.", max_running=8, max_waiting=200, max_model_len=64, num_pages=200) as served:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as served.session:
            asking = [served.complete("hi", max_tokens=8, stream=bool(i % 2)) for i in range(num)]
            answers = await asyncio.gather(*asking)
            refused = [answer for answer in answers if answer.status != 200]
            assert all((one.status, one.error["code"]) == (503, "queue_full") for one in refused)
            assert all(int(one.headers["Retry-After"]) > 0 for one in refused)
            texts = {answer.text() for answer in answers if answer.status == 200}
            assert len(texts) == 1 and len(refused) <= num - 208
            await served.idle()


async def test_conc_3_thousands_of_idle_sockets_beside_live_streams(serve: Serve) -> None:
    async with serve(endless, **LONG) as served:
        host, port = served.url.removeprefix("http://").split(":")
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        idle = [socket.create_connection((host, int(port))) for _ in range(min(2000, soft // 4))]
        answers = await asyncio.gather(*[served.complete(max_tokens=50, stream=True) for _ in range(32)])
        assert len({answer.text() for answer in answers}) == 1
        for one in idle:
            one.close()
        await served.alive()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
async def test_conc_3_at_the_descriptor_limit_accepting_recovers(serve: Serve, few_descriptors: int) -> None:
    async with serve() as served:
        host, port = served.url.removeprefix("http://").split(":")
        idle = []
        try:
            while True:
                idle.append(socket.create_connection((host, int(port))))
        except OSError:
            pass  # neither side gets another descriptor
        for one in idle:
            one.close()
        async with asyncio.timeout(20):
            await served.alive()


# -- MET-1 --


async def families(served: Served) -> dict[str, float]:
    async with served.session.get(served.url + "/metrics") as response:
        text = await response.text()
    return {
        sample.name + "".join(f"{{{value}}}" for value in sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_met_1_counters_agree_with_the_clients_own_tally(serve: Serve) -> None:
    async with serve(endless, **LONG) as served:
        before = await families(served)
        watching = asyncio.create_task(watched(served))
        by_stop = [await served.complete(max_tokens=50, stop="def", stream=bool(i % 2)) for i in range(3)]
        by_length = [await served.complete(max_tokens=7, stream=bool(i % 2)) for i in range(2)]
        for _ in range(5):
            assert (await served.complete(n=129)).status == 400
        for i in range(5):
            raw = await served.connect()
            await raw.send(TEXT, json.dumps({"prompt": "x", "stream": True, "max_tokens": 2000}).encode())
            await raw.events(1)
            raw.leave(reset=bool(i % 2))
        await served.idle()
        await until(lambda: sum(served.llm.totals.whole.counts) == 5)  # the engine's own word about the stopped ones
        watching.cancel()
        after = await families(served)
        reasons = ("stop", "length", "abort")
        finished = {reason: after[f"asyncllm_requests_finished_total{{{reason}}}"] for reason in reasons}
        assert finished == {"stop": 3, "length": 2, "abort": 5}
        told = sum(answer.usage["completion_tokens"] for answer in by_stop + by_length)
        assert after["asyncllm_output_tokens_total"] >= told + 5  # an aborted one's are counted as drawn
        for name in ("time_to_first_token", "request_queue_time", "request_prefill_time", "e2e_request_latency"):
            counts = [after[f"asyncllm_{name}_seconds_{kind}"] for kind in ("count", "bucket{+Inf}")]
            assert counts[0] == counts[1] == finished["length"] + finished["stop"]
        assert after["asyncllm_inter_token_latency_seconds_count"] > 0
        assert after["asyncllm_hand_off_seconds_count"] > 0
        for name in ("requests_running", "requests_waiting", "requests_live", "kv_pages_used", "kv_cache_usage"):
            assert after[f"asyncllm_{name}"] == 0
        assert all(after[name] >= value for name, value in before.items() if name.endswith(("_total", "_count")))


async def test_met_1_the_loops_health_and_the_engines_load_are_told(serve: Serve) -> None:
    async with serve(endless, **LONG) as served:
        served.llm.pace.policy = "every_step"  # a busy machine would have it gather
        shared = "the same beginning of two prompts, a few pages long, " * 2
        for _ in range(2):
            await served.complete(shared, max_tokens=100, stream=True)
        await served.idle()
        await until(lambda: sum(served.llm.pace.lag.counts) > 0)  # its timer takes 20 ms
        idle = await families(served)
        assert idle["asyncllm_cached_tokens_total"] > 0
        assert idle["asyncllm_flushes_total"] > 0
        for name in ("request_decode_time", "loop_lag", "hand_off", "inter_token_latency"):
            assert idle[f"asyncllm_{name}_seconds_count"] == idle[f"asyncllm_{name}_seconds_bucket{{+Inf}}"] > 0, name
        served.runner.hold(permits=3)
        served.llm.pace.policy, served.llm.pace.gathering = "gather", True
        async with served.session.post(served.url + TEXT, json={"prompt": shared, "stream": True, "max_tokens": 9}):
            busy = await families(served)
            for name in ("requests_running", "requests_live", "kv_pages_used", "kv_cache_usage", "batch_occupancy"):
                assert busy[f"asyncllm_{name}"] > idle[f"asyncllm_{name}"] == 0, name
            assert (idle["asyncllm_flush_gathering"], busy["asyncllm_flush_gathering"]) == (0, 1)
            assert busy["asyncllm_engine_step"] > idle["asyncllm_engine_step"] > 0
            served.runner.let_go()


def unread(ws: bool) -> bytes:
    """Sixteen answers at once, asked for over one connection."""
    if ws:
        create = {"type": "response.create", "input": "x", "max_output_tokens": 29_000}
        creates = [json.dumps({**create, "stream_id": f"{i}"}).encode() for i in range(16)]
        return REQUEST.encode() + b"".join(map(frame, creates))
    body = json.dumps({"prompt": ["x"] * 16, "stream": True, "max_tokens": 29_000}).encode()
    head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@pytest.mark.parametrize("ws", [False, True])
async def test_met_1_what_waits_for_a_reader_is_told_wherever_it_waits(serve: Serve, ws: bool) -> None:
    async with serve(endless, **(LONG | {"max_model_len": 30_000, "num_pages": 32_000})) as served:
        served.llm.pace.policy = "every_step"
        assert (await families(served))["asyncllm_unsent_bytes"] == 0
        host, port = served.url.removeprefix("http://").split(":")
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            raw.sendall(unread(ws))
            async with asyncio.timeout(30):
                while (await families(served))["asyncllm_unsent_bytes"] <= FULL_BYTES:
                    pass
        await served.idle()
        async with asyncio.timeout(30):
            while (await families(served))["asyncllm_unsent_bytes"]:
                pass


async def watched(served: Served) -> None:
    """Scrapes all the while: gauges are never below nought, counters never fall."""
    last: dict[str, float] = {}
    while True:
        now = await families(served)
        assert all(value >= 0 for value in now.values())
        assert all(now[name] >= value for name, value in last.items() if name.endswith("_total"))
        last = now


async def test_met_1_all_leave_at_once_and_nothing_else_happens(serve: Serve) -> None:
    async with serve(endless, **LONG) as served:
        raws = [await served.connect() for _ in range(50)]
        for raw in raws:
            await raw.send(TEXT, json.dumps({"prompt": "x", "stream": True, "max_tokens": 2000}).encode())
        await until(lambda: served.llm.num_live == 50)
        for raw in raws:
            raw.leave()
        await served.idle()
        after = await families(served)
        assert (after["asyncllm_requests_running"], after["asyncllm_kv_cache_usage"]) == (0, 0)
        assert after["asyncllm_requests_finished_total{abort}"] == 50
        scrapes = await asyncio.gather(*[families(served) for _ in range(50)])
        assert len({len(scrape) for scrape in scrapes}) == 1


# -- slow readers, and a loop that lags --


async def test_a_reader_that_stops_among_live_ones_is_bounded_and_freed(serve: Serve) -> None:
    settings = Settings(send_timeout_s=0.2)
    async with serve(endless, settings=settings, **(LONG | {"max_model_len": 30_000, "num_pages": 8000})) as served:
        host, port = served.url.removeprefix("http://").split(":")
        stuck = socket.create_connection((host, int(port)))
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        options = {"continuous_usage_stats": True}
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 29_000, "stream_options": options}).encode()
        head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        head += f"Content-Length: {len(body)}\r\n\r\n"
        stuck.sendall(head.encode() + body)
        await until(lambda: served.llm.num_live == 1)
        while not served.llm.totals.finished["abort"]:
            answers = await asyncio.gather(*[served.complete(max_tokens=20, stream=True) for _ in range(8)])
            assert len({answer.text() for answer in answers}) == 1
            assert served.llm.num_unread_bytes < settings.max_unread_bytes
        await served.idle()
        assert served.llm.totals.finished["abort"] == 1
        stuck.close()


@BOTH
async def test_text_is_the_same_gathered_or_not(serve: Serve, stream: bool) -> None:
    async with serve(endless, **LONG) as served:
        expected = (await served.complete(max_tokens=300)).text()
        for policy in ("gather", "every_step"):
            served.llm.pace.policy, served.llm.pace.gathering = policy, policy == "gather"
            answers = await asyncio.gather(*[served.complete(max_tokens=300, stream=stream) for _ in range(8)])
            assert {answer.text() for answer in answers} == {expected}


class Told:
    """A Reader that counts."""

    def __init__(self, *, full: bool = False) -> None:
        self.dirty, self.full, self.num_flushes, self.is_cut_off = False, full, 0, False

    def flush(self) -> bool:
        self.num_flushes += 1
        return not self.full

    def cut_off(self) -> None:
        self.is_cut_off = True


async def test_a_first_token_does_not_wait_while_others_are_gathered() -> None:
    pace = Pace(asyncio.get_running_loop(), "gather")
    first, other = Told(), Told()
    pace.mark(other, at_once=False)
    pace.mark(first, at_once=True)
    await until(lambda: first.num_flushes == 1)
    assert (other.dirty, other.num_flushes) == (True, 0)
    pace.mark(other, at_once=False)  # still once
    await until(lambda: other.num_flushes == 1)
    pace.close()


async def test_the_pace_turns_with_the_hand_offs_lag_and_back() -> None:
    loop = asyncio.get_running_loop()
    pace = Pace(loop)
    now_s = loop.time()
    for i in range(40):  # put long ago: the loop lags
        pace.step(now_s - 0.1 + i * 1e-4, 1)
    assert pace.gathering
    for i in range(200):
        pace.step(loop.time() + i, 1)  # in time, and rarely
    assert not pace.gathering and pace.num_turns == 2
    pace.close()


async def test_a_reader_without_room_is_asked_again_and_one_that_raises_stops_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Broken(Told):
        def flush(self) -> bool:
            raise KeyError("bug")

    pace = Pace(asyncio.get_running_loop())
    full, broken, fine = Told(full=True), Broken(), Told()
    for reader in (full, broken, fine):
        pace.mark(reader, at_once=False)
    await until(lambda: fine.num_flushes == 1 and full.num_flushes >= 2)
    full.full = False
    await until(lambda: not full.dirty)
    assert len(caplog.records) == 1
    assert (full.is_cut_off, broken.is_cut_off, fine.is_cut_off) == (False, True, False)
    assert GATHER_S < 0.025
    pace.close()
