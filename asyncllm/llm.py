"""AsyncLLM: submit, stream, abort; and LLM, the same for a program without a loop.

Loop thread. It turns ids into text and finds stop strings; it never knows HTTP, pages or tensors.
"""

import asyncio
import copy
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Self

import msgspec

from .bridge import Abort, Close, EngineStats, Finish, Inbox, Outbox, Submit
from .errors import Aborted, AsyncLLMError, Draining, InvalidRequest, QueueFull
from .text.chat import ChatTemplate
from .text.detokenizer import Detokenizer
from .text.stop import StopMatcher
from .text.tokenizer import Tokenizer, context_too_long
from .types import Completion, Delta, EngineLimits, FinishReason, SamplingParams, Submission

Prompt = str | Sequence[int]
Messages = Sequence[dict[str, Any]]

# Above this many characters a prompt is tokenised in a worker thread: about 1 ms of the loop's time.
INLINE_CHARS = 2048


class Mailbox:
    """Where one request's deltas become text and wait for their reader, merged while he lags.

    Owned by the registry of AsyncLLM, not by the reader: a Stream that is dropped takes nothing with it.
    """

    def __init__(self, submission: Submission, detokenizer: Detokenizer, stop: StopMatcher) -> None:
        self.submission = submission
        self.last: Delta | None = None  # the newest; the terminal one once `ended`
        self.ended = False
        self._detokenizer = detokenizer
        self._stop = stop
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._unread = False
        self._reader: asyncio.Future[None] | None = None

    def deliver(self, delta: Delta) -> bool:
        """Take one delta. True if its text met a stop string, which ends the request here and now."""
        for i, token_id in enumerate(delta.token_ids, 1):
            self._token_ids.append(token_id)
            if matched := self._add_text(self._visible_text(token_id, delta)):
                self._note(_stopped(delta, matched, delta.num_output_tokens - len(delta.token_ids) + i))
                return True
        if delta.finish_reason is not None:
            if matched := self._add_text(self._detokenizer.finish()):
                self._note(_stopped(delta, matched, delta.num_output_tokens))
                return True
            self._text.append(self._stop.finish())
        self._note(delta)
        return False

    def fail(self, error: AsyncLLMError) -> None:
        """End the request with an error in place of whatever the engine may still say."""
        reason = FinishReason.ABORT if isinstance(error, Aborted) else FinishReason.ERROR
        seen = self.last or Delta(request_id=self.submission.request_id)
        self._note(msgspec.structs.replace(seen, finish_reason=reason, error=error))

    def take(self) -> Delta | None:
        """Everything unread as one delta; None if there is nothing.

        Raises:
            AsyncLLMError: what ended the request, once the text before it has been read.
        """
        if not self._unread or self.last is None:
            return None
        last = self.last
        if last.error is not None:
            if not self._token_ids:
                # A copy: one error may end many requests, and each raise would grow its traceback.
                raise copy.copy(last.error)
            last = msgspec.structs.replace(last, finish_reason=None, error=None)
        self._unread = last is not self.last
        delta = msgspec.structs.replace(last, token_ids=tuple(self._token_ids), text="".join(self._text))
        self._token_ids, self._text = [], []
        return delta

    async def wait(self) -> None:
        """Sleep until something is unread or the end has come. One reader at a time."""
        if self._reader is not None:
            raise RuntimeError("a stream has one reader; two are waiting")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _visible_text(self, token_id: int, delta: Delta) -> str:
        # The stop id itself is counted but never shown, special or not.
        if delta.finish_reason is FinishReason.STOP and token_id == delta.token_ids[-1]:
            return ""
        return self._detokenizer.push((token_id,))

    def _add_text(self, text: str) -> str | None:
        visible, matched = self._stop.push(text)
        self._text.append(visible)
        return matched

    def _note(self, delta: Delta) -> None:
        self.last, self.ended, self._unread = delta, delta.finish_reason is not None, True
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class Stream:
    """One answer as it is generated: an async iterator of Delta, the last of which has a finish_reason.

    Leaving the iterator aborts the request: by `async with`, by `abort()`, or by letting the stream go.

    Raises, while iterating:
        StepFailed, EngineDead: the engine could not go on with this request.
        Aborted, Draining: somebody else ended it.
    """

    def __init__(self, llm: "AsyncLLM", mailbox: Mailbox) -> None:
        self._llm = llm
        self._mailbox = mailbox
        self._done = False
        self.request_id = mailbox.submission.request_id
        self.num_prompt_tokens = len(mailbox.submission.prompt_ids)

    def __del__(self) -> None:
        # `async for ...: break` leaves no ghost request. The collector may run on any thread.
        if not self._mailbox.ended:
            self._llm.abort_soon(self.request_id)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        while not self._done:
            if (delta := self._mailbox.take()) is not None:
                self._done = delta.finish_reason is not None
                return delta
            await self._mailbox.wait()
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.abort()

    def abort(self) -> None:
        """Nobody reads this any more. Idempotent; nothing if the answer is complete."""
        self._llm.abort(self.request_id)

    async def result(self) -> Completion:
        """Read to the end and return the whole answer."""
        texts: list[str] = []
        token_ids: list[int] = []
        last: Delta | None = None
        async for last in self:  # noqa: B007
            texts.append(last.text)
            token_ids += last.token_ids
        if last is None or last.finish_reason is None:
            raise Aborted("the stream had been read or aborted before")
        return Completion(
            text="".join(texts),
            token_ids=tuple(token_ids),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            timings=last.timings,
        )


class Totals:
    """What has been served since the start; the loop counts, metrics read."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # by finish_reason
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0

    def add(self, last: Delta) -> None:
        assert last.finish_reason is not None
        self.finished[last.finish_reason.value] += 1
        self.num_prompt_tokens += last.num_prompt_tokens
        self.num_cached_tokens += last.num_cached_tokens
        self.num_output_tokens += last.num_output_tokens


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
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_name = model_name
        self.created = int(time.time())
        self.dead: AsyncLLMError | None = None
        self.draining = False
        self.totals = Totals()
        self._inbox = inbox
        self._outbox = outbox
        self._mailboxes: dict[str, Mailbox] = {}
        self._empty = asyncio.Event()
        self._empty.set()
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="asyncllm-text")
        self._died = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        outbox.bind(self._loop, self._deliver)

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

    # -- the short way --

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Continue a text, or token ids as they are. Sampling by `params`, or by its fields as keywords.

        Raises: as `submit`.
        """
        prompt_ids = await self.encode(prompt) if isinstance(prompt, str) else prompt
        return self.submit(prompt_ids, _params(params, fields))

    async def chat(self, messages: Messages, params: SamplingParams | None = None, **fields: Any) -> Stream:
        """Answer a conversation through the model's chat template.

        Raises: as `submit`.
        """
        return self.submit(await self.encode_chat(messages), _params(params, fields))

    # -- the parts --

    async def encode(self, text: str) -> list[int]:
        """Token ids of a prompt. A control token that is typed in it stays text.

        Raises:
            ContextTooLong: the text cannot fit; far too long ones are refused without tokenising them.
        """
        encode = partial(self.tokenizer.encode, text, max_len=self.limits.max_prompt_len)
        return await self._run(len(text), encode)

    async def encode_chat(self, messages: Messages) -> list[int]:
        """Token ids of a conversation, rendered by the model's own template.

        Raises:
            InvalidRequest: the model has no template, or the template refuses the messages.
            ContextTooLong: as encode().
        """
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template; use completions", "messages")
        encode = partial(
            self.chat_template.encode, list(messages), self.tokenizer, max_len=self.limits.max_prompt_len
        )
        return await self._run(_num_chars(messages), encode)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Stream:
        """Queue one sequence. Every check happens here, before the engine hears of it.

        `max_tokens` larger than what fits behind the prompt is shortened to that.

        Raises:
            InvalidRequest: naming the field; ContextTooLong among them.
            QueueFull, Draining, EngineDead: not now.
        """
        self._check_open()
        submission = self._submission(tuple(prompt_ids), params)
        if problem := submission.problem(self.limits):
            raise InvalidRequest(problem.message, problem.param)
        detokenizer = self.tokenizer.detokenizer(skip_special_tokens=params.skip_special_tokens)
        mailbox = Mailbox(submission, detokenizer, StopMatcher(params.stop))
        self._mailboxes[submission.request_id] = mailbox  # before the engine can answer
        self._empty.clear()
        try:
            self._inbox.put(Submit(submission))
        except QueueFull:
            self._forget(submission.request_id)
            raise
        return Stream(self, mailbox)

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
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            self._fail_all(Draining("the server is stopping"))

    async def wait_died(self) -> AsyncLLMError:
        """Sleep until the engine thread ends by itself, which it never should."""
        await self._died.wait()
        assert self.dead is not None
        return self.dead

    def close(self) -> None:
        """End every request and tell the engine to leave. The thread is joined by who started it."""
        self.draining = True
        self._fail_all(Aborted("the engine is closed"))
        self._inbox.put(Close())
        self._workers.shutdown(wait=False, cancel_futures=True)

    def died(self, error: AsyncLLMError) -> None:
        """The engine thread is gone: nobody waits for it any more."""
        self.dead = error
        self._died.set()
        self._fail_all(error)

    # -- inside --

    def _submission(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> Submission:
        num_prompt = len(prompt_ids)
        if num_prompt > self.limits.max_prompt_len:
            raise context_too_long(self.limits.max_prompt_len, num_prompt)
        room = self.limits.max_model_len - num_prompt
        eos_ids = () if params.ignore_eos else tuple(self.tokenizer.eos_ids)
        return Submission(
            request_id=secrets.token_hex(12),
            prompt_ids=prompt_ids,
            params=params,
            seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
            max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
            stop_ids=(*eos_ids, *params.stop_token_ids),
            arrival_s=time.monotonic(),
        )

    def _check_open(self) -> None:
        if self.dead is not None:
            raise copy.copy(self.dead)
        if self.draining:
            raise Draining("the server is stopping")
        if len(self._mailboxes) >= self.limits.max_running + self.limits.max_waiting:
            raise QueueFull(f"{len(self._mailboxes)} requests are running or waiting; try again later")

    async def _run(self, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
        if num_chars <= INLINE_CHARS:
            return encode()
        return await self._loop.run_in_executor(self._workers, encode)

    def _deliver(self, deltas: Iterable[Delta]) -> None:
        """One step's deltas. Those of requests that have ended here are the engine's overrun: dropped."""
        for delta in deltas:
            mailbox = self._mailboxes.get(delta.request_id)
            if mailbox is None:
                continue
            if mailbox.deliver(delta) and delta.finish_reason is None:
                self._inbox.put(Finish(delta.request_id))
            if mailbox.ended:
                self._forget(delta.request_id)

    def _fail(self, request_id: str, error: AsyncLLMError) -> None:
        self._mailboxes[request_id].fail(error)
        self._forget(request_id)
        self._inbox.put(Abort(request_id))

    def _fail_all(self, error: AsyncLLMError) -> None:
        for request_id in list(self._mailboxes):
            self._fail(request_id, error)

    def _forget(self, request_id: str) -> None:
        mailbox = self._mailboxes.pop(request_id)
        if mailbox.last is not None and mailbox.ended:
            self.totals.add(mailbox.last)
        if not self._mailboxes:
            self._empty.set()


class LLM:
    """The blocking face: made by `asyncllm.load`, for scripts and notebooks without a running loop."""

    def __init__(self, opening: AbstractAsyncContextManager[AsyncLLM]) -> None:
        self._opening = opening
        self._runner = asyncio.Runner()
        try:
            self._llm = self._runner.run(opening.__aenter__())
        except BaseException:
            self._runner.close()
            raise

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Complete every prompt, batched as the engine sees fit; answers in the order of the prompts.

        Raises: as AsyncLLM.submit, for the first prompt at fault; then none is generated.
        """
        ask = self._llm.generate
        return self._runner.run(self._gather([partial(ask, prompt, params, **fields) for prompt in prompts]))

    def chat(
        self, conversations: Sequence[Messages], params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Answer every conversation through the model's chat template."""
        ask = self._llm.chat
        return self._runner.run(self._gather([partial(ask, messages, params, **fields) for messages in conversations]))

    async def _gather(self, requests: list[Callable[[], Awaitable[Stream]]]) -> list[Completion]:
        limits = self._llm.limits
        room = asyncio.Semaphore(limits.max_running + limits.max_waiting)

        async def complete(request: Callable[[], Awaitable[Stream]]) -> Completion:
            async with room, await request() as stream:
                return await stream.result()

        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(complete(request)) for request in requests]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in tasks]

    def close(self) -> None:
        """End the engine and free its memory. Idempotent."""
        opening, self._opening = self._opening, None  # type: ignore[assignment]
        if opening is not None:
            self._runner.run(opening.__aexit__(None, None, None))
            self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _params(params: SamplingParams | None, fields: dict[str, Any]) -> SamplingParams:
    """Either a SamplingParams or its fields; a field of the wrong kind is told by name."""
    if params is not None and fields:
        raise InvalidRequest(f"give params or {', '.join(fields)}, not both", next(iter(fields)))
    if unknown := [name for name in fields if name not in SamplingParams.__struct_fields__]:
        known = ", ".join(SamplingParams.__struct_fields__)
        raise InvalidRequest(f"unknown sampling parameter {unknown[0]!r}; known are {known}", unknown[0])
    try:
        return params or msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        raise InvalidRequest(str(error), next(iter(fields))) from None


def _stopped(delta: Delta, stop_string: str, num_output_tokens: int) -> Delta:
    return msgspec.structs.replace(
        delta,
        finish_reason=FinishReason.STOP,
        stop_reason=stop_string,
        num_output_tokens=num_output_tokens,
        error=None,
    )


def _num_chars(messages: Messages) -> int:
    """Enough to tell a short conversation from a long one; nested parts count by their repr."""
    return sum(len(str(message.get("content"))) for message in messages)
