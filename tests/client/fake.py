"""A server of raw bytes on a loopback socket: every test says itself what goes over the wire, and when."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n"
SSE_HEAD = HEAD % b"text/event-stream" + b"Transfer-Encoding: chunked\r\n\r\n"


class Request(msgspec.Struct):
    method: str
    path: str
    headers: dict[str, str]  # lower-case names
    body: bytes
    connection: int  # which one it came over

    def json(self) -> dict[str, object]:
        return json.loads(self.body)  # type: ignore[no-any-return]


Act = Callable[["Exchange"], Awaitable[object]]


class Exchange:
    """One request's turn: what its script writes with."""

    def __init__(self, request: Request, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.request = request
        self._reader = reader
        self._writer = writer

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        self._writer.transport.abort()

    async def hear(self) -> bytes:
        """What the client says next, behind its request."""
        return await self._reader.read(65536)

    async def left(self) -> None:
        """Wait until the client has closed the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(65536):
                pass


class RawServer:
    """Plays one act for each request, in order; the last one for all that follow."""

    def __init__(self, *acts: Act) -> None:
        self.acts = list(acts)
        self.requests: list[Request] = []
        self.num_connections = 0
        self.url = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        connection = self.num_connections
        try:
            while not writer.is_closing():
                request = await _read_request(reader, connection)
                self.requests.append(request)
                act = self.acts[min(len(self.requests), len(self.acts)) - 1]
                await act(Exchange(request, reader, writer))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has left
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


@contextlib.asynccontextmanager
async def raw_server(*acts: Act) -> AsyncIterator[RawServer]:
    server = RawServer(*acts)
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with contextlib.suppress(asyncio.CancelledError):
            await server.serve(reader, writer)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}/v1"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks)


async def _read_request(reader: asyncio.StreamReader, connection: int) -> Request:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(method, path, headers, body, connection)


# -- acts --


def json_reply(body: object, status: str = "200 OK", headers: str = "") -> Act:
    data = body if isinstance(body, bytes) else msgspec.json.encode(body)
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n{headers}\r\n"

    async def act(exchange: Exchange) -> None:
        await exchange.send(head.encode() + data)

    return act


def refusal(status: str, headers: str = "", message: str = "no") -> Act:
    return json_reply({"error": {"message": message, "type": "t", "code": "c", "param": "p"}}, status, headers)


def stream(*pieces: bytes, end: bytes = b"0\r\n\r\n") -> Act:
    """An SSE body, a chunk a piece; the connection is closed if the end is not the chunked one."""

    async def act(exchange: Exchange) -> None:
        await exchange.send(SSE_HEAD)
        for piece in pieces:
            await exchange.chunk(piece)
        await exchange.send(end)
        if not end:
            exchange.close()

    return act


# -- events --

DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def chat_event(text: str | None = None, finish: str | None = None, index: int = 0, **more: object) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": index, "delta": delta, "finish_reason": finish, "logprobs": None}
    return event({"id": "c1", "object": "chat.completion.chunk", "model": "m", "choices": [choice]} | more)


def usage_event(num_prompt: int, num_output: int) -> bytes:
    usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
    return event({"id": "c1", "object": "chat.completion.chunk", "choices": [], "usage": usage})


def chat_stream(*texts: str) -> Act:
    """A whole answer as it should be."""
    pieces = [chat_event(text) for text in texts]
    return stream(*pieces, chat_event(finish="stop") + usage_event(3, len(texts)) + DONE)


WHOLE = {
    "id": "c1", "object": "chat.completion", "created": 1, "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}  # fmt: skip
MESSAGES = [{"role": "user", "content": "Hello"}]
