"""The load generator: a plan of requests, sent from processes of its own, measured and reported.

Main thread of the caller, which blocks; each process has a loop. It never knows the server's insides.

The processes get their share of the plan, wait for one common start, and count bytes (probe.py). Arrivals
at a rate are open-loop: a slow server does not slow the next request down.
"""

import asyncio
import gc
import json
import multiprocessing
import os
import ssl
import sys
import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec

from . import report
from .client import AsyncClient
from .errors import APIError
from .plan import WORDS, Job, Load, Options, Planned, Wording, jobs, settle
from .probe import Pool
from .replies import Reply
from .socket_probe import SocketPool
from .tally import Measured

_START_DELAY_S = 0.2  # between "all are ready" and the first request, for the word to get around


class Done(msgspec.Struct, frozen=True, kw_only=True):
    """What a process answers."""

    measured: list[Measured]
    cpu_s: float


def bench(options: Options) -> list[dict[str, Any]]:
    """Run every load in turn; prints a JSON line for each as it is done, and returns them.

    Raises:
        APIError: the server cannot be asked for its models.
        ValueError: options that do not go together, or a plot without matplotlib.
    """
    if options.plot is not None:
        report.check_plot()
    options, server = asyncio.run(_look(settle(options)))
    runs = []
    with Processes(options.num_processes or default_processes()) as processes:
        if options.num_warmup:
            warmup = msgspec.structs.replace(options, num_requests=options.num_warmup)
            processes.run(jobs(warmup, Load(kind="rate", value=float("inf")), 1, run=-1))
        for run, load in enumerate(options.loads):
            measured, numbers = processes.run(jobs(options, load, processes.num, run))
            runs.append(_line(options, server, load) | numbers | _numbers(measured, options))
            print(json.dumps(runs[-1]), flush=True)
    if options.plot is not None:
        report.plot(runs, options.plot)
    return runs


def default_processes() -> int:
    """Half the cores, four at most: one does 30,000 events a second and more."""
    return max(1, min(4, (os.cpu_count() or 1) // 2))


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
        try:
            done = [msgspec.msgpack.decode(pipe.recv_bytes(), type=Done) for pipe in pipes]
        except EOFError:
            raise RuntimeError("a client process has died; its own traceback is above") from None
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
    """A process: jobs from the pipe until it is closed. Garbage is collected between them: a collection beside them
    would be taken for the server's time."""
    gc.disable()
    try:
        while True:
            gc.collect()
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
    tls = ssl.create_default_context() if job.tls else None
    pool: Pool | SocketPool = (
        Pool(job.host, job.port, tls) if job.lanes is None else SocketPool(job.host, job.port, tls, job.head, job.lanes)
    )
    waiting = deque((planned.at_s + start_s, _request(job, planned)) for planned in job.requests)
    await _until(start_s)
    try:
        if job.concurrency is not None:
            return await _closed_loop(pool, waiting, job.concurrency)
        return await _open_loop(pool, waiting)
    finally:
        pool.close()


async def _open_loop(pool: Pool | SocketPool, waiting: "deque[tuple[float, bytes]]") -> list[Measured]:
    measured: list[Measured] = []

    async def one(request: bytes, at_s: float) -> None:
        measured.append(await pool.ask(request, at_s))

    async with asyncio.TaskGroup() as asking:  # not gather(): for 20,000 that are done it takes 50 ms, beside the last
        for at_s, request in waiting:
            await _until(at_s)
            asking.create_task(one(request, at_s))
    return measured


async def _closed_loop(
    pool: Pool | SocketPool, waiting: "deque[tuple[float, bytes]]", concurrency: int
) -> list[Measured]:
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
    if job.lanes is not None:
        return planned.body
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
        options = msgspec.structs.replace(options, url=client.base_url, model=model)
        if options.prompt == "text":
            options = msgspec.structs.replace(options, wording=await _wording(client, options))
        return options, {"url": client.base_url, "model": model, "version": version}


async def _wording(client: AsyncClient, options: Options) -> Wording:
    """What the server counts for our words, and for a chat's template around them."""
    once = await _prompt_tokens(client, options, " ".join(WORDS))
    twice = await _prompt_tokens(client, options, " ".join([*WORDS, *WORDS]))
    if twice <= once:
        print("the server does not count prompts: they have a word for each token asked for", file=sys.stderr)
        return Wording()
    return Wording(around=once - (twice - once), of_word=(twice - once) / len(WORDS))


async def _prompt_tokens(client: AsyncClient, options: Options, text: str) -> int:
    """0: it does not say."""
    few = 16  # OpenAI's responses refuse less
    if options.endpoint == "responses":
        response = await client.responses.create(model=options.model, input=text, max_output_tokens=few, store=False)
        return response.usage.input_tokens if response.usage else 0
    if options.endpoint == "chat":
        messages = [{"role": "user", "content": text}]
        chat = await client.chat.completions.create(model=options.model, messages=messages, max_tokens=few)
        return chat.usage.prompt_tokens if chat.usage else 0
    completion = await client.completions.create(model=options.model, prompt=text, max_tokens=few)
    return completion.usage.prompt_tokens if completion.usage else 0


def _line(options: Options, server: dict[str, Any], load: Load) -> dict[str, Any]:
    asked = (
        "transport", "lanes", "endpoint", "prompt", "prompt_len", "output_len", "shared_prefix_len", "temperature",
        "ignore_eos", "seed",
    )  # fmt: skip
    return {
        **report.where(),
        "server": server,
        "load": {"kind": load.kind, "value": "inf" if load.value == float("inf") else load.value},
        "requests": {name: getattr(options, name) for name in asked},
    }


def _numbers(measured: Sequence[Measured], options: Options) -> dict[str, Any]:
    start_s = min([one.sent_s for one in measured], default=0.0)
    end_s = max([one.last_s for one in measured], default=start_s)
    return report.summary(measured, max(0.0, end_s - start_s), options.goodput_ms)
