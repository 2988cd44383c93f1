"""What the way to the client costs: the same work offline and served, over SSE and over WebSocket, on one machine.

    python -m bench.served MODEL [--work burst one] [--runs 3] [--option max_model_len=4096 ...]

First `python -m bench.burst MODEL`, then an `asyncllm serve MODEL` of its own and `asyncllm bench` on it. Every
run's line is printed as it comes; the last lines have the ratio of served to offline speed, medians of the runs
behind the first, which warms up. `burst` is 256 requests at once, `one` is one stream of 512 + 512 tokens.
"""

import argparse
import json
import re
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from asyncllm.client import report

STOPPED_WITHIN_S = 60.0
LOADS = {
    "burst": "--prompt-len 100:1024 --output-len 100:1024 --temperature 0.6 --num-requests 256 --num-processes 6",
    "one": "--prompt-len 512 --output-len 512 --num-requests 4 --num-processes 1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", nargs="+", default=list(LOADS), choices=tuple(LOADS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--option", nargs="*", default=[], help="of the engine, offline and served: as name=json")
    args = parser.parse_args()
    offline = {line["work"]: line for line in lines(offline_command(args))}
    summaries = []
    with serving(args.model, args.option) as url:
        for work in args.work:
            for transport in ("sse", "websocket"):
                runs = lines(bench_command(url, work, transport, args.runs))
                summaries.append(summary(work, transport, offline[work], runs))
    for one in summaries:
        print(json.dumps(one), flush=True)


def offline_command(args: argparse.Namespace) -> list[str]:
    options = ["--option", *args.option] if args.option else []
    return python("bench.burst", args.model, "--work", *args.work, "--runs", str(args.runs), *options)


def bench_command(url: str, work: str, transport: str, runs: int) -> list[str]:
    again = [",".join(["1" if work == "one" else "inf"] * (runs + 1))]
    load = ["--concurrency" if work == "one" else "--rate", *again]
    return python("asyncllm", "bench", url, *shlex.split(LOADS[work]), "--transport", transport, *load)


def python(module: str, *args: str) -> list[str]:
    return [sys.executable, "-m", module, *args]


def lines(command: Sequence[str]) -> list[dict[str, Any]]:
    """The JSON lines of a command, printed as they come.

    Raises:
        CalledProcessError: it failed.
    """
    found = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found.append(json.loads(line))
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return found


@contextmanager
def serving(model: str, options: Sequence[str]) -> Iterator[str]:
    """A server of the model, on a port that the system chooses; its address.

    Raises:
        RuntimeError: it did not start, or did not end as it should.
    """
    command = python("asyncllm", "serve", model, "--port", "0", *flags(options))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        urls = (found[0] for line in process.stdout if (found := re.search(r"http://[^/ ]+", line)))
        try:
            if (url := next(urls, None)) is None:
                raise RuntimeError(f"the server did not start: {shlex.join(command)}")
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(STOPPED_WITHIN_S)
    if code:
        raise RuntimeError(f"the server ended with {code}")


def flags(options: Sequence[str]) -> Iterator[str]:
    """name=json, as bench.burst takes it, to the flags of `asyncllm serve`."""
    for name, _, value in (option.partition("=") for option in options):
        flag, value = name.replace("_", "-"), json.loads(value)
        if isinstance(value, bool):
            yield f"--{flag}" if value else f"--no-{flag}"
        else:
            yield from (f"--{flag}", str(value))


def summary(work: str, transport: str, offline: dict[str, Any], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One figure: the speed of a burst in tokens a second, of one stream in milliseconds a token."""
    steady = runs[1:]

    def middle(*path: str) -> float:
        return statistics.median(at(run, path) for run in steady)

    served: dict[str, Any] = {
        "tok_s": middle("output_tokens_per_s"),
        "ms_per_token": middle("tpot_ms", "p50"),
        "ttft_p50_ms": middle("ttft_ms", "p50"),
        "ttft_p99_ms": middle("ttft_ms", "p99"),
        "itl_p99_ms": middle("itl_ms", "p99"),
        "all_tok_s": [round(run["output_tokens_per_s"]) for run in steady],
        "prompt_tokens": steady[0]["prompt_tokens"],
        "output_tokens": steady[0]["output_tokens"],
        "num_events": middle("num_events"),
        "client_busy": max(run["client_busy"] for run in steady),
    }
    names = ("tok_s", "ms_per_token", "ttft_ms", "num_steps", "occupancy", "gpu", "torch", "overlap", "model")
    is_burst = work == "burst"
    ratio = served["tok_s"] / offline["tok_s"] if is_burst else offline["ms_per_token"] / served["ms_per_token"]
    return {
        "work": work,
        "transport": transport,
        "served_to_offline": round(ratio, 4),
        "served": {name: round(value, 3) if isinstance(value, float) else value for name, value in served.items()},
        "offline": {name: offline[name] for name in names},
        **report.where(),
    }


def at(run: dict[str, Any], path: Sequence[str]) -> float:
    value: Any = run
    for name in path:
        value = value[name]
    return float(value)


if __name__ == "__main__":
    main()
