"""POST /v1/chat/completions and /v1/completions, streamed and whole.

Loop thread. It never knows token ids' meaning, steps or pages: an answer is a Stream of deltas.
"""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager

import msgspec
from aiohttp import web

from ..errors import AsyncLLMError, InvalidRequest, ModelNotFound
from ..llm import AsyncLLM, Stream
from ..types import Completion, Delta, SamplingParams
from ..wire import replies, requests, sse
from ..wire.messages import template_messages
from ..wire.replies import Chunks, Head, Usage
from ..wire.requests import ChatRequest, CompletionRequest
from .events import EventResponse
from .gate import read_body

log = logging.getLogger(__name__)

LLM = web.AppKey("llm", AsyncLLM)


class Dialect(msgspec.Struct, frozen=True):
    """How one of the two routes says the same thing."""

    id_prefix: str
    chunk_object: str
    reply: Callable[[Head, list[Completion]], bytes]
    chunks: Callable[[Head, int], Chunks]


CHAT = Dialect("chatcmpl-", "chat.completion.chunk", replies.chat_reply, replies.chat_chunks)
TEXT = Dialect("cmpl-", "text_completion", replies.completion_reply, replies.completion_chunks)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    llm = request.app[LLM]
    body = requests.decode_chat(await read_body(request))
    check_model(llm, body.model)
    messages = template_messages(body.messages)
    params = requests.chat_params(body)
    prompt_ids = await llm.encode_chat(messages)
    return await _answer(request, CHAT, body, [prompt_ids], params)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions: a choice for each prompt, in their order."""
    llm = request.app[LLM]
    body = requests.decode_completion(await read_body(request))
    check_model(llm, body.model)
    prompts = requests.completion_prompts(body)
    params = requests.completion_params(body)
    prompt_ids = [await llm.encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return await _answer(request, TEXT, body, prompt_ids, params)


def check_model(llm: AsyncLLM, model: str | None) -> None:
    """A request names the model that is served, or none.

    Raises:
        ModelNotFound: it names another.
    """
    if model is not None and model != llm.model_name:
        raise ModelNotFound(f"the model {model[:100]!r} does not exist here; served is {llm.model_name!r}", "model")


async def _answer(
    request: web.Request,
    dialect: Dialect,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
) -> web.StreamResponse:
    llm = request.app[LLM]
    head = Head(dialect.id_prefix + secrets.token_hex(12), int(time.time()), llm.model_name)
    with _submitted(llm, prompts, params) as streams:
        if body.stream:
            return await _stream(EventResponse(request), dialect, head, streams, *requests.wants_usage(body))
        answers = [await stream.result() for stream in streams]
    return web.Response(body=dialect.reply(head, answers), content_type="application/json")


@contextmanager
def _submitted(llm: AsyncLLM, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Iterator[list[Stream]]:
    """Every prompt in the engine; none of them any more when the handler is left, however it is left.

    The abort is synchronous: a cancelled handler may not await.
    """
    streams: list[Stream] = []
    try:
        for i, prompt_ids in enumerate(prompts):
            with _naming_prompt(i if len(prompts) > 1 else None):
                streams.append(llm.submit(prompt_ids, params))
        yield streams
    finally:
        for stream in streams:
            stream.abort()


@contextmanager
def _naming_prompt(index: int | None) -> Iterator[None]:
    """Puts the number of the prompt into an error about one of several."""
    try:
        yield
    except InvalidRequest as error:
        if index is not None and error.param is not None and error.param.startswith("prompt"):
            error.param = f"prompt[{index}]{error.param.removeprefix('prompt')}"
        raise


async def _stream(
    response: EventResponse,
    dialect: Dialect,
    head: Head,
    streams: list[Stream],
    want_usage: bool,
    want_usage_always: bool,
) -> web.StreamResponse:
    """Events as deltas come; the last text, the reason, the usage and [DONE] in one write."""
    chunks = [dialect.chunks(head, i) for i in range(len(streams))]
    tally = Tally(streams)
    try:
        async with aclosing(_merged(streams)) as deltas:
            async for i, delta in deltas:
                tally.add(i, delta)
                data = _events(chunks[i], delta, tally.usage() if want_usage_always else None)
                if tally.num_open == 0:
                    break
                if data:
                    await response.write(data)
        usage = replies.usage_chunk(head, dialect.chunk_object, tally.usage()) if want_usage else b""
        return await response.end(data + usage + sse.DONE)
    except ConnectionError:
        raise
    except Exception as error:
        if not response.begun:
            raise
        if not isinstance(error, AsyncLLMError):
            log.error("unexpected error in a stream", exc_info=error)
        return await response.fail(error)


def _events(chunks: Chunks, delta: Delta, usage: Usage | None) -> bytes:
    data = chunks.text(delta.text, usage) if delta.text else b""
    if delta.finish_reason is not None:
        data += chunks.finish(delta.finish_reason, usage)
    return data


class Tally:
    """The usage of a request so far, over its choices."""

    def __init__(self, streams: list[Stream]) -> None:
        self.num_open = len(streams)
        self._num_prompt_tokens = sum(stream.num_prompt_tokens for stream in streams)
        self._num_cached = [0] * len(streams)
        self._num_output = [0] * len(streams)

    def add(self, index: int, delta: Delta) -> None:
        self._num_cached[index] = delta.num_cached_tokens
        self._num_output[index] = delta.num_output_tokens
        self.num_open -= delta.finish_reason is not None

    def usage(self) -> Usage:
        return Usage(self._num_prompt_tokens, sum(self._num_cached), sum(self._num_output))


async def _merged(streams: list[Stream]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several streams as they come, with the number of their stream."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    waiting = {asyncio.ensure_future(anext(stream)): i for i, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for i, task in sorted((waiting.pop(task), task) for task in done):
                delta = task.result()
                if delta.finish_reason is None:
                    waiting[asyncio.ensure_future(anext(streams[i]))] = i
                yield i, delta
    finally:
        for task in waiting:
            task.cancel()
