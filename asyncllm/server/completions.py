"""POST /v1/chat/completions and /v1/completions, streamed and whole.

Loop thread. It never knows token ids' meaning, steps or pages: an answer is a Stream of deltas.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
from aiohttp import web

from ..errors import AsyncLLMError, InvalidRequest, ModelNotFound, as_ours
from ..llm import AsyncLLM
from ..stream import Stream, likeliest
from ..types import Completion, SamplingParams
from ..wire import replies, requests, sse
from ..wire.formats import grammar_spec
from ..wire.messages import template_messages
from ..wire.names import Names
from ..wire.obfuscation import obfuscated
from ..wire.replies import Head, Usage
from ..wire.requests import ChatRequest, CompletionRequest
from .asking import ask, naming
from .detailed import ChoiceChunks, DetailedChoice, Prompt, Telling, wanted
from .events import EventResponse
from .gate import LLM, read_request
from .parting import Parting


class Dialect(msgspec.Struct, frozen=True):
    """How one of the two routes says the same thing."""

    id_prefix: str
    chunk_object: str
    reply: Callable[[Head, list[Completion]], bytes]
    chunks: Callable[[Head, int], ChoiceChunks]
    shown: tuple[str, ...] = ()  # special tokens that the answer's text must have


CHAT = Dialect("chatcmpl-", "chat.completion.chunk", replies.chat_reply, replies.chat_chunks)
TEXT = Dialect("cmpl-", "text_completion", replies.completion_reply, replies.completion_chunks)


async def chat(request: web.Request) -> web.StreamResponse:
    """POST /v1/chat/completions."""
    llm = request.app[LLM]
    body = requests.decode_chat(await read_request(request))
    check_model(llm, body.model)
    messages = template_messages(body.messages)
    asked = await ask(llm, body, messages)
    return await _answer(request, _dialect(asked.parting), body, [Prompt(asked.prompt_ids, "")], asked.params)


def _dialect(parted: Parting | None) -> Dialect:
    """Chat's, or that of answers that are more than content."""
    if parted is None:
        return CHAT
    return msgspec.structs.replace(CHAT, reply=parted.reply, chunks=parted.chunks, shown=parted.shown)


async def completions(request: web.Request) -> web.StreamResponse:
    """POST /v1/completions: a choice for each prompt, in their order."""
    llm = request.app[LLM]
    body = requests.decode_completion(await read_request(request))
    check_model(llm, body.model)
    prompts = requests.completion_prompts(body)
    params = requests.completion_params(body, llm.sampling_defaults)
    params = msgspec.structs.replace(params, grammar=grammar_spec(body))
    params = await llm.compiled(params)
    read = [await _read_prompt(llm, prompt, body) for prompt in prompts]
    return await _answer(request, TEXT, body, read, params)


async def _read_prompt(llm: AsyncLLM, prompt: requests.Prompt, body: CompletionRequest) -> Prompt:
    """Its ids, and its text if that is to be echoed."""
    ids = await llm.encode(prompt) if isinstance(prompt, str) else prompt
    if not body.echo:
        return Prompt(ids, "")
    if isinstance(prompt, str):
        return Prompt(ids, prompt)
    return Prompt(ids, llm.tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens is not False))


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
    prompts: Sequence[Prompt],
    params: SamplingParams,
) -> web.StreamResponse:
    llm = request.app[LLM]
    head = Head(requests.answer_id(dialect.id_prefix, body), int(time.time()), llm.model_name)
    terms = requests.terms(body)
    if (asked := wanted(body)) is not None:
        dialect = _with_details(dialect, Telling(llm, asked, prompts, params.n))
    with _submitted(llm, prompts, params, terms | {"shown": dialect.shown}) as streams:
        if body.stream:
            want_usage, usage_always = requests.wants_usage(body)
            response = EventResponse(request)
            chunks = [dialect.chunks(head, i) for i in range(len(streams))]
            pads = requests.wants_obfuscation(body.stream_options)
            answer = Answer(response, streams, chunks, usage_always, params.n, pads=pads)
            return await _stream(response, dialect, head, answer, want_usage)
        answers = [await stream.result() for stream in streams]
    if (num_choices := params.num_choices) > 1:
        answers = _chosen(answers, params.n, num_choices)
    if asked is None:
        reply = dialect.reply(head, answers)
    else:  # some 5 us a position, and an echoed prompt may have thousands
        reply = await asyncio.to_thread(dialect.reply, head, answers)
    return web.Response(body=reply, content_type="application/json")


def _with_details(dialect: Dialect, telling: Telling) -> Dialect:
    return msgspec.structs.replace(
        dialect, reply=partial(telling.reply, dialect.reply), chunks=partial(telling.chunks, dialect.chunks)
    )


def _chosen(answers: list[Completion], num_told: int, num_choices: int) -> list[Completion]:
    """Those to tell, of which only each prompt's first counts the prompt: it was sent once."""
    told = likeliest(answers, num_told, num_choices) if num_choices > num_told else answers
    return [
        msgspec.structs.replace(answer, num_prompt_tokens=0, num_cached_tokens=0) if i % num_told else answer
        for i, answer in enumerate(told)
    ]


@contextmanager
def _submitted(
    llm: AsyncLLM, prompts: Sequence[Prompt], params: SamplingParams, terms: dict[str, Any]
) -> Iterator[list[Stream]]:
    """Every choice of every prompt in the engine; none of them any more when the handler is left, however it is left.

    The abort is synchronous: a cancelled handler may not await.
    """
    _check_choices(llm, len(prompts), params)
    streams: list[Stream] = []
    try:
        for i, prompt in enumerate(prompts):
            with naming(Names({"prompt": f"prompt[{i}]"} if len(prompts) > 1 else {})):
                if params.num_choices == 1:
                    streams.append(llm.submit(prompt.ids, params, **terms))
                else:
                    streams += llm.submit_choices(prompt.ids, params, **terms)
        yield streams
    finally:
        for stream in streams:
            stream.abort()


def _check_choices(llm: AsyncLLM, num_prompts: int, params: SamplingParams) -> None:
    """
    Raises:
        InvalidRequest: more sequences than could ever be running and waiting.
    """
    num_choices, most = params.num_choices, llm.limits.max_running + llm.limits.max_waiting
    if num_choices > 1 and num_prompts * num_choices > most:
        name = "n" if num_choices == params.n else "best_of"
        raise InvalidRequest(f"{num_prompts} times {num_choices} choices are more than the {most} that may wait", name)


async def _stream(
    response: EventResponse, dialect: Dialect, head: Head, answer: "Answer", want_usage: bool
) -> web.StreamResponse:
    """The task's part of a stream: its beginning and its end. What is between goes from callback to socket."""
    try:
        with response:
            await response.comment_until(answer.woken)  # the first text, or the end
            if answer.error is not None and not answer.has_text and not response.begun:
                raise answer.error
            await response.begin()
            await response.comment_until(answer.go_on())
            if answer.error is not None:
                return await response.fail(answer.error, answer.take())
            rest = answer.take()  # before the usage: it tells how much of the text is reasoning
            usage = replies.usage_chunk(head, dialect.chunk_object, answer.usage()) if want_usage else b""
            return await response.end(rest + usage + sse.DONE)
    finally:
        answer.close()


class Answer:
    """The choices of one streamed request, as the Reader that turns their text into events."""

    __slots__ = (
        "_choices", "_flowing", "_hides_output", "_num_choices", "_open", "_opens", "_pads", "_response", "_streams",
        "_take_more", "_text_event", "_usage_always", "dirty", "error", "woken",
    )  # fmt: skip

    def __init__(
        self,
        response: EventResponse,
        streams: list[Stream],
        chunks: list[ChoiceChunks],
        usage_always: bool,
        num_choices: int = 1,
        *,
        pads: bool = False,
    ) -> None:
        self.dirty = False
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.error: AsyncLLMError | None = None
        self._response = response
        self._streams = streams
        self._usage_always = usage_always
        self._pads = pads  # its events hide how long their text is
        self._num_choices = num_choices  # of each prompt
        self._choices = list(zip(streams, chunks, strict=True))
        self._open = self._choices.copy()
        first = chunks[0]
        is_plain = not isinstance(first, DetailedChoice) and not pads
        self._hides_output = isinstance(first, DetailedChoice) and first.hides_output
        is_plain = is_plain and len(streams) == 1 and not usage_always
        self._take_more = streams[0].take_more if is_plain else None  # of the only choice, where its text is all
        self._text_event = first.text
        self._flowing = False
        self._opens = num_choices > 1  # all choices in their order, before the first text: openai's helper wants it so
        for stream in streams:
            stream.listen(self)

    @property
    def has_text(self) -> bool:
        return any(stream.num_unread_bytes for stream, _ in self._open)

    def go_on(self) -> "asyncio.Future[None]":
        """From here on text is written as it comes; what is returned is done at the end."""
        self.woken, self._flowing = asyncio.get_running_loop().create_future(), True
        self.flush()
        return self.woken

    def flush(self) -> bool:
        if not self._flowing:
            self._note_end()
            self._wake()
            return True
        outflow = self._response.outflow
        has_room = outflow is None or not outflow.may_be_full or outflow.has_room()
        if has_room and self._take_more is not None and (text := self._take_more()) is not None:  # nearly always
            if text:
                self._response.write(self._text_event(text))
            return True
        if self._note_end():  # the end does not wait for the socket here: end() does, with a timeout
            return True
        if has_room:
            self._response.write(self.take())
        else:
            self._response.give_patience(sum([stream.num_unread_bytes for stream in self._streams]))
        return has_room

    def cut_off(self) -> None:
        """Of the Reader: none of the text is to be asked for again, and the task gets an error to end with."""
        self.error, self._take_more = AsyncLLMError("internal error"), None
        self._open.clear()
        if self._response.begun:
            self._response.cut_off()
        self._wake()

    def take(self) -> bytes:
        """The events of all unread text, and of the choices that have ended."""
        usage = self.usage() if self._usage_always else None
        opening = [chunks.open() for _, chunks in self._open] if self._opens else []
        self._opens = False
        data = b"".join(opening + [self._take_one(*choice, usage) for choice in list(self._open)])
        return obfuscated(data) if self._pads else data

    def usage(self) -> Usage:
        """The usage of the request so far, over its choices."""
        lasts = [stream.last for stream in self._streams if stream.last is not None]
        firsts = self._streams[:: self._num_choices]  # of each prompt, which counts once
        return Usage(
            sum([stream.num_prompt_tokens for stream in firsts]),
            sum([stream.last.num_cached_tokens for stream in firsts if stream.last is not None]),
            0 if self._hides_output else sum([last.num_output_tokens for last in lasts]),
            sum([chunks.reasoning_tokens(one.last.num_output_tokens) for one, chunks in self._choices if one.last]),
        )

    def close(self) -> None:
        for stream in self._streams:
            stream.listen(None)

    def _take_one(self, stream: Stream, chunks: ChoiceChunks, usage: Usage | None) -> bytes:
        if isinstance(chunks, DetailedChoice):
            chunks.note(*stream.take_details())
        text, last = stream.take_text(), stream.last
        data = chunks.text(text, usage) if text else b""
        if last is not None and last.finish_reason is not None:
            self._open.remove((stream, chunks))
            if last.error is None:
                data += chunks.finish(last.finish_reason, usage)
        return data

    def _note_end(self) -> bool:
        """True if this was the last thing to come: the task takes it from here, in one write."""
        lasts = [stream.last for stream, _ in self._open]
        for last in lasts:
            if last is not None and last.error is not None:
                self.error = as_ours(last.error)
        if self.error is None and not all(last is not None and last.finish_reason is not None for last in lasts):
            return False
        self._wake()
        return True

    def _wake(self) -> None:
        if not self.woken.done():
            self.woken.set_result(None)
