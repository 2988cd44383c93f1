"""What stands between logits and temperature, in torch: biases, allowed ids, bad words, penalties; and token counts.

GPU thread. A row is shaped by its own text and settings alone. It never knows requests, pages or how a token is drawn.

Order: logit_bias, allowed ids, bad words, then the penalties: repetition, frequency, presence.
"""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.base import Int64, Put
from ..engine.batch import NewRow, Shaping
from .sampler import put_floats

IN_PROMPT = 1 << 30  # of a token's count: it stands in the prompt; the bits below count the output


class Shape(NamedTuple):
    """What the rows of one step need, staged. None: no row needs it."""

    bias_at: Tensor | None  # [n] int64, device: places in the flat logits, each at most once
    biases: Tensor | None  # [n] float32, device
    restricted: Tensor | None  # [num_restricted] int64, device: rows that may draw some ids only
    allowed_at: Tensor | None  # [n] int64, device: places in the flat [num_restricted, num_tokens]
    words: "Words | None"
    penalties: "Penalties | None"

    def apply(self, logits: Tensor, token_pool: Tensor, counts: Tensor | None) -> None:
        """logits: [num_rows, num_tokens], changed in place. counts: [num_slots, num_tokens] int32, device."""
        flat = logits.view(-1)
        if self.bias_at is not None and self.biases is not None:
            biased = flat.index_select(0, self.bias_at) + self.biases  # rounded once, as on a GPU
            flat.index_copy_(0, self.bias_at, biased.to(logits.dtype))
        if self.restricted is not None and self.allowed_at is not None:
            chosen = logits.index_select(0, self.restricted)
            barred = torch.ones_like(chosen, dtype=torch.bool).view(-1).index_fill_(0, self.allowed_at, False)
            logits.index_copy_(0, self.restricted, chosen.masked_fill_(barred.view_as(chosen), -math.inf))
        if self.words is not None:
            self.words.apply(flat, token_pool.view(-1))
        if self.penalties is not None and counts is not None:
            self.penalties.apply(logits, counts)


class Words(NamedTuple):
    """Bad words that may be completed here: the last id of each, and what must stand before it."""

    at: Tensor  # [n] int64, device: places in the flat logits
    before_at: Tensor  # [n, longest] int64, device: places in the flat token pool
    before: Tensor  # [n, longest] int64, device: ids; -1 fits any

    def apply(self, flat: Tensor, pool: Tensor) -> None:
        """Added, not written: two words may end in one id, and minus infinity plus nothing is minus infinity."""
        found = pool.index_select(0, self.before_at.view(-1)).view_as(self.before_at)
        is_begun = ((found == self.before) | (self.before < 0)).all(-1)
        nothing = torch.zeros_like(is_begun, dtype=flat.dtype)
        flat.index_add_(0, self.at, nothing.masked_fill_(is_begun, -math.inf))


class Penalties(NamedTuple):
    at: Tensor  # [n] int64, device: rows of the logits
    slots: Tensor  # [n] int64, device
    presence: Tensor  # [n, 1] float32, device; so are the two below
    frequency: Tensor
    repetition: Tensor

    def apply(self, logits: Tensor, counts: Tensor) -> None:
        x, counted = logits.index_select(0, self.at), counts.index_select(0, self.slots)
        num_output = counted & (IN_PROMPT - 1)
        repeated = torch.where(x > 0, x / self.repetition, x * self.repetition)
        x = torch.where(counted > 0, repeated, x)
        x = x - self.frequency * num_output - self.presence * (num_output > 0)
        logits.index_copy_(0, self.at, x.to(logits.dtype))


class Counted(NamedTuple):
    """The rows of a step whose tokens are counted."""

    at: Tensor  # [n] int64, device: among the rows that draw
    counts_at: Tensor  # [n] int64, device: where their slots begin in the flat counts

    def add(self, drawn: Tensor, counts: Tensor) -> None:
        """drawn: [num_rows] int32, device. A row that drew nothing ends: what it counts is of no account."""
        places = self.counts_at + drawn.index_select(0, self.at).clamp_min(0)
        counts.view(-1).index_add_(0, places, torch.ones_like(places, dtype=torch.int32))


class SlotShaping:
    """Which slots shape their logits and how, on the host."""

    def __init__(self) -> None:
        self._shapings: dict[int, Shaping] = {}

    def __bool__(self) -> bool:
        return bool(self._shapings)

    def write(self, rows: Iterable[NewRow]) -> None:
        for row in rows:
            self._shapings.pop(row.slot, None)
            if row.shaping is not None:
                self._shapings[row.slot] = row.shaping

    def counts(self, slot: int) -> bool:
        return slot in self._shapings and self._shapings[slot].counts

    def stage_counted(self, slots: Int64, num_tokens: int, put: Put) -> Counted | None:
        """slots: of the rows that draw."""
        at = np.array([row for row, slot in enumerate(slots.tolist()) if self.counts(slot)], np.int64)
        return Counted(put(at), put(slots[at] * num_tokens)) if len(at) else None

    def stage(self, slots: Int64, positions: Int64, num_tokens: int, max_len: int, put: Put) -> Shape | None:
        """slots, positions: of the rows that draw, and where their tokens go."""
        rows = [(row, shaping) for row, slot in enumerate(slots.tolist()) if (shaping := self._shapings.get(slot))]
        if not rows:
            return None
        places = [(row * num_tokens + shaping.bias_ids, shaping.biases) for row, shaping in rows]
        at, biases = (np.concatenate(column) for column in zip(*places, strict=True))
        allowed = [(row, shaping.allowed) for row, shaping in rows if shaping.allowed is not None]
        allowed_at = [i * num_tokens + ids.astype(np.int64) for i, (_, ids) in enumerate(allowed)]
        return Shape(
            bias_at=put(at.astype(np.int64)) if len(at) else None,
            biases=put_floats(biases.astype(np.float64), put)[:, 0] if len(at) else None,
            restricted=put(np.array([row for row, _ in allowed])) if allowed else None,
            allowed_at=put(np.concatenate(allowed_at)) if allowed else None,
            words=_words(rows, slots, positions, num_tokens, max_len, put),
            penalties=_penalties([(row, shaping) for row, shaping in rows if shaping.counts], slots, put),
        )


def _words(
    rows: list[tuple[int, Shaping]], slots: Int64, positions: Int64, num_tokens: int, max_len: int, put: Put
) -> Words | None:
    begun = [
        (row, positions[row], ids) for row, shaping in rows for ids in shaping.bad
        if positions[row] - len(ids) + 1 >= shaping.prompt_len
    ]  # fmt: skip
    if not begun:
        return None
    longest = max(1, *(len(ids) - 1 for _, _, ids in begun))
    before_at, before = np.zeros((len(begun), longest), np.int64), np.full((len(begun), longest), -1)
    for i, (row, position, ids) in enumerate(begun):
        count = len(ids) - 1
        before[i, :count] = ids[:-1]
        before_at[i, :count] = slots[row] * max_len + position - count + np.arange(count)
    at = np.array([row * num_tokens + ids[-1] for row, _, ids in begun])
    return Words(put(at), put(before_at), put(before))


def _penalties(rows: list[tuple[int, Shaping]], slots: Int64, put: Put) -> Penalties | None:
    if not rows:
        return None
    at = np.array([row for row, _ in rows])
    columns = np.array([(shaping.presence, shaping.frequency, shaping.repetition) for _, shaping in rows]).T
    return Penalties(put(at), put(slots[at]), *(put_floats(column, put) for column in columns))


def counted(text: NDArray[np.int32], prompt_len: int) -> tuple[Int64, Int64]:
    """(ids, what a count holds of each) of a text: how often it stands in the output, and whether in the prompt."""
    ids, count = np.unique(text[prompt_len:], return_counts=True)
    prompt_ids = np.unique(text[:prompt_len])
    every = np.union1d(ids, prompt_ids)
    totals = np.isin(every, prompt_ids) * IN_PROMPT
    totals[np.searchsorted(every, ids)] += count
    return every.astype(np.int64), totals.astype(np.int64)


def stage_recount(rows: Sequence[NewRow], num_tokens: int, put: Put) -> tuple[Tensor, Tensor] | None:
    """(places in the flat counts, values) of the new rows that count; their other places are to be zeroed."""
    places, values = [], []
    for row in rows:
        if row.shaping is not None and row.shaping.counts:
            ids, totals = counted(row.token_ids, row.shaping.prompt_len)
            places.append(row.slot * num_tokens + ids)
            values.append(totals)
    return (put(np.concatenate(places)), put(np.concatenate(values))) if places else None
