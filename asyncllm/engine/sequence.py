"""One choice being generated: its tokens, its place on the device, and how far each has come.

GPU thread; numpy only. It never knows the tree's or the pool's insides, nor who reads its tokens.

    0          cached_len     computed_len      planned_len    committed_len    device_len
    |--- found in ---|--- computed by ---|--- in steps ---|--- known to ---|--- drawn by steps ---|
    |   the tree     |  committed steps  |   in flight    |   the host     |     in flight        |

cached_len <= computed_len <= planned_len <= device_len, committed_len <= device_len. The next row
starts at planned_len; it ends at device_len or, for a chunk, before. A sequence that decodes has
planned_len == device_len - 1: the last token drawn has no KV yet.
"""

import functools
import time

import numpy as np
from numpy.typing import NDArray

from ..bridge import Told
from ..types import Delta, FinishReason, Logprob, Matcher, PromptLogprobs, SamplingParams, Submission, Timings
from .batch import ALL_BARRED, NO_TOKEN, Logprobs, NewRow, Shaping
from .radix import Node


@functools.lru_cache(64)
def _ending_ids(stop_ids: tuple[int, ...]) -> tuple[int, ...]:
    """One tuple for all who stop alike: every token is looked up in it, and 256 copies would be 256 cache misses."""
    return (NO_TOKEN, ALL_BARRED, *stop_ids)


class Sequence:
    """Mutable generation state of one submission."""

    # What every step touches comes first and so lies side by side: between two steps the caches have seen other things,
    # and a row's cost is its cache misses.
    __slots__ = (
        "planned_len", "committed_len", "num_drawing", "num_in_flight", "final_len", "num_places", "finish_reason",
        "told", "output_ids", "ending_ids", "prompt_len", "slot",
        "submission", "request_id", "rank", "params", "_prompt_ids", "cached_len", "computed_len", "pages", "private",
        "node", "num_published", "waits_since_s", "admitted_s", "first_token_s", "num_logprobs", "matcher",
        "num_scored", "_scores",
    )  # fmt: skip

    def __init__(self, submission: Submission) -> None:
        self.submission = submission
        self.request_id = submission.request_id
        self.rank = submission.priority, 0.0, 0  # (priority, turn, number of arrival): the lower goes first
        self.params = submission.params  # as they are now: the client may change them
        self.prompt_len = len(submission.prompt_ids)
        self.final_len = self.prompt_len + submission.max_tokens
        self._prompt_ids = np.array(submission.prompt_ids, np.int32)
        self.output_ids: list[int] = []  # a list: appending to it takes a tenth of an array's assignment
        self.ending_ids = _ending_ids(submission.stop_ids)
        self.committed_len = self.prompt_len
        self.cached_len = 0  # of the first admission: what the client is told
        self.computed_len = 0
        self.planned_len = 0
        self.num_drawing = 0  # tokens that steps in flight will draw
        self.num_in_flight = 0  # steps in flight that name this sequence
        self.slot = 0  # 0: holds none
        self.pages: list[int] = []  # the row of the page table
        self.num_places = 0  # tokens that `pages` hold
        self.private: set[int] = set()  # those of `pages` that the tree does not own
        self.node: Node | None = None  # locked in the tree
        self.num_published = 0  # leading pages offered to the tree
        self.finish_reason: FinishReason | None = None
        self.waits_since_s = 0.0  # by CLOCK
        self.admitted_s = 0.0
        self.first_token_s = 0.0
        self.told: Told | None = None  # from the first token on, unless its deltas say more than plain ones
        self.num_logprobs = -1 if submission.params.logprobs is None else submission.params.logprobs
        # Has seen the committed output and nothing else, on the device or off it.
        self.matcher: Matcher | None = None if self.params.grammar is None else self.params.grammar.matcher()
        self.num_scored = 0  # prompt tokens whose log probabilities are known
        self._scores = None if submission.params.prompt_logprobs is None else PromptLogprobs([], [], [], [])

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request_id}, slot {self.slot}, prompt {self.prompt_len}, computed {self.computed_len}, "
            f"planned {self.planned_len}, committed {self.committed_len}, in flight {self.num_in_flight}, "
            f"{self.finish_reason or 'live'})"
        )

    @property
    def ids(self) -> NDArray[np.int32]:
        """Every token the host knows: prompt and committed output. A copy once there is output."""
        if not self.output_ids:
            return self._prompt_ids
        return np.concatenate([self._prompt_ids, np.array(self.output_ids, np.int32)])

    @property
    def device_len(self) -> int:
        return self.committed_len + self.num_drawing

    @property
    def num_output(self) -> int:
        return self.committed_len - self.prompt_len

    @property
    def num_unscored(self) -> int:
        """Prompt tokens whose log probabilities are still to be reported. The first one has none."""
        return 0 if self._scores is None else self.prompt_len - 1 - self.num_scored

    def add_scores(self, first: int, scores: Logprobs) -> None:
        """Of the tokens behind position `first` on; those known from before a preemption are dropped."""
        new = slice(self.num_scored - first, None)
        columns, known = (scores.logprobs, scores.top_ids, scores.top_logprobs), self._scores
        assert known is not None and self.num_scored >= first and self.submission.params.prompt_logprobs is not None
        wide = self.submission.params.prompt_logprobs
        known.logprobs.extend(columns[0][new].tolist())
        known.top_ids.extend(columns[1][new, :wide].tolist())
        known.top_logprobs.extend(columns[2][new, :wide].tolist())
        self.num_scored = max(self.num_scored, first + len(scores.logprobs))
        known.token_ids.extend(self._prompt_ids[1 + len(known.token_ids) : 1 + self.num_scored].tolist())

    def append(self, token_id: int) -> None:
        self.output_ids.append(token_id)
        self.committed_len += 1

    def new_row(self) -> NewRow:
        """What the device tables must hold for this sequence, from committed state alone."""
        params = self.params
        return NewRow(
            slot=self.slot,
            token_ids=self.ids,  # never written to
            temperature=params.temperature,
            top_k=min(max(0, params.top_k), 2**31 - 1),  # a larger one filters nothing either
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.submission.seed,
            stop_ids=self.submission.stop_ids,
            min_len=self.prompt_len + params.min_tokens,
            shaping=self._shaping(params) if params.shapes_logits else None,
            num_logprobs=self.num_logprobs,
        )

    def _shaping(self, params: SamplingParams) -> Shaping:
        biases, allowed = params.logit_bias or {}, params.allowed_token_ids
        return Shaping(
            prompt_len=self.prompt_len,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            repetition=params.repetition_penalty,
            bias_ids=np.array(list(biases), np.int32),
            biases=np.array(list(biases.values()), np.float32),
            allowed=None if allowed is None else np.unique(np.array(allowed, np.int32)),
            bad=self.submission.bad_ids,
        )

    def leave_device(self) -> None:
        """Forget slot, pages and progress; the tokens stay. The scheduler has given them back."""
        self.slot = self.computed_len = self.planned_len = self.num_published = self.num_places = 0
        self.pages, self.private, self.node = [], set(), None

    def delta(
        self, token_ids: tuple[int, ...], error: Exception | None = None, logprobs: tuple[Logprob, ...] = ()
    ) -> Delta:
        """The step's output; the last one if `finish_reason` is set."""
        last = self.finish_reason is not None
        stopped = self.finish_reason is FinishReason.STOP and self.output_ids
        stop_id = self.output_ids[-1] if stopped else None
        return Delta(
            request_id=self.request_id,
            token_ids=token_ids,
            finish_reason=self.finish_reason,
            stop_reason=stop_id if stop_id in self.submission.params.stop_token_ids else None,
            error=error,
            num_prompt_tokens=self.prompt_len,
            num_cached_tokens=self.cached_len,
            num_output_tokens=self.num_output,
            logprobs=logprobs,
            prompt_logprobs=self._scores if token_ids and self.num_output == 1 else None,
            timings=self._timings() if last else None,
        )

    def _timings(self) -> Timings:
        return Timings(
            arrival_s=self.submission.arrival_s,
            admitted_s=self.admitted_s,
            first_token_s=self.first_token_s,
            finished_s=time.monotonic(),
        )
