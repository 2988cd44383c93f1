"""bench/served.py: its commands and what it makes of their lines; bench/burst.py: that it runs, here on a CPU."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from bench import burst, served
from tests.tiny import make_checkpoint

OFFLINE = {
    "tok_s": 1000.0, "ms_per_token": 2.0, "ttft_ms": 9.0, "num_steps": 5, "occupancy": 0.9, "gpu": "g", "torch": "t",
    "overlap": True, "model": "m",
}  # fmt: skip


def run(tok_s: float, ms: float) -> dict[str, Any]:
    spread = {"p50": ms, "p99": 10 * ms}
    counts = {"prompt_tokens": 7, "output_tokens": 8, "num_events": 9, "client_busy": 0.1}
    return {"output_tokens_per_s": tok_s, "ttft_ms": spread, "tpot_ms": spread, "itl_ms": spread, **counts}


def test_the_first_run_warms_up_and_the_median_of_the_others_counts() -> None:
    runs = [run(1.0, 99.0), run(900.0, 2.5), run(990.0, 2.0), run(950.0, 4.0)]
    burst = served.summary("burst", "websocket", OFFLINE, runs)
    assert (burst["served_to_offline"], burst["served"]["all_tok_s"]) == (0.95, [900, 990, 950])
    assert (burst["served"]["ttft_p50_ms"], burst["served"]["ttft_p99_ms"]) == (2.5, 25.0)
    one = served.summary("one", "sse", OFFLINE, runs)
    assert one["served_to_offline"] == 0.8  # 2.0 ms a token offline, 2.5 served
    assert {"command", "versions", "hardware", "date", "offline"} <= one.keys()


def test_options_of_the_engine_are_the_servers_flags() -> None:
    options = ["max_model_len=4096", "overlap=false", "prefix_cache=true", 'attention="sdpa"']
    flags = ["--max-model-len", "4096", "--no-overlap", "--prefix-cache", "--attention", "sdpa"]
    assert list(served.flags(options)) == flags


def test_lines_of_a_command_are_kept_and_a_failure_is_one(capfd: pytest.CaptureFixture[str]) -> None:
    program = "import json; print(json.dumps({'a': 1})); print(json.dumps({'b': 2}))"
    assert served.lines([sys.executable, "-c", program]) == [{"a": 1}, {"b": 2}]
    assert [json.loads(line) for line in capfd.readouterr().out.splitlines()] == [{"a": 1}, {"b": 2}]
    with pytest.raises(served.subprocess.CalledProcessError):
        served.lines([sys.executable, "-c", "raise SystemExit(3)"])


def test_the_commands_are_ones_that_asyncllm_bench_takes() -> None:
    from asyncllm.cli import _parser

    for work in served.LOADS:
        for transport in ("sse", "websocket"):
            command = served.bench_command("http://h", work, transport, 3)
            args = _parser().parse_args(command[3:])
            loads = args.concurrency or args.rate
            assert (args.transport, len(loads)) == (transport, 4)


def test_burst_with_penalties_or_logprobs_is_burst() -> None:
    plain, penalties, logprobs = burst.burst(0), burst.penalties(0), burst.logprobs(0)
    for ours in (penalties, logprobs):
        assert [r.prompt_ids for r in ours] == [r.prompt_ids for r in plain]
        assert [r.params.max_tokens for r in ours] == [r.params.max_tokens for r in plain]
    assert all(request.params.counts_tokens for request in penalties)
    assert {request.params.logprobs for request in logprobs} == {5}


async def test_an_engine_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a GPU run finds after minutes that the house's insides have moved."""
    folder = make_checkpoint(tmp_path, "llama", "float32")
    monkeypatch.setattr(burst.build, "Engine", burst.Engine)  # open_house stands in for it: back with it afterwards
    request = burst.request(random.Random(0), 20, 4)
    few = [request._replace(prompt_ids=[token_id % 200 for token_id in request.prompt_ids])] * 3
    monkeypatch.setitem(burst.WORKS, "few", lambda run: few)
    async with burst.open_house(str(folder), device="cpu") as house:
        figures = await burst.measure(house, "few", runs=1)
    assert figures["tok_s"] > 0 and house.ready_s > 0
