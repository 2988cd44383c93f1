"""What the tokens that a step has drawn mean to its sequences: one more, or the end.

GPU thread; numpy only. It never knows which steps come next.
"""

import time
from collections.abc import Iterator

from ..errors import AsyncLLMError, Field, InvalidRequest
from ..types import FinishReason, Logprob
from .batch import ALL_BARRED, Logprobed, StepResult
from .roster import Roster
from .sequence import Sequence
from .step import Step


def commit_rows(roster: Roster, step: Step, result: StepResult) -> None:
    """Give each row's token, log probabilities and scores to its sequence."""
    now = time.monotonic()
    logprobs = iter(()) if result.logprobs is None else result.logprobs.entries()
    for scored, scores in zip(step.scored, result.scores, strict=True):
        step.sequences[scored.row].add_scores(scored.first, scores)
    if step.num_decodes == len(step.sequences) and not step.late:
        _commit_decodes(roster, step.sequences, result.token_ids.tolist(), logprobs, now)
    else:
        _commit_mixed(roster, step, iter(result.token_ids.tolist()), logprobs, now)


def _commit_mixed(roster: Roster, step: Step, tokens: Iterator[int], logprobs: Iterator[Logprobed], now: float) -> None:
    for sequence, start, length, wants_token in zip(
        step.sequences, step.starts, step.lengths, step.wants_token, strict=True
    ):
        sequence.num_in_flight -= 1
        if sequence in step.late:
            sequence.computed_len = start + length - 1
            next(tokens)
            if sequence.num_logprobs >= 0:
                next(logprobs)
            continue
        sequence.computed_len = start + length
        if wants_token:
            sequence.num_drawing -= 1
            _commit_token(roster, sequence, next(tokens), logprobs, now)


def _commit_decodes(
    roster: Roster, sequences: list[Sequence], tokens: list[int], logprobs: Iterator[Logprobed], now: float
) -> None:
    """_commit_mixed() of a step in which every row decoded: 0.6 us a row instead of 1.9.

    Nearly every token is one more of a sequence that goes on, written out here; the others take the long way.
    """
    add_delta = roster.deltas.append
    for sequence, token_id in zip(sequences, tokens, strict=True):
        sequence.num_in_flight -= 1
        sequence.num_drawing -= 1
        committed_len = sequence.committed_len + 1
        if (
            committed_len < sequence.final_len
            and token_id not in sequence.ending_ids
            and sequence.told
            and sequence.finish_reason is None
        ):
            sequence.output_ids.append(token_id)
            sequence.committed_len = committed_len
            add_delta((sequence.told, token_id, committed_len - sequence.prompt_len))
        else:
            _commit_token(roster, sequence, token_id, logprobs, now)


def _commit_token(roster: Roster, sequence: Sequence, token_id: int, entries: Iterator[Logprobed], now: float) -> None:
    wide = sequence.num_logprobs
    logprobs = (_logprob(token_id, wide, *next(entries)),) if wide >= 0 else ()
    if sequence.finish_reason is not None:
        return
    if token_id == ALL_BARRED and (names := _barring(sequence)):
        roster.end(sequence, FinishReason.ERROR, error=_nothing_left(sequence, names))
        return
    if token_id < 0:
        _end_undrawn(roster, sequence)
        return
    sequence.append(token_id)
    if not sequence.first_token_s:
        sequence.first_token_s = now
        if sequence.num_logprobs < 0:
            sequence.told = (sequence.request_id, sequence.prompt_len, sequence.cached_len)
    if token_id in sequence.submission.stop_ids:  # a stop id beats the limit
        roster.end(sequence, FinishReason.STOP, token_ids=(token_id,), logprobs=logprobs)
    elif sequence.committed_len >= sequence.final_len:
        roster.end(sequence, FinishReason.LENGTH, token_ids=(token_id,), logprobs=logprobs)
    else:
        roster.deltas.append(sequence.delta((token_id,), logprobs=logprobs))


def _end_undrawn(roster: Roster, sequence: Sequence) -> None:
    """There was nothing to draw from."""
    roster.cache.lose(sequence)  # its pages, and those it read, may hold the reason
    error = AsyncLLMError("the model's output for this request was not a number")
    roster.end(sequence, FinishReason.ERROR, error=error)


def _barring(sequence: Sequence) -> list[str]:
    """What the request forbids tokens by. That it leaves none is its own doing, and its prefix is as good as it was."""
    names = [name for name in ("allowed_token_ids", "bad_words") if getattr(sequence.params, name)]
    return names + ["min_tokens"] * bool(sequence.params.min_tokens and sequence.submission.stop_ids)


def _nothing_left(sequence: Sequence, names: list[str]) -> InvalidRequest:
    form = ("the form demanded of the answer",) if sequence.matcher is not None else ()
    barring = [part for name in (*map(Field, names), *form) for part in (name, " and ")][:-1]
    return InvalidRequest((*barring, f" left no token to go on with, after {len(sequence.output_ids)}"), names[0])


def _logprob(token_id: int, num_top: int, logprob: float, ids: list[int], values: list[float]) -> Logprob:
    return Logprob(token_id, logprob, tuple(zip(ids[:num_top], values[:num_top], strict=True)))
