"""Chat answers of models that reason or call tools: their text through a parser, its pieces to the wire.

Loop thread. It never knows sockets or tokens. A request that can have nothing but content does not come here.
"""

import secrets
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from ..llm import AsyncLLM
from ..text.answer import AnswerParser
from ..text.pieces import Kind, Piece
from ..types import Completion, FinishReason
from ..wire.parted import PartedChunks, message
from ..wire.replies import Head, Message, Usage, messages_reply
from ..wire.requests import ChatRequest
from ..wire.tools import ToolUse


class Parting(msgspec.Struct, frozen=True):
    """How the answers to one request are parted."""

    new_parser: Callable[[], AnswerParser]
    call_id: Callable[[], str]
    tells_reasoning: bool
    shown: tuple[str, ...]  # special tokens that the parser must see

    def reply(self, head: Head, answers: list[Completion]) -> bytes:
        """A chat.completion."""
        return messages_reply(head, answers, [self._message(answer) for answer in answers])

    def chunks(self, head: Head, index: int) -> "PartedChoice":
        """The events of one choice of a chat.completion.chunk stream."""
        return PartedChoice(PartedChunks(head, index), self.new_parser(), self)

    def _message(self, answer: Completion) -> Message:
        parser = self.new_parser()
        said = parser.whole(answer.text)
        calls = [(self.call_id(), name, arguments) for name, arguments in said.calls]
        body = message(said.content, said.reasoning if self.tells_reasoning else "", calls)
        num_chars = len(said.content) + len(said.reasoning) + sum([len(name) + len(text) for name, text in said.calls])
        num_tokens = reasoning_tokens(len(answer.token_ids), len(said.reasoning), num_chars)
        return Message(body, finish_reason(parser, answer.finish_reason), num_tokens)


def parting(llm: AsyncLLM, body: ChatRequest, prompt_ids: Sequence[int], use: ToolUse | None) -> Parting | None:
    """None: the answers are content, whatever they say.

    Raises:
        InvalidRequest: tools for a model whose calls would not be found.
    """
    new_parser = partial(
        llm.words.answer_parser,
        prompt_ids,
        None if use is None else use.names,
        one_call=use is not None and use.one_call,
        parts_reasoning=body.separate_reasoning is not False,
    )
    if llm.chat_template is None or new_parser() is None:
        return None
    form = llm.chat_template.form
    return Parting(
        new_parser=new_parser,  # type: ignore[arg-type]  # it is none for all answers, or for no answer
        call_id=lambda: form.calls.call_id(secrets.token_hex(12)) if form.calls else "",
        tells_reasoning=body.include_reasoning is not False,
        shown=form.markers(calls=use is not None),
    )


def reasoning_tokens(num_output_tokens: int, num_reasoning_chars: int, num_chars: int) -> int:
    """How many of an answer's tokens are reasoning: in proportion to its characters, so the same however it was cut.
    Which token a character came with is kept for log probabilities alone."""
    return round(num_output_tokens * num_reasoning_chars / num_chars) if num_reasoning_chars else 0


def finish_reason(parser: AnswerParser, reason: FinishReason) -> str:
    """OpenAI's word: an answer that ended by itself with its calls whole has ended to have them made."""
    return "tool_calls" if reason is FinishReason.STOP and parser.has_whole_calls else reason.value


class PartedChoice:
    """One choice's text as events, in the place of replies.Chunks."""

    def __init__(self, chunks: PartedChunks, parser: AnswerParser, parting: Parting) -> None:
        self._chunks = chunks
        self._parser = parser
        self._parting = parting
        self._num_chars = self._num_reasoning_chars = 0
        self.open = chunks.open

    def text(self, text: str, usage: Usage | None = None) -> bytes:
        """The events of what this text says for certain: none, or several."""
        return b"".join([self._event(piece, usage) for piece in self._parser.push(text)])

    def finish(self, reason: FinishReason, usage: Usage | None = None) -> bytes:
        """The events of what was held back, and the one that closes the choice."""
        rest = [self._event(piece, usage) for piece in self._parser.finish()]
        return b"".join(rest) + self._chunks.finish(finish_reason(self._parser, reason), usage)

    def reasoning_tokens(self, num_output_tokens: int) -> int:
        """How many of so many tokens, which have all been told, are reasoning."""
        return reasoning_tokens(num_output_tokens, self._num_reasoning_chars, self._num_chars)

    def _event(self, piece: Piece, usage: Usage | None) -> bytes:
        self._num_chars += len(piece.text)
        self._num_reasoning_chars += len(piece.text) if piece.kind is Kind.REASONING else 0
        match piece.kind:
            case Kind.CONTENT:
                return self._chunks.content(piece.text, usage)
            case Kind.CALL:
                return self._chunks.call(self._parting.call_id(), piece.text, usage)
            case Kind.ARGUMENTS:
                return self._chunks.arguments(piece.text, usage)
        return self._chunks.reasoning(piece.text, usage) if self._parting.tells_reasoning else b""
