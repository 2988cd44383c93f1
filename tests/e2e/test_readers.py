"""Readers as a server meets them: killed in the middle of an answer and started again, or alive and not reading."""

import asyncio
import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import ROOT, ServerProcess
from tests.e2e.reader import ASKED
from tests.e2e.test_process import checkpoint, metrics, until  # noqa: F401  (checkpoint is a fixture)

SEND_TIMEOUT_S = 1
NUM_LIVE, NUM_STUCK = 64, 16


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:  # noqa: F811
    limits = ["--send-timeout-seconds", str(SEND_TIMEOUT_S), "--max-running", "80", "--num-pages", "6000"]
    with ServerProcess(str(checkpoint), "--log-level", "warning", *limits) as running:
        yield running


class ReaderProcess:
    """tests/e2e/reader.py; `seen` is what it has said by the time it was killed, or ended."""

    def __init__(self, transport: str, url: str, hang_after: int, *again: str) -> None:
        command = [sys.executable, "-m", "tests.e2e.reader", transport, url, str(hang_after), *again]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True)
        self._hang_after = hang_after
        self.seen: list[dict[str, Any]] = []

    def kill(self) -> None:
        """Let it read as far as it does, then SIGKILL: it says goodbye to nobody."""
        assert self._process.stdout is not None
        while sum(event["type"] == "response.output_text.delta" for event in self.seen) < self._hang_after:
            self.seen.append(json.loads(self._process.stdout.readline()))
        self._process.send_signal(signal.SIGKILL)
        self.finish(-signal.SIGKILL)
        assert self.seen[-1]["type"] == "response.output_text.delta"

    def finish(self, code: int = 0) -> None:
        assert self._process.stdout is not None and self._process.stdin is not None
        self.seen += [json.loads(line) for line in self._process.stdout]
        self._process.stdin.close()
        self._process.stdout.close()
        assert self._process.wait(timeout=60) == code


@pytest.mark.parametrize("transport", ["sse", "ws"])
def test_a_client_killed_mid_answer_and_started_again_misses_and_repeats_nothing(
    server: ServerProcess, transport: str
) -> None:
    killed = ReaderProcess(transport, server.url, 3)  # few: a piece may be many tokens, on a busy machine
    killed.kill()
    response_id, last = killed.seen[0]["response"]["id"], killed.seen[-1]["number"]
    again = ReaderProcess(transport, server.url, 1, response_id, str(last))
    again.kill()
    third = ReaderProcess(transport, server.url, 0, response_id, str(again.seen[-1]["number"]))
    third.finish()
    events = killed.seen + again.seen + third.seen
    assert [event["number"] for event in events] == list(range(len(events)))
    with urllib.request.urlopen(f"{server.url}/v1/responses/{response_id}") as reply:
        whole = json.load(reply)
    said = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    assert said == whole["output"][0]["content"][0]["text"] == asked_at_once(server)
    assert (whole["usage"]["output_tokens"], events[-1]["type"]) == (900, "response.incomplete")
    until(server, requests_running=0, requests_live=0, kv_pages_used=0)
    assert server.stderr() == ""


def asked_at_once(server: ServerProcess) -> str:
    """The same request's text, by a client that nobody kills."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{server.url}/v1/responses", json.dumps(ASKED).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        text: str = json.load(reply)["output"][0]["content"][0]["text"]
    return text


def request(max_tokens: int, num_prompts: int = 1) -> bytes:
    prompt = ["The quick brown fox"] * num_prompts
    asked = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    body = json.dumps(asked).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def read_all(server: ServerProcess, max_tokens: int) -> str:
    """The text of a stream that came to its end."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(request(max_tokens))
    raw = await reader.read()
    writer.close()
    assert b"data: [DONE]" in raw, raw[-300:]
    return "".join(json.loads(text) for text in re.findall(rb'"text":("(?:[^"\\]|\\.)*")', raw))


async def wave(server: ServerProcess) -> set[str]:
    return set(await asyncio.gather(*[read_all(server, 100) for _ in range(NUM_LIVE)]))


def test_a_reader_that_stops_among_live_ones_is_bounded_and_cut_off_and_they_do_not_notice(
    server: ServerProcess,
) -> None:
    expected = asyncio.run(wave(server))  # also the memory that serving so many takes
    rss = server.rss_bytes()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as stuck:
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # before connecting: the window is made of it
        stuck.settimeout(60)
        stuck.connect((host, int(port)))
        stuck.sendall(request(1000, NUM_STUCK))  # many answers in one stream: a buffer is full within a second
        seen = until(server, requests_live=NUM_STUCK)
        aborted = 'asyncllm_requests_finished_total{reason="abort"}'
        aborts, most_unsent = seen[aborted], 0.0
        while metrics(server)["asyncllm_requests_live"]:
            assert asyncio.run(wave(server)) == expected
            most_unsent = max(most_unsent, metrics(server)["asyncllm_unsent_bytes"])
        assert metrics(server)[aborted] == aborts + NUM_STUCK
        assert 0 < most_unsent < 1 << 20
        until(server, requests_running=0, requests_live=0, kv_pages_used=0, unsent_bytes=0)
        with contextlib.suppress(ConnectionResetError):
            while data := stuck.recv(1 << 16):
                assert b"[DONE]" not in data
    assert len(expected) == 1
    assert server.rss_bytes() < rss + (16 << 20)
    assert server.stderr() == ""
