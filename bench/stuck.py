"""What one reader that stops reading costs the server and the others: its memory, their gaps, and when it is cut off.

    python bench/stuck.py                                   # 64 live readers, one that stops for 60 s
    python bench/stuck.py --transport ws --seconds 5 --send-timeout-s 2

The server of bench/frontend.py, in a process of its own, with its fake engine. First all read, for as long as the
one then does not, which gives what the gaps are to be compared with. One JSON line.
"""

import argparse
import asyncio
import json
import resource
import socket
import sys
import time
from pathlib import Path
from typing import Any

import frontend
import uvloop

SAMPLE_S = 0.25


class Watched(frontend.Stream):
    """A stream that notes the time between what it reads, and whether a token is missing."""

    def __init__(self, transport_kind: str) -> None:
        super().__init__(transport_kind, timed=False, idle=False)
        self.gaps_ms: list[float] = []
        self.num_tokens = self.num_missing = 0
        self._last_s = 0.0
        self._last_word: int | None = None
        self._rest = b""  # of the last read: it may end within a word

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        now_s = time.monotonic()
        if self._last_s:
            self.gaps_ms.append(1e3 * (now_s - self._last_s))
        self._last_s = now_s
        self._count(self._rest + data)

    def pause(self) -> None:
        self._transport.pause_reading()

    def resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    def _count(self, data: bytes) -> None:
        end = 0
        for match in frontend._WORD.finditer(data):
            word, end = int(match[1]), match.end()
            if self._last_word is not None:
                self.num_missing += word != (self._last_word + 1) % frontend.NUM_WORDS
            self._last_word = word
            self.num_tokens += 1
        self._rest = data[max(end, len(data) - 8) :]


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


async def bench(args: argparse.Namespace) -> dict[str, Any]:
    server = frontend.Server()
    await server.start("ours", args)
    pid = server.process.pid
    try:
        live = [await frontend.connect(server, Watched(args.transport)) for _ in range(args.streams)]
        stuck = Watched(args.transport)
        await connect_narrow(server, stuck)
        await asyncio.sleep(frontend.WARMUP_S)
        take_gaps(live)
        await asyncio.sleep(args.seconds)
        before_ms, rss_before = take_gaps(live), rss_bytes(pid)
        stuck.pause()
        samples, cut_off_s, start_s = [], None, time.monotonic()
        while (passed_s := time.monotonic() - start_s) < args.seconds:
            await asyncio.sleep(SAMPLE_S)
            mark = await server.mark()
            samples.append((rss_bytes(pid), mark["num_unread_bytes"]))
            if cut_off_s is None and mark["num_live"] == args.streams:
                cut_off_s = round(passed_s, 2)
        during_ms, num_read = take_gaps(live), stuck.num_tokens
        stuck.resume()
        await asyncio.sleep(0.5)
        return {
            "streams": args.streams, "step_ms": args.step_ms, "transport": args.transport, "seconds": args.seconds,
            "send_timeout_s": args.send_timeout_s,
            "gaps_ms": {"before": frontend._quantiles(before_ms), "during": frontend._quantiles(during_ms)},
            "reads": {"before": len(before_ms), "during": len(during_ms)},
            "missing_tokens": sum(one.num_missing for one in live), "lost_streams": sum(one.lost for one in live),
            "rss_mib": {
                "before": mib(rss_before), "most": mib(max(one for one, _ in samples)), "after": mib(rss_bytes(pid)),
            },
            "unread_bytes": {"most": max(one for _, one in samples), "after": samples[-1][1]},
            "stuck": {
                "cut_off_after_s": cut_off_s, "is_closed": stuck.lost,
                "tokens_left_to_read": stuck.num_tokens - num_read,
            },
            "live_at_the_end": (await server.mark())["num_live"],
        }  # fmt: skip
    finally:
        await server.stop()


async def connect_narrow(server: frontend.Server, stream: Watched) -> None:
    """With a receive buffer of 64 KB: the usual one takes MBs on loopback before the server sees a thing."""
    narrow = socket.socket()
    narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 << 10)
    narrow.connect(("127.0.0.1", server.port))
    narrow.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: stream, sock=narrow)


def take_gaps(streams: list[Watched]) -> list[float]:
    gaps = [gap for one in streams for gap in one.gaps_ms]
    for one in streams:
        one.gaps_ms.clear()
    return gaps


def mib(num_bytes: int) -> float:
    return round(num_bytes / 2**20, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--step-ms", type=float, default=8.0)
    parser.add_argument("--transport", choices=("sse", "ws"), default="sse")
    parser.add_argument("--send-timeout-s", type=float, default=30.0, help="the server's")
    args = parser.parse_args()
    args.pace = "adaptive"
    sys.setswitchinterval(5e-4)
    print(json.dumps({**frontend.where(), **uvloop.run(bench(args))}), flush=True)


if __name__ == "__main__":
    main()
