"""What travels between the floors: SamplingParams and Submission inward, Delta outward.

All frozen, owned by nobody, read by everyone. Of ours it imports errors alone.
"""

import enum
import math
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Protocol

import msgspec

from .errors import Field, InvalidRequest

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 512
MAX_STOP_TOKEN_IDS = 64
MAX_CHOICES = 128
MAX_LOGPROBS = 20  # alternatives a position
MAX_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_IDS = 512  # tokens of all bad words together
MAX_SALT_CHARS = 256
LEAST_LOGPROB = -9999.0  # in place of minus infinity, which JSON has no word for


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class EngineLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The frozen numbers every request is checked against, at the edge and at the engine's door."""

    vocab_size: int  # ids 0 .. vocab_size-1 exist in the tokenizer and in the logits
    max_model_len: int  # prompt and output together, tokens
    max_prompt_len: int  # tokens; smaller than the context where the KV pool is
    max_running: int  # sequences that hold a slot
    max_waiting: int  # submissions that may queue behind them
    max_waiting_tokens: int = 1 << 20  # and the tokens of their prompts
    queue_timeout_s: float = 0.0  # who has no slot after that is sent away; 0: nobody is


class Caller(msgspec.Struct, frozen=True, kw_only=True):
    """On whose behalf a request is served, and how long he will wait for its end."""

    name: str = ""  # "" where no keys are asked for
    timeout_s: float | None = None


# Set at the door, and inherited by every task that serves the request.
CALLER: ContextVar[Caller] = ContextVar("caller", default=Caller())  # noqa: B039  (it is frozen)


class GrammarSpec(msgspec.Struct, frozen=True):
    """What an answer must look like, as its request says it.

    kinds: "json" (a JSON schema), "regex", "choice" (a JSON list of strings) and "grammar" (Lark or EBNF); "lark" and
    "ebnf" are ours.
    """

    kind: Literal["json", "regex", "choice", "grammar", "lark", "ebnf"]
    source: str
    param: str = "grammar"  # of the request: who is to blame if it is wrong
    frame: str = ""  # Lark around it, where it is called @body


class Matcher(Protocol):
    """How far one answer has come in its grammar. Moved by Masker alone."""

    def is_stopped(self) -> bool:
        """Whether nothing can follow: the answer is complete, or in error."""

    def is_error(self) -> bool: ...

    def get_error(self) -> str: ...


class Grammar(Protocol):
    """Compiled, and shared by all answers that follow it."""

    def matcher(self) -> Matcher: ...

    def wear_out(self) -> None:
        """Nobody is to have it from now on: a matcher met a limit, which all of its share."""

    def failure(self, matcher: Matcher) -> Exception:
        """What to tell of a matcher in error."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request's tokens are chosen and when it ends.

    What changes the logits acts in this order: logit_bias, allowed_token_ids, bad_words, stop ids before
    min_tokens; then the penalties (repetition, frequency, presence); then the grammar; then temperature, top_k,
    top_p and min_p. Log probabilities are the model's own, before all of these.
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
    include_stop_str_in_output: bool = False  # also what a stop token id spells
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    n: int = 1  # choices; a sequence each
    best_of: int | None = None  # so many are generated, the n likeliest by mean logprob are given
    presence_penalty: float = 0.0  # once for each token id that the output holds
    frequency_penalty: float = 0.0  # as often as it holds it
    repetition_penalty: float = 1.0  # divides positive logits, multiplies negative ones, of ids in prompt or output
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # never completed by the output
    logprobs: int | None = None  # how many alternatives beside the sampled token
    prompt_logprobs: int | None = None  # the same for each prompt token but the first
    grammar: Any = None  # a GrammarSpec, or the Grammar that AsyncLLM.compiled() made of it

    @property
    def num_choices(self) -> int:
        """Sequences to generate."""
        return max(self.n, self.best_of or 0)

    @property
    def counts_tokens(self) -> bool:
        """Whether some penalty is on."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def shapes_logits(self) -> bool:
        """Whether more than temperature and cuts stands between the model and the draw."""
        return bool(
            self.counts_tokens or self.logit_bias or self.bad_words or self.allowed_token_ids is not None
        )  # fmt: skip

    def problem(self, limits: EngineLimits) -> InvalidRequest | None:
        """The first thing wrong with these parameters, or None."""
        return next(self._problems(limits), None)

    def _problems(self, limits: EngineLimits) -> Iterator[InvalidRequest]:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            # Written so that NaN fails: `value < low or value > high` lets it pass.
            if value is not None and not (low <= value <= high and math.isfinite(value)):
                yield InvalidRequest.of(name, f"must be between {low} and {high}, got {value}")
        if self.top_k < -1:
            yield InvalidRequest.of("top_k", f"must be at least 1, or 0 or -1 for off, got {self.top_k}")
        if self.seed is not None and not -(2**63) <= self.seed < 2**63:
            yield InvalidRequest.of("seed", f"must be a signed 64-bit integer, got {self.seed}")
        if self.max_tokens is not None and self.max_tokens < 1:
            yield InvalidRequest.of("max_tokens", f"must be at least 1, got {self.max_tokens}")
        if not 0 <= self.min_tokens <= limits.max_model_len:
            yield InvalidRequest.of("min_tokens", f"must be between 0 and {limits.max_model_len}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            above = Field("max_tokens"), f" {self.max_tokens}"
            yield InvalidRequest.of("min_tokens", f"{self.min_tokens} is above ", *above)
        if self.best_of is not None and self.best_of < self.n:
            yield InvalidRequest.of("best_of", f"{self.best_of} is below ", Field("n"), f" {self.n}")
        yield from self._stop_problems(limits)
        yield from self._id_problems(limits)

    def _stop_problems(self, limits: EngineLimits) -> Iterator[InvalidRequest]:
        if len(self.stop) > MAX_STOP_STRINGS:
            yield InvalidRequest.of("stop", f"takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for i, text in enumerate(self.stop):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                sentence = f"a stop string has 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
                yield InvalidRequest(sentence, f"stop[{i}]")
        if len(self.bad_words) > MAX_BAD_WORDS:
            yield InvalidRequest.of("bad_words", f"takes at most {MAX_BAD_WORDS} strings, got {len(self.bad_words)}")
        for i, text in enumerate(self.bad_words):
            if not 1 <= len(text) <= MAX_STOP_CHARS:
                sentence = f"a bad word has 1 to {MAX_STOP_CHARS} characters, got {len(text)}"
                yield InvalidRequest(sentence, f"bad_words[{i}]")
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            yield InvalidRequest.of("stop_token_ids", f"takes at most {MAX_STOP_TOKEN_IDS} ids")
        yield from _unknown_ids("stop_token_ids", self.stop_token_ids, limits)

    def _id_problems(self, limits: EngineLimits) -> Iterator[InvalidRequest]:
        if (allowed := self.allowed_token_ids) is not None:
            if not 1 <= len(allowed) <= limits.vocab_size:
                yield InvalidRequest.of("allowed_token_ids", f"takes 1 to {limits.vocab_size} ids")
            yield from _unknown_ids("allowed_token_ids", allowed, limits)
        biases = self.logit_bias or {}
        if len(biases) > MAX_BIASES:
            yield InvalidRequest.of("logit_bias", f"takes at most {MAX_BIASES} ids, got {len(biases)}")
        for token_id, bias in biases.items():
            if not 0 <= token_id < limits.vocab_size:
                yield InvalidRequest(_unknown_id(token_id, limits), "logit_bias")
            if not -100 <= bias <= 100:
                yield InvalidRequest(f"a bias must be between -100 and 100, got {bias} for {token_id}", "logit_bias")


DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # what generation_config.json may say
NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})
_CUTS = ("top_p", "top_k", "min_p")


def with_defaults(given: dict[str, Any], defaults: Mapping[str, float]) -> dict[str, Any]:
    """The fields of a SamplingParams that a request gives, and the model's defaults for those that it does not."""
    filled = {**defaults, **given}
    if filled.get("temperature") == 0:  # the likeliest token survives every cut, and each cut costs a sort
        filled = {name: value for name, value in filled.items() if name in given or name not in _CUTS}
    return filled


_RANGES = (
    ("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("min_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0), ("repetition_penalty", 0.01, 10.0), ("n", 1, MAX_CHOICES),
    ("best_of", 1, MAX_CHOICES), ("logprobs", 0, MAX_LOGPROBS), ("prompt_logprobs", 0, MAX_LOGPROBS),
)  # fmt: skip


def _unknown_ids(name: str, ids: tuple[int, ...], limits: EngineLimits) -> Iterator[InvalidRequest]:
    if ids and (min(ids) < 0 or max(ids) >= limits.vocab_size):
        i = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < limits.vocab_size)
        yield InvalidRequest(_unknown_id(ids[i], limits), f"{name}[{i}]")


def _unknown_id(token_id: int, limits: EngineLimits) -> str:
    return f"token id {token_id} is outside the vocabulary of {limits.vocab_size}"


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
    bad_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words, each as the ids that spell it
    priority: int = 0  # lower goes first
    wants_progress: bool = False  # tell its place in the queue and its prefill
    deadline_s: float | None = None  # time.monotonic(): then it ends with what it has
    cache_salt: str = ""  # prefixes are shared only under the same one
    caller: str = ""  # callers take turns

    def problem(self, limits: EngineLimits) -> InvalidRequest | None:
        """The engine's own door check; the edge calls the same."""
        if (wrong := self.params.problem(limits)) is not None:
            return wrong
        num_prompt = len(self.prompt_ids)
        if not 1 <= num_prompt <= limits.max_prompt_len:
            return InvalidRequest(f"the prompt has {num_prompt} tokens; 1 to {limits.max_prompt_len} fit", "prompt")
        if not 1 <= self.max_tokens <= limits.max_model_len - num_prompt:
            sentence = f"{self.max_tokens} tokens do not fit behind {num_prompt} prompt tokens"
            return InvalidRequest(sentence, "max_tokens")
        if sum(map(len, self.bad_ids)) > MAX_BAD_IDS:
            return InvalidRequest(f"the bad words have more than {MAX_BAD_IDS} tokens together", "bad_words")
        if len(self.cache_salt) > MAX_SALT_CHARS:
            return InvalidRequest.of("cache_salt", f"has at most {MAX_SALT_CHARS} characters")
        return next(_unknown_ids("prompt", self.prompt_ids, limits), None)


class Logprob(msgspec.Struct, frozen=True):
    """One token's log probability, and the likeliest tokens in its place, the best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


class TokenSpan(NamedTuple):
    """One token and the characters of the answer's text that it wrote: [start, end). A token that only begins a
    character, or is not shown, wrote none."""

    start: int
    end: int
    logprob: Logprob


class PromptLogprobs(msgspec.Struct, frozen=True):
    """The same for every prompt token but the first, a list a column: a prompt may have 100,000 tokens."""

    token_ids: list[int]
    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]

    def __len__(self) -> int:
        return len(self.token_ids)

    def entries(self) -> Iterator[Logprob]:
        for token_id, logprob, ids, values in zip(
            self.token_ids, self.logprobs, self.top_ids, self.top_logprobs, strict=True
        ):
            yield Logprob(token_id, logprob, tuple(zip(ids, values, strict=True)))


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
    logprobs: tuple[Logprob, ...] = ()  # of token_ids, one each, if they were asked for
    prompt_logprobs: PromptLogprobs | None = None  # with the first token, if they were asked for
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
    logprobs: tuple[Logprob, ...] = ()
    prompt_logprobs: PromptLogprobs | None = None
    timings: Timings | None = None
