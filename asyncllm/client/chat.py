"""A conversation at a terminal: lines in, an answer as it comes, tokens per second.

Main thread; the loop runs while an answer does and stands still at the prompt. It never knows where answers
come from: a server's address makes one kind of Answerer (`over_http`), an engine in this process another.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, TextIO

import msgspec

from ..errors import AsyncLLMError
from .client import AsyncClient

HELP = """\
/reset          forget the conversation, not the system message
/system TEXT    set the system message and forget the conversation; without TEXT: none
/help           this
/quit           leave; so does end of input
ctrl-C          stop the answer"""

Messages = list[dict[str, str]]


class Piece(msgspec.Struct, frozen=True):
    """Some text of an answer, and how many tokens it has so far, if that is known."""

    text: str
    num_tokens: int | None = None


Pieces = AsyncIterator[Piece]
# Leaving the context stops the answer.
Answerer = Callable[[Messages], AbstractAsyncContextManager[Pieces]]


class Chat:
    """The conversation, and what is typed into it."""

    def __init__(self, answerer: Answerer, out: TextIO, notes: TextIO, system: str | None = None) -> None:
        self._answerer = answerer
        self._out = out
        self._notes = notes  # what is not the answer: apart, so that a pipe gets answers alone
        self._system = system
        self._messages: Messages = []

    def run(self, runner: asyncio.Runner, lines: "Lines") -> None:
        """Until the end of input or /quit."""
        for line in lines:
            if not line.startswith("/"):
                self._answer(runner, line)
            elif not self._command(*line[1:].split(maxsplit=1)):
                return

    def _command(self, name: str = "", text: str = "") -> bool:
        """False: leave."""
        if name == "quit":
            return False
        if name in ("reset", "system"):
            self._messages = []
            self._system = self._system if name == "reset" else text or None
            self._note("forgotten" if name == "reset" else f"system message: {self._system or 'none'}; forgotten")
        else:
            self._note(HELP if name == "help" else f"unknown command /{name}; /help names them")
        return True

    def _answer(self, runner: asyncio.Runner, line: str) -> None:
        answer = _Answer(self._out)
        messages = [*self._with_system(), {"role": "user", "content": line}]
        try:
            runner.run(answer.read(self._answerer(messages)))
        except KeyboardInterrupt:  # asyncio's Runner has cancelled the answer, and with it the request
            self._note(f"stopped: {answer.pace()}", "\n")
        except AsyncLLMError as error:
            self._note(f"error: {error}", "\n" if answer.text else "")
            return  # the question was not answered: it is not part of the conversation
        else:
            self._note(answer.pace(), "\n")
        if answer.text:
            self._messages += [messages[-1], {"role": "assistant", "content": answer.text}]

    def _with_system(self) -> Messages:
        system = [] if self._system is None else [{"role": "system", "content": self._system}]
        return [*system, *self._messages]

    def _note(self, text: str, end_of_answer: str = "") -> None:
        self._out.write(end_of_answer)
        self._out.flush()
        self._notes.write(f"[{text}]\n" if "\n" not in text else f"{text}\n")
        self._notes.flush()


class _Answer:
    """One answer, written as it comes."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._parts: list[str] = []
        self._num_tokens = 0
        self._start_s = time.monotonic()
        self._first_s: float | None = None
        self._last_s = self._start_s

    @property
    def text(self) -> str:
        return "".join(self._parts)

    async def read(self, answering: AbstractAsyncContextManager[Pieces]) -> None:
        async with answering as pieces:
            async for piece in pieces:
                self._add(piece)

    def _add(self, piece: Piece) -> None:
        if piece.text:
            self._parts.append(piece.text)
            self._out.write(piece.text)
            self._out.flush()
        self._last_s = time.monotonic()
        if self._first_s is None:
            self._first_s = self._last_s
        self._num_tokens = self._num_tokens + bool(piece.text) if piece.num_tokens is None else piece.num_tokens

    def pace(self) -> str:
        """For the line behind the answer. Tokens a second count from the first on, as a reader sees it."""
        if self._first_s is None:
            return "no token came"
        first = f"{self._num_tokens} tokens, the first after {self._first_s - self._start_s:.2f} s"
        if self._num_tokens < 2 or self._last_s == self._first_s:
            return first
        return f"{first}, {(self._num_tokens - 1) / (self._last_s - self._first_s):.1f} tokens/s"


class Lines:
    """What is typed, line by line; from a pipe without prompts. ctrl-C at the prompt drops the line."""

    def __init__(self, notes: TextIO) -> None:
        self._notes = notes
        self._is_terminal = sys.stdin.isatty()
        if self._is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # gives input() its editing and its history

    def __iter__(self) -> "Lines":
        return self

    def __next__(self) -> str:
        while True:
            try:
                line = input("> " if self._is_terminal else "").strip()
            except EOFError:
                raise StopIteration from None
            except KeyboardInterrupt:
                self._notes.write("\n[/quit or end of input leaves]\n")
                continue
            if line:
                return line


def talk(
    opening: Callable[[], AbstractAsyncContextManager[tuple[str, Answerer]]], system: str | None = None
) -> int:
    """`asyncllm chat`: open what answers, talk, close it; returns the exit code.

    Raises:
        AsyncLLMError: nothing that answers could be opened.
    """
    notes = sys.stderr
    with asyncio.Runner() as runner:
        opened = opening()
        name, answerer = runner.run(_enter(opened))
        try:
            notes.write(f"{name}: /help for help\n")
            notes.flush()
            Chat(answerer, sys.stdout, notes, system).run(runner, Lines(notes))
        finally:
            runner.run(_leave(opened))
    return 0


# Runner.run takes coroutines; a context manager's own methods may return any awaitable.
async def _enter(opened: AbstractAsyncContextManager[tuple[str, Answerer]]) -> tuple[str, Answerer]:
    return await opened.__aenter__()


async def _leave(opened: AbstractAsyncContextManager[Any]) -> None:
    await opened.__aexit__(None, None, None)


@contextlib.asynccontextmanager
async def over_http(
    url: str, api_key: str | None, model: str | None, fields: Mapping[str, Any]
) -> AsyncIterator[tuple[str, Answerer]]:
    """The name and the answers of a server's model, by default its first.

    Raises: as AsyncClient.
    """
    async with AsyncClient(url, api_key) as client:
        name = model or (await client.models.list()).data[0].id

        @contextlib.asynccontextmanager
        async def answer(messages: Messages) -> AsyncIterator[Pieces]:
            request = client.chat.completions.create(
                model=name, messages=messages, stream=True, stream_options={"include_usage": True}, **fields
            )
            async with await request as chunks:
                yield (
                    Piece(
                        (chunk.choices[0].delta.content or "") if chunk.choices else "",
                        chunk.usage.completion_tokens if chunk.usage else None,
                    )
                    async for chunk in chunks
                )

        yield f"{name} at {client.base_url}", answer
