"""`asyncllm chat` at a real terminal: keys as they are pressed, and what is then on the screen."""

import asyncio
import os
import pty
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from .fake import chat_stream, raw_server
from .test_chat import MODELS, endless

ROOT = Path(__file__).resolve().parents[2]
CTRL_C, CTRL_D, ENTER, UP = "\x03", "\x04", "\r", "\x1b[A"
# The terminal becomes the session's own, so that ctrl-C is a signal; preexec_fn would fork beside threads.
IN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """The keyboard and the screen of one program."""

    def __init__(self, master: int) -> None:
        self._master = master
        self._unread = ""
        self._changed = asyncio.Event()
        asyncio.get_running_loop().add_reader(master, self._read)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    async def until(self, text: str) -> str:
        """What is shown up to and with this text, since the last time."""
        while text not in self._unread:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), 20)
            except TimeoutError:
                raise AssertionError(f"{text!r} is not shown, but {self._unread!r}") from None
        shown, _, self._unread = self._unread.partition(text)
        return shown + text

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._master)

    def _read(self) -> None:
        try:
            self._unread += os.read(self._master, 65536).decode()
        except OSError:  # the program has left
            self.close()
        self._changed.set()


@asynccontextmanager
async def chat(*args: str) -> AsyncIterator[tuple[Terminal, asyncio.subprocess.Process]]:
    master, slave = pty.openpty()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", IN_TERMINAL, sys.executable, "-W", "error", "-m", "asyncllm", "chat", *args,
        cwd=ROOT, env={"PYTHONPATH": str(ROOT), "TERM": "dumb"}, stdin=slave, stdout=slave, stderr=slave,
        start_new_session=True,
    )  # fmt: skip
    os.close(slave)
    terminal = Terminal(master)
    try:
        yield terminal, process
    finally:
        terminal.close()
        if process.returncode is None:
            process.kill()
            await process.wait()
        os.close(master)


def said(request: Any) -> list[tuple[str, str]]:
    return [(message["role"], message["content"]) for message in request.json()["messages"]]


async def test_a_conversation_at_the_keyboard() -> None:
    pytest.importorskip("readline")
    left = asyncio.Event()
    answers = (chat_stream("Hel", "lo"), chat_stream("again"), endless(left), chat_stream("on"), chat_stream("new"))
    async with raw_server(MODELS, *answers) as server, chat(server.url, "--system", "S") as (terminal, process):
        await terminal.until("> ")

        terminal.type("Hi" + ENTER)
        shown = await terminal.until("> ")
        assert "Hello\r\n[2 tokens, the first after " in shown
        assert re.search(r"\d+\.\d tokens/s\]", shown)

        terminal.type(UP + ENTER)  # the line before
        assert "again" in await terminal.until("> ")

        terminal.type("go" + ENTER)
        await terminal.until("begun")
        terminal.type(CTRL_C)
        await left.wait()  # the server has seen it too
        assert "[stopped: 1 tokens" in await terminal.until("> ")

        # A signal between two waits of readline's is seen at the next return of input(): for that the ENTER.
        terminal.type("half a lin" + CTRL_C + ENTER)
        await terminal.until("[/quit or end of input leaves]")
        terminal.type("on" + ENTER)
        await terminal.until("on\r\n[")
        await terminal.until("> ")

        terminal.type("/reset" + ENTER)
        assert "[forgotten]" in await terminal.until("> ")
        terminal.type("/system Be short." + ENTER)
        assert "[system message: Be short.; forgotten]" in await terminal.until("> ")
        terminal.type("Hi" + ENTER)
        assert "new" in await terminal.until("> ")

        terminal.type(CTRL_D)
        assert await process.wait() == 0
    first = [("system", "S"), ("user", "Hi")]
    second = [*first, ("assistant", "Hello"), ("user", "Hi")]
    third = [*second, ("assistant", "again"), ("user", "go")]
    fourth = [*third, ("assistant", "begun"), ("user", "on")]
    last = [("system", "Be short."), ("user", "Hi")]
    assert [said(request) for request in server.requests[1:]] == [first, second, third, fourth, last]
