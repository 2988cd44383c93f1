"""The load generator: a plan of requests, sent from processes of its own, measured and reported.

Main thread of the caller, which blocks; each process has a loop. It never knows the server's insides.

The processes get their share of the plan, wait for one common start, and count bytes (probe.py). Arrivals
at a rate are open-loop: a slow server does not slow the next request down.
"""

import asyncio
import json
import multiprocessing
import os
import random
import shlex
import ssl
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from . import report
from .client import AsyncClient
from .errors import APIError
from .probe import Measured, Pool
from .replies import Reply

FIRST_TOKEN_ID = 1000  # below are bytes and control tokens, in most vocabularies
_START_DELAY_S = 0.2  # between "all are ready" and the first request, for the word to get around
_WORDS = (
    "the of and to in is was for on that with as his they at be this had not are but from or have an one all "
    "were her she there would their we him been has when who will more no if out so said what up its about into"
).split()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests arrive: all at once ("rate", inf), at a Poisson rate, or `value` at a time."""

    kind: Literal["rate", "concurrency"]
    value: float


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark. Lengths are tokens, from and to, drawn evenly."""

    url: str
    loads: tuple[Load, ...] = (Load(kind="rate", value=float("inf")),)
    api_key: str | None = None
    model: str | None = None  # None: the first that the server names
    endpoint: Literal["completions", "chat"] = "completions"
    prompt: Literal["ids", "text"] | None = None  # text: about as many words; None: ids where they can be
    num_requests: int = 256
    prompt_len: tuple[int, int] = (512, 512)
    output_len: tuple[int, int] = (128, 128)
    shared_prefix_len: int = 0  # more tokens, the same before each prompt
    vocab_size: int = 10_000
    temperature: float = 0.0
    ignore_eos: bool = True
    goodput_ms: dict[str, float] = msgspec.field(default_factory=dict)
    num_processes: int | None = None
    num_warmup: int = 1
    seed: int = 0
    plot: Path | None = None


class Planned(msgspec.Struct, frozen=True):
    at_s: float  # after the start
    body: bytes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process's share."""

    host: str
    port: int
    tls: bool
    head: bytes  # of every request, up to its length
    requests: list[Planned]
    concurrency: int | None


class Done(msgspec.Struct, frozen=True, kw_only=True):
    measured: list[Measured]
    cpu_s: float


def bench(options: Options) -> list[dict[str, Any]]:
    """Run every load in turn; prints a JSON line for each as it is done, and returns them.

    Raises:
        APIError: the server cannot be asked for its models.
        ValueError: options that do not go together.
    """
    if options.prompt == "ids" and options.endpoint == "chat":
        raise ValueError("a chat takes no token ids; use text prompts")
    prompt = options.prompt or ("text" if options.endpoint == "chat" else "ids")
    options, server = asyncio.run(_look(msgspec.structs.replace(options, prompt=prompt)))
    runs = []
    with Processes(options.num_processes or default_processes()) as processes:
        if options.num_warmup:
            warmup = msgspec.structs.replace(options, num_requests=options.num_warmup, seed=options.seed + 1)
            processes.run(jobs(warmup, Load(kind="rate", value=float("inf")), 1))
        for load in options.loads:
            measured, numbers = processes.run(jobs(options, load, processes.num))
            runs.append(_line(options, server, load) | numbers | _numbers(measured, options))
            print(json.dumps(runs[-1]), flush=True)
    _plot(runs, options.plot)
    return runs


def default_processes() -> int:
    """Half the cores, four at most: one does 30,000 events a second and more."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


# -- the plan --


def jobs(options: Options, load: Load, num: int) -> list[Job]:
    """The plan, dealt out. Every request is made before the first is sent."""
    parts = urlsplit(options.url)
    requests = [Planned(at_s, body) for at_s, body in zip(arrivals(options, load), bodies(options), strict=True)]
    is_closed = load.kind == "concurrency"
    num = min(num, max(1, int(load.value))) if is_closed else num
    return [
        Job(
            host=parts.hostname or "",
            port=parts.port or (443 if parts.scheme == "https" else 80),
            tls=parts.scheme == "https",
            head=_head(options),
            requests=requests[i::num],
            concurrency=len(range(i, int(load.value), num)) if is_closed else None,
        )
        for i in range(num)
    ]


def arrivals(options: Options, load: Load) -> list[float]:
    """Seconds after the start. Poisson gaps, stretched so that the whole has exactly the rate, as vLLM does it."""
    num = options.num_requests
    if load.kind == "concurrency" or load.value == float("inf"):
        return [0.0] * num
    generator = random.Random(options.seed)
    times = [0.0]
    for _ in range(num - 1):
        times.append(times[-1] + generator.expovariate(load.value))
    stretch = (num - 1) / load.value / times[-1] if num > 1 else 1.0
    return [at_s * stretch for at_s in times]


def bodies(options: Options) -> Iterator[bytes]:
    """The JSON of each request; the same for the same seed."""
    generator = random.Random(options.seed)
    prefix = _tokens(options, generator, options.shared_prefix_len)
    for _ in range(options.num_requests):
        prompt = prefix + _tokens(options, generator, generator.randint(*options.prompt_len))
        yield msgspec.json.encode(
            {
                "model": options.model,
                **_prompt(options, prompt),
                "max_tokens": generator.randint(*options.output_len),
                "temperature": options.temperature,
                "ignore_eos": options.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def _tokens(options: Options, generator: random.Random, num: int) -> list[Any]:
    if options.prompt == "text":
        return generator.choices(_WORDS, k=num)
    return [generator.randrange(min(FIRST_TOKEN_ID, options.vocab_size // 2), options.vocab_size) for _ in range(num)]


def _prompt(options: Options, tokens: list[Any]) -> dict[str, Any]:
    prompt = " ".join(tokens) if options.prompt == "text" else tokens
    if options.endpoint == "chat":
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"prompt": prompt}


def _head(options: Options) -> bytes:
    parts = urlsplit(options.url)
    path = f"{parts.path}/{'chat/' if options.endpoint == 'chat' else ''}completions"
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
    ]
    if options.api_key:
        lines.append(f"Authorization: Bearer {options.api_key}")
    return "\r\n".join(lines).encode()


# -- the processes --


class Processes:
    """Processes that wait for work; a context manager, at whose end they leave."""

    def __init__(self, num: int) -> None:
        self.num = num
        # spawn: a fork would copy this process's threads and loop. Started once, not for each load.
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Pipe] = []
        self._processes = []
        for _ in range(num):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, work: list[Job]) -> tuple[list[Measured], dict[str, Any]]:
        """All requests of a plan, and what the clients themselves cost."""
        pipes = self._pipes[: len(work)]
        for pipe, job in zip(pipes, work, strict=True):
            pipe.send_bytes(msgspec.msgpack.encode(job))
        for pipe in pipes:
            pipe.recv_bytes()  # ready: the job is decoded
        start_s = time.monotonic() + _START_DELAY_S
        for pipe in pipes:
            pipe.send_bytes(msgspec.msgpack.encode(start_s))
        done = [msgspec.msgpack.decode(pipe.recv_bytes(), type=Done) for pipe in pipes]
        measured = [one for part in done for one in part.measured]
        duration_s = max([one.last_s for one in measured], default=start_s) - start_s
        busy = max(part.cpu_s for part in done) / duration_s if duration_s > 0 else 0.0
        # Near 1 a client process was the bottleneck, and the run says nothing about the server.
        return measured, {"num_processes": len(work), "client_busy": round(busy, 3)}

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join()
            process.close()


def _work(pipe: Pipe) -> None:
    """A process: jobs from the pipe until it is closed."""
    try:
        while True:
            job = msgspec.msgpack.decode(pipe.recv_bytes(), type=Job)
            pipe.send_bytes(b"ready")
            start_s = msgspec.msgpack.decode(pipe.recv_bytes(), type=float)
            pipe.send_bytes(msgspec.msgpack.encode(_run(job, start_s)))
    except (EOFError, KeyboardInterrupt):
        pass


def _run(job: Job, start_s: float) -> Done:
    cpu_s = time.process_time()
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        measured = runner.run(send(job, start_s))
    return Done(measured=measured, cpu_s=time.process_time() - cpu_s)


def _loop_factory() -> Any:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


async def send(job: Job, start_s: float) -> list[Measured]:
    """One process's requests, from the common start on."""
    pool = Pool(job.host, job.port, ssl.create_default_context() if job.tls else None)
    waiting = deque((planned.at_s + start_s, _request(job, planned)) for planned in job.requests)
    await _until(start_s)
    try:
        if job.concurrency is not None:
            return await _closed_loop(pool, waiting, job.concurrency)
        return await _open_loop(pool, waiting)
    finally:
        pool.close()


async def _open_loop(pool: Pool, waiting: "deque[tuple[float, bytes]]") -> list[Measured]:
    tasks = []
    for at_s, request in waiting:
        await _until(at_s)
        tasks.append(asyncio.create_task(pool.ask(request, at_s)))
    return await asyncio.gather(*tasks)


async def _closed_loop(pool: Pool, waiting: "deque[tuple[float, bytes]]", concurrency: int) -> list[Measured]:
    measured: list[Measured] = []

    async def one_after_another() -> None:
        while waiting:
            _, request = waiting.popleft()
            measured.append(await pool.ask(request, time.monotonic()))

    await asyncio.gather(*[one_after_another() for _ in range(concurrency)])
    return measured


async def _until(at_s: float) -> None:
    if (wait_s := at_s - time.monotonic()) > 0:
        await asyncio.sleep(wait_s)


def _request(job: Job, planned: Planned) -> bytes:
    return b"%b\r\nContent-Length: %d\r\n\r\n%b" % (job.head, len(planned.body), planned.body)


# -- the report --


class _Version(Reply, kw_only=True):
    version: str | None = None


async def _look(options: Options) -> tuple[Options, dict[str, Any]]:
    """The options with the server's address and model made out, and what the server says it is."""
    async with AsyncClient(options.url, options.api_key) as client:
        model = options.model or (await client.models.list()).data[0].id
        try:
            version = (await client._api.root().whole(_Version, "GET", "/version")).version
        except APIError:
            version = None  # only some have it
        return (
            msgspec.structs.replace(options, url=client.base_url, model=model),
            {"url": client.base_url, "model": model, "version": version},
        )


def _line(options: Options, server: dict[str, Any], load: Load) -> dict[str, Any]:
    asked = ("endpoint", "prompt", "prompt_len", "output_len", "shared_prefix_len", "temperature", "ignore_eos", "seed")
    return {
        "command": shlex.join(sys.argv),
        **report.where(),
        "server": server,
        "load": {"kind": load.kind, "value": "inf" if load.value == float("inf") else load.value},
        "requests": {name: getattr(options, name) for name in asked},
    }


def _numbers(measured: Sequence[Measured], options: Options) -> dict[str, Any]:
    start_s = min([one.sent_s for one in measured], default=0.0)
    end_s = max([one.last_s for one in measured], default=start_s)
    return report.summary(measured, max(0.0, end_s - start_s), options.goodput_ms)


def _plot(runs: Sequence[dict[str, Any]], path: Path | None) -> None:
    if path is None:
        return
    try:
        report.plot(runs, path)
    except ImportError:
        print(f"no {path}: the plot needs matplotlib, which is not installed", file=sys.stderr)
