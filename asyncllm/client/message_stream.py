"""What `.stream(...)` gives: a Stream that adds up what it reads, with the text, a snapshot and the whole at the end.

The client's loop. It never knows transports, or how an answer adds up (accumulate.py).
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Protocol, Self, TypeVar

from .replies import Message
from .stream import Stream

ItemT = TypeVar("ItemT")
EventT = TypeVar("EventT")
WholeT = TypeVar("WholeT")
ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
WholeT_co = TypeVar("WholeT_co", covariant=True)


class Accumulator(Protocol[ItemT_contra, EventT, WholeT_co]):
    """Items of a stream, added up."""

    def add(self, item: ItemT_contra) -> list[EventT]:
        """Take one item; the events it means to a reader."""

    def text_of(self, event: EventT) -> str:
        """The text that this event adds to the first answer; "" for most."""

    def snapshot(self) -> WholeT_co:
        """All of it so far."""

    def message(self) -> Message:
        """The first answer so far, as the next request's history takes it."""


class MessageStream(Generic[ItemT, EventT, WholeT]):
    """An accumulating stream: iterate its events, or `text_stream`, or ask for the end at once.

    Raises, while reading: as Stream.
    """

    def __init__(self, stream: Stream[ItemT], accumulator: Accumulator[ItemT, EventT, WholeT]) -> None:
        self._stream = stream
        self._accumulator = accumulator
        self._ready: list[EventT] = []  # in reverse

    @property
    def request_id(self) -> str | None:
        return self._stream.request_id

    @property
    def response(self) -> Any:
        """The HTTP answer; None over WebSocket."""
        return self._stream.response

    @property
    def snapshot(self) -> WholeT:
        """What has been read so far, as a whole reply. Costs as much as the answer is long."""
        return self._accumulator.snapshot()

    @property
    def text_stream(self) -> "TextStream[EventT]":
        """The pieces of text of the first answer."""
        return TextStream(self, self._accumulator.text_of)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> EventT:
        while not self._ready:
            self._ready = self._accumulator.add(await anext(self._stream))[::-1]
        return self._ready.pop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def until_done(self) -> None:
        """Read what is left."""
        async for _ in self:
            pass

    async def get_final_completion(self) -> WholeT:
        """Read what is left; the whole reply. After an early close: what there is."""
        await self.until_done()
        return self.snapshot

    get_final_response = get_final_completion  # openai's name of it for responses

    async def get_final_message(self) -> Message:
        """Read what is left; the first answer as a message."""
        await self.until_done()
        return self._accumulator.message()

    async def get_final_text(self) -> str:
        """Read what is left; the first answer's text."""
        return (await self.get_final_message()).content or ""

    async def aclose(self) -> None:
        """Cancel on the server, unless the answer is complete. Idempotent."""
        await self._stream.aclose()

    close = aclose


class TextStream(Generic[EventT]):
    """The text of a MessageStream's events. A class: a generator that is left in the middle closes late."""

    def __init__(self, events: AsyncIterator[EventT], text_of: Callable[[EventT], str]) -> None:
        self._events = events
        self._text_of = text_of

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> str:
        while not (text := self._text_of(await anext(self._events))):
            pass
        return text


class StreamManager(Generic[ItemT, EventT, WholeT]):
    """What `.stream(...)` returns: `async with` sends the request, and closes the stream at the end."""

    def __init__(
        self, request: Callable[[], Awaitable[Stream[ItemT]]], accumulator: Accumulator[ItemT, EventT, WholeT]
    ) -> None:
        self._request = request
        self._accumulator = accumulator
        self._stream: MessageStream[ItemT, EventT, WholeT] | None = None

    async def __aenter__(self) -> MessageStream[ItemT, EventT, WholeT]:
        self._stream = MessageStream(await self._request(), self._accumulator)
        return self._stream

    async def __aexit__(self, *exc_info: object) -> None:
        if self._stream is not None:
            await self._stream.aclose()
