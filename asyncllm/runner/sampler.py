"""From logits to token ids: exact argmax, or a Gumbel-max draw from a counter-based generator.

GPU thread. A row's draw depends on its logits, seed and position alone, never on its row or its neighbours.
It never knows slots, pages or which request a row is.

Order of the filters: temperature, then top_k, then top_p over what top_k left, then min_p against the largest
remaining probability. Among equal logits the lowest id ranks first, everywhere.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.base import Int64, Put
from ..engine.batch import ALL_BARRED, NO_TOKEN

_M0, _M1 = 0xD2511F53, 0xCD9E8D57  # Philox4x32's multipliers
_W0, _W1 = 0x9E3779B9, 0xBB67AE85  # and the key's increments
_LOW = 0xFFFFFFFF
TINIEST = 2.0**-126  # the smallest normal float32: below it a GPU may flush the temperature to 0


class SamplingRows(NamedTuple):
    """One value a sampled row; `at` says which rows of the logits they are."""

    at: Int64
    temperature: NDArray[np.float64]  # above 0
    top_k: Int64  # 0 is off
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    position: Int64  # of the token to be drawn


class Draw(NamedTuple):
    """The sampled rows of one step, staged. The filters' tensors are None when no row of the step filters."""

    at: Tensor  # [num_sampled] int64, device
    temperature: Tensor  # [num_sampled, 1] float32, device
    key: Tensor  # [2, num_sampled, 1] int64, device: Philox's key words
    filters: "Filters | None"

    @classmethod
    def of(cls, rows: SamplingRows, put: Put) -> "Draw":
        temperature = np.clip(rows.temperature, TINIEST, np.finfo(np.float32).max)
        key = mix(rows.seed, rows.position)
        words = np.stack((key & np.uint64(_LOW), key >> np.uint64(32))).astype(np.int64)
        return cls(put(rows.at), put_floats(temperature, put), put(words[:, :, None]), Filters.of(rows, put))


class Filters(NamedTuple):
    at: Tensor  # [num_filtered] int64, device: which of the sampled rows
    top_k: Tensor  # [num_filtered, 1] int64, device; the vocabulary's size or more is off
    top_p: Tensor  # [num_filtered, 1] float32, device
    log_min_p: Tensor  # [num_filtered, 1] float32, device; -inf is off

    @classmethod
    def of(cls, rows: SamplingRows, put: Put) -> "Filters | None":
        at = np.flatnonzero((rows.top_k > 0) | (rows.top_p < 1) | (rows.min_p > 0))
        if not len(at):
            return None
        top_k = np.where(rows.top_k > 0, rows.top_k, np.iinfo(np.int64).max)[at, None]
        with np.errstate(divide="ignore"):
            log_min_p = np.log(rows.min_p[at])
        return cls(put(at), put(top_k), put_floats(rows.top_p[at], put), put_floats(log_min_p, put))


def put_floats(values: NDArray[np.float64], put: Put) -> Tensor:
    """[n, 1] float32, device. The step's one transfer is of int64: a float rides in the low half as its bits."""
    bits = values.astype(np.float32)[:, None].view(np.uint32).astype(np.int64)
    return put(bits).view(torch.float32)[:, :1]  # views alone: no kernel may read it before the transfer


def pick(logits: Tensor, banned: Tensor | None, draw: Draw | None) -> Tensor:
    """One token a row; NO_TOKEN where a row holds NaN or an infinite logit, ALL_BARRED where nothing else is left.

    logits: [num_rows, num_tokens], overwritten at `banned` ([n] int64, places in the flat logits).
    Returns [num_rows] int64, device.
    """
    if banned is not None:
        logits.view(-1).index_fill_(0, banned, -math.inf)
    largest, ids = logits.max(dim=-1)  # the lowest id among equals; NaN is the largest of all
    if draw is not None:
        ids.index_copy_(0, draw.at, sample(logits.index_select(0, draw.at), draw))
    undrawn = torch.where(largest == -math.inf, ALL_BARRED, NO_TOKEN)
    return torch.where(largest.isfinite(), ids, undrawn)


def sample(logits: Tensor, draw: Draw) -> Tensor:
    """Gumbel-max: argmax(logits / temperature + gumbel) is a draw from softmax. -> [num_sampled] int64, device."""
    logits = logits.float()
    # The largest becomes 0 first, so that no temperature, however small, makes inf - inf of it.
    scaled = logits.sub_(logits.amax(-1, keepdim=True)).div_(draw.temperature)
    if draw.filters is not None:
        at = draw.filters.at
        scaled.index_copy_(0, at, _filtered(scaled.index_select(0, at), draw.filters))
    return scaled.add_(gumbel(draw.key, scaled.shape[-1])).argmax(-1)


def _filtered(scaled: Tensor, filters: Filters) -> Tensor:
    """scaled: [num_filtered, num_tokens] float32, largest 0 -> the same with -inf at what the filters remove."""
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(ranked.shape[-1], device=ranked.device)
    ranked = ranked.masked_fill(rank >= filters.top_k, -math.inf)
    probability = ranked.softmax(-1)
    before = probability.cumsum(-1) - probability  # mass of everything more likely
    removed = (before >= filters.top_p) | (ranked < filters.log_min_p)
    ranked = ranked.masked_fill_(removed & (rank > 0), -math.inf)  # the most likely token always stays
    return torch.empty_like(scaled).scatter_(-1, order, ranked)


def gumbel(key: Tensor, num_tokens: int) -> Tensor:
    """Noise of every token id: [num_rows, num_tokens] float32, device. key: [2, num_rows, 1] int64."""
    counter = torch.arange(-(-num_tokens // 4), device=key.device)[None]
    words = torch.stack(philox(counter, key[0], key[1]), dim=-1)  # [num_rows, num_tokens / 4, 4]
    # 24 significant bits, exact in float32, never 0 or 1. Not in-place: the shift makes the room it needs.
    uniform = (words >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_().view(key.shape[1], -1)[:, :num_tokens]


def philox(counter: Tensor, key0: Tensor, key1: Tensor, high: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 of the counters (counter, high, high, high); words are uint32 held in int64."""
    a, b, c, d = counter, torch.full_like(counter, high), torch.full_like(counter, high), torch.full_like(counter, high)
    for _ in range(10):
        # The product of two 32-bit words may wrap past the sign; its 64 bits are right all the same.
        low, far = a * _M0, c * _M1
        a, b, c, d = ((far >> 32) & _LOW) ^ b ^ key0, far & _LOW, ((low >> 32) & _LOW) ^ d ^ key1, low & _LOW
        key0, key1 = (key0 + _W0) & _LOW, (key1 + _W1) & _LOW
    return a, b, c, d


def mix(seed: NDArray[np.uint64], position: Int64) -> NDArray[np.uint64]:
    """hash(seed, position): SplitMix64's finaliser over seed + (position + 1) * golden, modulo 2^64.

    SplitMix64's stream of a seed, read at the position; so two positions of a seed never share a key.
    """
    x: NDArray[np.uint64] = seed + (position.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
