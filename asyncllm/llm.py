"""AsyncLLM: encode, submit, update, abort; and the engine's life as its users see it.

Loop thread. It never knows HTTP, pages or tensors, nor a program without a loop.
"""

import asyncio
import copy
import faulthandler
import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from .bridge import Close, EngineStats, Inbox, Outbox, Update
from .config import PacePolicy
from .errors import Aborted, AsyncLLMError, Draining, EngineStuck, InvalidRequest
from .mailbox import Mailbox
from .registry import Registry
from .stream import Stream
from .submission import Terms, as_params, make_submission, of_right_kinds, take_terms
from .text.chat import ChatTemplate, Ending
from .text.stop import StopMatcher
from .text.tokenizer import Tokenizer
from .text.words import Messages, Words
from .types import NO_DEFAULTS, EngineLimits, SamplingParams

if TYPE_CHECKING:  # llguidance has no wheel for every machine
    from .text.grammars import Grammars

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class AsyncLLM:
    """The engine as one loop sees it. Made by `asyncllm.start`; used from that loop alone."""

    def __init__(
        self,
        *,
        inbox: Inbox,
        outbox: Outbox,
        limits: EngineLimits,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        model_name: str,
        pace: PacePolicy = "adaptive",
        grammars: "Grammars | None" = None,
        sampling_defaults: Mapping[str, float] = NO_DEFAULTS,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.words = Words(tokenizer, chat_template, grammars)
        self.model_name = model_name
        self.sampling_defaults = sampling_defaults
        self.created = int(time.time())
        self.dead: AsyncLLMError | None = None
        self.draining = False
        self._inbox = inbox
        self._outbox = outbox
        self._registry = Registry(inbox, outbox, pace, self.died)
        self.admission, self.pace, self.totals = self._registry.admission, self._registry.pace, self._registry.totals
        self._died = asyncio.Event()
        self._draining_began = asyncio.Event()

    def __repr__(self) -> str:
        return f"AsyncLLM({self.model_name!r}, {self.num_live} live, {self.stats!r})"

    @property
    def stats(self) -> EngineStats:
        """The engine's last heartbeat."""
        return self._outbox.stats

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self.admission.num_live

    @property
    def num_unread_bytes(self) -> int:
        """What the tokens take that no reader has taken yet, about."""
        return self._registry.num_unread_bytes

    @property
    def silent_s(self) -> float:
        """For how long no step has ended while somebody waits for one; 0 while nobody does."""
        return self._registry.silent_s

    # -- the short way --

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Continue a text, or token ids as they are. Sampling by `params`, or by its fields as keywords; beside them
        those of Terms.

        Raises: as `submit`.
        """
        prompt_ids, asked, terms = await self._understand(prompt, params, fields)
        return self.submit(prompt_ids, asked, **terms)

    async def choices(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> list[Stream]:
        """generate(), for each of `n` choices; or of `best_of`, for the caller to choose from.

        Raises: as `submit_choices`.
        """
        prompt_ids, asked, terms = await self._understand(prompt, params, fields)
        return self.submit_choices(prompt_ids, asked, **terms)

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answer a conversation through the model's chat template; keywords as in `generate`.

        Raises: as `submit`.
        """
        return await self.generate(await self.encode_chat(messages), params, **fields)

    async def _understand(
        self, prompt: Prompt, params: SamplingParams | None, fields: dict[str, Any]
    ) -> tuple[Sequence[int], SamplingParams, Terms]:
        prompt_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        terms = take_terms(fields)
        return prompt_ids, await self.compiled(as_params(params, fields, self.sampling_defaults)), terms

    # -- the parts --

    def check_open(self) -> None:
        """Whether a request sent now would be taken.

        Raises:
            QueueFull, Draining, EngineDead: not now.
        """
        if self.dead is not None:
            raise copy.copy(self.dead)
        if self.draining:
            raise Draining("the server is stopping")
        self.admission.check_room(self.limits)

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. A control token that is typed in it stays text.

        Raises:
            ContextTooLong: the text cannot fit; far too long ones are refused without tokenising them.
        """
        self.check_open()
        return await self.words.encode(text, self.limits.max_prompt_len)

    async def encode_chat(
        self,
        messages: Messages,
        *,
        tools: list[dict[str, Any]] | None = None,
        variables: dict[str, Any] | None = None,
        ending: Ending = "opening",
    ) -> list[int]:
        """Token ids of a conversation, rendered by the model's own template with these tools and further variables.

        It ends in the opening of an answer, or in nothing more, or inside the last message, to be continued.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages.
            ContextTooLong: as encode().
        """
        self.check_open()
        max_len = self.limits.max_prompt_len
        return await self.words.encode_chat(messages, max_len, tools=tools, variables=variables, ending=ending)

    async def compiled(self, params: SamplingParams) -> SamplingParams:
        """The same, its grammar compiled: in a worker thread, unless it has been lately.

        Raises:
            InvalidRequest: the grammar is wrong, impossible or too large, and why.
            QueueFull, GrammarUnchecked: not now.
        """
        return await self.words.compiled(params)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, **terms: Unpack[Terms]) -> Stream:
        """Queue one sequence. Every check happens here, before the engine hears of it.

        `max_tokens` larger than what fits behind the prompt is shortened to that.

        Raises:
            InvalidRequest: naming the field; ContextTooLong among them.
            QueueFull, Draining, EngineDead: not now.
        """
        params = of_right_kinds(params)
        if params.num_choices != 1:
            message = "a stream is one answer: choices() makes several"
            raise InvalidRequest(message, "n" if params.n != 1 else "best_of")
        return self._submit(prompt_ids, params, terms)

    def submit_choices(self, prompt_ids: Sequence[int], params: SamplingParams, **terms: Unpack[Terms]) -> list[Stream]:
        """submit(), for each of the n choices of a prompt, or of the best_of among which to choose.

        They share the prompt's computation as equal prompts do. With a seed, choice i has seed + i.

        Raises: as submit(); then none of them is in the engine.
        """
        params = of_right_kinds(params)
        if problem := params.problem(self.limits):
            raise problem
        streams: list[Stream] = []
        try:
            for i in range(params.num_choices):
                seed = None if params.seed is None else (params.seed + 2**63 + i) % 2**64 - 2**63
                own = params if not i else msgspec.structs.replace(params, seed=seed)
                streams.append(self._submit(prompt_ids, own, terms))
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    def _submit(self, prompt_ids: Sequence[int], params: SamplingParams, terms: Terms) -> Stream:
        self.check_open()
        if params.grammar is not None and not hasattr(params.grammar, "matcher"):
            raise InvalidRequest("a grammar is compiled first: await compiled(params)", "grammar")
        submission = make_submission(prompt_ids, params, terms, self.limits, self.tokenizer)
        self.admission.check_backlog(submission, self.limits)
        if problem := submission.problem(self.limits):
            raise problem
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, shown=terms.get("shown", ())
        )
        matcher = _matcher(params.stop, include=params.include_stop_str_in_output)
        mailbox = Mailbox(submission, detokenizer, matcher, self.pace)
        self._registry.submit(mailbox)
        return Stream(self._registry, mailbox)

    def update(
        self,
        request_id: str,
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] | None = None,
        temperature: float | None = None,
    ) -> bool:
        """Change a running generation: limit and temperature from the first step not yet scheduled, stop strings
        from the next token. False if it has ended.

        Raises:
            InvalidRequest: naming the field; then nothing is changed.
        """
        if (mailbox := self._registry.mailboxes.get(request_id)) is None:
            return False
        self.check_update(max_tokens=max_tokens, stop=stop, temperature=temperature)
        if stop is not None:
            include = mailbox.submission.params.include_stop_str_in_output
            mailbox.set_stop(_matcher(stop, include=include))
        if max_tokens is not None or temperature is not None:
            room = self.limits.max_model_len - len(mailbox.submission.prompt_ids)
            limit = None if max_tokens is None else min(max_tokens, room)
            self._inbox.put(Update(request_id=request_id, max_tokens=limit, temperature=temperature))
        return True

    def check_update(
        self, *, max_tokens: int | None = None, stop: Sequence[str] | None = None, temperature: float | None = None
    ) -> None:
        """Whether update() would take these.

        Raises:
            InvalidRequest: naming the field.
        """
        given = {"max_tokens": max_tokens, "stop": None if stop is None else tuple(stop), "temperature": temperature}
        changes = {name: value for name, value in given.items() if value is not None}
        params = msgspec.structs.replace(SamplingParams(), **changes)
        if problem := params.problem(self.limits):
            raise problem

    def abort(self, request_id: str) -> None:
        """End a request. Its reader, if any, gets Aborted; unknown and ended ones are no news."""
        self._registry.abort(request_id)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish for `grace_s` seconds, then end the rest with an error."""
        self.draining = True
        self._draining_began.set()
        try:
            async with asyncio.timeout(grace_s):
                await self._registry.wait_empty()
        except TimeoutError:
            self._registry.fail_all(Draining("the server is stopping"))

    async def wait_draining(self) -> None:
        """Sleep until drain() is called."""
        await self._draining_began.wait()

    async def wait_died(self) -> AsyncLLMError:
        """Sleep until the engine thread ends by itself, which it never should."""
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    async def watch(self, limit_s: float) -> None:
        """Look after the engine's heartbeat: once no step has ended for `limit_s` while somebody waits, every
        thread's stack goes to stderr and the engine counts as dead. A thread in a kernel cannot be stopped."""
        looked_s = time.monotonic()
        while self.dead is None:
            was_paused, looked_s = time.monotonic() - looked_s > limit_s / 2, time.monotonic()
            if self.silent_s > limit_s and not was_paused:  # who was stopped and goes on gets the time to
                faulthandler.dump_traceback(all_threads=True)
                log.critical("no step has ended for %g s; the stacks are above", limit_s)
                self.died(EngineStuck(f"no step has ended for {limit_s:g} s; the server must be restarted"))
            await asyncio.sleep(limit_s / 4)

    def close(self) -> None:
        """End every request and tell the engine to leave. The thread is joined by who started it."""
        self.draining = True
        self._registry.fail_all(Aborted("the engine is closed"))
        self._inbox.put(Close())
        self.pace.close()
        self.words.close()

    def died(self, error: AsyncLLMError) -> None:
        """The engine thread is gone: nobody waits for it any more."""
        self.dead = error
        self._died.set()
        self._registry.fail_all(error)


def _matcher(stop: Sequence[str], *, include: bool) -> StopMatcher | None:
    return StopMatcher(stop, include=include) if stop else None
