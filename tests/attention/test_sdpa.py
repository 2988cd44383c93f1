"""The reference attention against a naive one, on random page tables with poison wherever no token lives."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.attention import sdpa
from asyncllm.attention.base import Rows
from asyncllm.attention.sdpa import SdpaAttention

HEADS, KV_HEADS, HEAD_DIM = 6, 2, 8
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
torch.set_num_threads(1)


class World:
    """Slots with pages scattered over a pool whose every unwritten position is NaN."""

    def __init__(self, page_size: int, lengths: list[int], dtype: torch.dtype, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.page_size, self.dtype = page_size, dtype
        self.max_pages = -(-max(lengths) // page_size) + 1
        num_pages = 1 + self.max_pages * len(lengths)
        pages = torch.full((num_pages, 2, KV_HEADS, page_size, HEAD_DIM), math.nan, dtype=dtype)
        pages[0] = 0
        self.pages = pages
        self.table = torch.zeros((len(lengths) + 1, self.max_pages), dtype=torch.int64)
        order = self.rng.permutation(np.arange(1, num_pages))
        for row, length in enumerate(lengths):
            used = -(-length // page_size)
            self.table[row + 1, :used] = torch.from_numpy(order[row * self.max_pages :][:used].copy())
        self.k = [self.random(length, KV_HEADS) for length in lengths]
        self.v = [self.random(length, KV_HEADS) for length in lengths]

    def random(self, length: int, heads: int) -> torch.Tensor:
        return torch.randn(length, heads, HEAD_DIM, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def fill(self, row: int, until: int) -> None:
        """Write positions 0 .. until - 1 as earlier steps would have: the rest of a page begun is zero."""
        if until % self.page_size:
            self.pages[self.table[row + 1, until // self.page_size]] = 0
        for position in range(until):
            page, offset = int(self.table[row + 1, position // self.page_size]), position % self.page_size
            self.pages[page, 0, :, offset] = self.k[row][position]
            self.pages[page, 1, :, offset] = self.v[row][position]

    def run(self, rows: list[tuple[int, int, int]], q: torch.Tensor, window: int | None) -> torch.Tensor:
        """rows of (row, start, length), in batch order."""
        columns = np.array([(row + 1, start, length) for row, start, length in rows], np.int64).T
        attention = SdpaAttention(self.pages[None], [window], self.max_pages)
        plan = attention.plan(Rows.of(*columns), torch.from_numpy).bind(self.table)
        k, v = (torch.cat([kv[row][start : start + n] for row, start, n in rows]) for kv in (self.k, self.v))
        return plan.run(0, q, k, v)


def naive(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, window: int | None) -> torch.Tensor:
    """One row in float64: q [length, heads, dim] at positions start..., k and v from position 0."""
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        low = 0 if window is None else max(0, start + i + 1 - window)
        for head in range(q.shape[1]):
            kv_head = head // (HEADS // KV_HEADS)
            keys = k[low : start + i + 1, kv_head].double()
            values = v[low : start + i + 1, kv_head].double()
            out[i, head] = (keys @ q[i, head].double() / HEAD_DIM**0.5).softmax(0) @ values
    return out.view(q.shape[0], -1)


MIXED = [(0, 36, 1), (1, 0, 13), (2, 0, 1), (3, 20, 9), (4, 63, 1), (5, 64, 1), (6, 0, 2)]  # row, start, length
DECODE = [(0, 36, 1), (1, 12, 1), (2, 0, 1), (3, 28, 1), (4, 63, 1), (5, 64, 1), (6, 1, 1)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("window", [None, 1, 10])
@pytest.mark.parametrize("rows", [MIXED, DECODE])
def test_equals_naive_attention(page_size: int, dtype: torch.dtype, window: int | None, rows: Any) -> None:
    world = World(page_size, [start + length for _, start, length in rows], dtype)
    for row, start, _ in rows:
        world.fill(row, start)
    q = world.random(sum(length for *_, length in rows), HEADS)
    out, first = world.run(rows, q, window), 0
    for row, start, length in rows:
        expected = naive(q[first : first + length], world.k[row], world.v[row], start, window)
        assert (out[first : first + length].double() - expected).abs().max() < TOLERANCE[dtype], (row, start, length)
        first += length


def test_groups_of_very_different_lengths_are_split_and_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(0, 300, 1), (1, 3, 1), (2, 290, 1), (3, 5, 1), (4, 4, 1)]
    world = World(4, [start + 1 for _, start, _ in rows], torch.float64)
    for row, start, _ in rows:
        world.fill(row, start)
    q = world.random(len(rows), HEADS)
    split = world.run(rows, q, None)
    monkeypatch.setattr(sdpa, "SPLIT_TOKENS", 1 << 40)
    assert (split - world.run(rows, q, None)).abs().max() < 1e-12
    assert len(list(sdpa._split(np.array([75, 1, 73, 2, 2]), 100))) == 2
    assert len(list(sdpa._split(np.array([75, 1, 73, 2, 2]), 1000))) == 1


@pytest.mark.parametrize("order", [0, 1])
def test_a_row_reads_pages_that_another_row_of_its_step_fills(order: int) -> None:
    """The scheduler publishes a prompt's pages with the step that fills them, so writes come first, whatever
    the order of the rows."""
    world = World(4, [8, 11], torch.float64)
    world.k[1][:8], world.v[1][:8] = world.k[0], world.v[0]  # an equal prefix, in shared pages
    world.table[2, :2] = world.table[1, :2]
    rows = [(0, 0, 8), (1, 8, 3)]
    rows = rows[::-1] if order else rows
    q = world.random(11, HEADS)
    out = world.run(rows, q, None)
    reader = slice(8, 11) if order == 0 else slice(0, 3)
    assert (out[reader] - naive(q[reader], world.k[1], world.v[1], 8, None)).abs().max() < 1e-12


def test_two_plans_may_be_in_flight() -> None:
    world = World(4, [9, 9], torch.float64)
    for row in (0, 1):
        world.fill(row, 8)
    attention = SdpaAttention(world.pages[None], [None], world.max_pages)
    plans = [
        attention.plan(Rows.of(*np.array([[row + 1], [8], [1]])), torch.from_numpy).bind(world.table) for row in (0, 1)
    ]
    q = world.random(2, HEADS)
    for row in (1, 0):
        out = plans[row].run(0, q[row : row + 1], world.k[row][8:], world.v[row][8:])
        assert (out - naive(q[row : row + 1], world.k[row], world.v[row], 8, None)).abs().max() < 1e-12
