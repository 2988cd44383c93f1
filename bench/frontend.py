"""What an event costs on its way from the engine to the socket: our server, Starlette on uvicorn, plain aiohttp.

    python bench/frontend.py --streams 256 --step-ms 16
    python bench/frontend.py --streams 1,64,256,1024,4096 --transport ws --sides ours
    python bench/frontend.py --streams 256 --step-ms 4 --idle 4096 --sides ours

Each server runs in a process of its own, with a fake engine in a thread of its own that makes one token a
stream every step; the client is this process. A server's CPU is its process's less its fake engine's. One
JSON line for each number of streams. Starlette and uvicorn come with the extra `bench`.
"""

import argparse
import asyncio
import importlib.metadata
import json
import os
import platform
import re
import resource
import shlex
import statistics
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvloop

NUM_WORDS = 10_000
WARMUP_S = 1.5
ENDLESS = 10_000_000
_WORD = re.compile(rb"tok(\d{4})")

Deliver = Callable[[str], None]


# -- the servers, each in its own process --


class Ticker:
    """A fake engine: every step, whatever `step` does, from a thread of its own."""

    def __init__(self, step_s: float, step: Callable[[int], None]) -> None:
        self.put_s: deque[tuple[int, float]] = deque(maxlen=NUM_WORDS // 2)  # word, when it was put
        self.cpu_s = 0.0
        self._step_s = step_s
        self._step = step
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        number, due_s = 0, time.monotonic()
        while True:
            due_s = max(due_s + self._step_s, time.monotonic())
            time.sleep(max(0.0, due_s - time.monotonic()))
            number = (number + 1) % NUM_WORDS
            self.put_s.append((number, time.monotonic()))
            self._step(number)
            self.cpu_s = time.thread_time()


class Lag:
    """How late a timer of 5 ms is."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._loop = asyncio.get_running_loop()
        self._again()

    def _again(self) -> None:
        self._loop.call_later(5e-3, self._look, time.monotonic() + 5e-3)

    def _look(self, due_s: float) -> None:
        self.late_s.append(max(0.0, time.monotonic() - due_s))
        self._again()


def answer_marks(ticker: Ticker, more: Callable[[], dict[str, Any]] = dict) -> None:
    """For each line on stdin, say what has been used since the start."""
    lag = Lag()

    def mark() -> None:
        if not os.read(0, 4096):
            os._exit(0)
        late, lag.late_s = lag.late_s, []
        said = {
            "process_s": time.process_time(), "loop_s": time.thread_time(), "engine_s": ticker.cpu_s,
            "kernel_s": os.times().system,
            "late_s": late, "put_s": list(ticker.put_s), **more(),
        }  # fmt: skip
        print(json.dumps(said), flush=True)

    asyncio.get_running_loop().add_reader(0, mark)


def words() -> Any:
    """A tokenizer whose first ids are the words that the fake engine says; the others are bytes."""
    import tokenizers

    from asyncllm.text.tokenizer import Tokenizer

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*(f"Ġtok{i:04d}" for i in range(NUM_WORDS)), *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        return Tokenizer.from_folder(Path(folder))


async def serve_ours(args: argparse.Namespace) -> None:
    from asyncllm.bridge import Abort, Deltas, Inbox, Outbox, Submit, Token
    from asyncllm.llm import AsyncLLM
    from asyncllm.server.app import listening
    from asyncllm.server.settings import Settings
    from asyncllm.text.chat import ChatTemplate
    from asyncllm.types import EngineLimits

    inbox, outbox = Inbox(20_000), Outbox()
    limits = EngineLimits(
        vocab_size=NUM_WORDS + 256, max_model_len=ENDLESS, max_prompt_len=99, max_running=10_000, max_waiting=0
    )
    template = ChatTemplate("{{ messages[-1].content }}")
    llm = AsyncLLM(
        inbox=inbox, outbox=outbox, limits=limits, tokenizer=words(), chat_template=template, model_name="fake",
        pace=args.pace,
    )  # fmt: skip
    rows: dict[str, list[Any]] = {}  # what is told of each, as the engine keeps it too, and how many tokens it has

    def step(word: int) -> None:
        for message in inbox.drain():
            if isinstance(message, Submit):
                name = message.submission.request_id
                rows[name] = [(name, 1, 0), 0]
            elif isinstance(message, Abort):
                rows.pop(message.request_id, None)
        tokens: list[Token] = []
        for row in rows.values():
            row[1] += 1
            tokens.append((row[0], word, row[1]))
        if tokens:
            outbox.put(Deltas(tokens))

    settings = Settings(send_timeout_s=args.send_timeout_s, heartbeat_s=1e6)  # the client here answers no ping
    async with listening(llm, port=0, settings=settings) as url:
        print(json.dumps({"port": int(url.rsplit(":", 1)[1])}), flush=True)
        pace = llm.pace
        answer_marks(
            Ticker(args.step_ms / 1e3, step),
            lambda: {
                "num_flushes": pace.num_flushes, "gathering": pace.gathering, "num_turns": pace.num_turns,
                "num_live": llm.num_live, "num_unread_bytes": llm.num_unread_bytes,
            },  # fmt: skip
        )
        await asyncio.Event().wait()


class Queues:
    """What the others have for an engine: one wake-up a step, a queue a stream."""

    def __init__(self, step_s: float) -> None:
        self.queues: set[asyncio.Queue[str]] = set()
        loop = asyncio.get_running_loop()
        self.ticker = Ticker(step_s, lambda word: loop.call_soon_threadsafe(self._deliver, word) and None)

    def _deliver(self, word: int) -> None:
        for queue in self.queues:
            queue.put_nowait(f" tok{word:04d}")


def chunk(text: str) -> str:
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None}
    body = {"id": "cmpl-0123456789abcdef", "object": "text_completion", "created": 1, "model": "fake"}
    return json.dumps({**body, "choices": [choice]})


def delta(text: str, number: int) -> str:
    place = {"item_id": "msg_0123456789abcdef", "output_index": 0, "content_index": 0, "logprobs": []}
    return json.dumps({"type": "response.output_text.delta", **place, "delta": text, "sequence_number": number})


async def serve_aiohttp(args: argparse.Namespace) -> None:
    from aiohttp import web

    queues = Queues(args.step_ms / 1e3)

    async def sse(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        queues.queues.add(queue := asyncio.Queue())
        try:
            while True:
                await response.write(f"data: {chunk(await queue.get())}\n\n".encode())
        finally:
            queues.queues.discard(queue)

    async def ws(request: web.Request) -> web.StreamResponse:
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        await socket.receive()
        queues.queues.add(queue := asyncio.Queue())
        number = 0
        try:
            while True:
                await socket.send_str(delta(await queue.get(), number := number + 1))
        finally:
            queues.queues.discard(queue)

    app = web.Application()
    app.add_routes([web.post("/v1/completions", sse), web.get("/v1/responses", ws)])
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    answer_marks(queues.ticker)
    await asyncio.Event().wait()


async def serve_starlette(args: argparse.Namespace) -> None:
    import socket

    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route, WebSocketRoute
    from starlette.websockets import WebSocket

    queues = Queues(args.step_ms / 1e3)

    async def sse(request: Request) -> StreamingResponse:
        async def events() -> Any:
            queues.queues.add(queue := asyncio.Queue())
            try:
                while True:
                    yield f"data: {chunk(await queue.get())}\n\n"
            finally:
                queues.queues.discard(queue)

        return StreamingResponse(events(), media_type="text/event-stream")

    async def ws(websocket: WebSocket) -> None:
        await websocket.accept()
        await websocket.receive_text()
        queues.queues.add(queue := asyncio.Queue())
        number = 0
        try:
            while True:
                await websocket.send_text(delta(await queue.get(), number := number + 1))
        finally:
            queues.queues.discard(queue)

    app = Starlette(routes=[Route("/v1/completions", sse, methods=["POST"]), WebSocketRoute("/v1/responses", ws)])
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    print(json.dumps({"port": listener.getsockname()[1]}), flush=True)
    answer_marks(queues.ticker)
    config = uvicorn.Config(app, http="httptools", access_log=False, log_level="critical", ws_per_message_deflate=False)
    await uvicorn.Server(config).serve(sockets=[listener])


class FloorStream(asyncio.Protocol):
    """A connection that is written to as soon as it has asked."""

    def __init__(self, transports: set[Any]) -> None:
        self._transports = transports

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transports.add(self._transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._transports.discard(self._transport)


async def serve_floor(args: argparse.Namespace) -> None:
    """As many bytes, made once for all: what the kernel and one Python call a write take, whoever calls."""
    from asyncllm.wire.frames import text_frame

    loop = asyncio.get_running_loop()
    transports: set[Any] = set()

    def write(word: int) -> None:
        if args.transport == "ws":
            data = text_frame(delta(f" tok{word:04d}", word).encode())
        else:
            event = f"data: {chunk(f' tok{word:04d}')}\n\n".encode()
            data = b"%x\r\n%b\r\n" % (len(event), event)
        for transport in transports:
            transport.write(data)

    server = await loop.create_server(lambda: FloorStream(transports), "127.0.0.1", 0, backlog=4096)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    answer_marks(Ticker(args.step_ms / 1e3, lambda word: loop.call_soon_threadsafe(write, word) and None))
    await asyncio.Event().wait()


SERVERS = {"ours": serve_ours, "starlette": serve_starlette, "aiohttp": serve_aiohttp, "floor": serve_floor}
SSE = b'{"prompt": [1], "stream": true, "max_tokens": 9000000}'
CREATE = b'{"type": "response.create", "input": "x", "max_output_tokens": 9000000}'
UPGRADE = (
    b"GET /v1/responses HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


# -- the client --


class Stream(asyncio.Protocol):
    """One stream: counts events; the first stream also notes when each word came."""

    def __init__(self, transport_kind: str, *, timed: bool, idle: bool) -> None:
        self.num_events = self.num_bytes = 0
        self.arrived_s: dict[int, float] = {}
        self.lost = False
        self._ws = transport_kind == "ws"
        self._mark = b"output_text.delta" if self._ws else b"data: "
        self._per_event = 1
        self._timed = timed
        self._idle = idle
        self._begun = False

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        if self._ws:
            transport.write(UPGRADE)
        elif not self._idle:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            transport.write(head + b"Content-Length: %d\r\n\r\n" % len(SSE) + SSE)

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True

    def data_received(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            if self._ws and not self._idle:
                self._transport.write(b"\x81" + bytes([0x80 | len(CREATE)]) + bytes(4) + CREATE)  # masked with noughts
        self.num_bytes += len(data)
        self.num_events += data.count(self._mark)
        if self._timed:
            now_s = time.monotonic()
            for word in _WORD.findall(data):
                self.arrived_s[int(word)] = now_s


class Server:
    """A server's process, and what it says."""

    async def start(self, side: str, args: argparse.Namespace) -> None:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--serve", side, "--step-ms", str(args.step_ms), "--pace", args.pace,
            "--transport", args.transport, "--send-timeout-s", str(args.send_timeout_s),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 24,
        )  # fmt: skip
        self.port = (await self._line())["port"]

    async def mark(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        return await self._line()

    async def stop(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def _line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())


async def measure(side: str, num_streams: int, args: argparse.Namespace) -> dict[str, Any]:
    server = Server()
    await server.start(side, args)
    try:
        idle = [await connect(server, Stream(args.transport, timed=False, idle=True)) for _ in range(args.idle)]
        streams = [
            await connect(server, Stream(args.transport, timed=i == 0, idle=False)) for i in range(num_streams)
        ]
        await asyncio.sleep(WARMUP_S)
        before, counted, client_s = await server.mark(), [one.num_events for one in streams], time.process_time()
        start_s = time.monotonic()
        streams[0].arrived_s.clear()
        await asyncio.sleep(args.seconds)
        after, wall_s = await server.mark(), time.monotonic() - start_s
        events = [one.num_events - count for one, count in zip(streams, counted, strict=True)]
        lost = sum(one.lost for one in streams + idle)
        return {"side": side} | numbers(before, after, events, wall_s, streams[0], args) | {
            "num_lost": lost, "client_share": round((time.process_time() - client_s) / wall_s, 3),
        }  # fmt: skip
    finally:
        await server.stop()


async def connect(server: Server, stream: Stream) -> Stream:
    await asyncio.get_running_loop().create_connection(lambda: stream, "127.0.0.1", server.port)
    return stream


def numbers(
    before: dict[str, Any], after: dict[str, Any], events: list[int], wall_s: float, timed: Stream,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    used = {name: after[name] - before[name] for name in ("process_s", "loop_s", "engine_s", "kernel_s")}
    server_s, num_events = used["process_s"] - used["engine_s"], max(1, sum(events))
    put_s = {word: at_s for word, at_s in after["put_s"] if word in timed.arrived_s}
    num_tokens = len(put_s) * len(events)
    waits_ms = sorted(1e3 * (timed.arrived_s[word] - at_s) for word, at_s in put_s.items())
    return {
        "server_us_per_event": round(1e6 * server_s / num_events, 2),
        "loop_us_per_event": round(1e6 * used["loop_s"] / num_events, 2),
        "kernel_us_per_event": round(1e6 * used["kernel_s"] / num_events, 2),
        "server_us_per_token": round(1e6 * server_s / max(1, num_tokens), 2),
        "server_share": round(server_s / wall_s, 3),
        "events_per_s": round(num_events / wall_s),
        "tokens_per_s": round(num_tokens / wall_s),
        "lag_ms": _quantiles([1e3 * late_s for late_s in after["late_s"]]),
        "commit_to_client_ms": _quantiles(waits_ms),
        "fewest_events": min(events),
        **{name: after[name] for name in ("gathering", "num_turns") if name in after},
    }


def _quantiles(values: list[float]) -> dict[str, float]:
    if len(values) < 2:
        return {}
    cuts = statistics.quantiles(values, n=100)
    return {"p50": round(cuts[49], 2), "p99": round(cuts[98], 2), "max": round(max(values), 2)}


def where() -> dict[str, Any]:
    names = ("aiohttp", "uvloop", "orjson", "msgspec", "starlette", "uvicorn")
    versions = {"python": platform.python_version()}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    hardware = {"machine": platform.machine(), "kernel": platform.release(), "cpus": os.cpu_count()}
    return {"command": shlex.join(sys.argv), "versions": versions, "hardware": hardware}


async def bench(args: argparse.Namespace) -> None:
    for num_streams in args.streams:
        sides = [await measure(side, num_streams, args) for side in args.sides]
        load = {"streams": num_streams, "step_ms": args.step_ms, "transport": args.transport, "idle": args.idle}
        line: dict[str, Any] = {**where(), "load": load, "pace": args.pace, "sides": sides}
        by_side = {one["side"]: one["server_us_per_event"] for one in sides}
        if "ours" in by_side:
            others = [(name, cost) for name, cost in by_side.items() if name != "ours"]
            line["floor_us"] = by_side.get("floor")
            line["ours_to"] = {name: round(by_side["ours"] / cost, 3) for name, cost in others}
        print(json.dumps(line), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=lambda text: [int(part) for part in text.split(",")], default=[256])
    parser.add_argument("--step-ms", type=float, default=16.0)
    parser.add_argument("--transport", choices=("sse", "ws"), default="sse")
    parser.add_argument("--idle", type=int, default=0, help="connections that ask for nothing")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--sides", type=lambda text: text.split(","), default=list(SERVERS))
    parser.add_argument("--pace", choices=("adaptive", "every_step", "gather"), default="adaptive", help="ours")
    parser.add_argument("--send-timeout-s", type=float, default=30.0, help=argparse.SUPPRESS)  # bench/stuck.py's
    parser.add_argument("--serve", choices=tuple(SERVERS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sys.setswitchinterval(5e-4)
    uvloop.run(SERVERS[args.serve](args) if args.serve else bench(args))


if __name__ == "__main__":
    main()
