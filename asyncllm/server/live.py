"""A response: its text in pieces, the one client that follows it, and how long it may be asked for.

Loop thread. It never knows HTTP or WebSocket: a client is a Sink.
"""

import asyncio
import copy
import secrets
import time
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from typing import Any, Protocol

import msgspec
from aiohttp import web

from ..errors import Aborted, AsyncLLMError, InvalidRequest
from ..llm import AsyncLLM, Stream
from ..types import CALLER, FinishReason, Logprob, Progress, SamplingParams
from ..wire import items
from ..wire.items import CONTENT, REASONING, Logprobs, Piece
from ..wire.response_events import Events, Framing, Head, Outcome, Script, all_events
from ..wire.responses import NAMES, ResponseRequest, as_chat, echo, input_messages, tells_logprobs
from .asking import Asked, ask, ask_what_fits, call_id_chars, naming
from .detailed import token_logprobs
from .parting import Parting, reasoning_tokens
from .settings import Settings

Messages = list[dict[str, Any]]


class Sink(Protocol):
    """Where one client's events go."""

    @property
    def framing(self) -> Framing: ...

    def has_room(self) -> bool:
        """Whether text may be written."""

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


class ResponseNotFound(InvalidRequest):
    status = 404
    code = "response_not_found"


class PreviousNotFound(InvalidRequest):
    code = "previous_response_not_found"


class Telling(Protocol):
    """An answer in the words of one API."""

    @property
    def id(self) -> str: ...

    @property
    def call_id_chars(self) -> int | None: ...

    def script(self, framing: Framing) -> Script:
        """A fresh one, before its first event."""

    def whole(self, outcome: Outcome | None, pieces: list[Piece]) -> dict[str, Any]:
        """All of it at once."""


class LiveResponse:
    """One answer from its submission to the end of its retention; the Reader of its stream.

    The pieces are kept as they were sent, so that every event can be said again with its number.
    """

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
        tell_logprobs: Callable[[Sequence[Logprob]], Logprobs] | None = None,
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
        self._parting = parting
        self._tell_logprobs = tell_logprobs
        self._logprobs: Logprobs | None = None  # of tokens that have made no text yet
        self._parser = None if parting is None else parting.new_parser()
        self._messages = messages
        self._settings = settings
        self._on_over = on_over
        self._pieces: list[Piece] = []
        self._num_chars = self._num_reasoning_chars = 0
        self._sink: Sink | None = None
        self._script: Script | None = None
        self._told: Progress | None = None
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
        past = sum([len(message["content"] or "") for message in self._messages])
        said = sum([len(piece.text) + 200 * len(piece.logprobs or ()) for piece in self._pieces])
        return past + said + 2000

    def whole(self) -> dict[str, Any]:
        """The answer as an object."""
        return self._telling.whole(self.outcome, self._pieces)

    def conversation(self) -> Messages:
        """What a response behind this one has for its past."""
        if not self._pieces:
            return self._messages
        return [*self._messages, items.said(self._pieces, self.id, self._telling.call_id_chars)]

    # -- the client --

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
        if self.outcome is not None or self._stream is None:
            return True
        ended = self._stream.ended
        sink, script = self._sink, self._script
        if sink is None or script is None:
            if ended:
                self._pieces += self._take_pieces()
                self._finish(self._outcome())
            return True
        if not ended and not sink.has_room():
            sink.give_patience(self._stream.num_unread_bytes)
            return False
        data = b"" if self._stream.progress is self._told else self._progress(script)
        for piece in self._take_pieces():
            data += b"".join(script.say(*piece))
            self._pieces.append(piece)
        if ended:
            self._end(sink, script, data, self._outcome())
        elif data:
            sink.write(data)
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
        """What has been said since, as far as it is certain."""
        assert self._stream is not None
        ended = self._stream.ended
        if self._tell_logprobs is not None:
            self._logprobs = [*(self._logprobs or ()), *self._tell_logprobs(self._stream.take_details()[1])]
        text = self._stream.take_text()
        if self.is_warm_up:
            return []
        if self._parser is None or self._parting is None:
            return self._with_logprobs([Piece(CONTENT, text)]) if text else []
        pieces = [*self._parser.push(text), *(self._parser.finish() if ended else ())]
        said = [Piece(piece.kind.value, piece.text) for piece in pieces]
        self._num_chars += sum([len(piece.text) for piece in said])
        self._num_reasoning_chars += sum([len(piece.text) for piece in said if piece.kind == REASONING])
        said = self._with_logprobs(said)
        return said if self._parting.tells_reasoning else [piece for piece in said if piece.kind != REASONING]

    def _with_logprobs(self, pieces: list[Piece]) -> list[Piece]:
        """Those of the tokens that came with these pieces, at the first that is content; other pieces have none."""
        if self._logprobs is None or not pieces:
            return pieces
        logprobs, self._logprobs = self._logprobs, None
        at = next((i for i, piece in enumerate(pieces) if piece.kind == CONTENT), None)
        return pieces if at is None else [*pieces[:at], pieces[at]._replace(logprobs=logprobs), *pieces[at + 1 :]]

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
        self._finish(outcome)
        sink.end(data + b"".join(script.closing(outcome)))

    def _finish(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._sink = self._script = self._stream = None  # the prompt's ids go with the stream
        if not self.over.done():
            self.over.set_result(None)
        self._on_over(self)

    def _outcome(self) -> Outcome:
        assert self._stream is not None and self._stream.last is not None
        last = self._stream.last
        whole = Outcome(
            status="completed",
            num_prompt_tokens=self._stream.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            num_output_tokens=0 if self.is_warm_up else last.num_output_tokens,
            num_reasoning_tokens=reasoning_tokens(last.num_output_tokens, self._num_reasoning_chars, self._num_chars),
            calls=self._parser is not None and self._parser.has_whole_calls,
            stop_string=last.stop_reason if isinstance(last.stop_reason, str) else None,
            is_warm_up=self.is_warm_up,
        )
        if last.finish_reason is FinishReason.STOP or (self.is_warm_up and last.error is None):
            return whole
        if last.finish_reason is FinishReason.LENGTH:
            return msgspec.structs.replace(whole, status="incomplete", reason="max_output_tokens")
        if self._cancelled and isinstance(last.error, Aborted):
            return msgspec.structs.replace(whole, status="cancelled")
        self.error = copy.copy(last.error) if isinstance(last.error, AsyncLLMError) else AsyncLLMError("internal error")
        return msgspec.structs.replace(whole, status="failed", error=_told(self.error))


def _params(asked: Asked, body: ResponseRequest) -> SamplingParams:
    """The engine ends a sequence with a token: a warm-up has one, which nobody gets to see."""
    if body.generate is False:
        return msgspec.structs.replace(asked.params, max_tokens=1, min_tokens=0)
    return asked.params


def _told(error: AsyncLLMError) -> dict[str, str]:
    """As it stands in a response: openai's clients know a fixed list of codes, so ours is in the message."""
    return {"code": "server_error", "message": str(error)}


class Responses:
    """Every response that can be asked for by its id: the live ones, and those that ended within retention_s."""

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self._llm = llm
        self._settings = settings
        self._by_id: dict[str, LiveResponse] = {}
        self._ended: dict[str, tuple[float, int]] = {}  # id: (until, bytes)
        self._order: list[tuple[float, str]] = []  # of _ended, a heap; what is no more in there is old news
        self._owned: dict[object, set[str]] = {}  # by socket: the ids kept for it alone
        self._num_bytes = 0

    def __repr__(self) -> str:
        return f"Responses({len(self._by_id)}, {len(self._ended)} ended, {self._num_bytes} bytes)"

    async def start(self, body: ResponseRequest, owner: object = None) -> LiveResponse:
        """Submit one. `owner`, a socket, may refer to its own responses though they are not stored.

        Raises:
            InvalidRequest: naming the field. QueueFull, Draining, EngineDead: not now.
        """
        messages = self._past(body.previous_response_id, owner) + input_messages(body)
        asked = await self._ask(body, messages)
        progress = body.progress is True
        stream = self._llm.submit(asked.prompt_ids, _params(asked, body), shown=asked.shown, wants_progress=progress)
        head = Head(
            id=f"resp_{secrets.token_hex(12)}",
            created_at=int(time.time()),
            model=self._llm.model_name,
            echo=echo(body),
            call_id_chars=call_id_chars(self._llm),
            encrypts="reasoning.encrypted_content" in (body.include or ()),
        )
        live = LiveResponse(
            head,
            stream,
            messages,
            self._settings,
            self._note_over,
            stored=body.store is not False,
            resumable=body.resumable is True,
            parting=asked.parting,
            tell_logprobs=partial(token_logprobs, self._llm) if tells_logprobs(body) else None,
            is_warm_up=body.generate is False,
            owner=owner,
        )
        self._by_id[live.id] = live
        if live.owner is not None:
            self._owned.setdefault(live.owner, set()).add(live.id)
        return live

    async def count(self, body: ResponseRequest) -> int:
        """The tokens of the prompt that start() would make.

        Raises:
            InvalidRequest: as start().
        """
        messages = self._past(body.previous_response_id, None) + input_messages(body)
        return len((await self._ask(body, messages)).prompt_ids)

    async def _ask(self, body: ResponseRequest, messages: Messages) -> Asked:
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        with naming(NAMES):
            chat = as_chat(body)
            if body.truncation == "auto":
                return await ask_what_fits(self._llm, chat, system, messages)
            return await ask(self._llm, chat, system + messages)

    def get(self, response_id: str) -> LiveResponse:
        """
        Raises:
            ResponseNotFound: unknown, no longer kept, or another caller's.
        """
        live = self._own(response_id)
        if live is None or (live.outcome is not None and not (live.stored or live.resumable)):
            raise ResponseNotFound(f"no response {response_id[:80]!r} is kept here", "response_id")
        return live

    def forget(self, live: LiveResponse) -> None:
        """Keep it no longer; it is ended if it runs."""
        live.stored = live.resumable = False
        live.cancel()
        self._drop(live.id)

    def disown(self, owner: object) -> None:
        """This socket is gone, and with it what was kept for its sake alone."""
        for response_id in self._owned.pop(owner, ()):
            live = self._by_id[response_id]
            live.owner = None
            if live.outcome is not None:
                self._note_over(live)

    def _own(self, response_id: str) -> LiveResponse | None:
        self._expire()
        live = self._by_id.get(response_id)
        return live if live is not None and live.caller == CALLER.get().name else None

    def _past(self, response_id: str | None, owner: object) -> Messages:
        if response_id is None:
            return []
        live = self._own(response_id)
        is_there = live is not None and (live.stored or (owner is not None and live.owner is owner))
        if live is None or not is_there or live.outcome is None or live.outcome.status == "failed":
            message = f"the response {response_id[:80]!r} is not kept here, or has not ended; send the whole input"
            raise PreviousNotFound(message, "previous_response_id")
        return live.conversation()

    def _note_over(self, live: LiveResponse) -> None:
        if live.id not in self._by_id:
            return
        self._uncount(live.id)
        is_kept = live.stored or live.owner is not None
        keep_s = self._settings.retention_s if is_kept else self._settings.resume_grace_s * live.resumable
        if not keep_s:
            self._drop(live.id)
            return
        until_s, num_bytes = time.monotonic() + keep_s, live.num_bytes
        self._ended[live.id] = (until_s, num_bytes)
        self._num_bytes += num_bytes
        heappush(self._order, (until_s, live.id))
        self._expire()

    def _expire(self) -> None:
        now_s, limit = time.monotonic(), self._settings.max_retained_bytes
        while self._order:
            until_s, response_id = self._order[0]
            if until_s > now_s and self._num_bytes <= limit:
                return
            heappop(self._order)
            if self._ended.get(response_id, (0.0, 0))[0] == until_s:
                self._drop(response_id)

    def _drop(self, response_id: str) -> None:
        live = self._by_id.pop(response_id, None)
        if live is not None and live.owner is not None:
            self._owned[live.owner].discard(response_id)
        self._uncount(response_id)

    def _uncount(self, response_id: str) -> None:
        self._num_bytes -= self._ended.pop(response_id, (0.0, 0))[1]


RESPONSES = web.AppKey("responses", Responses)
