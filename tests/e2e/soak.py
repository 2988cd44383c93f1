"""Mixed load for as long as asked: `python -m tests.e2e.soak [--minutes 30]`, or make soak.

Its own process, against the real server process. Whole, streamed and WebSocket answers, equal and unique prompts,
leavers hard and soft, malformed requests, unknown models, ids of all kinds; every minute all is let go, and what the
server then holds is noted. Fails where memory, descriptors, tasks, threads or pages do not stay flat.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import aiohttp

from asyncllm.client import APIError, AsyncClient
from tests.e2e.process import ServerProcess
from tests.tiny import make_checkpoint

NUM_WORKERS = 24
WAVE_S = 20.0
MAX_RSS_SLOPE = 8 << 20  # bytes an hour; in half an hour less is noise
LEAVERS = 0.05


class Worker:
    """One client that does something else each time."""

    def __init__(self, client: AsyncClient, session: aiohttp.ClientSession, url: str, seed: int, did: Counter[str]):
        self._client, self._session, self._url, self._did = client, session, url, did
        self._random = random.Random(seed)

    async def run(self, until_s: float, pause_s: float) -> None:
        acts = (self._whole, self._streamed, self._lane, self._malformed, self._chat, self._broken_off)
        while time.monotonic() < until_s:
            act = self._random.choice(acts)
            with contextlib.suppress(APIError, aiohttp.ClientError, asyncio.TimeoutError):
                await act()
                self._did[act.__name__] += 1
            await asyncio.sleep(pause_s * self._random.random())

    def _prompt(self) -> str:
        """One in three is known already, whole or in its beginning."""
        words = [self._random.choice(("fox", "dog", "sun", "sea")) for _ in range(self._random.randint(1, 60))]
        same = self._random.random() < 0.33
        return ("the same for all " * 20 if same else f"{self._random.random()} ") + " ".join(words)

    def _fields(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"max_tokens": self._random.randint(1, 60), "temperature": self._random.choice((0, 1))}
        if self._random.random() < 0.3:
            fields["stop"] = [self._random.choice("aeiou ")]
        if self._random.random() < 0.2:
            fields |= {"n": 2, "temperature": 1}
        if self._random.random() < 0.2:
            fields["presence_penalty"] = 0.5
        return fields

    async def _whole(self) -> None:
        await self._client.completions.create(prompt=self._prompt(), **self._fields())

    async def _chat(self) -> None:
        messages = [{"role": "user", "content": self._prompt()}]
        await self._client.chat.completions.create(messages=messages, max_tokens=self._random.randint(1, 40))

    async def _streamed(self) -> None:
        leaves_after = self._random.randint(1, 10) if self._random.random() < 3 * LEAVERS else None
        stream = await self._client.completions.create(prompt=self._prompt(), stream=True, **self._fields())
        async with stream:
            num = 0
            async for _ in stream:
                num += 1
                if num == leaves_after:
                    return

    async def _lane(self) -> None:
        async with self._client.responses.connect() as session:
            streams = [await session.create(input=self._prompt(), max_output_tokens=30) for _ in range(3)]
            for stream in streams[: self._random.randint(1, 3)]:
                async for _ in stream:
                    pass

    async def _malformed(self) -> None:
        body = self._random.choice((b"{", b"[" * 5000, b'{"prompt": 7}', b'{"prompt":"x","temperature":9}', b"\xff"))
        headers = {"Content-Type": "application/json", "X-Request-Id": f"id-{self._random.random()}"}
        path = self._random.choice(("/v1/completions", f"/{self._random.random()}", "/v1/chat/completions"))
        async with self._session.post(self._url + path, data=body, headers=headers) as reply:
            assert 400 <= reply.status < 500, reply.status

    async def _broken_off(self) -> None:
        """A socket that is reset, in the head, the body or the answer."""
        host, port = self._url.rpartition("//")[2].split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps({"prompt": self._prompt(), "max_tokens": 60, "stream": True, "ignore_eos": True})
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        data = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
        writer.write(data[: self._random.choice((20, len(head) + 30, len(data)))])
        await writer.drain()
        await asyncio.sleep(self._random.random() / 20)
        writer.transport.abort()


def held(server: ServerProcess) -> dict[str, float]:
    """What an idle server holds. Pages that are neither free nor cached count as used: it is idle without any."""
    deadline_s = time.monotonic() + 20
    while True:
        metrics = server.metrics()
        busy = [metrics[name] for name in ("requests_live", "requests_running", "kv_pages_used", "websockets_open")]
        if not any(busy):
            break
        assert time.monotonic() < deadline_s, f"it holds on to something: {metrics}"
        time.sleep(0.1)
    process = Path(f"/proc/{server.process.pid}")
    return {
        "rss_bytes": server.rss_bytes(),
        "fds": len(os.listdir(process / "fd")),
        "threads": len(os.listdir(process / "task")),
        "tasks": metrics["tasks"],
        "unsent_bytes": metrics["unsent_bytes"],
    }


def slope(points: list[tuple[float, float]]) -> float:
    """Theil and Sen's: the median of all pairs', which a spike does not move."""
    return statistics.median([(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2)] or [0.0])


async def soak(server: ServerProcess, minutes: float, pause_s: float) -> dict[str, Any]:
    did: Counter[str] = Counter()
    samples: list[tuple[float, dict[str, float]]] = []
    began_s = time.monotonic()
    while (elapsed_s := time.monotonic() - began_s) < 60 * minutes:
        until_s = time.monotonic() + min(WAVE_S, 60 * minutes - elapsed_s)
        # Anew each time: connections that a client keeps are the server's too.
        async with AsyncClient(server.url, max_retries=0, timeout=60) as client, aiohttp.ClientSession() as session:
            workers = [Worker(client, session, server.url, len(samples) * 1000 + i, did) for i in range(NUM_WORKERS)]
            await asyncio.gather(*[worker.run(until_s, pause_s) for worker in workers])
        samples.append((time.monotonic() - began_s, await asyncio.to_thread(held, server)))
        print(f"{samples[-1][0]:.0f} s: {samples[-1][1]}", file=sys.stderr, flush=True)
    warm = samples[len(samples) // 4 :]  # caches fill and allocators settle first
    flat = {name: sorted({sample[name] for _, sample in warm}) for name in warm[0][1] if name != "rss_bytes"}
    per_hour = 3600 * slope([(at_s, sample["rss_bytes"]) for at_s, sample in warm])
    return {
        "minutes": minutes, "requests": sum(did.values()), "did": dict(did),
        "rss_mb_per_hour": round(per_hour / 1e6, 2),
        "rss_mb": [round(sample["rss_bytes"] / 1e6, 1) for _, sample in samples], "held": flat,
    }  # fmt: skip


def not_flat(seen: dict[str, Any]) -> list[str]:
    grown = [name for name, values in seen["held"].items() if values[-1] - values[0] > 2]  # the scrape's own socket
    return grown + (["rss"] if seen["rss_mb_per_hour"] * 1e6 > MAX_RSS_SLOPE and seen["minutes"] >= 10 else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--pause-seconds", type=float, default=0.2, help="of each client between two acts, at most")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny-llama")
        with ServerProcess(str(checkpoint), "--log-level", "warning", "--retention-seconds", "30") as server:
            seen = asyncio.run(soak(server, args.minutes, args.pause_seconds))
            seen["log"] = server.stderr()[:500]
            seen["broken"] = not_flat(seen) + (["the log"] if "Traceback" in server.stderr() else [])
            print(json.dumps(seen), flush=True)
            assert server.stop() == 0
    return len(seen["broken"])


if __name__ == "__main__":
    sys.exit(main())
