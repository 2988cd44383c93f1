"""Where one request's deltas become text and wait for their reader, merged while he lags.

Loop thread. It never knows the engine's messages, sockets or HTTP.

A delta without stop strings costs half a microsecond: its ids are kept, and become text when the reader
takes them. So a reader who comes every fifth step pays for one decoding and one write, not for five.
"""

import asyncio
import logging

import msgspec

from .bridge import Token, plain_delta
from .errors import Aborted, AsyncLLMError, as_ours
from .pace import Pace, Reader
from .text.detokenizer import Detokenizer
from .text.stop import StopMatcher
from .types import Delta, FinishReason, Logprob, Progress, PromptLogprobs, Submission, TokenSpan

log = logging.getLogger(__name__)

# What an id that nobody has read takes: an int and a place in a list.
BYTES_PER_UNREAD_TOKEN = 36


class Mailbox:
    """Owned by the registry of AsyncLLM, not by the reader: a Stream that is dropped takes nothing with it."""

    # Between two tokens of a stream the caches have seen every other: what counts is how many lines it lies in.
    __slots__ = (
        "_detokenizer", "_due", "_last", "_logprobs", "_mark", "_num_chars", "_num_spelled", "_prompt_logprobs",
        "_spans", "_stop", "_text", "_token", "_token_ids", "_unread", "ended", "progress", "reader", "seen_s",
        "submission",
    )  # fmt: skip

    def __init__(self, submission: Submission, detokenizer: Detokenizer, stop: StopMatcher | None, pace: Pace) -> None:
        self.submission = submission
        self._last: Delta | None = None
        self._token: Token | None = None  # newer than _last: a Delta costs as much as all the rest, and few are read
        self.ended = False
        self.progress: Progress | None = None  # until the first token
        self.seen_s = 0.0  # when the last token came
        self.reader: Reader | None = None
        self._detokenizer = detokenizer
        self._stop = stop
        self._mark = pace.mark
        self._due = pace.due
        self._token_ids: list[int] = []
        self._num_spelled = 0  # of these, already in _text
        self._text: list[str] = []
        self._spans: list[tuple[int, int]] | None = None  # [start, end) of the ids that are spelled, for who asked
        self._num_chars = 0
        self._unread = False
        self._logprobs: list[Logprob] = []  # of the unread ids, for who asked
        self._prompt_logprobs: PromptLogprobs | None = None

    @property
    def last(self) -> Delta | None:
        """The newest delta; the terminal one once `ended`."""
        if self._token is not None:
            self._last, self._token = plain_delta(*self._token), None
        return self._last

    @last.setter
    def last(self, delta: Delta) -> None:
        self._last, self._token = delta, None

    # -- from the engine --

    def add_token(self, token: Token) -> bool:
        """deliver() of a plain token, which nearly all are; Pace.settle() is to be called after the last."""
        if self._stop is not None or self.ended:
            return self.deliver(plain_delta(*token))
        is_first = self._token is None and self._last is None
        self._token, self._unread = token, True
        self._token_ids.append(token[1])
        if (reader := self.reader) is not None:
            if is_first:
                self._mark(reader, at_once=True)
            elif not reader.dirty:
                reader.dirty = True
                self._due.append(reader)
        return False

    def deliver(self, delta: Delta) -> bool:
        """Take one delta. True if its text ends the request here and now: it met a stop string, or broke."""
        if delta.logprobs or delta.prompt_logprobs is not None:
            self._logprobs += delta.logprobs
            if delta.prompt_logprobs is not None:
                self._prompt_logprobs = delta.prompt_logprobs
        if delta.finish_reason is None and self._stop is None and not self.ended:
            self._token_ids += delta.token_ids
            is_first, self.last, self._unread = self.last is None, delta, True
            if (reader := self.reader) is not None and (is_first or not reader.dirty):
                self._mark(reader, at_once=is_first)
            return False
        if self.ended:  # its text had broken
            return True
        try:
            stopped = self._find_stop(delta)
        except Exception as error:
            self._break(error)
            return True
        self._note(delta if stopped is None else stopped)
        return stopped is not None

    def note_progress(self, progress: Progress) -> None:
        self.progress = progress
        if self.reader is not None:
            self._mark(self.reader, at_once=True)

    def fail(self, error: AsyncLLMError) -> None:
        """End the request with an error in place of whatever the engine may still say."""
        reason = FinishReason.ABORT if isinstance(error, Aborted) else FinishReason.ERROR
        seen = self.last or Delta(request_id=self.submission.request_id)
        self._note(msgspec.structs.replace(seen, finish_reason=reason, error=error))

    def set_stop(self, stop: StopMatcher | None) -> None:
        """Other stop strings from here on. What was held back for the old ones is shown."""
        self._spell()
        if self._stop is not None:
            self._text.append(self._stop.finish())
        self._stop = stop

    # -- to the reader --

    def track_spans(self) -> None:
        """Before the first token: the text will be read by take_spans()."""
        self._spans = []

    def listen(self, reader: Reader | None) -> None:
        """Who is to be flushed. What is unread counts as new."""
        self.reader = reader
        if reader is not None and self._unread:
            self._mark(reader, at_once=True)

    @property
    def num_unread_bytes(self) -> int:
        """What the unread output takes here, about."""
        return BYTES_PER_UNREAD_TOKEN * len(self._token_ids)

    def take_more(self) -> str | None:
        """take_text(), for who asks for nothing else; None, and nothing is taken, once `last` is terminal."""
        if self.ended:
            return None
        if len(self._token_ids) != 1 or self._num_spelled or self._text:
            return self.take_text()
        self._unread = False
        try:
            return self._detokenizer.push_one(self._token_ids.pop())
        except Exception as error:
            self._break(error)
            return ""

    def take_text(self) -> str:
        """All unread text; the ids are dropped. The state beside it is in `last`."""
        self._unread = False
        try:
            if not self._num_spelled and not self._text:
                ids, self._token_ids = self._token_ids, []
                return self._detokenizer.push(ids)
            self._spell()
        except Exception as error:
            self._break(error)
            return ""
        text = "".join(self._text)
        self._token_ids, self._text, self._num_spelled = [], [], 0
        return text

    def take_spans(self) -> tuple[str, list[TokenSpan]]:
        """take_text(), and what was asked to be told of the unread ids, each with its place in the text."""
        _, logprobs, _ = self.take_details()
        try:
            self._spell()
        except Exception as error:
            self._break(error)
        text, spans, self._spans = self.take_text(), self._spans or (), []
        return text, [TokenSpan(*span, logprob) for span, logprob in zip(spans, logprobs, strict=False)]

    def take_details(self) -> tuple[list[int], list[Logprob], PromptLogprobs | None]:
        """The unread ids and what was asked to be told of them; before take_text(), which drops the ids."""
        logprobs, self._logprobs = self._logprobs[: len(self._token_ids)], []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, None
        return self._token_ids, logprobs, prompt_logprobs

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
                raise as_ours(last.error)
            last = msgspec.structs.replace(last, finish_reason=None, error=None)
        token_ids = tuple(self._token_ids)
        _, logprobs, prompt_logprobs = self.take_details()
        delta = msgspec.structs.replace(
            last,
            token_ids=token_ids,
            text=self.take_text(),
            logprobs=tuple(logprobs),
            prompt_logprobs=prompt_logprobs,
        )
        self._unread = last is not self.last
        return delta

    async def wait(self) -> None:
        """Sleep until something is unread or the end has come. One reader at a time."""
        if self.reader is not None:
            raise RuntimeError("a stream has one reader; two are waiting")
        waiter = _Waiter()
        self.listen(waiter)
        try:
            await waiter.woken
        finally:
            self.reader = None

    # -- inside --

    def _find_stop(self, delta: Delta) -> Delta | None:
        """Spell a delta's ids one by one, as a stop string ends the answer behind the very token that completes it."""
        self._spell()
        for i, token_id in enumerate(delta.token_ids, 1):
            self._token_ids.append(token_id)
            self._num_spelled += 1
            if matched := self._add_text(self._tracked(self._visible_text(token_id, delta))):
                return _stopped(delta, matched, delta.num_output_tokens - len(delta.token_ids) + i)
        if delta.finish_reason is not None:
            if matched := self._add_text(self._detokenizer.finish()):
                return _stopped(delta, matched, delta.num_output_tokens)
            if self._stop is not None:
                self._text.append(self._stop.finish())
        return None

    def _spell(self) -> None:
        if len(self._token_ids) > self._num_spelled:
            new = self._token_ids[self._num_spelled :] if self._num_spelled else self._token_ids
            if self._spans is None:
                self._text.append(self._detokenizer.push(new))
            else:
                self._text += [self._tracked(self._detokenizer.push_one(token_id)) for token_id in new]
            self._num_spelled = len(self._token_ids)

    def _tracked(self, text: str) -> str:
        """One token's text, its place noted if that was asked for."""
        if self._spans is not None:
            self._spans.append((self._num_chars, self._num_chars + len(text)))
            self._num_chars += len(text)
        return text

    def _break(self, error: Exception) -> None:
        """A tokenizer's fault is this request's alone: it ends with an error, and no other hears of it."""
        log.error("the text of request %s cannot be made", self.submission.request_id, exc_info=error)
        self._token_ids, self._text, self._num_spelled = [], [], 0
        self.fail(AsyncLLMError("the answer's tokens could not be turned into text"))

    def _visible_text(self, token_id: int, delta: Delta) -> str:
        # The stop id itself is counted but not shown, special or not, unless a request names it and asks for it.
        if delta.finish_reason is FinishReason.STOP and token_id == delta.token_ids[-1] and not self._shows(token_id):
            return ""
        return self._detokenizer.push_one(token_id)

    def _shows(self, stop_id: int) -> bool:
        params = self.submission.params
        return params.include_stop_str_in_output and stop_id in params.stop_token_ids

    def _add_text(self, text: str) -> str | None:
        if self._stop is None:
            self._text.append(text)
            return None
        visible, matched = self._stop.push(text)
        self._text.append(visible)
        return matched

    def _note(self, delta: Delta) -> None:
        is_first = self.last is None
        self.last, self.ended, self._unread = delta, delta.finish_reason is not None, True
        if self.reader is not None:
            self._mark(self.reader, at_once=is_first or self.ended)


class _Waiter:
    """A task that waits, as a Reader."""

    def __init__(self) -> None:
        self.dirty = False
        self.woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def flush(self) -> bool:
        if not self.woken.done():
            self.woken.set_result(None)
        return True

    def cut_off(self) -> None:
        self.flush()  # the task that was woken reads how its request ended


def _stopped(delta: Delta, stop_string: str, num_output_tokens: int) -> Delta:
    return msgspec.structs.replace(
        delta,
        finish_reason=FinishReason.STOP,
        stop_reason=stop_string,
        num_output_tokens=num_output_tokens,
        error=None,
    )
