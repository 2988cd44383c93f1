"""Answers that tell more than their text: log probabilities, token ids, the prompt itself.

Loop thread. It never knows sockets or how the text is told: it wraps whatever dialect does. A request that asks for
none of this does not come here.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any, Protocol

import msgspec

from ..llm import AsyncLLM
from ..text.detokenizer import Detokenizer
from ..types import Completion, FinishReason, Logprob, PromptLogprobs
from ..wire import details
from ..wire.details import Position, Token
from ..wire.replies import Head, Usage
from ..wire.requests import ChatRequest, CompletionRequest


class ChoiceChunks(Protocol):
    """One choice's text as events."""

    @property
    def open(self) -> Callable[[], bytes]: ...

    def text(self, text: str, usage: Usage | None = None) -> bytes: ...

    def finish(self, reason: FinishReason, usage: Usage | None = None) -> bytes: ...

    def reasoning_tokens(self, num_output_tokens: int) -> int: ...


class Prompt(msgspec.Struct, frozen=True):
    ids: Sequence[int]
    text: str  # "" unless it is echoed


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What one request wants told."""

    logprobs: Callable[[Sequence[Position]], dict[str, Any]] | None  # their form
    prompt_logprobs: bool = False  # apart, as vLLM has them
    token_ids: bool = False
    ids_as_tokens: bool = False
    echo: bool = False
    hides_output: bool = False  # max_tokens 0: what was drawn is not told
    skip_special_tokens: bool = True
    is_chat: bool = False  # the prompt's ids and scores stand beside the choices, as vLLM has them there


def wanted(body: ChatRequest | CompletionRequest) -> Wanted | None:
    """None: nothing but text."""
    if isinstance(body, ChatRequest):
        echo, logprobs = False, details.chat_logprobs if body.logprobs else None
    else:
        echo = bool(body.echo)
        logprobs = details.completion_logprobs if _is_number(body.logprobs) else None
    asked = Wanted(
        logprobs=logprobs,
        prompt_logprobs=_is_number(body.prompt_logprobs),
        token_ids=bool(body.return_token_ids),
        ids_as_tokens=bool(body.return_tokens_as_token_ids),
        echo=echo,
        hides_output=echo and body.max_tokens == 0,
        skip_special_tokens=body.skip_special_tokens is not False,
        is_chat=isinstance(body, ChatRequest),
    )
    return asked if asked.logprobs or asked.prompt_logprobs or asked.token_ids or asked.echo else None


def _is_number(value: int | bool | None) -> bool:
    return value is not None and value is not False  # 0 is a number of alternatives


class Telling:
    """How one request's details are told: makes the reply's bytes, and each choice's events, from the plain ones."""

    def __init__(self, llm: AsyncLLM, wanted: Wanted, prompts: Sequence[Prompt], num_choices: int) -> None:
        self.wanted = wanted
        self._llm = llm
        self._prompts = prompts
        self._num_choices = num_choices
        self.name = lru_cache(4096)(partial(_name, llm, wanted.ids_as_tokens))

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index // self._num_choices]

    def detokenizer(self) -> Detokenizer:
        return self._llm.tokenizer.detokenizer(skip_special_tokens=self.wanted.skip_special_tokens)

    def reply(self, plain: Callable[[Head, list[Completion]], bytes], head: Head, answers: list[Completion]) -> bytes:
        """The whole reply."""
        if self.wanted.hides_output:
            answers = [_hidden(answer) for answer in answers]
        tellers = [Teller(self, i) for i in range(len(answers))]
        for teller, answer in zip(tellers, answers, strict=True):
            teller.note(answer.token_ids, answer.logprobs, answer.prompt_logprobs)
        if self.wanted.echo:
            answers = [
                msgspec.structs.replace(answer, text=self.prompt(i).text + answer.text)
                for i, answer in enumerate(answers)
            ]
        data = details.put_in(plain(head, answers), [teller.take() for teller in tellers])
        return details.put_beside(data, tellers[0].take_beside())

    def chunks(self, plain: Callable[[Head, int], ChoiceChunks], head: Head, index: int) -> "DetailedChoice":
        """The events of one choice."""
        return DetailedChoice(plain(head, index), Teller(self, index))


class Teller:
    """One choice's details, from what has come since the last time they were taken."""

    def __init__(self, telling: Telling, index: int) -> None:
        self.wanted = telling.wanted
        self.prompt = telling.prompt(index)
        self._name = telling.name
        self._detokenizer = telling.detokenizer()
        self._offset = 0
        self._positions: list[Position] = []
        self._token_ids: list[int] = []
        self._firsts: dict[str, Any] = {}  # told once, in the choice
        self._beside: dict[str, Any] = {}  # told once, beside the choices
        self._tells_prompt = not index or not telling.wanted.is_chat
        self._has_begun = False

    def note(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprob], prompt_logprobs: PromptLogprobs | None
    ) -> None:
        """More of the answer."""
        if not self._has_begun:
            self._begin(prompt_logprobs)
        if self.wanted.token_ids:
            self._token_ids += token_ids
        if self.wanted.logprobs is not None:
            self._positions += [self._position(entry) for entry in logprobs]

    def take(self) -> dict[str, Any]:
        """The fields of a choice."""
        told, self._firsts = self._firsts, {}
        if self.wanted.logprobs is not None:
            told = {"logprobs": self.wanted.logprobs(self._positions), **told}
            self._positions = []
        if self.wanted.token_ids:
            told = told | {"token_ids": self._token_ids}
            self._token_ids = []
        return told

    def take_beside(self) -> dict[str, Any]:
        """The fields of the whole reply or event."""
        told, self._beside = self._beside, {}
        return told

    def _begin(self, scores: PromptLogprobs | None) -> None:
        self._has_begun = True
        told = self._beside if self.wanted.is_chat else self._firsts
        if self.wanted.token_ids and self._tells_prompt:
            told["prompt_token_ids"] = list(self.prompt.ids)
        if self.wanted.prompt_logprobs and scores is not None and self._tells_prompt:
            told["prompt_logprobs"] = details.prompt_logprobs(scores.entries(), self._name)
        if self.wanted.echo and self.wanted.logprobs is not None and scores is not None:
            first = Position(self._name(self.prompt.ids[0]), None, (), 0)
            self._offset += len(self._detokenizer.push(self.prompt.ids[:1]))
            self._positions = [first, *(self._position(entry) for entry in scores.entries())]

    def _position(self, entry: Logprob) -> Position:
        name = self._name
        position = Position(
            name(entry.token_id), entry.logprob, [(name(i), value) for i, value in entry.top], self._offset
        )  # fmt: skip
        self._offset += len(self._detokenizer.push((entry.token_id,)))
        return position


class DetailedChoice:
    """One choice's events with its details in them, those of tokens that made no text yet in the next one."""

    def __init__(self, plain: ChoiceChunks, teller: Teller) -> None:
        self._plain = plain
        self._teller = teller
        self._prefix = teller.prompt.text
        self.open, self.reasoning_tokens = plain.open, plain.reasoning_tokens
        self.hides_output = teller.wanted.hides_output

    def note(
        self, token_ids: Sequence[int], logprobs: Sequence[Logprob], prompt_logprobs: PromptLogprobs | None
    ) -> None:
        """What is behind the text that comes next."""
        if not token_ids:  # what is told of the prompt comes with the first
            return
        if self.hides_output:
            token_ids, logprobs = (), ()
        self._teller.note(token_ids, logprobs, prompt_logprobs)

    def text(self, text: str, usage: Usage | None = None) -> bytes:
        if self.hides_output:
            text = ""
        text, self._prefix = self._prefix + text, ""
        data = self._plain.text(text, usage) if text else b""
        return self._detailed(data) if data else b""

    def finish(self, reason: FinishReason, usage: Usage | None = None) -> bytes:
        opening = self.text("", None) if self._prefix else b""
        if self.hides_output:
            reason = FinishReason.LENGTH
        return opening + self._detailed(self._plain.finish(reason, usage))

    def _detailed(self, data: bytes) -> bytes:
        return details.put_beside(details.put_in(data, [self._teller.take()]), self._teller.take_beside())


def token_logprobs(llm: AsyncLLM, as_ids: bool, entries: Sequence[Logprob]) -> list[dict[str, Any]]:
    """As chat and responses have them."""
    name = partial(_name, llm, as_ids)
    positions = [
        Position(name(one.token_id), one.logprob, [(name(i), value) for i, value in one.top], 0) for one in entries
    ]
    told: list[dict[str, Any]] = details.chat_logprobs(positions)["content"]
    return told


def _hidden(answer: Completion) -> Completion:
    return msgspec.structs.replace(
        answer, text="", token_ids=(), logprobs=(), finish_reason=FinishReason.LENGTH, stop_reason=None
    )  # fmt: skip


def _name(llm: AsyncLLM, as_id: bool, token_id: int) -> Token:
    """A token that is no whole UTF-8 is written as `bytes:\\xe2\\x80`, so that no two tokens read alike."""
    spelled = llm.tokenizer.spell(token_id)
    if as_id:
        return Token(f"token_id:{token_id}", spelled)
    try:
        return Token(spelled.decode(), spelled)
    except UnicodeDecodeError:
        return Token("bytes:" + "".join([f"\\x{byte:02x}" for byte in spelled]), spelled)
