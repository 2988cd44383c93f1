"""The load generator: its parser against every cut, its plan, its numbers, and whole runs against servers."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncllm.client import load, plan, report
from asyncllm.client.plan import Job, Load, Options, Planned
from asyncllm.client.probe import Connection, Dechunker, EventCounter, Pool
from asyncllm.client.tally import Measured
from tests.fakes import engine_config, scripted, scripted_llm
from tests.text import toys

from .fake import (
    DONE,
    Act,
    Exchange,
    RawServer,
    chat_event,
    chat_stream,
    event,
    json_reply,
    raw_server,
    refusal,
    stream,
    usage_event,
)

ROOT = Path(__file__).resolve().parents[2]


def cuts(data: bytes, size: int) -> Iterator[bytes]:
    return (data[i : i + size] for i in range(0, len(data), size))


# -- the parser --


@pytest.mark.parametrize("size", [1, 2, 3, 5, 11, 1000])
def test_dechunker_however_cut(size: int) -> None:
    dechunker = Dechunker()
    coded = b"5\r\nhello\r\nA;x=y\r\n\r\n in two\r\n\r\n0\r\n\r\n"
    assert b"".join(dechunker.feed(part) for part in cuts(coded, size)) == b"hello\r\n in two\r\n"[:15]
    assert dechunker.done


def counted(*parts: bytes) -> tuple[Measured, EventCounter]:
    measured = Measured()
    counter = EventCounter(measured)
    for now_s, part in enumerate(parts, 1):
        counter.feed(part, float(now_s))
    counter.finish()
    return measured, counter


def test_counter_takes_times_at_events_with_choices_alone() -> None:
    measured, counter = counted(
        chat_event("a"),
        b": ping\n\n",
        chat_event("b") + chat_event("c"),
        chat_event("d") + chat_event(finish="stop") + usage_event(7, 4) + DONE,
    )
    assert (measured.first_s, measured.last_s, measured.gaps_s) == (1, 4, [2, 0, 1, 0])
    assert (measured.num_prompt_tokens, measured.num_output_tokens) == (7, 4)
    assert counter.done and measured.error is None and not measured.tokens_are_events


@pytest.mark.parametrize("size", [1, 7, 50, 10_000])
@pytest.mark.parametrize("ends", [b"\n", b"\r\n"])
def test_counter_counts_the_same_however_cut(size: int, ends: bytes) -> None:
    data = b": x\n\n" + b"".join(chat_event(text) for text in "naïve \n\n x") + usage_event(1, 10) + DONE
    measured, counter = counted(*cuts(data.replace(b"\n", ends), size))
    assert (len(measured.gaps_s), measured.num_output_tokens, measured.error) == (9, 10, None)
    assert counter.done


def test_counter_without_usage_counts_events_and_says_so() -> None:
    measured, _ = counted(chat_event("a"), chat_event("b") + DONE)
    assert (measured.num_output_tokens, measured.tokens_are_events) == (2, True)


def test_counter_finds_errors() -> None:
    assert counted(chat_event("a"), event({"error": {"message": "broke"}}))[0].error == "broke"
    assert counted(b"data: rubbish\n\n")[0].error is not None
    assert counted(DONE)[0].error == "an empty stream"


# -- one connection --


async def asked(*acts: Act) -> tuple[list[Measured], RawServer]:
    """One request for each act, one after the other."""
    async with raw_server(*acts) as server:
        port = int(server.url.split(":")[2].removesuffix("/v1"))
        pool = Pool("127.0.0.1", port, None)
        request = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}"
        measured = [await pool.ask(request, 0.0) for _ in acts]
        pool.close()
    return measured, server


def plain(body: bytes, head: str = "") -> Act:
    async def act(exchange: Exchange) -> None:
        await exchange.send(f"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n{head}\r\n".encode() + body)
        if "Content-Length" not in head:
            exchange.close()

    return act


async def test_requests_share_a_connection_and_every_framing_is_read() -> None:
    body = chat_event("a") + chat_event(finish="stop") + usage_event(3, 1) + DONE
    measured, server = await asked(
        chat_stream("a", "b"), plain(body, f"Content-Length: {len(body)}\r\n"), refusal("503 No"), plain(body)
    )
    assert [one.num_output_tokens for one in measured] == [2, 1, 0, 1]
    assert [one.error for one in measured] == [None, None, "503: no", None]
    assert server.num_connections == 1


async def test_what_goes_wrong_is_in_the_measurement() -> None:
    async def rubbish(exchange: Exchange) -> None:
        await exchange.send(b"rubbish\r\n\r\n")
        exchange.close()

    async def hang_up(exchange: Exchange) -> None:
        exchange.close()

    cut = stream(chat_event("a"), end=b"")
    early = stream(chat_event("a"))
    measured, _ = await asked(rubbish, hang_up, cut, early)
    assert [bool(one.error) for one in measured] == [True] * 4
    assert measured[2].error == "the connection was closed"
    assert measured[3].error == "the stream ended before the answer did"
    assert (await Pool("127.0.0.1", 1, None).ask(b"", 0.0)).error


async def test_a_stale_connection_is_replaced() -> None:
    async def hang_up(exchange: Exchange) -> None:
        exchange.close()

    async with raw_server(chat_stream("a"), hang_up, chat_stream("a", "b")) as server:
        pool = Pool("127.0.0.1", int(server.url.split(":")[2].removesuffix("/v1")), None)
        request = b"POST / HTTP/1.1\r\nContent-Length: 0\r\n\r\n"
        measured = [await pool.ask(request, 0.0) for _ in range(2)]
        pool.close()
    assert [(one.num_output_tokens, one.error) for one in measured] == [(1, None), (2, None)]
    assert isinstance(pool._idle[0], Connection)


# -- the plan --


def test_arrivals() -> None:
    options = Options(url="http://h/v1", num_requests=1000)
    poisson = plan.arrivals(options, Load(kind="rate", value=50.0))
    assert poisson == sorted(poisson)
    assert poisson[-1] == pytest.approx(999 / 50)
    gaps = [b - a for a, b in zip(poisson, poisson[1:], strict=False)]
    spread = sum((gap - 0.02) ** 2 for gap in gaps) / len(gaps)
    assert 0.8 < spread**0.5 / 0.02 < 1.2  # an exponential's deviation is its mean
    assert set(plan.arrivals(options, Load(kind="rate", value=float("inf")))) == {0.0}


def test_bodies_have_the_lengths_and_the_prefix_that_were_asked_for() -> None:
    options = Options(
        url="http://h/v1", model="m", prompt="ids", num_requests=50, prompt_len=(3, 6), output_len=(2, 4),
        shared_prefix_len=5, vocab_size=2000,
    )  # fmt: skip
    bodies = [json.loads(body) for body in plan.bodies(options)]
    assert {len(body["prompt"]) for body in bodies} == {8, 9, 10, 11}
    assert {body["max_tokens"] for body in bodies} == {2, 3, 4}
    assert len({tuple(body["prompt"][:5]) for body in bodies}) == 1
    assert all(1000 <= token < 2000 for body in bodies for token in body["prompt"])
    assert bodies == [json.loads(body) for body in plan.bodies(options)]
    chat = Options(url="http://h/v1", endpoint="chat", prompt="text", num_requests=1, prompt_len=(4, 4))
    (body,) = [json.loads(body) for body in plan.bodies(chat)]
    assert len(body["messages"][0]["content"].split()) == 4


def test_the_plan_is_dealt_out() -> None:
    options = plan.settle(Options(url="https://h/v1", model="m", num_requests=10, prompt_len=(1, 1)))
    jobs = plan.jobs(options, Load(kind="concurrency", value=3), 2)
    assert [(len(job.requests), job.concurrency, job.port, job.tls) for job in jobs] == [(5, 2, 443, True)] * 1 + [
        (5, 1, 443, True)
    ]
    assert len(plan.jobs(options, Load(kind="concurrency", value=1), 4)) == 1
    assert jobs[0].head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h\r\n")


# -- the numbers --


def test_numbers_by_vllms_definitions() -> None:
    good = Measured(sent_s=10, first_s=10.1, last_s=10.5, gaps_s=[0.1, 0.3], num_prompt_tokens=7, num_output_tokens=5)
    late = Measured(sent_s=10, first_s=10.9, last_s=10.9, num_prompt_tokens=7, num_output_tokens=1)
    failed = Measured(sent_s=10, error="503: no")
    numbers = report.summary([good, late, failed], 2.0, {"ttft": 200.0})
    assert (numbers["num_requests"], numbers["num_failed"], numbers["errors"]) == (3, 1, {"503: no": 1})
    assert (numbers["output_tokens_per_s"], numbers["requests_per_s"]) == (3.0, 1.0)
    assert numbers["ttft_ms"]["p50"] == pytest.approx(500)
    assert numbers["tpot_ms"]["mean"] == pytest.approx(100)
    assert numbers["itl_ms"]["mean"] == pytest.approx(200)
    assert numbers["e2el_ms"]["p99"] == pytest.approx(896)
    assert numbers["goodput"]["requests_per_s"] == 0.5
    assert report.summary([], 0.0, {})["ttft_ms"] is None


def test_percentiles_are_numpys() -> None:
    assert [report.percentile([1, 2, 3, 4], p) for p in (0, 50, 90, 100)] == [1, 2.5, pytest.approx(3.7), 4]


def test_goodput_limits() -> None:
    assert report.goodput_limits("ttft:200,e2el:5") == {"ttft": 200, "e2el": 5}
    with pytest.raises(ValueError, match="ttft"):
        report.goodput_limits("speed:1")


# -- whole runs --


async def test_closed_and_open_loop_in_one_process() -> None:
    running = most = 0

    async def act(exchange: Exchange) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await chat_stream("a")(exchange)
        running -= 1

    async with raw_server(act) as server:
        port = int(server.url.split(":")[2].removesuffix("/v1"))
        requests = [Planned(0.0, b"{}")] * 20
        for concurrency in (3, None):
            job = Job(
                host="127.0.0.1", port=port, tls=False, head=b"POST / HTTP/1.1", requests=requests,
                concurrency=concurrency, lanes=None,
            )  # fmt: skip
            measured = await load.send(job, 0.0)
            assert [one.error for one in measured] == [None] * 20
            assert most <= 3 or concurrency is None


async def bench_lines(*args: str) -> tuple[list[dict[str, object]], str, int | None]:
    """bench/serve.py as a user runs it."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", str(ROOT / "bench" / "serve.py"), *args,
        cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate()
    return [json.loads(line) for line in out.splitlines()], err.decode(), process.returncode


async def test_bench_against_the_real_server(tmp_path: Path) -> None:
    from asyncllm.server.app import listening
    from asyncllm.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(toys.byte_level(tmp_path))
    async with (
        scripted_llm(tokenizer, None, scripted(tokenizer.encode("abc" * 9)), engine_config()) as (llm, _),
        listening(llm, port=0) as url,
    ):
        lines, err, code = await bench_lines(
            url, "--num-requests", "12", "--prompt-len", "4:8", "--output-len", "5", "--vocab-size", "390",
            "--rate", "200,inf", "--num-processes", "2", "--goodput", "ttft:60000",
        )  # fmt: skip
        assert (code, [line["load"]["value"] for line in lines]) == (0, [200.0, "inf"]), err  # type: ignore[index]
        for line in lines:
            assert (line["num_requests"], line["num_failed"], line["output_tokens"]) == (12, 0, 60)
            assert line["server"] == {"url": f"{url}/v1", "model": "scripted", "version": "0.1.0"}
            assert line["goodput"]["num_met"] == 12  # type: ignore[index]
            assert {"command", "date", "versions", "hardware", "ttft_ms", "itl_ms", "client_busy"} <= line.keys()
        assert llm.num_live == 0


def test_a_plot_is_a_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    runs = [
        {"load": {"kind": "rate", "value": value}, "ttft_ms": {"p50": 1, "p99": 2}, "tpot_ms": None, "itl_ms": None}
        for value in (1.0, "inf")
    ]
    report.plot(runs, tmp_path / "p.png")
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


async def test_bench_counts_failures_and_says_so() -> None:
    models = json_reply({"data": [{"id": "m"}]})
    async with raw_server(models, refusal("404 No"), refusal("503 No", message="full")) as server:
        lines, err, code = await bench_lines(
            server.url, "--num-requests", "3", "--concurrency", "2", "--num-processes", "1", "--num-warmup", "0"
        )
    assert code == 1, err
    assert (lines[0]["num_failed"], lines[0]["errors"]) == (3, {"503: full": 3})


async def test_bench_without_a_server_is_told_in_one_line() -> None:
    _, err, code = await bench_lines("http://127.0.0.1:1")
    assert code == 2
    assert err.startswith("asyncllm: the connection to ") and err.count("\n") == 1
