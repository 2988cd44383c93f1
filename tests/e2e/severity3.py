"""The gravest bug reports about servers like this one, tried on the running process: `make cases`.

Each test has the id of its case. The quick suite has the same cases inside one process (tests/server/test_cases_*);
here all is real: a process, sockets, a model of real (tiny) weights, neighbours whose answers must not change.
GRAPH-1 needs a GPU: tests/gpu.
"""

import asyncio
import io
import json
import random
import signal
import socket
import struct
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.process import ServerProcess
from tests.tiny import make_checkpoint

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT = 4096
HI = [{"role": "user", "content": "x"}]
BUSY = ("requests_live", "requests_running", "requests_waiting", "kv_pages_used")
BOTH = pytest.mark.parametrize("stream", [False, True])
PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", max_position_embeddings=CONTEXT)


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    flags = ("--max-running", "32", "--max-waiting", "6000", "--kv-cache-bytes", str(256 << 20))
    with ServerProcess(str(checkpoint), *flags, "--queue-timeout-seconds", "0", "--log-level", "warning") as running:
        yield running
        assert "Traceback" not in running.stderr(), running.stderr()


class Client:
    def __init__(self, server: ServerProcess, session: aiohttp.ClientSession) -> None:
        self.server, self.session = server, session

    async def post(self, path: str, body: Any) -> tuple[int, Any, bytes]:
        """Status, JSON (of an answer, or the joined text of a stream), and the raw bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        url = self.server.url + path
        async with self.session.post(url, data=io.BytesIO(data), headers=headers) as reply:
            raw = await reply.read()
            if reply.content_type != "text/event-stream":
                return reply.status, json.loads(raw), raw
            return reply.status, _joined(raw), raw

    async def greedy(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> Any:
        asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True} | fields
        status, answer, raw = await self.post(TEXT, asked)
        assert status == 200, raw
        return answer

    async def text(self, prompt: Any, max_tokens: int = 16, **fields: Any) -> str:
        return str((await self.greedy(prompt, max_tokens, **fields))["choices"][0]["text"])

    async def refused(self, path: str, body: Any, param: str | None = None) -> Any:
        """A JSON error of 4xx, before any event."""
        status, answer, raw = await self.post(path, body)
        assert 400 <= status < 500, (body if len(str(body)) < 300 else path, status, raw[:300])
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        assert "Traceback" not in raw.decode() and "/work" not in raw.decode()
        if param is not None:
            assert str(answer["error"]["param"]).startswith(param), (param, answer)
        return answer["error"]

    async def metrics(self) -> dict[str, float]:
        return await asyncio.to_thread(self.server.metrics)

    async def alive(self) -> None:
        began_s = time.monotonic()
        assert (await asyncio.to_thread(self.server.get, "/health"))["status"] == "ok"
        await self.greedy("alive?", 1)
        assert time.monotonic() - began_s < 5

    async def idle(self) -> None:
        deadline_s = time.monotonic() + 10
        while True:
            seen = await self.metrics()
            if not any(seen[name] for name in BUSY):
                return
            assert time.monotonic() < deadline_s, seen
            await asyncio.sleep(0.05)

    def raw(self) -> socket.socket:
        return self.server.connect()


def _joined(raw: bytes) -> dict[str, Any]:
    """A stream as one answer."""
    events = [line[6:] for line in raw.decode().splitlines() if line.startswith("data: ")]
    chunks = [json.loads(event) for event in events if event != "[DONE]"]
    if any("error" in chunk for chunk in chunks):
        return {"error": chunks[-1]["error"]}
    assert events[-1] == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    return {"choices": [{"text": text, "finish_reason": reasons[-1]}]}


@asynccontextmanager
async def using(server: ServerProcess) -> AsyncIterator[Client]:
    """A client; afterwards the server is alive and idle."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
        client = Client(server, session)
        yield client
        await client.alive()
        await client.idle()


@asynccontextmanager
async def neighbours(client: Client) -> AsyncIterator[None]:
    """Four greedy streams beside what happens; their text is what it is alone."""
    alone = [await client.text(f"neighbour {i}", 300) for i in range(4)]
    tasks = [asyncio.create_task(client.text(f"neighbour {i}", 300, stream=True)) for i in range(4)]
    yield
    assert await asyncio.gather(*tasks) == alone


@asynccontextmanager
async def polled(client: Client, worst_s: float) -> AsyncIterator[None]:
    """/health every 50 ms meanwhile; no answer takes longer than that."""
    gaps: list[float] = []
    going = True

    async def poll() -> None:
        while going:
            began_s = time.monotonic()
            async with client.session.get(client.server.url + "/health") as reply:
                assert reply.status == 200
            gaps.append(time.monotonic() - began_s)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(poll())
    yield
    going = False
    await task
    assert max(gaps) < worst_s, max(gaps)


def send(connection: socket.socket, path: str, body: Any) -> None:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)


def close(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


async def test_sse_3_errors_before_the_first_event_are_plain(server: ServerProcess) -> None:
    async with using(server) as client:
        for fields in (
            {"n": 0}, {"max_tokens": -1}, {"response_format": {"type": "json_schema"}}, {"prompt": "0a" * 9000},
        ):  # fmt: skip
            began_s = time.monotonic()
            await client.refused(TEXT, {"prompt": "x", "stream": True} | fields)
            assert time.monotonic() - began_s < 1


async def test_abort_1_three_hundred_closed_streams_leave_no_ghosts(server: ServerProcess) -> None:
    async with using(server) as client:
        long = {"prompt": "ghost", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        for group in range(15):
            connections = [client.raw() for _ in range(20)]
            for connection in connections:
                send(connection, TEXT, long | {"prompt": f"ghost {group}"})
            for i, connection in enumerate(connections):
                await asyncio.to_thread(connection.recv, 500)
                close(connection, reset=bool(i % 2))
        began_s = time.monotonic()
        await client.idle()
        assert time.monotonic() - began_s < 2


@BOTH
async def test_abort_2_leavers_are_noticed_running_and_queued(server: ServerProcess, stream: bool) -> None:
    async with using(server) as client:
        connections = [client.raw() for _ in range(50)]
        for i, connection in enumerate(connections):
            body = {"prompt": f"{i} leaves", "max_tokens": 4000, "ignore_eos": True, "stream": stream}
            send(connection, TEXT, body)
        await asyncio.sleep(0.5)
        for i, connection in enumerate(connections):
            close(connection, reset=bool(i % 2))
        began_s = time.monotonic()
        await client.idle()
        assert time.monotonic() - began_s < 3


async def test_abort_2_a_thousand_plain_requests_leave_nothing(server: ServerProcess) -> None:
    async with using(server) as client:
        sizes = []
        for _ in range(5):
            await asyncio.gather(*[client.greedy(f"{i} short", 2) for i in range(200)])
            sizes.append(server.rss_bytes())
        assert sizes[-1] < 1.05 * sizes[0], sizes


@PAGES
async def test_abort_3_leaving_in_the_middle_of_a_chunked_prefill(checkpoint: Path, page_size: int) -> None:
    flags = ("--page-size", str(page_size), "--max-step-tokens", "64", "--max-running", "16", "--log-level", "warning")
    with ServerProcess(str(checkpoint), *flags) as server:
        async with using(server) as client:
            prompt = [5 + i % 200 for i in range(3000)]
            right = await client.text(prompt, 8)
            async with neighbours(client):
                for i in range(40):
                    connection = client.raw()
                    send(connection, TEXT, {"prompt": [7 + i, *prompt], "max_tokens": 5})
                    await asyncio.sleep(random.random() * 0.1)
                    close(connection, reset=bool(i % 2))
            assert await client.text(prompt, 8) == right


async def test_id_1_requests_that_share_an_id(server: ServerProcess) -> None:
    async with using(server) as client:
        right = [await client.text(f"number {i}", 8) for i in range(20)]

        async def ask(i: int, stream: bool) -> str:
            body = {"prompt": f"number {i}", "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": stream}
            headers = {"X-Request-Id": "same"}
            async with client.session.post(server.url + TEXT, json=body | {"request_id": "same"}, headers=headers) as r:
                raw = await r.read()
                assert r.headers["X-Request-Id"] == "same"
                return str((_joined(raw) if stream else json.loads(raw))["choices"][0]["text"])

        for stream in (False, True):
            assert await asyncio.gather(*[ask(i, stream) for i in range(20)]) == right
        for i in range(200):
            assert await ask(i % 20, stream=bool(i % 2)) == right[i % 20]


async def test_samp_2_a_huge_n_costs_nothing(server: ServerProcess) -> None:
    async with using(server) as client:
        before = server.rss_bytes()
        async with polled(client, 0.3):
            for n in (0, -1, 1.5, "2", True, 129, 100_000, 10**18):
                began_s = time.monotonic()
                await client.refused(TEXT, {"prompt": [5] * 2000, "n": n}, "n")
                assert time.monotonic() - began_s < 0.3
            for many in ([""] * 100_000, ["a"] * 100_000):
                await client.refused(TEXT, {"prompt": many}, "prompt")
        assert server.rss_bytes() - before < 32 << 20


async def test_samp_5_numbers_beyond_the_machine(server: ServerProcess) -> None:
    async with using(server) as client, neighbours(client):
        for name, values in {
            "top_logprobs": (21, 10**6, -1), "seed": (2**63, 2**64, -(2**63) - 1, "100", 1.5),
            "repetition_penalty": (0, -3, 10**9), "presence_penalty": (-3, 10**9), "frequency_penalty": (-3, 10**9),
            "top_k": (-2, 10**30),
        }.items():  # fmt: skip
            for value in values:
                body = {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "max_tokens": 2, name: value}
                await client.refused(CHAT, body, name)
        await client.refused(TEXT, {"prompt": "x", "logprobs": 10**6}, "logprobs")
        for top_k in (0, -1, 512, 513, 2**31):
            assert await client.text("x", 4, top_k=top_k) == await client.text("x", 4)


async def test_samp_7_odd_temperatures(server: ServerProcess) -> None:
    async with using(server) as client:
        right = await client.text("odd", 8)
        for value in (1e-4, 1e-8, 1e-45, 0, -0.0):
            assert await client.text("odd", 8, temperature=value) == right
        for name, values in (("temperature", (-1, 2.01, 100, 1e308, "1")), ("top_p", (1.0001, -0.1)), ("min_p", (2,))):
            for value in values:
                await client.refused(TEXT, {"prompt": "x", name: value}, name)
        for name in ("temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty"):
            for value in ("NaN", "Infinity", "-Infinity", "1e999", '"nan"'):
                await client.refused(TEXT, f'{{"prompt": "x", "{name}": {value}}}'.encode())


@BOTH
async def test_lim_1_max_tokens(server: ServerProcess, stream: bool) -> None:
    async with using(server) as client:
        for path in (TEXT, CHAT):
            body = {"prompt": [5] * 10, "messages": [{"role": "user", "content": "x"}], "stream": stream}
            for value in (0, -1, 1.5, "5", True):
                await client.refused(path, body | {"max_tokens": value}, "max_tokens")
        for length in (10, CONTEXT - 3):
            for value in (1, 3, CONTEXT, CONTEXT + 1, 10**12) if length > 10 else (1, 16):
                answer = await client.greedy([5] * length, value, stream=stream)
                assert answer["choices"][0]["finish_reason"] == "length"


@BOTH
async def test_lim_3_prompts_around_the_context(server: ServerProcess, stream: bool) -> None:
    async with using(server) as client, neighbours(client):
        assert (await client.greedy([5] * (CONTEXT - 1), 1, stream=stream))["choices"]
        for length in (CONTEXT, CONTEXT + 1, 2 * CONTEXT, 100 * CONTEXT):
            body = {"prompt": [5] * length, "stream": stream}
            errors = await asyncio.gather(*[client.refused(TEXT, body) for _ in range(2)])
            if length < 100 * CONTEXT:  # more values than any prompt has are refused before they are read
                assert {error["code"] for error in errors} == {"context_length_exceeded"}
            message = {"role": "user", "content": "0a" * length}
            error = await client.refused(CHAT, {"messages": [message], "stream": stream})
            assert error["code"] == "context_length_exceeded"


async def test_lim_4_empty_prompts(server: ServerProcess) -> None:
    async with using(server) as client:
        for prompt in ("", [""], [], [[]], None, ["a", "", "b"]):
            status, answer, _ = await client.post(TEXT, {"prompt": prompt, "max_tokens": 2})
            assert status == 400 and "error" in answer or (status == 200 and prompt in ("", [""]))
            await client.alive()
        for messages in ([], None):
            await client.refused(CHAT, {"messages": messages}, "messages")
        await client.refused(CHAT, {}, "messages")


async def test_in_2_nested_json(server: ServerProcess) -> None:
    async with using(server) as client, neighbours(client):
        for depth in (500, 1000, 3000, 10_000, 100_000):
            for opening, closing in (("[", "]"), ('{"a":', "}")):
                nested = opening * depth + "1" + closing * depth
                for field in ("foo", "tools", "response_format", "messages", "metadata", "stop", "prompt"):
                    status, _, _ = await client.post(CHAT, f'{{"{field}": {nested}}}'.encode())
                    assert status == 400
        async with client.session.ws_connect(server.url + "/v1/responses") as ws:
            await ws.send_str('{"type":"response.create","input":' + "[" * 100_000)
            assert (await ws.receive_json())["type"] == "error"


async def test_in_6_ids_outside_the_vocabulary(server: ServerProcess) -> None:
    async with using(server) as client, neighbours(client):
        tokens = (await client.post("/tokenize", {"prompt": "x"}))[1]
        assert tokens["count"] >= 1
        size = 512
        for bad in (size, 2 * size, -1, 2**31, 2**63, 1.5, "5", True):
            await client.refused(TEXT, {"prompt": [1, bad]}, "prompt")
            await client.refused(TEXT, {"prompt": [[1, 2], [bad]]}, "prompt")
            await client.refused(TEXT, {"prompt": "x", "stop_token_ids": [bad], "min_tokens": 5}, "stop_token_ids")
        for bias in ({"-1": 1}, {str(2 * size): 1}, {"abc": 1}, {"1.0": 1}, {"1": 101}, {"1": "x"}):
            await client.refused(TEXT, {"prompt": "x", "logit_bias": bias}, "logit_bias")


async def test_conc_1_huge_prompts_do_not_stop_the_others(server: ServerProcess) -> None:
    async with using(server) as client, neighbours(client), polled(client, 0.5):
        for megabytes in (5, 25):
            body = {"messages": [{"role": "user", "content": "0a " * (megabytes << 20 >> 2)}]}
            await client.refused(CHAT, body)
        body = {"messages": [{"role": "user", "content": "0a " * (1 << 18)}]}
        await asyncio.gather(*[client.refused(CHAT, body) for _ in range(20)])
        await client.greedy([5] * (CONTEXT - 10), 2)


async def test_conc_3_two_thousand_at_once(server: ServerProcess) -> None:
    async with using(server) as client:
        right = [await client.text(f"{i} of many", 8) for i in range(20)]
        answers = await asyncio.gather(*[client.text(f"{i % 20} of many", 8, stream=bool(i % 2)) for i in range(2000)])
        assert answers == [right[i % 20] for i in range(2000)]


@pytest.mark.parametrize("fault", ["dead_thread@60", "stuck_step@60"])
async def test_life_1_a_dead_or_stuck_engine(checkpoint: Path, fault: str) -> None:
    flags = ("--max-running", "10", "--watchdog-seconds", "2")
    with ServerProcess(str(checkpoint), *flags, fault=fault) as server:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(60)) as session:
            client = Client(server, session)
            began_s = time.monotonic()

            async def ask(i: int) -> str:
                body = {"prompt": f"{i}", "max_tokens": 3000, "ignore_eos": True, "stream": i % 2 == 0}
                try:
                    status, answer, raw = await client.post(TEXT, body)
                    assert "error" in answer and b"[DONE]" not in raw, (status, raw[-300:])
                    return f"{status}"
                except aiohttp.ClientError as error:
                    return type(error).__name__

            ends = await asyncio.gather(*[ask(i) for i in range(20)])
            assert time.monotonic() - began_s < 9 and len(ends) == 20, ends
            assert await asyncio.to_thread(server.process.wait, 10) in (70, 72)


async def test_life_1_a_request_that_fails_in_preprocessing_fails_alone(server: ServerProcess) -> None:
    async with using(server) as client, neighbours(client):
        for fields in ({"response_format": {"type": "json_schema"}}, {"messages": [{"role": "nobody"}]}):
            await client.refused(CHAT, {"messages": HI} | fields)


@PAGES
async def test_pfx_the_prefix_cache(checkpoint: Path, page_size: int) -> None:
    """PFX-1, 3 and 4: whole pages of prompt, pages counted at every rest, warm answers equal to cold ones."""
    common = ("--max-running", "16", "--num-pages", str(8192 // page_size + 1), "--page-size", str(page_size))
    cold: dict[tuple[int, ...], str] = {}
    prompts = [tuple(5 + (i * k) % 200 for i in range(n)) for k in (1, 3) for n in _around(page_size)]
    with ServerProcess(str(checkpoint), *common, "--no-prefix-cache", "--log-level", "warning") as server:
        async with using(server) as client:
            for prompt in prompts:
                cold[prompt] = await client.text(list(prompt), 12)
    with ServerProcess(str(checkpoint), *common, "--log-level", "warning") as server:
        async with using(server) as client:
            total = (await client.metrics())["kv_pages_total"]
            for _ in range(3):
                for prompt in prompts:
                    pair = await asyncio.gather(*[client.greedy(list(prompt), 12) for _ in range(2)])
                    assert {answer["choices"][0]["text"] for answer in pair} == {cold[prompt]}
                    for answer in pair:
                        cached = answer["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)
                        assert 0 <= cached < len(prompt) and cached % page_size == 0
            draw = random.Random(page_size)
            for _ in range(6):
                drawn = [([5 + i % 90 for i in range(draw.randint(1, 300))], draw.randint(1, 20)) for _ in range(60)]
                await asyncio.gather(*[client.greedy(*one) for one in drawn])
                await client.idle()
                assert (await client.metrics())["kv_pages_used"] == 0  # what is neither free nor cached
            whole_pool = [5] * (min(CONTEXT, int(total) * page_size) - 8)
            assert (await client.greedy(whole_pool, 4))["choices"][0]["finish_reason"] == "length"


def _around(page_size: int) -> list[int]:
    return sorted({n for k in (1, 2, 3) for n in (k * page_size - 1, k * page_size, k * page_size + 1) if n > 0})


async def test_kv_1_what_never_fits_is_refused_and_holds_nobody_up(checkpoint: Path) -> None:
    flags = ("--num-pages", "64", "--page-size", "16", "--max-running", "8", "--log-level", "warning")  # 1,008 tokens
    with ServerProcess(str(checkpoint), *flags) as server:
        async with using(server) as client:
            for length in (2000, 1009):
                behind = [asyncio.create_task(client.greedy(f"small {i}", 4)) for i in range(5)]
                await client.refused(TEXT, {"prompt": [5] * length, "max_tokens": 1}, "prompt")
                await asyncio.wait_for(asyncio.gather(*behind), 10)
            growing = asyncio.create_task(client.greedy([5] * 600, 1000))
            await asyncio.gather(*[client.greedy(f"beside {i}", 4) for i in range(5)])
            assert (await growing)["choices"][0]["finish_reason"] == "length"


@PAGES
async def test_kv_2_preemption_under_a_full_pool(checkpoint: Path, page_size: int) -> None:
    flags = ("--num-pages", str(2000 // page_size + 1), "--page-size", str(page_size), "--max-running", "32")
    with ServerProcess(str(checkpoint), *flags, "--max-step-tokens", "64", "--log-level", "warning") as server:
        async with using(server) as client:
            prompts = [[5 + (i * (k if k % 2 else 1)) % 150 for i in range(200)] + [k + 5] for k in range(16)]
            alone = [await client.text(prompt, 200) for prompt in prompts]
            for _ in range(2):
                assert await asyncio.gather(*[client.text(prompt, 200) for prompt in prompts]) == alone
            assert (await client.metrics())["preemptions_total"] > 0


async def test_gram_1_schemas_that_cannot_be(server: ServerProcess) -> None:
    async with using(server) as client, neighbours(client):
        for schema in (
            {"properties": {"foo": "bar"}}, {"type": "strng"}, {"required": "a"}, {"type": "string", "pattern": "(["},
            {"$ref": "#/nowhere"}, {"$ref": "http://127.0.0.1:1/x"}, "a string",
        ):  # fmt: skip
            asked = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
            for stream in (False, True):
                body = {"messages": HI, "max_tokens": 8, "stream": stream}
                await client.refused(CHAT, body | {"response_format": asked})


async def test_gram_3_patterns_that_cost_too_much(server: ServerProcess) -> None:
    async with using(server) as client, polled(client, 1.0):
        before = server.rss_bytes()
        for pattern in ("a{1,1000000000}", "(a{1,1000}){1,1000}", "((a|b)*c){50}(d|e){500}", "(a+)+$"):
            body = {"messages": HI, "max_tokens": 4, "structured_outputs": {"regex": pattern}}
            began_s = time.monotonic()
            status, _, raw = await client.post(CHAT, body)
            assert status in (200, 400), raw
            assert time.monotonic() - began_s < 30
        assert server.rss_bytes() - before < 512 << 20


def test_ws_1_and_the_process_lives(server: ServerProcess) -> None:
    """The ways of cutting a socket are in tests/attacks; here, 200 of them at random."""
    from tests.attacks.raw import UPGRADE, frame

    draw = random.Random(1)
    create = frame(1, json.dumps({"type": "response.create", "input": "x", "max_output_tokens": 900}).encode())
    for _ in range(200):
        connection = server.connect()
        data = UPGRADE.encode() + create + frame(8, struct.pack("!H", draw.choice((1000, 1001, 4999, 999))))
        connection.sendall(data[: draw.randint(1, len(data))])
        time.sleep(draw.random() * 0.01)
        close(connection, reset=draw.random() < 0.5)

    async def rest() -> None:
        async with using(server):
            pass

    asyncio.run(rest())


def test_sigterm_after_all_that(checkpoint: Path) -> None:
    with ServerProcess(str(checkpoint)) as server:
        assert server.stop(signal.SIGTERM) == 0
