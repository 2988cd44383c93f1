"""AsyncLLM: encode, submit, update, abort; and the engine's life as its users see it.

Loop thread. It never knows HTTP, pages or tensors, nor a program without a loop.
"""

import asyncio
import copy
import faulthandler
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Unpack

import msgspec

from .admission import Admission
from .bridge import Abort, Close, EngineStats, Finish, Inbox, Outbox, Submit, Token, Update
from .config import PacePolicy
from .errors import Aborted, AsyncLLMError, Draining, EngineDead, EngineStuck, InvalidRequest, QueueFull
from .mailbox import Mailbox
from .pace import Pace, Reader
from .stream import Stream
from .submission import Terms, as_params, make_submission, of_right_kinds, take_terms
from .text.answer import AnswerForm, AnswerParser
from .text.chat import ChatTemplate, Ending
from .text.forcing import forced
from .text.stop import StopMatcher
from .text.tokenizer import Tokenizer
from .totals import Totals
from .types import (
    Delta,
    EngineLimits,
    GrammarSpec,
    Progress,
    SamplingParams,
)

if TYPE_CHECKING:  # llguidance has no wheel for every machine
    from .text.grammars import Grammar, Grammars

log = logging.getLogger(__name__)

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]

# Above this many characters a prompt is tokenised in a worker thread: about 1 ms of the loop's time.
INLINE_CHARS = 2048
INLINE_MESSAGES = 32
MAX_COMPILING = 64  # grammars that may wait to be compiled
COMPILE_S = 15.0  # and how long each waits and is compiled, at most
PROMPT_END_TOKENS = 16  # hold the tag that opens an answer's reasoning, were each a letter
# Deltas taken in one go, at 0.7 us each, or three where there are stop strings. Fewer, and at 4,096 rows the
# flushes between the turns let the engine run half a second ahead.
ROWS_A_TURN = 1024


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
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.grammars = grammars
        self.model_name = model_name
        self.created = int(time.time())
        self.dead: AsyncLLMError | None = None
        self.draining = False
        self.totals = Totals()
        self._inbox = inbox
        self._outbox = outbox
        self._mailboxes: dict[str, Mailbox] = {}
        self.admission = Admission(outbox)
        self._finishing: set[str] = set()  # ended by a stop string; the engine's word is still to come
        self._empty = asyncio.Event()
        self._empty.set()
        self._busy_since_s = 0.0  # when it was last left idle
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="asyncllm-text")
        # One grammar at a time, and none of them in the way of a prompt.
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asyncllm-grammar")
        self._num_compiling = 0
        self._died = asyncio.Event()
        self._draining_began = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self.pace = Pace(self._loop, pace, self._abandon)
        self._rest: Iterator[Delta | Progress | Token] = iter(())  # of the step being delivered
        self._num_rest = 0
        outbox.bind(self._loop, self._receive)

    def __repr__(self) -> str:
        return f"AsyncLLM({self.model_name!r}, {self.num_live} live, {self.stats!r})"

    @property
    def stats(self) -> EngineStats:
        """The engine's last heartbeat."""
        return self._outbox.stats

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._mailboxes)

    @property
    def num_unread_bytes(self) -> int:
        """What the tokens take that no reader has taken yet, about."""
        return sum([mailbox.num_unread_bytes for mailbox in self._mailboxes.values()])

    @property
    def silent_s(self) -> float:
        """For how long no step has ended while somebody waits for one; 0 while nobody does."""
        since_s = max(self.stats.monotonic_s, self._busy_since_s)
        return time.monotonic() - since_s if self._mailboxes else 0.0

    # -- the short way --

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Continue a text, or token ids as they are. Sampling by `params`, or by its fields as keywords; beside them
        those of Terms.

        Raises: as `submit`.
        """
        prompt_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        terms = take_terms(fields)
        return self.submit(prompt_ids, await self.compiled(as_params(params, fields)), **terms)

    async def choices(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> list[Stream]:
        """generate(), for each of `n` choices; or of `best_of`, for the caller to choose from.

        Raises: as `submit_choices`.
        """
        prompt_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        terms = take_terms(fields)
        return self.submit_choices(prompt_ids, await self.compiled(as_params(params, fields)), **terms)

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answer a conversation through the model's chat template; keywords as in `generate`.

        Raises: as `submit`.
        """
        terms = take_terms(fields)
        prompt_ids = await self.encode_chat(messages)
        return self.submit(prompt_ids, await self.compiled(as_params(params, fields)), **terms)

    # -- the parts --

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. A control token that is typed in it stays text.

        Raises:
            ContextTooLong: the text cannot fit; far too long ones are refused without tokenising them.
        """
        self.check_open()
        encode = partial(self.tokenizer.encode, text, max_len=self.limits.max_prompt_len)
        return await self._run(len(text), encode)

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
        if not all(isinstance(message, dict) for message in messages):
            raise InvalidRequest("messages must be dicts with a role and a content", "messages")
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use completions", "messages")
        encode = partial(
            self.chat_template.encode,
            list(messages),
            self.tokenizer,
            tools=tools,
            variables=variables,
            ending=ending,
            max_len=self.limits.max_prompt_len,
        )
        return await self._run(_num_chars([*messages, *(tools or ())]), encode)

    async def compiled(self, params: SamplingParams) -> SamplingParams:
        """The same, its grammar compiled: in a worker thread, unless it has been lately.

        Raises:
            InvalidRequest: the grammar is wrong, impossible or too large, and why.
            QueueFull: too many others are being compiled.
        """
        spec = params.grammar
        if spec is None or hasattr(spec, "matcher"):
            return params
        if not isinstance(spec, GrammarSpec):
            raise InvalidRequest(f"a grammar is a GrammarSpec, not {type(spec).__name__}", "grammar")
        if self.grammars is None:
            raise InvalidRequest("no grammar can be kept to with this model's tokenizer, or here", spec.param)
        grammar = self.grammars.find(spec) or await self._compile(self.grammars, spec)
        return msgspec.structs.replace(params, grammar=grammar)

    async def _compile(self, grammars: "Grammars", spec: GrammarSpec) -> "Grammar":
        if self._num_compiling >= MAX_COMPILING:
            raise QueueFull("too many grammars are being compiled; try again later")
        self._num_compiling += 1
        try:
            async with asyncio.timeout(COMPILE_S):
                return await self._loop.run_in_executor(self._compiler, grammars.compile, spec)
        except TimeoutError:
            raise QueueFull("other grammars are being compiled; try again later") from None
        finally:
            self._num_compiling -= 1

    def forced(self, prompt_ids: Sequence[int], spec: GrammarSpec | None, **calls: Any) -> GrammarSpec | None:
        """What all of an answer behind this prompt must look like; see text/forcing.py."""
        form = AnswerForm() if self.chat_template is None else self.chat_template.form
        return forced(form, self.tokenizer.literal, self._end_of(prompt_ids), spec, **calls)

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(prompt_ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False)

    def answer_parser(
        self, prompt_ids: Sequence[int], names: frozenset[str] | None = None, **options: bool
    ) -> AnswerParser | None:
        """Parts an answer behind this prompt into reasoning, content and calls of `names`. None: it is all content.

        Raises:
            InvalidRequest: as AnswerForm.parser, whose options these are.
        """
        if self.chat_template is None:
            return None
        return self.chat_template.form.parser(self._end_of(prompt_ids), names, **options)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, **terms: Unpack[Terms]) -> Stream:
        """Queue one sequence. Every check happens here, before the engine hears of it.

        `max_tokens` larger than what fits behind the prompt is shortened to that.

        Raises:
            InvalidRequest: naming the field; ContextTooLong among them.
            QueueFull, Draining, EngineDead: not now.
        """
        params = of_right_kinds(params)
        if params.num_choices != 1:
            message = "a stream is one answer: submit_choices() makes several"
            raise InvalidRequest(message, "n" if params.n != 1 else "best_of")
        return self._submit(prompt_ids, params, terms)

    def submit_choices(self, prompt_ids: Sequence[int], params: SamplingParams, **terms: Unpack[Terms]) -> list[Stream]:
        """submit(), for each of the n choices of a prompt, or of the best_of among which to choose.

        They share the prompt's computation as equal prompts do. With a seed, choice i has seed + i.

        Raises: as submit(); then none of them is in the engine.
        """
        params = of_right_kinds(params)
        if problem := params.problem(self.limits):
            raise InvalidRequest(problem.message, problem.param)
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
            raise InvalidRequest(problem.message, problem.param)
        detokenizer = self.tokenizer.detokenizer(
            skip_special_tokens=params.skip_special_tokens, shown=terms.get("shown", ())
        )
        matcher = _matcher(params.stop, include=params.include_stop_str_in_output)
        mailbox = Mailbox(submission, detokenizer, matcher, self.pace)
        self._mailboxes[submission.request_id] = mailbox  # before the engine can answer
        self.admission.enter(submission)
        if self._empty.is_set():
            self._busy_since_s = submission.arrival_s
        self._empty.clear()
        try:
            self._inbox.put(Submit(submission))
        except QueueFull:
            self._forget(submission.request_id)
            raise
        self.admission.sent(submission)
        return Stream(self, mailbox)

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
        if (mailbox := self._mailboxes.get(request_id)) is None:
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
            raise InvalidRequest(problem.message, problem.param)

    def abort(self, request_id: str) -> None:
        """End a request. Its reader, if any, gets Aborted; unknown and ended ones are no news."""
        if request_id in self._mailboxes:
            self._fail(request_id, Aborted("the request was aborted"))

    def abort_soon(self, request_id: str) -> None:
        """abort(), from any thread. On a closed loop there is nothing left to abort."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.abort, request_id)

    async def drain(self, grace_s: float) -> None:
        """Take nothing new, let what runs finish for `grace_s` seconds, then end the rest with an error."""
        self.draining = True
        self._draining_began.set()
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            self._fail_all(Draining("the server is stopping"))

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
        self._fail_all(Aborted("the engine is closed"))
        self._inbox.put(Close())
        self.pace.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self.grammars is not None:
            self.grammars.close()

    def died(self, error: AsyncLLMError) -> None:
        """The engine thread is gone: nobody waits for it any more."""
        self.dead = error
        self._died.set()
        self._fail_all(error)

    # -- inside --

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

    async def _run(self, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
        if num_chars <= INLINE_CHARS:
            return encode()
        return await self._loop.run_in_executor(self._workers, encode)

    def _receive(self) -> None:
        """Deliver what the engine has put. A bug here would leave every stream waiting behind a healthy face: it
        counts as the engine's death, which everybody hears of."""
        try:
            self._receive_rows()
        except Exception as error:
            log.critical("deltas cannot be delivered: %r", error, exc_info=error)
            self._inbox.put(Close())
            self.died(EngineDead("the engine's output cannot be delivered; the server must be restarted"))

    def _receive_rows(self) -> None:
        """A turn of the loop for each ROWS_A_TURN deltas."""
        num_left = ROWS_A_TURN
        while num_left > 0:
            if not self._num_rest:
                if (step := self._outbox.take()) is None:
                    return
                put_s, deltas = step
                self._rest, self._num_rest = iter(deltas.entries), len(deltas)
                self.pace.step(put_s, self._num_rest)
            rows = min(num_left, self._num_rest)
            num_left -= rows
            self._num_rest -= rows
            self._deliver(islice(self._rest, rows))
        self._loop.call_soon(self._receive)

    def _deliver(self, entries: Iterable[Delta | Progress | Token]) -> None:
        """Those of requests that have ended here are the engine's overrun: dropped."""
        get, now_s = self._mailboxes.get, time.monotonic()
        since_s, num_since = 0.0, 0  # rows whose last token came with the same step stand together
        for entry in entries:
            request_id = entry[0][0] if isinstance(entry, tuple) else entry.request_id
            mailbox = get(request_id)
            if mailbox is None:
                self._note_overrun(entry)
                continue
            if isinstance(entry, Progress):
                mailbox.note_progress(entry)
                continue
            if isinstance(entry, tuple) or entry.token_ids:
                if mailbox.seen_s != since_s:
                    self.totals.add_gap(now_s, since_s, num_since)
                    since_s, num_since = mailbox.seen_s, 0
                num_since += 1
                mailbox.seen_s = now_s
            stopped = mailbox.add_token(entry) if isinstance(entry, tuple) else mailbox.deliver(entry)
            if stopped and (isinstance(entry, tuple) or entry.finish_reason is None):
                self._finishing.add(request_id)
                self._inbox.put(Finish(request_id))
            if mailbox.ended:
                self._forget(request_id)
        self.totals.add_gap(now_s, since_s, num_since)

    def _note_overrun(self, delta: Delta | Progress | Token) -> None:
        """The engine's own end of a sequence that a stop string ended here has the times of it."""
        if isinstance(delta, Delta) and delta.finish_reason is not None and delta.request_id in self._finishing:
            self._finishing.remove(delta.request_id)
            self.totals.add_times(delta)

    def _fail(self, request_id: str, error: AsyncLLMError) -> None:
        self._mailboxes[request_id].fail(error)
        self._forget(request_id)
        self._inbox.put(Abort(request_id))

    def _abandon(self, reader: Reader) -> None:
        """This reader is broken: whatever it read ends here, and tells it so no more."""
        for request_id, mailbox in list(self._mailboxes.items()):
            if mailbox.reader is reader:
                mailbox.listen(None)
                self._fail(request_id, AsyncLLMError("internal error"))

    def _fail_all(self, error: AsyncLLMError) -> None:
        for request_id in list(self._mailboxes):
            self._fail(request_id, error)

    def _forget(self, request_id: str) -> None:
        mailbox = self._mailboxes.pop(request_id)
        self.admission.leave(mailbox.submission)
        if mailbox.last is not None and mailbox.ended:
            self.totals.add(mailbox.last)
            self.admission.note_end(mailbox.last)
        if not self._mailboxes:
            self._empty.set()


def _matcher(stop: Sequence[str], *, include: bool) -> StopMatcher | None:
    return StopMatcher(stop, include=include) if stop else None


def _num_chars(messages: Messages) -> int:
    """Enough to tell a short conversation from a long one, everything in it counted by its repr."""
    return INLINE_CHARS + 1 if len(messages) > INLINE_MESSAGES else sum(len(str(message)) for message in messages)
