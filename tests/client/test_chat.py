"""`asyncllm chat` as a program: lines through a pipe, answers from a server or from an engine of its own."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.tiny import make_checkpoint

from .fake import SSE_HEAD, Act, Exchange, chat_event, chat_stream, json_reply, raw_server, refusal

ROOT = Path(__file__).resolve().parents[2]
MODELS = json_reply({"object": "list", "data": [{"id": "m"}]})


@asynccontextmanager
async def chat(*args: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "error", "-m", "asyncllm", "chat", *args,
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "OPENAI_API_KEY": "k"},
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def talk(lines: str, *args: str) -> tuple[str, str, int | None]:
    async with chat(*args) as process:
        out, err = await process.communicate(lines.encode())
    return out.decode(), err.decode(), process.returncode


async def test_a_conversation_with_its_commands() -> None:
    async with raw_server(MODELS, chat_stream("Hel", "lo"), chat_stream("again"), chat_stream("new")) as server:
        lines = "Hi\nand now?\n/help\n/flavour\n/system Be short.\n\nonce more\n/quit\nnever read\n"
        out, err, code = await talk(lines, server.url, "--temperature", "0", "--max-tokens", "9")
    assert (code, out) == (0, "Hello\nagain\nnew\n")
    assert "2 tokens, the first after" in err
    assert "tokens/s" in err
    assert "/reset" in err
    assert "unknown command /flavour" in err
    asked: list[Any] = [request.json()["messages"] for request in server.requests[1:]]
    hi, hello = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}
    assert asked == [
        [hi],
        [hi, hello, {"role": "user", "content": "and now?"}],
        [{"role": "system", "content": "Be short."}, {"role": "user", "content": "once more"}],
    ]
    first = server.requests[1]
    assert (first.json()["temperature"], first.json()["max_tokens"], first.json()["model"]) == (0, 9, "m")
    assert first.headers["authorization"] == "Bearer k"


async def test_reset_keeps_the_system_message_and_an_error_leaves_no_trace() -> None:
    acts = (MODELS, chat_stream("a"), refusal("400 No", message="too long"), chat_stream("b"))
    async with raw_server(*acts) as server:
        out, err, code = await talk("one\ntwo\n/reset\nthree\n", server.url, "--system", "S")
    assert (code, out) == (0, "a\nb\n")
    assert "error: Error code: 400 - too long" in err
    system = {"role": "system", "content": "S"}
    assert server.requests[2].json()["messages"] == [
        system,
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "two"},
    ]
    assert server.requests[3].json()["messages"] == [system, {"role": "user", "content": "three"}]


def endless(left: asyncio.Event) -> Act:
    async def act(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        await exchange.chunk(chat_event("begun"))
        await exchange.left()
        left.set()

    return act


async def test_ctrl_c_stops_the_answer_on_the_server_and_not_the_program() -> None:
    left = asyncio.Event()
    async with raw_server(MODELS, endless(left), chat_stream("more")) as server, chat(server.url) as process:
        assert process.stdin and process.stdout and process.stderr
        process.stdin.write(b"Hi\n")
        assert await process.stdout.readexactly(5) == b"begun"
        process.send_signal(signal.SIGINT)
        await left.wait()
        process.stdin.write(b"go on\n/quit\n")
        out, err = await process.communicate()
    assert (process.returncode, out) == (0, b"\nmore\n")
    assert b"stopped: 1 tokens" in err
    messages: Any = server.requests[2].json()["messages"]
    assert [message["content"] for message in messages] == ["Hi", "begun", "go on"]


async def test_no_server_is_told_in_one_line() -> None:
    out, err, code = await talk("Hi\n", "http://127.0.0.1:1")
    assert (out, code) == ("", 2)
    assert err.startswith("asyncllm: the connection to http://127.0.0.1:1/v1/models failed: nothing listens there")


async def test_an_engine_of_its_own(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny")
    out, err, code = await talk("Hi\nand?\n", str(model), "--temperature", "0", "--max-tokens", "5", "--device", "cpu")
    assert code == 0, err
    assert err.count("tokens, the first after") == 2
    assert out.count("\n") >= 2
