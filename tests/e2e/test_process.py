"""The server as its users meet it: one process, real sockets, a real (tiny, or the default) model."""

import asyncio
import json
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.process import ROOT, ServerProcess
from tests.e2e.storm import ROOMY, storm
from tests.tiny import make_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(checkpoint), "--log-level", "warning") as running:
        yield running


def metrics(server: ServerProcess) -> dict[str, float]:
    with urllib.request.urlopen(f"{server.url}/metrics") as reply:
        text = reply.read().decode()
    return {name: float(value) for name, value in re.findall(r"^(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)}


def until(server: ServerProcess, **expected: float) -> dict[str, float]:
    """Read the metrics until they are as expected; 10 s is for machines that do other things as well."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        seen = metrics(server)
        if all(seen[f"asyncllm_{name}"] == value for name, value in expected.items()):
            return seen
    raise AssertionError(f"wanted {expected}, saw {seen}")


def open_stream(server: ServerProcess, number: int, max_tokens: int = 2000) -> socket.socket:
    asked = {"prompt": f"{number} The quick brown fox", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps(asked)
    connection = server.connect()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return connection


def close(connection: socket.socket, *, reset: bool) -> None:
    if reset:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


def test_streams_opened_and_closed_early_leave_nothing_behind(server: ServerProcess) -> None:
    """1,000 streams in waves, half of them reset, some before their first token: ABORT-1 and more."""
    sizes = []
    for wave in range(20):
        connections = [open_stream(server, 50 * wave + i) for i in range(50)]
        for i, connection in enumerate(connections):
            if i % 3:
                connection.recv(512)
            close(connection, reset=bool(i % 2))
        until(server, requests_running=0, requests_waiting=0, requests_live=0, kv_pages_used=0)
        sizes.append(server.rss_bytes())
    assert max(sizes[4:]) < 1.05 * sizes[3], f"RSS after each wave: {sizes}"
    assert server.stderr() == ""


def test_a_storm_of_leavers_leaves_nothing_behind(checkpoint: Path) -> None:
    """Row 37, in small: make storm blows for five minutes."""
    with ServerProcess(str(checkpoint), *ROOMY) as server:
        told = asyncio.run(storm(server, seconds=4, rate=1000))
        assert set(told["left"]) >= {"streamed", "whole", "socket", "half"} and told["canary_answers"], told


@pytest.mark.parametrize("python", [("-O",), ("-X", "dev", "-W", "error")], ids=["O", "dev"])
def test_without_asserts_and_with_all_warnings_it_is_the_same_server(
    checkpoint: Path, server: ServerProcess, python: tuple[str, ...]
) -> None:
    """Row 55, in small: make interpreters runs attacks and endings so, and under -O the cases."""
    with ServerProcess(str(checkpoint), "--log-level", "warning", python=python) as other:
        for prompt in ("The quick", "brown fox"):
            texts = [one.complete(prompt, max_tokens=16)["choices"][0]["text"] for one in (server, other)]
            assert texts[0] == texts[1] != ""
        for bad in ({"temperature": -1}, {"prompt": [1 << 30]}, {"logit_bias": {"-1": 1}}, {"n": 0}, {"stop": [""]}):
            with pytest.raises(urllib.error.HTTPError) as refused:
                other.complete(**({"prompt": "x"} | bad))
            with refused.value as answer:
                assert (answer.code, json.load(answer)["error"]["type"]) == (400, "invalid_request_error")
        with other.connect() as leaver:
            leaver.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
        assert other.stop() == 0
        told = [line for line in other.stderr().splitlines() if "asyncio: Executing" not in line]
        assert told == []  # how long a callback took is dev's own affair


def test_openai_client_streams_the_same_as_it_gets_whole(server: ServerProcess) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        asked = {"model": "tiny-llama", "messages": [{"role": "user", "content": "Hello there"}], "temperature": 0}
        whole = client.chat.completions.create(**asked, max_tokens=24)  # type: ignore[call-overload]
        with client.chat.completions.create(**asked, max_tokens=24, stream=True) as chunks:  # type: ignore[call-overload]
            joined = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert joined == whole.choices[0].message.content and whole.usage.completion_tokens >= 1


def test_sigterm_lets_running_streams_finish(checkpoint: Path) -> None:
    with ServerProcess(str(checkpoint)) as server:
        connection = open_stream(server, 1, max_tokens=300)
        received = connection.recv(65536)
        server.process.send_signal(signal.SIGTERM)
        while b"data: [DONE]" not in received:
            received += (piece := connection.recv(65536))
            assert piece, "the stream was cut"
        connection.close()
        assert received.count(b'"finish_reason":"length"') == 1
        assert server.process.wait(timeout=30) == 0


def test_a_port_in_use_is_told_at_once(checkpoint: Path, server: ServerProcess) -> None:
    port = server.url.rpartition(":")[2]
    command = [sys.executable, "-m", "asyncllm", "serve", str(checkpoint), "--port", port]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and f"cannot listen on 127.0.0.1:{port}" in failed.stderr
    assert "--port names another" in failed.stderr
    assert "Traceback" not in failed.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["./no-such-folder"], "no-such-folder"),
        (["."], "is not a model folder: it has no config.json; name the one that holds"),
        (["{checkpoint}", "--page-size", "3"], "page_size must be a power of two"),
        (["{checkpoint}", "--max-model-len", "99999"], "max_model_len 99999 is above"),
        (["{checkpoint}", "--kv-cache-bytes", "10"], "raise kv_cache_bytes"),
        (["{checkpoint}", "--num-pages", "9", "--kv-cache-bytes", "10"], "not both"),
        (["{checkpoint}", "--num-pages", "2000000000"], "GiB are free: lower it"),
        (["{checkpoint}", "--port", "99999"], "not a port from 0 to 65535"),
        (["{checkpoint}", "--drain-seconds", "-1"], "not a number of seconds"),
        (["{checkpoint}", "--api-key-file", "./no-such-file"], "--api-key-file no-such-file cannot be read"),
        (["{checkpoint}", "--ssl-certfile", "./no-such-file"], "--ssl-certfile and --ssl-keyfile"),
    ],
)
def test_what_cannot_start_says_why(checkpoint: Path, arguments: list[str], told: str) -> None:
    command = [sys.executable, "-m", "asyncllm", "serve", *(a.format(checkpoint=checkpoint) for a in arguments)]
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and told in failed.stderr and "Traceback" not in failed.stderr


def test_version_needs_no_installation() -> None:
    done = subprocess.run([sys.executable, "-m", "asyncllm", "--version"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith("asyncllm 0.")


@pytest.mark.default_model
def test_the_default_model_answers() -> None:
    """The README's promise: the printed curl line streams the answer. In how many pieces is the loop's affair, which
    gathers where the machine is busy."""
    with ServerProcess("--log-level", "warning") as server:
        curl = subprocess.run(shlex.split(server.curl_line), capture_output=True, text=True, timeout=60)
        events = [line.removeprefix("data: ") for line in curl.stdout.splitlines() if line.startswith("data: ")]
        chunks = [json.loads(event) for event in events[:-1]]
        texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
        assert events[-1] == "[DONE]" and "".join(texts) == "The capital of France is Paris."
        assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "stop"]
        with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            asked = [{"role": "user", "content": "What is the capital of France?"}]
            stream = client.chat.completions.create(
                model="SmolLM2-135M-Instruct", messages=asked, temperature=0, stream=True  # type: ignore[arg-type]
            )  # fmt: skip
            with stream:
                assert "".join(c.choices[0].delta.content or "" for c in stream) == "The capital of France is Paris."
        assert "transformers" not in Path(f"/proc/{server.process.pid}/maps").read_text()
