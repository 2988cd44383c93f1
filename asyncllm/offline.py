"""LLM: the engine for a program without a loop, whole answers to whole lists of prompts.

The caller's thread, whose loop turns while a call lasts. It never knows tokens or deltas.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Self

import msgspec

from .errors import InvalidRequest
from .llm import AsyncLLM, Prompt
from .stream import Stream, likeliest
from .submission import Terms, as_params, take_terms
from .text.words import Messages
from .types import Completion, SamplingParams


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
        """Complete every prompt, batched as the engine sees fit; answers in the order of the prompts, `n` to each.

        Raises: as AsyncLLM.submit; the first error ends them all.
        """
        if isinstance(prompts, str):
            raise InvalidRequest("prompts must be a list; generate([prompt]) takes one", "prompts")
        terms = take_terms(fields)
        params = as_params(params, fields, self._llm.sampling_defaults)
        if params.num_choices > 1:
            return self._runner.run(self._choose(prompts, params, terms))
        ask = self._llm.generate
        return self._runner.run(self._gather([partial(ask, prompt, params, **terms) for prompt in prompts]))

    def chat(
        self, conversations: Sequence[Messages], params: SamplingParams | None = None, **fields: Any
    ) -> list[Completion]:
        """Answer every conversation through the model's chat template."""
        ask = self._llm.chat
        return self._runner.run(self._gather([partial(ask, messages, params, **fields) for messages in conversations]))

    async def _choose(self, prompts: Sequence[Prompt], params: SamplingParams, terms: Terms) -> list[Completion]:
        """A choice is a request of its own: as many prompts at a time as the engine takes choices of."""
        num_choices, n = params.num_choices, params.n
        if num_choices > n and params.logprobs is None:
            params = msgspec.structs.replace(params, logprobs=0)
        limits, answers = self._llm.limits, list[Completion]()
        most = max(1, (limits.max_running + limits.max_waiting) // num_choices)
        for i in range(0, len(prompts), most):
            asked = [await self._llm.choices(prompt, params, **terms) for prompt in prompts[i : i + most]]
            answers += [await stream.result() for streams in asked for stream in streams]
        return likeliest(answers, n, num_choices) if num_choices > n else answers

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
