"""An answer as its caller reads it: as it comes, or whole, or the likeliest of several.

Loop thread. It never knows the engine, nor how ids become text.
"""

from collections.abc import Callable
from typing import Self

from .errors import Aborted
from .mailbox import Mailbox
from .pace import Reader
from .registry import Registry
from .types import Completion, Delta, Logprob, Progress, PromptLogprobs


class Stream:
    """One answer as it is generated: an async iterator of Delta, the last of which has a finish_reason.

    Leaving the iterator aborts the request: by `async with`, by `abort()`, or by letting the stream go.

    Raises, while iterating:
        StepFailed, EngineDead: the engine could not go on with this request.
        Aborted, Draining: somebody else ended it.
    """

    def __init__(self, registry: Registry, mailbox: Mailbox) -> None:
        self._registry = registry
        self._mailbox = mailbox
        self._done = False
        self.request_id = mailbox.submission.request_id
        self.num_prompt_tokens = len(mailbox.submission.prompt_ids)
        # All text that has come since, for who listens.
        self.take_text: Callable[[], str] = mailbox.take_text
        self.take_more = mailbox.take_more  # the same while more is to come
        self.take_details = mailbox.take_details  # what is told of it beside, to be taken first
        self.track_spans = mailbox.track_spans  # before the first token, by who reads by take_spans()
        self.take_spans = mailbox.take_spans  # in place of take_text() and take_details()

    def __del__(self) -> None:
        # `async for ...: break` leaves no ghost request. The collector may run on any thread.
        if not self._mailbox.ended:
            self._registry.abort_soon(self.request_id)

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
        self._registry.abort(self.request_id)

    # -- for who writes text on from a callback: no task wakes up for a token --

    def listen(self, reader: Reader | None) -> None:
        """Flush this reader whenever there is something, as often as the loop can afford. In place of iterating."""
        self._mailbox.listen(reader)

    @property
    def last(self) -> Delta | None:
        """The newest delta, without its text; the terminal one has a finish_reason, and the error if one ended it."""
        return self._mailbox.last

    @property
    def progress(self) -> Progress | None:
        """The last word about queue and prefill, if it was asked for."""
        return self._mailbox.progress

    @property
    def num_unread_bytes(self) -> int:
        return self._mailbox.num_unread_bytes

    @property
    def ended(self) -> bool:
        """Whether `last` is the terminal delta."""
        return self._mailbox.ended

    async def result(self) -> Completion:
        """Read to the end and return the whole answer."""
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[Logprob] = []
        prompt_logprobs: PromptLogprobs | None = None
        last: Delta | None = None
        async for last in self:
            texts.append(last.text)
            token_ids += last.token_ids
            logprobs += last.logprobs
            prompt_logprobs = last.prompt_logprobs if prompt_logprobs is None else prompt_logprobs
        if last is None or last.finish_reason is None:
            raise Aborted("the stream had been read or aborted before")
        return Completion(
            text="".join(texts),
            token_ids=tuple(token_ids),
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            num_prompt_tokens=last.num_prompt_tokens,
            num_cached_tokens=last.num_cached_tokens,
            logprobs=tuple(logprobs),
            prompt_logprobs=prompt_logprobs,
            timings=last.timings,
        )


def likeliest(answers: list[Completion], num_told: int, num_choices: int) -> list[Completion]:
    """Of each prompt's choices the best by mean log probability, the best first."""
    groups = [answers[i : i + num_choices] for i in range(0, len(answers), num_choices)]
    return [answer for group in groups for answer in sorted(group, key=_mean_logprob, reverse=True)[:num_told]]


def _mean_logprob(answer: Completion) -> float:
    return sum([entry.logprob for entry in answer.logprobs]) / max(1, len(answer.logprobs))
