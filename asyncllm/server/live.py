"""A live answer: its text in pieces, and the one client that follows it.

Loop thread. It never knows HTTP or WebSocket: a client is a Sink.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from ..errors import Aborted, AsyncLLMError, InvalidRequest, as_ours
from ..stream import Stream
from ..types import CALLER, FinishReason, Progress
from ..wire import items
from ..wire.items import CONTENT, Piece
from ..wire.names import Names
from ..wire.response_events import Events, EventStream, Framing, Outcome, Script, all_events
from .events import Outflow
from .parting import Parting
from .saying import PieceReader, TellLogprobs
from .settings import Settings

Messages = list[dict[str, Any]]


class Sink(Protocol):
    """Where one client's events go."""

    @property
    def framing(self) -> Framing: ...

    @property
    def outflow(self) -> Outflow | None:
        """Whether it has room decides whether text may be written; None: it may."""

    def give_patience(self, num_unread_bytes: int) -> None:
        """It has no room, and this much waits for it; a client that takes too long is cut off."""

    def write(self, data: bytes) -> None:
        """Send events."""

    def end(self, data: bytes) -> None:
        """Send the last ones; nothing follows."""

    def replaced(self) -> None:
        """Another client follows this response now; nothing follows here."""

    def cut_off(self) -> None:
        """Close the connection: what should follow cannot be said."""


class Telling(Protocol):
    """An answer in the words of one API."""

    @property
    def id(self) -> str: ...

    @property
    def call_id_chars(self) -> int | None: ...

    @property
    def names(self) -> Names:
        """Of the request's fields."""

    @property
    def num_chars(self) -> int:
        """About what it repeats of its request."""

    def script(self, framing: Framing) -> Script:
        """A fresh one, before its first event."""

    def whole(self, outcome: Outcome | None, pieces: list[Piece]) -> dict[str, Any]:
        """All of it at once."""


class LiveResponse:
    """One answer from its submission to the end of its retention; the Reader of its stream.

    The pieces are kept as they were sent, so that every event can be said again with its number.
    """

    __slots__ = (
        "_cancelled", "_grace", "_is_plain", "_messages", "_on_over", "_pieces", "_reader", "_script",
        "_settings", "_sink", "_stream", "_take_more", "_telling", "_told", "caller", "dirty", "error", "id",
        "is_warm_up", "outcome", "over", "owner", "resumable", "stored",
    )  # fmt: skip

    def __init__(
        self,
        telling: Telling,
        stream: Stream,
        messages: Messages,
        settings: Settings,
        on_over: Callable[["LiveResponse"], None] = lambda live: None,
        *,
        stored: bool = False,
        resumable: bool = False,
        parting: Parting | None = None,
        tell_logprobs: TellLogprobs | None = None,
        is_warm_up: bool = False,
        owner: object = None,
    ) -> None:
        self.dirty = False
        self.id = telling.id
        self.caller = CALLER.get().name
        self.stored = stored
        self.resumable = resumable
        self.is_warm_up = is_warm_up
        self.owner = None if stored else owner  # for whom it is kept where it is not for everybody
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.outcome: Outcome | None = None
        self.error: AsyncLLMError | None = None
        self._telling = telling
        self._stream: Stream | None = stream
        self._reader: PieceReader | None = PieceReader(stream, parting, tell_logprobs)
        # All text is content: it is read past the reader, who has nothing to part or count.
        self._is_plain = parting is None and tell_logprobs is None and not is_warm_up
        self._messages = messages
        self._settings = settings
        self._on_over = on_over
        self._pieces: list[Piece] = []
        self._sink: Sink | None = None
        self._script: Script | None = None
        self._told: Progress | None = None
        # Its stream's, once plain text has been sent: nothing but more of it comes before the end.
        self._take_more: Callable[[], str | None] | None = None
        self._cancelled = False
        self._grace: asyncio.TimerHandle | None = None
        stream.listen(self)

    def __repr__(self) -> str:
        return f"LiveResponse({self.id}, {self.outcome or 'live'}, {len(self._pieces)} pieces)"

    @property
    def request_id(self) -> str | None:
        """The engine's name of it, while it runs."""
        return None if self._stream is None or self.outcome is not None else self._stream.request_id

    @property
    def num_bytes(self) -> int:
        """About what keeping it takes."""
        past = _num_bytes(self._messages) + self._telling.num_chars
        said = sum([100 + len(piece.text) for piece in self._pieces])
        entries = [entry for piece in self._pieces for entry in piece.logprobs or ()]
        return past + said + sum([400 * (1 + len(entry["top_logprobs"])) for entry in entries]) + 2000

    def whole(self) -> dict[str, Any]:
        """The answer as an object."""
        return self._telling.whole(self.outcome, self._pieces)

    @property
    def past(self) -> Messages:
        """What it was asked."""
        return self._messages

    def conversation(self) -> Messages:
        """What a response behind this one has for its past."""
        if not self._pieces:
            return self._messages
        return [*self._messages, items.said(self._pieces, self.id, self._telling.call_id_chars)]

    # -- the client --

    def check_after(self, after: int, name: str) -> None:
        """Whether anything comes behind event number `after`, which the request calls `name`.

        Raises:
            InvalidRequest: there is no such event yet, or it was the last.
        """
        if after < 0:
            return
        last = len(all_events(self._telling.script(EventStream()), self._pieces, self.outcome)) - 1
        if after > last:
            raise InvalidRequest(f"there is no event {after}; the last so far is {last}", name)
        if after == last and self.outcome is not None:
            raise InvalidRequest(f"the response has ended, and event {after} is its last", name)

    def attach(self, sink: Sink, after: int = -1) -> None:
        """Send this client every event behind number `after`, those to come too. A client before it is let go."""
        if self.outcome is not None:
            sink.end(self._said(self._telling.script(sink.framing), after))
            return
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
        if self._sink is not None:
            self._sink.replaced()
        self._sink, self._script = sink, self._telling.script(sink.framing)
        if data := self._said(self._script, after):
            sink.write(data)
        self.flush()

    def detach(self, sink: Sink, *, for_good: bool = False) -> None:
        """This client is gone. Nobody waits for the rest, unless it is resumable and was merely cut off."""
        if self._sink is not sink:
            return
        self._sink = self._script = None
        if self.outcome is not None:
            return
        if self.resumable and not for_good:
            self._grace = asyncio.get_running_loop().call_later(self._settings.resume_grace_s, self.cancel)
        else:
            self.cancel()

    def cancel(self) -> None:
        """End it. What it has said stays; its client gets the terminal event."""
        self._cancelled = True
        if (stream := self._stream) is not None:
            stream.abort()
            self.flush()

    def flush(self) -> bool:
        """Turn unread text into a piece, and say it."""
        if (stream := self._stream) is None:  # it is over
            return True
        sink, script = self._sink, self._script
        if sink is None or script is None:
            if stream.ended:
                self._pieces += self._take_pieces()
                self._finish(self._outcome())
            return True
        outflow = sink.outflow
        has_room = outflow is None or not outflow.may_be_full or outflow.has_room()
        if has_room and self._take_more is not None and (text := self._take_more()) is not None:  # nearly always
            if text:
                self._pieces.append(Piece(CONTENT, text))
                sink.write(script.more(text))
            return True
        ended = stream.ended
        if not ended and not has_room:
            sink.give_patience(stream.num_unread_bytes)
            return False
        data = b"" if stream.progress is self._told else self._progress(script)
        for piece in self._take_pieces():
            data += b"".join(script.say(piece.kind, piece.text, piece.logprobs))
            self._pieces.append(piece)
        if ended:
            self._end(sink, script, data, self._outcome())
        elif data:
            sink.write(data)
            self._take_more = stream.take_more if self._is_plain and self._pieces else None
        return True

    def cut_off(self) -> None:
        """Of the Reader: what it read is over, and its client would not hear of it."""
        if (sink := self._sink) is not None:
            sink.cut_off()
        if self.outcome is None:
            self.error = AsyncLLMError("internal error")
            self._finish(Outcome(status="failed", error=_told(self.error)))

    # -- inside --

    def _take_pieces(self) -> list[Piece]:
        assert self._reader is not None
        pieces = self._reader.take()
        return [] if self.is_warm_up else pieces

    def _progress(self, script: Script) -> bytes:
        assert self._stream is not None
        self._told = progress = self._stream.progress
        if progress is None or not isinstance(script, Events):
            return b""
        return script.progress(progress.queue_position, progress.num_prompt_tokens, progress.num_computed_tokens)

    def _said(self, script: Script, after: int) -> bytes:
        """The events so far behind a number."""
        return b"".join(all_events(script, self._pieces, self.outcome)[max(0, after + 1) :])

    def _end(self, sink: Sink, script: Script, data: bytes, outcome: Outcome) -> None:
        data += b"".join(script.closing(outcome))  # before it is over: where this raises the client is cut off
        try:
            self._finish(outcome)
        finally:  # who was told of all that was said must hear the end, or that there is none, whatever raises
            try:
                sink.end(data)
            except BaseException:
                sink.cut_off()
                raise

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        # The prompt's ids go with the stream.
        self._sink = self._script = self._stream = self._reader = self._take_more = None
        if not self.over.done():
            self.over.set_result(None)
        self._on_over(self)

    def _outcome(self) -> Outcome:
        assert self._reader is not None and self._stream is not None and self._stream.last is not None
        last = self._stream.last
        whole = Outcome(
            status="completed",
            num_prompt_tokens=self._stream.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            num_output_tokens=0 if self.is_warm_up else last.num_output_tokens,
            num_reasoning_tokens=self._reader.num_reasoning_tokens(last.num_output_tokens),
            calls=self._reader.has_whole_calls,
            stop_string=last.stop_reason if isinstance(last.stop_reason, str) else None,
            is_warm_up=self.is_warm_up,
        )
        if last.finish_reason is FinishReason.STOP or (self.is_warm_up and last.error is None):
            return whole
        if last.finish_reason is FinishReason.LENGTH:
            return msgspec.structs.replace(whole, status="incomplete", reason="max_output_tokens")
        if self._cancelled and isinstance(last.error, Aborted):
            return msgspec.structs.replace(whole, status="cancelled")
        self.error = as_ours(last.error).renamed(self._telling.names.of)
        return msgspec.structs.replace(whole, status="failed", error=_told(self.error))


def _num_bytes(value: Any) -> int:
    """About what CPython takes for it."""
    if isinstance(value, str):
        return 50 + len(value)
    if isinstance(value, dict):
        return 60 + sum([100 + len(key) + _num_bytes(inner) for key, inner in value.items()])
    return 60 + sum([8 + _num_bytes(inner) for inner in value]) if isinstance(value, list) else 30


def _told(error: AsyncLLMError) -> dict[str, str]:
    """As it stands in a response: openai's clients know a fixed list of codes, so ours is in the message."""
    return {"code": "server_error", "message": str(error)}
