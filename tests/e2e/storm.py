"""A storm of leavers: `python -m tests.e2e.storm [--seconds 300] [--rate 1000]`, or make storm.

Its own process, open-loop, against the real server process: each opens a connection, asks, and is gone 0 to 50 ms
later, softly or by a reset, before, in or behind its first tokens. A greedy stream runs throughout, and its text is
that of a quiet server. Prints one line of JSON with the rate that was reached; fails where something is not as before.
"""

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from asyncllm.client import APIError, AsyncClient
from tests.attacks.raw import JSON, UPGRADE, frame
from tests.e2e.process import ServerProcess
from tests.e2e.soak import held
from tests.tiny import make_checkpoint

LEAVES_WITHIN_S = 0.05
MAX_OPEN = 500  # of the storm's own connections: beyond it this machine can do no more
CANARY: dict[str, Any] = {"prompt": "The canary", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
ROOMY = (
    "--kv-cache-bytes", "16777216", "--max-running", "64", "--max-retained-bytes", "1000000", "--log-level", "warning",
)  # fmt: skip
MAX_GROWTH_BYTES = 24 << 20  # in the second half; the pages above are touched one by one
KINDS = ("streamed", "whole", "socket", "half")
MORE_S = 60
SLOWER = 0.8  # of the best throughput of before, afterwards


class Storm:
    """Leavers at a rate, until stopped."""

    def __init__(self, url: str, rate: float, seed: int = 0) -> None:
        self.did: Counter[str] = Counter()
        self._address = url.rpartition("//")[2].split(":")
        self._rate = rate
        self._random = random.Random(seed)
        self._open: set[asyncio.Task[None]] = set()

    async def blow(self, seconds: float) -> float:
        """Returns how many came a second."""
        began_s = now_s = time.monotonic()
        num, num_before = 0, sum(self.did.values())
        while now_s - began_s < seconds:
            due = min(int((now_s - began_s) * self._rate) - num, MAX_OPEN - len(self._open))
            for _ in range(due):
                task = asyncio.create_task(self._leaver(self._random.choice(KINDS), self._random.random()))
                self._open.add(task)
                task.add_done_callback(self._open.discard)
            num += max(0, due)
            await asyncio.sleep(0.002)
            now_s = time.monotonic()
        await asyncio.gather(*self._open, return_exceptions=True)
        return (sum(self.did.values()) - num_before) / (time.monotonic() - began_s)

    async def _leaver(self, kind: str, chance: float) -> None:
        try:
            _, writer = await asyncio.open_connection(*self._address)
        except OSError:
            self.did["not let in"] += 1
            return
        writer.write(_asked(kind, chance))
        await asyncio.sleep(LEAVES_WITHIN_S * chance)
        if int(chance * 1000) % 2:
            peer = writer.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()
        self.did[kind] += 1


def _asked(kind: str, chance: float) -> bytes:
    prompt = "the same for all " * 10 if chance < 0.3 else f"{chance} of its own"
    if kind == "socket":
        create = {"type": "response.create", "input": prompt, "max_output_tokens": 200}
        return UPGRADE.encode() + frame(1, json.dumps(create).encode())
    body = json.dumps({"prompt": prompt, "max_tokens": 200, "ignore_eos": True, "stream": kind == "streamed"})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
    data = (head + body).encode()
    return data[: len(data) // 2] if kind == "half" else data


class Canary:
    """Greedy answers, one after the other, each the same as the first."""

    def __init__(self, url: str) -> None:
        self.num_answers = self.num_refused = 0
        self._url = url

    async def sing(self, text: str) -> None:
        async with AsyncClient(self._url, max_retries=0, timeout=60) as client:
            while True:
                try:
                    stream = await client.completions.create(stream=True, **CANARY)
                    told = "".join([chunk.choices[0].text async for chunk in stream])
                except APIError as error:
                    if error.status_code != 503:
                        raise
                    self.num_refused += 1
                    await asyncio.sleep(0.1)
                    continue
                assert told == text, f"the canary said something else: {told!r}"
                self.num_answers += 1


async def storm(server: ServerProcess, seconds: float, rate: float) -> dict[str, Any]:
    """All of it, and what came of it; everything is given back.

    Raises:
        AssertionError: something is not as before.
    """
    text = server.complete(**CANARY)["choices"][0]["text"]
    await Storm(server.url, rate, seed=1).blow(2)  # warm
    before = held(server)
    canary, leavers = Canary(server.url), Storm(server.url, rate)
    singing = asyncio.create_task(canary.sing(text))
    reached = [await leavers.blow(seconds / 2)]
    middle_bytes = server.rss_bytes()
    reached.append(await leavers.blow(seconds / 2))
    grown_bytes = server.rss_bytes() - middle_bytes  # not behind what follows: it takes 50 s until all is touched
    for _ in range(MORE_S):  # a short storm on a slow machine: until one answer is whole in it
        if not canary.num_answers and not singing.done():
            await leavers.blow(1)
    singing.cancel()
    [fell_silent] = await asyncio.gather(singing, return_exceptions=True)
    assert isinstance(fell_silent, asyncio.CancelledError), fell_silent
    after = held(server)
    for name in ("fds", "tasks", "unsent_bytes"):
        assert after[name] <= before[name] + 2, (name, before, after)
    assert grown_bytes < MAX_GROWTH_BYTES, (before, middle_bytes, grown_bytes, after)
    assert server.complete(**CANARY)["choices"][0]["text"] == text
    assert server.stderr() == ""
    return {
        "offered_a_second": rate, "reached_a_second": round(sum(reached) / 2), "left": dict(leavers.did),
        "canary_answers": canary.num_answers, "canary_refused": canary.num_refused,
        "before": before, "middle_bytes": middle_bytes, "grown_bytes": grown_bytes, "after": after,
    }  # fmt: skip


async def throughput(server: ServerProcess) -> float:
    """Tokens a second of sixteen streams: the best of five, as what else a machine does only slows."""

    async def one(client: AsyncClient, number: int) -> None:
        fields = CANARY | {"prompt": f"{number} of sixteen"}
        async for _ in await client.completions.create(stream=True, **fields):
            pass

    rates = []
    async with AsyncClient(server.url, timeout=60) as client:
        for _ in range(5):
            began_s = time.monotonic()
            await asyncio.gather(*[one(client, i) for i in range(16)])
            rates.append(16 * CANARY["max_tokens"] / (time.monotonic() - began_s))
    return max(rates)


async def _main(server: ServerProcess, seconds: float, rate: float) -> int:
    before = await throughput(server)
    told = await storm(server, seconds, rate)
    after = await throughput(server)
    told |= {"tokens_a_second_before": round(before), "tokens_a_second_after": round(after)}
    print(json.dumps(told))
    return int(after < SLOWER * before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--rate", type=float, default=1000, help="leavers a second")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny-llama")
        with ServerProcess(str(checkpoint), *ROOMY) as server:
            sys.exit(asyncio.run(_main(server, options.seconds, options.rate)))


if __name__ == "__main__":
    main()
