"""Triton: decode attention by equal shares: every program reads as many blocks of keys, whoever's they are.

GPU thread. It never knows weights, slots or sampling: tables and lengths are on the device, and the host plans nothing.

A step's work is a list of units, a row's block of 64 keys each, made once a step and read by every layer. A program
takes one contiguous share of the list: it may end one row, do some whole and begin another, so all programs end at
the same time, whatever the rows' lengths. Of a row that several programs share, the last to finish merges the parts.

It took XQA's place, which gives every row the same number of programs. On an H200, 16 query and 8 KV heads of 128,
us a layer, XQA against this: one row of 768 keys 8.4, 6.4; 128 rows as in burst-256 127.7, 114.6; 256 rows 232.8,
201.3; one row of 32k among 15 of 500 298, 49; one of 100k among 63 890, 133.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels import enter, pdl

MAX_BLOCK = 64  # keys of a unit
WORDS = 4  # of a unit: block of the pool, row, number within its row, the row's keys from the block's first on
LOG2_E = math.log2(math.e)
# Tried: 1 to 4 programs of 2, 4 or 8 warps with 1 to 3 blocks ahead. Small ones overlap each other best.
NUM_WARPS, NUM_STAGES = 2, 3


@triton.jit
def _list_units(
    tables, seq_lens, units, total, num_rows, max_pages, window,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row's units, behind those of the rows before it."""
    enter(PDL)
    row = tl.program_id(0)
    i = tl.arange(0, ROWS)
    length = tl.load(seq_lens + i, mask=i < num_rows, other=0)
    first = tl.where(window > 0, tl.maximum(length - window, 0) // BLOCK, 0)
    count = (length + BLOCK - 1) // BLOCK - first
    offset = tl.sum(tl.where(i < row, count, 0), 0)
    my_first = tl.sum(tl.where(i == row, first, 0), 0)
    my_count = tl.sum(tl.where(i == row, count, 0), 0)
    my_length = tl.sum(tl.where(i == row, length, 0), 0)
    if row == num_rows - 1:
        tl.store(total, offset + my_count)
    for begin in range(0, my_count, 256):
        number = begin + tl.arange(0, 256)
        mine = number < my_count
        key = (my_first + number) * BLOCK
        page = tl.load(tables + row.to(tl.int64) * max_pages + key // PAGE_SIZE, mask=mine, other=0)
        at = units + (offset + number).to(tl.int64) * WORDS
        tl.store(at, page * (PAGE_SIZE // BLOCK) + key % PAGE_SIZE // BLOCK, mask=mine)
        tl.store(at + 1, tl.zeros_like(number) + row, mask=mine)
        tl.store(at + 2, number, mask=mine)
        tl.store(at + 3, my_length - key, mask=mine)


@triton.jit
def _decode_units(
    q, out, pages, units, total, parts, parts_lse, arrived, num_programs, page_stride, value_offset, head_stride, scale,
    window,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_BLOCKS: tl.constexpr,
    GROUP: tl.constexpr, MERGED: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr, WORDS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    num_units = tl.load(total)
    share = (num_units + num_programs - 1) // num_programs
    begin = program * share
    end = tl.minimum(begin + share, num_units)
    # Query heads of the group, then padding. In both products they are columns, of which there are 8 at the least;
    # rows are 16.
    head = tl.arange(0, HEADS)
    column = tl.arange(0, DIM)
    token = tl.arange(0, BLOCK)
    inside = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    at_head = (kv_head * GROUP + head)[:, None] * HEAD_DIM + column[None, :]
    best = tl.full((HEADS,), float("-inf"), tl.float32)
    mass = tl.zeros((HEADS,), tl.float32)
    sums = tl.zeros((DIM, HEADS), tl.float32)
    for u in range(begin, end):
        unit = units + u * WORDS
        block = tl.load(unit)
        row = tl.load(unit + 1).to(tl.int64)
        number = tl.load(unit + 2)
        left = tl.load(unit + 3)
        query = tl.load(q + row * (NUM_HEADS * HEAD_DIM) + at_head, mask=inside, other=0.0)
        seen = (token < left) & (token >= tl.where(window > 0, left - window, 0))
        place = (block // PAGE_BLOCKS).to(tl.int64) * page_stride + (block % PAGE_BLOCKS) * (BLOCK * HEAD_DIM)
        tile = pages + kv_head * head_stride + place
        at_key = tile + token[:, None] * HEAD_DIM + column[None, :]
        at_value = tile + value_offset + token[None, :] * HEAD_DIM + column[:, None]
        # Beyond lies anything, NaN too.
        key = tl.load(at_key, mask=seen[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        value = tl.load(at_value, mask=seen[None, :] & (column < HEAD_DIM)[:, None], other=0.0)
        score = tl.dot(key, tl.trans(query)) * scale
        score = tl.where(seen[:, None], score, float("-inf"))
        fresh = number == 0  # a new row; what the last one left may be NaN, so it is not multiplied away
        best = tl.where(fresh, float("-inf"), best)
        mass = tl.where(fresh, 0.0, mass)
        sums = tl.where(fresh, 0.0, sums)
        # A whole number, so that a weight is rounded alike whichever maximum came before: else a row's result would
        # depend in its third digit on where the shares cut it.
        new_best = tl.maximum(best, tl.ceil(tl.max(score, 0)))
        weight = tl.exp2(score - new_best[None, :])
        rest = tl.exp2(best - new_best)
        mass = mass * rest + tl.sum(weight, 0)
        sums = sums * rest[None, :] + tl.dot(value, weight.to(value.dtype))
        best = new_best
        row_begin = u - number
        row_end = u + (left + BLOCK - 1) // BLOCK
        if (row_end == u + 1) | (u == end - 1):
            result = tl.trans(sums / mass[None, :])
            if (row_begin >= begin) & (row_end <= end):
                at = out + row * (NUM_HEADS * HEAD_DIM) + at_head
                tl.store(at, result.to(out.dtype.element_ty), mask=inside)
            else:
                # Two places a program: for the row that it takes over, and for the one it hands on.
                mine = ((2 * program + (row_begin >= begin)) * tl.num_programs(1) + kv_head) * MERGED + head
                tl.store(parts + mine[:, None] * DIM + column[None, :], result, mask=inside)
                tl.store(parts_lse + mine, best + tl.log2(mass), mask=head < GROUP)
    # Not inside the loop: a loop with a loop in it is not pipelined.
    if begin < end:
        first = units + begin * WORDS
        last = units + (end - 1) * WORDS
        taken_begin = begin - tl.load(first + 2)
        taken_end = begin + (tl.load(first + 3) + BLOCK - 1) // BLOCK
        handed_begin = end - 1 - tl.load(last + 2)
        handed_end = end - 1 + (tl.load(last + 3) + BLOCK - 1) // BLOCK
        tl.debug_barrier()  # every thread has stored before one counts
        if taken_begin < begin:
            _hand_in(
                out, parts, parts_lse, arrived, tl.load(first + 1), kv_head, taken_begin, taken_end, share,
                NUM_HEADS, HEAD_DIM, DIM, GROUP, MERGED,
            )  # fmt: skip
        if (handed_end > end) & (handed_begin >= begin):
            _hand_in(
                out, parts, parts_lse, arrived, tl.load(last + 1), kv_head, handed_begin, handed_end, share,
                NUM_HEADS, HEAD_DIM, DIM, GROUP, MERGED,
            )  # fmt: skip


@triton.jit
def _hand_in(
    out, parts, parts_lse, arrived, row, kv_head, row_begin, row_end, share,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """Count one part of a row; who counts the last one merges them."""
    first = row_begin // share
    num_parts = (row_end - 1) // share - first + 1
    counter = arrived + row * tl.num_programs(1) + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == num_parts - 1:
        tl.store(counter, 0)  # for the next layer
        place = row.to(tl.int64) * (NUM_HEADS * HEAD_DIM) + kv_head * GROUP * HEAD_DIM
        _merge(out + place, parts, parts_lse, kv_head, first, num_parts, HEAD_DIM, DIM, GROUP, MERGED, 8)


@triton.jit
def _merge(
    out, parts, parts_lse, kv_head, first, num_parts, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, GROUP: tl.constexpr,
    MERGED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A row's parts, AT_ONCE at a time, so that their loads overlap."""
    head = tl.arange(0, MERGED)
    column = tl.arange(0, DIM)
    most = tl.full((MERGED,), float("-inf"), tl.float32)
    whole = tl.zeros((MERGED,), tl.float32)
    merged = tl.zeros((MERGED, DIM), tl.float32)
    for begin in range(0, num_parts, AT_ONCE):
        i = begin + tl.arange(0, AT_ONCE)
        there = (i < num_parts)[:, None] & (head < GROUP)[None, :]
        place = 2 * (first + i) + (i == 0).to(tl.int32)
        mine = (place.to(tl.int64) * tl.num_programs(1) + kv_head)[:, None] * MERGED + head[None, :]
        lse = tl.load(parts_lse + mine, mask=there, other=float("-inf"), cache_modifier=".cg")
        tile = parts + mine[:, :, None] * DIM + column[None, None, :]
        part = tl.load(tile, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_most = tl.maximum(tl.maximum(most, tl.max(lse, 0)), -1e30)  # finite in the padding heads too
        share = tl.exp2(lse - new_most[None, :])
        rest = tl.exp2(most - new_most)
        whole = whole * rest + tl.sum(share, 0)
        merged = merged * rest[:, None] + tl.sum(part * share[:, :, None], 0)
        most = new_most
    inside = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out + head[:, None] * HEAD_DIM + column[None, :], (merged / whole[:, None]).to(out.dtype.element_ty),
             mask=inside)  # fmt: skip


class Decode:
    """The list of one window and its scratch. Its launches may follow each other, not overlap."""

    def __init__(
        self, max_rows: int, max_pages: int, page_shape: tuple[int, int, int], num_heads: int, window: int | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self._num_kv_heads, self._page_size, self._head_dim = page_shape
        self._num_heads, self._window = num_heads, window or 0
        self._rows = triton.next_power_of_2(max_rows)
        self._block = min(MAX_BLOCK, self._page_size)
        self._dim = triton.next_power_of_2(self._head_dim)
        self._merged = triton.next_power_of_2(num_heads // self._num_kv_heads)
        # As many as fit on the GPU at once: the next ones would begin when these end.
        programs = _num_multiprocessors(device) * {256: 2, 128: 4}.get(self._dim, 6)
        self._num_programs = max(1, programs // self._num_kv_heads)
        max_units = max_rows * max_pages * (self._page_size // self._block)
        self._units = torch.zeros(max_units, WORDS, dtype=torch.int32, device=device)
        self._total = torch.zeros(1, dtype=torch.int32, device=device)
        places = 2 * self._num_programs * self._num_kv_heads * self._merged
        self._parts = torch.zeros(places, self._dim, dtype=torch.float32, device=device)
        self._parts_lse = torch.zeros(places, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_rows * self._num_kv_heads, dtype=torch.int32, device=device)

    def plan(self, tables: Tensor, seq_lens: Tensor) -> None:
        """On the device, once a step. tables: [num_rows, max_pages] int32; seq_lens: [num_rows] int32, the current
        token counted, at least 1."""
        num_rows = len(seq_lens)
        _list_units[(num_rows,)](
            tables, seq_lens, self._units, self._total, num_rows, tables.stride(0), self._window, ROWS=self._rows,
            BLOCK=self._block, PAGE_SIZE=self._page_size, WORDS=WORDS, **pdl(), num_warps=4,
        )  # fmt: skip

    def run(self, q: Tensor, out: Tensor, pages: Tensor) -> None:
        """q, out: [num_rows, num_heads, head_dim] 16-bit; pages: [num_pages, 2, num_kv_heads, page_size, head_dim]."""
        group = self._num_heads // self._num_kv_heads
        num_programs = self._num_programs if len(q) > 1 else -(-self._num_programs // 2)  # idle ones cost 1 us
        _decode_units[(num_programs, self._num_kv_heads)](
            q, out, pages, self._units, self._total, self._parts, self._parts_lse, self._arrived, num_programs,
            pages.stride(0), pages.stride(1), pages.stride(2), self._head_dim**-0.5 * LOG2_E, self._window,
            NUM_HEADS=self._num_heads, HEAD_DIM=self._head_dim, DIM=self._dim,
            PAGE_BLOCKS=self._page_size // self._block, GROUP=group, MERGED=self._merged, HEADS=max(8, self._merged),
            BLOCK=self._block, WORDS=WORDS, **pdl(), num_warps=NUM_WARPS, num_stages=NUM_STAGES,
        )  # fmt: skip


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
