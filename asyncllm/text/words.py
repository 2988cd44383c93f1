"""What a model reads and may say: prompts and conversations to ids, grammars compiled, answers parted.

Loop thread, with workers for what takes longer. It never knows requests, nor whether there is room for them.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import InvalidRequest, QueueFull
from ..types import GrammarSpec, SamplingParams
from .answer import AnswerForm, AnswerParser
from .chat import ChatTemplate, Ending
from .forcing import forced
from .tokenizer import Tokenizer

if TYPE_CHECKING:  # llguidance has no wheel for every machine
    from .grammars import Grammar, Grammars

Messages = Sequence[dict[str, Any]]

# Above this many characters a prompt is tokenised in a worker thread: about 1 ms of the loop's time.
INLINE_CHARS = 2048
INLINE_MESSAGES = 32
MAX_COMPILING = 64  # grammars that may wait to be compiled
COMPILE_S = 15.0  # and how long each waits and is compiled, at most
PROMPT_END_TOKENS = 16  # hold the tag that opens an answer's reasoning, were each a letter


class Words:
    """A model's tokenizer, chat template and grammars, and the threads in which they work."""

    def __init__(
        self, tokenizer: Tokenizer, chat_template: ChatTemplate | None, grammars: "Grammars | None" = None
    ) -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.grammars = grammars
        self._workers = ThreadPoolExecutor(max_workers=2, thread_name_prefix="asyncllm-text")
        # One grammar at a time, and none of them in the way of a prompt.
        self._compiler = ThreadPoolExecutor(max_workers=1, thread_name_prefix="asyncllm-grammar")
        self._num_compiling = 0

    async def encode(self, text: str, max_len: int) -> list[int]:
        """Token ids of a prompt. A control token that is typed in it stays text.

        Raises:
            ContextTooLong: the text has more; far too long ones are refused without tokenising them.
        """
        return await self._run(len(text), partial(self.tokenizer.encode, text, max_len=max_len))

    async def encode_chat(
        self,
        messages: Messages,
        max_len: int,
        *,
        tools: list[dict[str, Any]] | None,
        variables: dict[str, Any] | None,
        ending: Ending,
    ) -> list[int]:
        """Token ids of a conversation, rendered by the template with these tools and further variables.

        Raises:
            InvalidRequest: there is no template, or it refuses the messages.
            ContextTooLong: as encode().
        """
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
            max_len=max_len,
        )
        return await self._run(_num_chars([*messages, *(tools or ())]), encode)

    async def compiled(self, params: SamplingParams) -> SamplingParams:
        """The same, its grammar compiled: in a worker thread, unless it has been lately.

        Raises:
            InvalidRequest: the grammar is wrong, impossible or too large, and why.
            QueueFull, GrammarUnchecked: not now.
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

    def forced(self, prompt_ids: Sequence[int], spec: GrammarSpec | None, **calls: Any) -> GrammarSpec | None:
        """What all of an answer behind this prompt must look like; see forcing.py."""
        form = AnswerForm() if self.chat_template is None else self.chat_template.form
        return forced(form, self.tokenizer.literal, self._end_of(prompt_ids), spec, **calls)

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

    def close(self) -> None:
        """Begin nothing more."""
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._compiler.shutdown(wait=False, cancel_futures=True)
        if self.grammars is not None:
            self.grammars.close()

    async def _run(self, num_chars: int, encode: Callable[[], list[int]]) -> list[int]:
        if num_chars <= INLINE_CHARS:
            return encode()
        return await asyncio.get_running_loop().run_in_executor(self._workers, encode)

    async def _compile(self, grammars: "Grammars", spec: GrammarSpec) -> "Grammar":
        if self._num_compiling >= MAX_COMPILING:
            raise QueueFull("too many grammars are being compiled; try again later")
        self._num_compiling += 1
        try:
            async with asyncio.timeout(COMPILE_S):
                return await asyncio.get_running_loop().run_in_executor(self._compiler, grammars.compile, spec)
        except TimeoutError:
            raise QueueFull("other grammars are being compiled; try again later") from None
        finally:
            self._num_compiling -= 1

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(prompt_ids[-PROMPT_END_TOKENS:]), skip_special_tokens=False)


def _num_chars(messages: Messages) -> int:
    """Enough to tell a short conversation from a long one, everything in it counted by its repr."""
    return INLINE_CHARS + 1 if len(messages) > INLINE_MESSAGES else sum(len(str(message)) for message in messages)
