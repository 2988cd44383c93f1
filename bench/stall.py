"""How long running streams wait while long prompts pour in.

    python -m bench.stall MODEL [--streams 64] [--prompts 16] [--prompt-len 8192] [--option max_mixed_tokens=2048 ...]

One JSON line: the longest gap between two tokens of any stream while the prompts come in, the median and p99 of all
gaps then, the median before, and how long the prompts took to their first tokens. Medians of the runs.
"""

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

from asyncllm.llm import AsyncLLM

from .burst import Request, machine, open_house, request

ANSWER_TOKENS = 2000  # more than come in while the prompts do


async def read(llm: AsyncLLM, rng: random.Random, prompt_len: int, times_s: list[float]) -> None:
    """Notes when each of the stream's tokens came; runs until it is cancelled."""
    ids, params = request(rng, prompt_len, ANSWER_TOKENS)
    async with llm.submit(ids, params) as stream:
        async for _ in stream:
            times_s.append(time.perf_counter())  # noqa: PERF401  each as it comes


async def first_token(llm: AsyncLLM, prompt: Request) -> None:
    async with llm.submit(*prompt) as stream:
        await stream.result()


async def stall(llm: AsyncLLM, args: argparse.Namespace, run: int) -> dict[str, float]:
    rng = random.Random(f"stall {run}")
    times: list[list[float]] = [[] for _ in range(args.streams)]
    readers = [asyncio.create_task(read(llm, rng, 200, mine)) for mine in times]
    while not all(len(mine) > 20 for mine in times):
        ended, _ = await asyncio.wait(readers, timeout=0.01)
        if ended:
            raise RuntimeError(f"a stream ended before the prompts came: {ended.pop().exception()!r}")
    prompts = [request(rng, args.prompt_len, 2) for _ in range(args.prompts)]
    await asyncio.sleep(0.5)
    began_s = time.perf_counter()
    await asyncio.gather(*(first_token(llm, prompt) for prompt in prompts))
    ended_s = time.perf_counter()
    for reader in readers:
        reader.cancel()
    await asyncio.gather(*readers, return_exceptions=True)
    # A gap belongs to the time in which it ends.
    pairs = [(later, later - earlier) for mine in times for earlier, later in zip(mine, mine[1:], strict=False)]
    during = sorted(gap for end_s, gap in pairs if began_s <= end_s <= ended_s)
    before = [gap for end_s, gap in pairs if end_s < began_s]
    return {
        "longest_gap_ms": 1e3 * during[-1],
        "p99_gap_ms": 1e3 * during[int(0.99 * len(during))],
        "p50_gap_ms": 1e3 * statistics.median(during),
        "p50_gap_before_ms": 1e3 * statistics.median(before),
        "prompts_s": ended_s - began_s,
    }


async def run(args: argparse.Namespace) -> None:
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.option)}
    async with open_house(args.model, **options) as house:
        house.runner.on_step = None
        figures = [await stall(house.llm, args, run) for run in range(args.runs + 1)][1:]
        result: dict[str, Any] = {
            name: round(statistics.median(figure[name] for figure in figures), 2) for name in figures[0]
        }
        limits = house.engine.scheduler.step_limits
        sizes = {"streams": args.streams, "prompts": args.prompts, "prompt_len": args.prompt_len}
        sizes["max_mixed_tokens"] = limits.max_mixed_tokens or limits.max_step_tokens
        all_longest = {"all_longest_gap_ms": [round(figure["longest_gap_ms"], 1) for figure in figures]}
        name = {"bench": "stall", "model": Path(args.model).name}
        print(json.dumps(name | result | all_longest | sizes | machine()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-len", type=int, default=8192)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--option", nargs="*", default=[], help="Config fields as name=json")
    import uvloop

    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
