"""The real server, AsyncLLM and engine on loopback sockets; only the model's numbers are scripted."""

import asyncio
import io
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from asyncllm.llm import AsyncLLM
from asyncllm.server.app import listening
from asyncllm.server.settings import Settings
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.wire.sse import Decoder

from ..fakes import NextToken, ScriptedRunner, engine_config, scripted, scripted_llm
from ..text import toys

MODEL = "scripted"
HI = [{"role": "user", "content": "hi"}]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BOTH = pytest.mark.parametrize("stream", [False, True])


def pytest_asyncio_loop_factories(config: Any, item: Any) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    return {"uvloop": uvloop.new_event_loop}


class Answer:
    """One answer, whole or joined from its events, so that tests can compare the two."""

    def __init__(self, status: int, headers: Mapping[str, str], raw: bytes) -> None:
        self.status, self.headers, self.raw = status, headers, raw
        self.events: list[dict[str, Any]] = []
        self.is_done = False  # [DONE] was the last event
        if headers["Content-Type"].startswith("text/event-stream"):
            *data, last = [event.data for event in Decoder().feed(raw)]
            self.is_done = last == "[DONE]"
            self.events = [json.loads(one) for one in (data if self.is_done else [*data, last])]
            assert raw.decode() == "".join(f"data: {event.data}\n\n" for event in Decoder().feed(raw))
        else:
            self.body = json.loads(raw)

    @property
    def error(self) -> dict[str, Any]:
        error: dict[str, Any] = (self.events[-1] if self.events else self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def texts(self, index: int = 0) -> list[str]:
        """The pieces of text of one choice."""
        choices = [choice for choice in self._choices() if choice["index"] == index]
        return [_text(choice) for choice in choices if _text(choice) is not None]

    def text(self, index: int = 0) -> str:
        return "".join(self.texts(index))

    @property
    def finish_reason(self) -> str:
        reasons = [choice["finish_reason"] for choice in self._choices() if choice["finish_reason"] is not None]
        assert len(reasons) == 1, reasons
        return str(reasons[0])

    @property
    def usage(self) -> dict[str, Any]:
        usages = [body["usage"] for body in (self.events or [self.body]) if body.get("usage")]
        assert len(usages) == 1, usages
        return dict(usages[0])

    def _choices(self) -> list[dict[str, Any]]:
        return [choice for body in (self.events or [self.body]) for choice in body["choices"]]


def _text(choice: dict[str, Any]) -> Any:
    if "text" in choice:
        return choice["text"]
    return choice.get("delta", choice.get("message")).get("content")


def refused(answer: Answer, param: str | None) -> None:
    assert answer.status == 400
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["param"] == param


class Served:
    """A running server and a client of it."""

    def __init__(self, url: str, llm: AsyncLLM, runner: ScriptedRunner, session: aiohttp.ClientSession) -> None:
        self.url, self.llm, self.runner, self.session = url, llm, runner, session
        self.tokenizer = llm.tokenizer

    async def post(self, path: str, body: Any = None, *, data: Any = None, headers: Any = None) -> Answer:
        data = json.dumps(body).encode() if data is None else data
        data = io.BytesIO(data) if isinstance(data, bytes) else data  # aiohttp warns of large bytes
        headers = {"Content-Type": "application/json"} | (headers or {})
        async with self.session.post(self.url + path, data=data, headers=headers) as response:
            return Answer(response.status, response.headers, await response.read())

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.json()

    async def chat(self, messages: Any = None, **fields: Any) -> Answer:
        usage = {"stream_options": {"include_usage": True}}
        return await self.post(CHAT, {"messages": messages or HI, "temperature": 0} | usage | fields)

    async def complete(self, prompt: Any = "hi", **fields: Any) -> Answer:
        usage = {"stream_options": {"include_usage": True}}
        return await self.post(TEXT, {"prompt": prompt, "temperature": 0, "max_tokens": 64} | usage | fields)

    async def metrics(self) -> dict[str, float]:
        async with self.session.get(self.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
        return {name: float(value) for name, value in (line.split() for line in lines if line[0] != "#")}

    async def alive(self) -> None:
        """Healthy, and a short request is answered."""
        assert (await self.get("/health"))[0] == 200
        assert (await self.complete(max_tokens=1)).status == 200

    async def idle(self) -> None:
        """Nothing runs or waits any more, and every page is free or cached."""
        await until(lambda: self.llm.num_live == 0)
        await until(lambda: self.llm.stats.num_running == self.llm.stats.num_waiting == self.llm.stats.pages_used == 0)

    async def connect(self) -> "Raw":
        host, port = self.url.removeprefix("http://").split(":")
        return Raw(*await asyncio.open_connection(host, int(port)))


class Raw:
    """A client that writes and leaves as it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, path: str, body: bytes, headers: str = "") -> None:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n{headers}"
        length = (
            "" if "Content-Length" in headers or "Transfer-Encoding" in headers else f"Content-Length: {len(body)}\r\n"
        )
        self.writer.write(f"{head}{length}\r\n".encode() + body)
        await self.writer.drain()

    async def status(self) -> int:
        return int((await self.reader.readline()).split()[1])

    async def events(self, count: int) -> None:
        """Read on until so many events have come."""
        for _ in range(count):
            await self.reader.readuntil(b"data: ")

    async def rest(self) -> bytes:
        """Everything until the server closes."""
        try:
            return await self.reader.read()
        except ConnectionResetError:
            return b""

    def leave(self, *, reset: bool = False) -> None:
        """Close with FIN, or with RST."""
        if reset:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.close()


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for a state that another thread brings about."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110  (there is no event to wait for)
            await asyncio.sleep(0.001)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.byte_level(tmp_path_factory.mktemp("served"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


Serve = Callable[..., Any]


@pytest.fixture
def serve(folder: Path, tokenizer: Tokenizer) -> Serve:
    """`async with serve(answer="text") as served`: a server whose model says this, then EOS for ever."""

    @asynccontextmanager
    async def served(
        answer: str | list[int] | NextToken = "Hello there.",
        *,
        template: str | None = toys.CHATML,
        tokenizer: Tokenizer = tokenizer,
        settings: Settings | None = None,
        **config: Any,
    ) -> AsyncIterator[Served]:
        if isinstance(answer, str):
            answer = tokenizer.encode(answer)
        next_token = scripted(answer, toys.EOS_ID) if isinstance(answer, list) else answer
        chat = ChatTemplate(template) if template is not None else None
        async with (
            scripted_llm(tokenizer, chat, next_token, engine_config(**config)) as (llm, runner),
            listening(llm, port=0, settings=settings) as url,
            aiohttp.ClientSession() as session,
        ):
            try:
                yield Served(url, llm, runner, session)
            finally:
                runner.let_go()  # or the engine's thread would not end

    return served


def endless(context: list[int], prompt_len: int) -> int:
    """A model that never stops: the letters a to z, over and over."""
    return 3 + 64 + (len(context) - prompt_len) % 26
