"""What a caller asks for, checked field by field and made into a Submission: ids, sampling, terms.

Loop thread. It never knows streams, nor whether there is room.
"""

import re
import secrets
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

import msgspec

from .errors import InvalidRequest
from .text.tokenizer import Tokenizer, context_too_long
from .types import (
    CALLER,
    MAX_BAD_WORDS,
    MAX_STOP_CHARS,
    NO_DEFAULTS,
    EngineLimits,
    SamplingParams,
    Submission,
    with_defaults,
)

_MAX_TIMEOUT_S = 86_400.0
_MAX_PRIORITY = 2**31


class Terms(TypedDict, total=False):
    """What a request says of itself beside its sampling."""

    wants_progress: bool  # the stream's `progress` is kept up to date, from the queue to the first token
    shown: tuple[str, ...]  # special tokens that the text is to have all the same
    priority: int  # the lower is admitted first, and preempted last
    timeout_s: float | None  # then the answer ends with what it has, by length; with TimedOut if it has nothing
    cache_salt: str  # prefixes are shared only under the same one


def take_terms(fields: dict[str, Any]) -> Terms:
    """The keywords that are terms; they leave `fields`."""
    return {name: fields.pop(name) for name in Terms.__annotations__ if name in fields}  # type: ignore[return-value]


def as_params(
    params: SamplingParams | None, fields: dict[str, Any], defaults: Mapping[str, float] = NO_DEFAULTS
) -> SamplingParams:
    """Either a SamplingParams or its fields, with the model's defaults for the rest; a field of the wrong kind is
    told by name."""
    if params is not None and fields:
        raise InvalidRequest(f"give params or {', '.join(fields)}, not both", next(iter(fields)))
    if unknown := [name for name in fields if name not in SamplingParams.__struct_fields__]:
        known = ", ".join([*SamplingParams.__struct_fields__, *Terms.__annotations__])
        raise InvalidRequest(f"unknown sampling parameter {unknown[0]!r}; known are {known}", unknown[0])
    if isinstance(fields.get("stop"), str):  # as OpenAI takes it
        fields = fields | {"stop": (fields["stop"],)}
    return params or _converted(with_defaults(fields, defaults))


def of_right_kinds(params: SamplingParams) -> SamplingParams:
    """A struct made by hand is not checked by msgspec: an int where a float may stand, a str where a tuple must not.

    Raises:
        InvalidRequest: naming the field.
    """
    return _converted(msgspec.structs.asdict(params))


def _converted(fields: dict[str, Any]) -> SamplingParams:
    try:
        return msgspec.convert(fields, SamplingParams)
    except msgspec.ValidationError as error:
        name = re.search(r"\$\.(\w+)", str(error))
        raise InvalidRequest(str(error), name and name[1]) from None


def make_submission(
    prompt_ids: Sequence[int], params: SamplingParams, terms: Terms, limits: EngineLimits, tokenizer: Tokenizer
) -> Submission:
    """Every default resolved; `max_tokens` at most what fits behind the prompt. problem() has still to be asked.

    Raises:
        InvalidRequest: what has no place in a Submission; ContextTooLong among them.
    """
    ids = _plain(prompt_ids)
    if len(ids) > limits.max_prompt_len:
        raise context_too_long(limits.max_prompt_len, len(ids))
    room = limits.max_model_len - len(ids)
    eos_ids = () if params.ignore_eos else tuple(tokenizer.eos_ids)
    return Submission(
        request_id=secrets.token_hex(12),
        prompt_ids=ids,
        params=params,
        seed=secrets.randbits(64) if params.seed is None else params.seed % 2**64,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_ids=(*eos_ids, *params.stop_token_ids),
        arrival_s=time.monotonic(),
        bad_ids=_spelled(params.bad_words, tokenizer) if params.bad_words else (),
        priority=_priority(terms.get("priority", 0)),
        wants_progress=terms.get("wants_progress", False),
        deadline_s=_deadline_s(terms.get("timeout_s")),
        cache_salt=_salt(terms.get("cache_salt", "")),
        caller=CALLER.get().name,
    )


def _plain(prompt_ids: Sequence[int]) -> tuple[int, ...]:
    """Plain ints, whatever kind of sequence they come in; in C, as a prompt may have 100,000.

    Raises:
        InvalidRequest: something else is among them.
    """
    try:
        if isinstance(prompt_ids, str | bytes | bytearray):
            raise TypeError("a prompt is a str or a sequence of token ids")
        return tuple(array("q", prompt_ids))
    except (TypeError, OverflowError) as error:
        raise InvalidRequest(f"the prompt's token ids must be integers: {error}", "prompt") from None


def _spelled(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Cut to what problem() lets pass, for it has not looked yet."""
    spellings = [tokenizer.word_ids(word[:MAX_STOP_CHARS]) for word in words[:MAX_BAD_WORDS]]
    return tuple([ids for found in spellings for ids in sorted(found)])


def _priority(priority: int) -> int:
    if not isinstance(priority, int) or not -_MAX_PRIORITY <= priority <= _MAX_PRIORITY:
        raise InvalidRequest.of("priority", f"must be between {-_MAX_PRIORITY} and {_MAX_PRIORITY}")
    return priority


def _deadline_s(timeout_s: float | None) -> float | None:
    """By the request's word and its caller's, whichever is sooner."""
    given = [one for one in (_timeout(timeout_s), CALLER.get().timeout_s) if one is not None]
    return time.monotonic() + min(given) if given else None


def _timeout(timeout_s: float | None) -> float | None:
    if timeout_s is None or isinstance(timeout_s, int | float) and 0 < timeout_s <= _MAX_TIMEOUT_S:  # NaN fails
        return timeout_s
    raise InvalidRequest.of("timeout", f"must be above 0 and at most {_MAX_TIMEOUT_S:g} seconds")


def _salt(theirs: str) -> str:
    """Callers share no pages: how fast a prompt is answered would tell one what another had asked."""
    name = CALLER.get().name
    return f"{name}\n{theirs}" if name or theirs else ""  # a name has no line in it
