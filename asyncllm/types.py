"""What travels between the floors: SamplingParams and Submission inward, Delta outward.

All frozen, owned by nobody, read by everyone. Imports nothing of ours.
"""

import enum
import math
from typing import Any

import msgspec

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 64


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class Problem(msgspec.Struct, frozen=True):
    """Why a request is refused: the field at fault and a sentence for its sender."""

    param: str
    message: str


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen numbers every request is checked against, at the edge and at the engine's door."""

    vocab_size: int  # ids 0 .. vocab_size-1 exist in the tokenizer and in the logits
    max_model_len: int  # prompt and output together, tokens
    max_prompt_len: int  # tokens; smaller than the context where the KV pool is
    max_running: int  # sequences that hold a slot
    max_waiting: int  # submissions that may queue behind them


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen and when it ends.

    Fields below the line are part of the contract but not served yet: any value that asks for
    something is refused by name (`problem`), never ignored.
    """

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    seed: int | None = None  # None: a fresh one each time
    max_tokens: int | None = None  # None: to the end of the context
    min_tokens: int = 0  # EOS and stop ids cannot be drawn before
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    # -- not served yet --
    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None  # how many alternatives beside the sampled token
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    grammar: Any = None

    def problem(self, limits: EngineLimits) -> Problem | None:
        """The first thing wrong with these parameters, or None."""
        return next(self._problems(limits), None)

    def _problems(self, limits: EngineLimits) -> Any:
        for name, neutral in _NOT_SERVED.items():
            if getattr(self, name) not in neutral:
                yield Problem(name, f"'{name}' is not supported by this server yet; leave it out")
        for name, low, high in _RANGES:
            value = getattr(self, name)
            # Written so that NaN fails: `value < low or value > high` lets it pass.
            if not (low <= value <= high and math.isfinite(value)):
                yield Problem(name, f"'{name}' must be between {low} and {high}, got {value}")
        if self.top_k < -1:
            yield Problem("top_k", f"'top_k' must be at least 1, or 0 or -1 for off, got {self.top_k}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            yield Problem("seed", f"'seed' must be a signed 64-bit integer, got {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 1:
            yield Problem("max_tokens", f"'max_tokens' must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= limits.max_model_len:
            yield Problem("min_tokens", f"'min_tokens' must be between 0 and {limits.max_model_len}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            yield Problem("min_tokens", f"'min_tokens' {self.min_tokens} is above 'max_tokens' {self.max_tokens}")
        yield from self._stop_problems(limits)

    def _stop_problems(self, limits: EngineLimits) -> Any:
        if len(self.stop) > MAX_STOP_STRINGS:
            yield Problem("stop", f"'stop' takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for i, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                yield Problem(f"stop[{i}]", f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            yield Problem("stop_token_ids", f"'stop_token_ids' takes at most {MAX_STOP_TOKEN_IDS} ids")
        for i, token_id in enumerate(self.stop_token_ids):
            if not 0 <= token_id < limits.vocab_size:
                message = f"token id {token_id} is outside the vocabulary of {limits.vocab_size}"
                yield Problem(f"stop_token_ids[{i}]", message)


_RANGES = (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0))
_NOT_SERVED: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (None, 1), "presence_penalty": (0,), "frequency_penalty": (0,),
    "repetition_penalty": (1,), "logit_bias": (None, {}), "allowed_token_ids": (None,), "bad_words": ((),),
    "logprobs": (None,), "prompt_logprobs": (None,), "include_stop_str_in_output": (False,), "grammar": (None,),
}  # fmt: skip


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence as the engine receives it: ids only, every default resolved.

    `request_id` is made by us and unique; what a client calls its request never comes this far.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # 64 bits, resolved
    max_tokens: int  # resolved: prompt and output fit the context
    stop_ids: tuple[int, ...]  # EOS ids (unless ignored) and stop_token_ids
    arrival_s: float  # time.monotonic()
    priority: int = 0
    wants_progress: bool = False  # tell its place in the queue and its prefill
    deadline_s: float | None = None  # time.monotonic(); not served yet

    def problem(self, limits: EngineLimits) -> Problem | None:
        """The engine's own door check; the edge calls the same."""
        if (wrong := self.params.problem(limits)) is not None:
            return wrong
        num_prompt = len(self.prompt_ids)
        if not 1 <= num_prompt <= limits.max_prompt_len:
            return Problem("prompt", f"the prompt has {num_prompt} tokens; 1 to {limits.max_prompt_len} fit")
        if not 1 <= self.max_tokens <= limits.max_model_len - num_prompt:
            return Problem("max_tokens", f"{self.max_tokens} tokens do not fit behind {num_prompt} prompt tokens")
        if min(self.prompt_ids) < 0 or max(self.prompt_ids) >= limits.vocab_size:
            i = next(i for i, token_id in enumerate(self.prompt_ids) if not 0 <= token_id < limits.vocab_size)
            message = f"token id {self.prompt_ids[i]} is outside the vocabulary of {limits.vocab_size}"
            return Problem(f"prompt[{i}]", message)
        if self.deadline_s is not None:
            return Problem("timeout", "a deadline is not supported yet")
        if self.priority:
            return Problem("priority", "a priority is not supported yet")
        return None


class Logprob(msgspec.Struct, frozen=True):
    """One position's log probabilities; filled by a later change."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """time.monotonic() of a request's milestones."""

    arrival_s: float
    admitted_s: float
    first_token_s: float
    finished_s: float


class Delta(msgspec.Struct, frozen=True, kw_only=True):
    """What one sequence produced in one step, or in several that its reader was too slow to see apart.

    The engine fills the ids; the loop adds the text. The delta with a `finish_reason` is the last.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or id that ended it; None for EOS and length
    error: Exception | None = None  # with finish_reason ERROR
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    num_output_tokens: int = 0  # so far, this delta included
    logprobs: tuple[Logprob, ...] = ()
    timings: Timings | None = None  # with the last delta


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """Where a sequence stands before its first token; sent when it changes, to those who asked."""

    request_id: str
    queue_position: int | None = None  # 0 is next; None once it holds a slot
    num_prompt_tokens: int = 0
    num_computed_tokens: int = 0  # of the prompt, prefix cache included


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """A whole answer, as `LLM.generate` and `Stream.result` return it."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    num_prompt_tokens: int
    num_cached_tokens: int
    timings: Timings | None = None
