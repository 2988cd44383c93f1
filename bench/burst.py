"""GPU workloads on one engine, one JSON line each: burst-256, one stream, prefill-heavy, shared prefix; and burst-256
with penalties, with log probabilities, or with a JSON schema, on all rows.

    python -m bench.burst MODEL [--work burst one ...] [--runs 3] [--no-overlap] [--burn] [--option num_pages=900 ...]

Every run has fresh prompts; the first is a warm-up of its own, the figure is the median of the rest. `burst` is the
Mini-SGLang offline benchmark: 256 requests at once, prompts and answers of 100 to 1024 tokens, lengths by seed(0).
"""

import argparse
import asyncio
import itertools
import json
import platform
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from asyncllm import build
from asyncllm import config as configs
from asyncllm.engine.loop import Engine
from asyncllm.llm import AsyncLLM
from asyncllm.types import GrammarSpec, SamplingParams

# As tools and tables have it: keys, an enum, numbers, free and patterned text. More items than fit any answer.
ENDLESS = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "kind": {"enum": ["person", "place", "thing"]},
            "code": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
            "score": {"type": "number"},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 4},
            "seen": {"type": "boolean"},
        },
        "required": ["name", "kind", "code", "score", "tags", "seen"],
        "additionalProperties": False,
    },
}
# A seed no run of this process has had, for the engine keeps the pages of what it has seen.
_FRESH = itertools.count()


class Request(NamedTuple):
    prompt_ids: list[int]
    params: SamplingParams


def burst(run: int) -> list[Request]:
    rng, fresh = random.Random(0), random.Random(f"burst {run}")
    lengths = []
    for _ in range(256):
        prompt_len = rng.randint(100, 1024)
        lengths.append(prompt_len)
        for _ in range(prompt_len):
            rng.randint(0, 10000)
    outputs = [rng.randint(100, 1024) for _ in range(256)]
    return [request(fresh, n, out, temperature=0.6) for n, out in zip(lengths, outputs, strict=True)]


def one(run: int) -> list[Request]:
    return [request(random.Random(f"one {run}"), 512, 512)]


def prefill(run: int) -> list[Request]:
    fresh = random.Random(f"prefill {run}")
    return [request(fresh, 4000, 8) for _ in range(64)]


def shared(run: int) -> list[Request]:
    fresh = random.Random(f"shared {run}")
    prefix = [fresh.randint(10, 9999) for _ in range(2048)]
    return [Request(prefix + r.prompt_ids, r.params) for r in (request(fresh, 100, 128) for _ in range(256))]


def penalties(run: int) -> list[Request]:
    """burst, with every penalty on every row."""
    return _with(burst(run), presence_penalty=0.5, frequency_penalty=0.5, repetition_penalty=1.1)


def logprobs(run: int) -> list[Request]:
    """burst, with five alternatives beside every token of every row."""
    return _with(burst(run), logprobs=5)


def schema(run: int) -> list[Request]:
    """burst, with a JSON schema on every row that no answer completes."""
    return _with(burst(run), grammar=GrammarSpec("json", json.dumps(ENDLESS)))


def _with(requests: list[Request], **changes: Any) -> list[Request]:
    return [r._replace(params=msgspec.structs.replace(r.params, **changes)) for r in requests]


WORKS = {
    "burst": burst, "one": one, "prefill": prefill, "shared": shared, "penalties": penalties, "logprobs": logprobs,
    "schema": schema,
}  # fmt: skip


def request(rng: random.Random, prompt_len: int, max_tokens: int, temperature: float = 0.0) -> Request:
    params = SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=max_tokens)
    return Request([rng.randint(10, 9999) for _ in range(prompt_len)], params)


class Clock:
    """Device time of every step, from events on the engine's stream; read when the work is done."""

    def __init__(self) -> None:
        self._events: dict[int, dict[str, Any]] = {}
        self._zero: Any = None

    def attach(self, runner: Any) -> None:
        import torch

        def on_step(step: int, moment: str) -> None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record()
            self._events.setdefault(step, {})[moment] = event

        runner.on_step = on_step
        self.mark()

    def mark(self) -> float:
        """A device moment that take_steps() counts from, and the host's perf_counter at it, to some 20 us."""
        import torch

        self._zero = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._zero.record(torch.cuda.default_stream())
        self._zero.synchronize()
        return time.perf_counter()

    def take_steps(self) -> dict[int, tuple[float, float]]:
        """(begin, end) of each step in ms since mark(); forgets them."""
        events, self._events = self._events, {}
        whole = {step: event for step, event in sorted(events.items()) if len(event) == 2}
        for event in whole.values():
            event["end"].synchronize()
        zero = self._zero
        return {s: (zero.elapsed_time(e["begin"]), zero.elapsed_time(e["end"])) for s, e in whole.items()}

    def take(self) -> list[tuple[float, float]]:
        return list(self.take_steps().values())


class House(NamedTuple):
    llm: AsyncLLM
    runner: Any
    engine: Any
    clock: Clock
    overlap: bool
    ready_s: float


@asynccontextmanager
async def open_house(model: str, **options: Any) -> AsyncIterator[House]:
    """build.serving() with the runner in reach."""
    began_s = time.monotonic()
    engines: list[Engine] = []

    def make_engine(*args: Any, **kwargs: Any) -> Engine:
        engines.append(Engine(*args, **kwargs))
        return engines[-1]

    build.Engine = make_engine  # type: ignore[assignment,misc]
    async with build.serving(configs.make(model=model, **options)) as llm:
        engine: Any = engines[0]
        clock = Clock()
        if hasattr(engine.runner, "on_step"):
            clock.attach(engine.runner)
        overlap = engine._step == engine.overlap_step
        yield House(llm, engine.runner, engine, clock, overlap, time.monotonic() - began_s)


async def compiled(llm: AsyncLLM, request: Request) -> Request:
    return request._replace(params=await llm.compiled(request.params))


async def generate(llm: AsyncLLM, requests: list[Request]) -> tuple[float, int, list[float]]:
    """Seconds, output tokens, and each request's time to the first token."""

    async def read(request: Request) -> tuple[int, float]:
        async with llm.submit(request.prompt_ids, request.params) as stream:
            done = await stream.result()
        assert done.timings is not None
        return len(done.token_ids), done.timings.first_token_s - done.timings.arrival_s

    began_s = time.perf_counter()
    answers = await asyncio.gather(*(read(request) for request in requests))
    return time.perf_counter() - began_s, sum(n for n, _ in answers), [first_s for _, first_s in answers]


@contextmanager
def burning(share: float = 0.7, period_s: float = 0.01) -> Iterator[None]:
    """A thread of pure Python that wants `share` of a core."""
    stop = threading.Event()

    def burn() -> None:
        while not stop.is_set():
            until_s = time.perf_counter() + share * period_s
            while time.perf_counter() < until_s:
                pass
            time.sleep((1 - share) * period_s)

    thread = threading.Thread(target=burn, name="burner")
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


async def measure(house: House, work: str, runs: int) -> dict[str, Any]:
    figures: list[dict[str, float]] = []
    for _ in range(runs + 1):
        house.clock.take()
        requests = [await compiled(house.llm, request) for request in WORKS[work](next(_FRESH))]
        seconds, num_tokens, firsts_s = await generate(house.llm, requests)
        steps = house.clock.take()
        longest = max(request.params.max_tokens or 1 for request in requests)
        figures.append(
            {
                "tok_s": num_tokens / seconds,
                "seconds": seconds,
                "in_tok_s": sum(len(r.prompt_ids) for r in requests) / seconds,
                "ms_per_token": 1e3 * (seconds - max(firsts_s)) / max(1, longest - 1),
                "ttft_ms": 1e3 * statistics.median(firsts_s),
                "num_steps": len(steps),
                "occupancy": sum(end - begin for begin, end in steps) / (1e3 * seconds),
            }
        )
    steady = figures[1:]
    return {name: round(statistics.median(figure[name] for figure in steady), 4) for name in steady[0]} | {
        "first_tok_s": round(figures[0]["tok_s"], 1),
        "all_tok_s": [round(figure["tok_s"]) for figure in steady],
    }


def machine() -> dict[str, str]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"gpu": gpu, "torch": torch.__version__, "python": platform.python_version()}


async def run(args: argparse.Namespace) -> None:
    options = {name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.option)}
    async with open_house(args.model, overlap=args.overlap, **options) as house:
        base = machine() | {"model": Path(args.model).name, "overlap": house.overlap}
        base |= {"ready_s": round(house.ready_s, 1)}
        for work in args.work:
            for burn in (False, True) if args.burn else (False,):
                if burn:
                    with burning():
                        figures = await measure(house, work, args.runs)
                else:
                    figures = await measure(house, work, args.runs)
                print(json.dumps({"work": work, "burn": burn} | figures | base), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", nargs="+", default=["burst"], choices=tuple(WORKS))
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction)
    parser.add_argument("--burn", action="store_true", help="once more beside a thread that burns 70%% of a core")
    parser.add_argument("--option", nargs="*", default=[], help="Config fields as name=json")
    import uvloop

    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
