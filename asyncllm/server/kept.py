"""Every response that can be asked for by its id: how one is begun, who may ask for it, and how long it is kept.

Loop thread. It never knows HTTP, WebSocket or how a response is told.
"""

import secrets
import time
from functools import partial
from heapq import heappop, heappush

import msgspec
from aiohttp import web

from ..errors import InvalidRequest
from ..llm import AsyncLLM
from ..types import CALLER, SamplingParams
from ..wire.names import RESPONSE_NAMES
from ..wire.requests import terms
from ..wire.response_events import Head
from ..wire.response_input import input_messages
from ..wire.responses import ResponseRequest, as_chat, echo, tells_logprobs
from .asking import Asked, ask, ask_what_fits, call_id_chars, naming
from .detailed import token_logprobs
from .live import LiveResponse, Messages
from .saying import TellLogprobs
from .settings import Settings


class ResponseNotFound(InvalidRequest):
    status = 404
    code = "response_not_found"


class PreviousNotFound(InvalidRequest):
    code = "previous_response_not_found"


def _params(asked: Asked, body: ResponseRequest) -> SamplingParams:
    """The engine ends a sequence with a token: a warm-up has one, which nobody gets to see."""
    if body.generate is False:
        return msgspec.structs.replace(asked.params, max_tokens=1, min_tokens=0)
    return asked.params


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
        messages = self._past(body.previous_response_id, owner) + input_messages(body.input)
        asked = await self._ask(body, messages)
        progress = body.progress is True
        with naming(RESPONSE_NAMES):
            stream = self._llm.submit(
                asked.prompt_ids, _params(asked, body), shown=asked.shown, wants_progress=progress, **terms(body)
            )
        head = Head(
            id=f"resp_{secrets.token_hex(12)}",
            created_at=int(time.time()),
            model=self._llm.model_name,
            echo=echo(body, asked.params),
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
            tell_logprobs=self._tell_logprobs(body),
            is_warm_up=body.generate is False,
            owner=owner,
        )
        self._by_id[live.id] = live
        if live.owner is not None:
            self._owned.setdefault(live.owner, set()).add(live.id)
        return live

    def _tell_logprobs(self, body: ResponseRequest) -> TellLogprobs | None:
        if not tells_logprobs(body):
            return None
        return partial(token_logprobs, self._llm, body.return_tokens_as_token_ids is True)

    async def count(self, body: ResponseRequest) -> int:
        """The tokens of the prompt that start() would make.

        Raises:
            InvalidRequest: as start().
        """
        messages = self._past(body.previous_response_id, None) + input_messages(body.input)
        return len((await self._ask(body, messages)).prompt_ids)

    async def _ask(self, body: ResponseRequest, messages: Messages) -> Asked:
        system = [{"role": "system", "content": body.instructions}] if body.instructions else []
        with naming(RESPONSE_NAMES):
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
        lives = [self._by_id[response_id] for response_id in self._owned.pop(owner, ())]
        for live in lives:  # all, before any is let go
            live.owner = None
        self._expire()
        for live in lives:
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
        keep_s = max(self._settings.retention_s * is_kept, self._settings.resume_grace_s * live.resumable)
        num_bytes = live.num_bytes
        if not keep_s or num_bytes > self._settings.max_retained_bytes:  # it alone: the others would go, and it too
            self._drop(live.id)
            return
        until_s = time.monotonic() + keep_s
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
