"""Stream: an answer as it is generated, from SSE or WebSocket alike; and how events of SSE become chunks.

The client's loop. It never knows requests, retries or what a caller does with a chunk.
"""

import asyncio
from collections import deque
from typing import Any, Generic, Protocol, Self, TypeVar

import msgspec
from aiohttp import ClientResponse

from ..wire import sse
from .errors import APIConnectionError, APIError, ReplyTooLargeError, StreamTruncatedError, event_error
from .http import Body, Call, request_id_of
from .replies import ChatCompletionChunk, Completion, Reader, ResponseEvent

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
ChunkT = TypeVar("ChunkT", bound=ChatCompletionChunk | Completion)


class Source(Protocol[T_co]):
    """Where a Stream's items come from."""

    @property
    def request_id(self) -> str | None: ...

    @property
    def response(self) -> ClientResponse | None: ...

    async def next(self) -> T_co:
        """The next item. Raises StopAsyncIteration at the proper end, APIError at any other."""

    async def aclose(self) -> None:
        """The server shall stop. Idempotent."""

    def drop(self) -> None:
        """aclose() without waiting, from the loop, for a Stream that nobody holds any more."""


class Stream(Generic[T]):
    """An async iterator of chunks or events, and a context manager.

    Nothing is read ahead of the reader but what the sockets hold. Leaving early (`async with`, `aclose()`,
    cancelling the task that reads, or letting the stream go) closes the TCP connection, or cancels the
    response on a WebSocket: the server stops generating. To bound a single wait give the client a
    read timeout; a read that is cancelled from outside ends the stream.

    Raises, while iterating:
        StreamTruncatedError: the server ended without the end of the answer.
        APITimeoutError, APIConnectionError: silence, or a break. Never retried: the text would double.
        APIError: the server's own error event.
        ReplyTooLargeError: an event above the client's max_event_bytes.
    """

    def __init__(self, source: Source[T]) -> None:
        self._source = source
        self._loop = asyncio.get_running_loop()
        self._done = False

    def __repr__(self) -> str:
        return f"Stream({self.request_id}, {'done' if self._done else 'open'})"

    def __del__(self) -> None:
        # `async for ...: break` leaves no ghost. The collector may run on any thread.
        if not getattr(self, "_done", True) and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._source.drop)

    @property
    def request_id(self) -> str | None:
        return self._source.request_id

    @property
    def response(self) -> ClientResponse | None:
        """The HTTP answer; None over WebSocket."""
        return self._source.response

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> T:
        if self._done:
            raise StopAsyncIteration
        try:
            return await self._source.next()
        except StopAsyncIteration:
            self._done = True
            raise
        except BaseException:
            self._done = True
            self._source.drop()
            raise

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel on the server, unless the answer is complete. Idempotent."""
        if not self._done:
            self._done = True
            await self._source.aclose()

    close = aclose  # openai's name


class Reading(Protocol[T_co]):
    """What the events of one answer mean."""

    @property
    def done(self) -> bool:
        """The end has been said: what follows is dropped."""

    @property
    def complete(self) -> bool:
        """Nothing is missing, if the body ends here."""

    def read(self, event: sse.Event, request_id: str) -> T_co | None: ...


class ChunkReading(Generic[ChunkT]):
    """Chat and completions. The end is [DONE]; a body that ends without it must have finished every choice."""

    def __init__(self, reader: "Reader[ChunkT]") -> None:
        self._reader = reader
        self._open: set[int] = set()
        self._any_finished = False
        self.done = False

    @property
    def complete(self) -> bool:
        return self._any_finished and not self._open

    def read(self, event: sse.Event, request_id: str) -> ChunkT | None:
        if event.data.strip() == "[DONE]":
            self.done = True
            return None
        _raise_error(event, request_id)
        chunk = self._reader.read(event.data, request_id)
        for choice in chunk.choices:
            self._note(choice.index, choice.finish_reason)
        return chunk

    def _note(self, index: int, finish_reason: str | None) -> None:
        if finish_reason is None:
            self._open.add(index)
        else:
            self._open.discard(index)
            self._any_finished = True


TERMINAL_EVENTS = frozenset(
    ("response.completed", "response.incomplete", "response.failed", "response.cancelled", "response.done")
)


class EventReading:
    """Responses. The end is one of the terminal events; there is no [DONE], but some send it."""

    def __init__(self, reader: "Reader[ResponseEvent]") -> None:
        self._reader = reader
        self.done = False

    @property
    def complete(self) -> bool:
        return self.done

    def read(self, event: sse.Event, request_id: str) -> ResponseEvent | None:
        if event.data.strip() == "[DONE]":
            self.done = True
            return None
        _raise_error(event, request_id)
        item = self._reader.read(event.data, request_id)
        self.done = item.type in TERMINAL_EVENTS
        return item


def _raise_error(event: sse.Event, request_id: str) -> None:
    # The word is looked for first, as decoding every event twice would cost more than all the rest.
    if event.type != "error" and '"error"' not in event.data:
        return
    body = _decoded(event.data)
    if event.type == "error" or (isinstance(body, dict) and _says_error(body)):
        raise event_error(body, request_id)


def _says_error(body: dict[str, Any]) -> bool:
    if "error" in (body.get("type"), body.get("object")):
        return True
    return bool(body.get("error")) and "choices" not in body and "type" not in body


def _decoded(data: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data


class SseSource(Generic[T]):
    """The events of a response body."""

    def __init__(self, response: ClientResponse, call: Call, reading: Reading[T], max_event_bytes: int) -> None:
        self.response = response
        self.request_id = request_id_of(response, call)
        self._body = Body(response, call)
        self._reading = reading
        self._decoder = sse.Decoder(max_event_bytes)
        self._events: deque[sse.Event] = deque()
        self._too_large: ReplyTooLargeError | None = None  # behind those events

    async def next(self) -> T:
        while not self._reading.done:
            if not self._events:
                await self._read()
            elif (item := self._reading.read(self._events.popleft(), self.request_id)) is not None:
                return item
        await self._body.finish()
        raise StopAsyncIteration

    async def _read(self) -> None:
        if self._too_large is not None:
            raise self._too_large
        data = await self._read_body()
        try:
            self._events.extend(self._decoder.feed(data))
        except sse.EventTooLarge as error:
            self._events.extend(error.events)
            self._too_large = ReplyTooLargeError(str(error), request_id=self.request_id)

    async def _read_body(self) -> bytes:
        """
        Raises:
            StopAsyncIteration, StreamTruncatedError: the body has ended, with the answer or before.
        """
        try:
            data = await self._body.read()
        except APIError as error:
            if type(error) is APIConnectionError:  # a break, not a silence
                raise self._truncated() from error
            raise
        if not data:
            if self._reading.complete:
                raise StopAsyncIteration
            raise self._truncated()
        return data

    def _truncated(self) -> StreamTruncatedError:
        return StreamTruncatedError("the stream ended before the answer did", request_id=self.request_id)

    async def aclose(self) -> None:
        self.drop()

    def drop(self) -> None:
        self._body.close()


chat_reader = Reader(ChatCompletionChunk)
text_reader = Reader(Completion)
event_reader = Reader(ResponseEvent)


def chat_reading() -> ChunkReading[ChatCompletionChunk]:
    return ChunkReading(chat_reader)


def text_reading() -> ChunkReading[Completion]:
    return ChunkReading(text_reader)


def event_reading() -> EventReading:
    return EventReading(event_reader)
