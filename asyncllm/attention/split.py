"""Triton: split-KV decode attention. Long rows are cut into chunks, so that every multiprocessor has a like share.

GPU thread. It never knows weights, slots or sampling: tables and lengths are on the device, and there is no plan.

XQA cuts every row alike, and none at all from 17 rows of 8 KV heads on: one row of 32k tokens among 15 short ones
took 299 us a layer where the GPU's bandwidth would do 35. Here a program finds its chunk itself: all programs read the
lengths, agree on the chunk length that gives each at most one, and the last to finish a row merges its chunks.
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

BLOCK_TOKENS = 64  # keys a program reads at a time; chunks are whole blocks
PROGRAMS_A_MULTIPROCESSOR = 4
LOG2_E = math.log2(math.e)


@triton.jit
def _chunk_of(seq_lens, num_rows, program, num_programs, window, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """(row, its first and last position + 1 to read, the chunk's number, its row's number of chunks, row length)."""
    i = tl.arange(0, ROWS)
    length = tl.load(seq_lens + i, mask=i < num_rows, other=0)
    # Whole blocks from the one where the window begins.
    first = tl.where(window > 0, tl.maximum(length - window, 0) // BLOCK, 0)
    blocks = (length + BLOCK - 1) // BLOCK - first
    total = tl.sum(blocks, 0)
    share = (total + num_programs - num_rows - 1) // (num_programs - num_rows)  # blocks a chunk
    share = tl.maximum(share, 1)
    chunks = (blocks + share - 1) // share
    ends = tl.cumsum(chunks, 0)
    row = tl.sum((ends <= program).to(tl.int32), 0)
    mine = i == row
    num_chunks = tl.sum(tl.where(mine, chunks, 0), 0)
    chunk = program - tl.sum(tl.where(mine, ends - chunks, 0), 0)
    row_len = tl.sum(tl.where(mine, length, 0), 0)
    begin = tl.sum(tl.where(mine, first, 0), 0) + chunk * share
    return row, begin * BLOCK, tl.minimum((begin + share) * BLOCK, row_len), chunk, num_chunks, row_len


@triton.jit
def _split_decode(
    q, out, pages, tables, seq_lens, partial, partial_lse, arrived, num_rows, num_programs, max_pages, page_stride,
    value_offset, head_stride, scale, window,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr,
    HEADS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, MERGED: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    program = tl.program_id(0)
    kv_head = tl.program_id(1)
    row, begin, end, chunk, num_chunks, row_len = _chunk_of(
        seq_lens, num_rows, program, num_programs, window, ROWS, BLOCK
    )
    if row < num_rows:
        head = tl.arange(0, HEADS)  # query heads of the group, then padding: a matrix product has 16 rows
        column = tl.arange(0, DIM)
        at_head = row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + head
        inside = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        at = at_head[:, None] * HEAD_DIM + column[None, :]
        query = tl.load(q + at, mask=inside, other=0.0)
        token = tl.arange(0, BLOCK)
        best = tl.full((HEADS,), float("-inf"), tl.float32)
        mass = tl.zeros((HEADS,), tl.float32)
        sums = tl.zeros((HEADS, DIM), tl.float32)
        base = pages + kv_head * head_stride
        table = tables + row.to(tl.int64) * max_pages
        low = tl.where(window > 0, tl.maximum(row_len - window, 0), 0)
        for block in range(begin, end, BLOCK):
            position = block + token
            seen = (position >= low) & (position < end)
            if PAGE_SIZE >= BLOCK:
                page = tl.load(table + block // PAGE_SIZE).to(tl.int64)
                place = page * page_stride + (block % PAGE_SIZE + token) * HEAD_DIM
            else:
                page = tl.load(table + position // PAGE_SIZE, mask=position < end, other=0).to(tl.int64)
                place = page * page_stride + (position % PAGE_SIZE) * HEAD_DIM
            tile = base + place[:, None] + column[None, :]
            readable = seen[:, None] & (column < HEAD_DIM)[None, :]  # beyond lies anything, NaN too
            key = tl.load(tile, mask=readable, other=0.0)
            value = tl.load(tile + value_offset, mask=readable, other=0.0)
            score = tl.dot(query, tl.trans(key)) * scale
            score = tl.where(seen[None, :], score, float("-inf"))
            new_best = tl.maximum(best, tl.max(score, 1))
            weight = tl.exp2(score - new_best[:, None])
            rest = tl.exp2(best - new_best)
            mass = mass * rest + tl.sum(weight, 1)
            sums = sums * rest[:, None] + tl.dot(weight.to(value.dtype), value)
            best = new_best
        if num_chunks == 1:
            tl.store(out + at, (sums / mass[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            # A program's own place; a row's chunks lie side by side.
            mine = (program.to(tl.int64) * tl.num_programs(1) + kv_head) * HEADS + head
            tl.store(partial + mine[:, None] * DIM + column[None, :], sums / mass[:, None])
            tl.store(partial_lse + mine, best + tl.log2(mass))
            tl.debug_barrier()  # every thread has stored before one counts
            counter = arrived + row * tl.num_programs(1) + kv_head
            before = tl.atomic_add(counter, 1, sem="acq_rel")
            if before == num_chunks - 1:
                tl.store(counter, 0)  # for the next layer
                _merge(
                    out, partial, partial_lse, row, kv_head, program - chunk, num_chunks, NUM_HEADS, HEAD_DIM, DIM,
                    GROUP, MERGED, HEADS, AT_ONCE,
                )  # fmt: skip


@triton.jit
def _merge(
    out, partial, partial_lse, row, kv_head, first, num_chunks, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, GROUP: tl.constexpr, MERGED: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A row's chunks, AT_ONCE at a time, so that their loads overlap."""
    head = tl.arange(0, MERGED)
    column = tl.arange(0, DIM)
    most = tl.full((MERGED,), float("-inf"), tl.float32)
    whole = tl.zeros((MERGED,), tl.float32)
    merged = tl.zeros((MERGED, DIM), tl.float32)
    for begin in range(0, num_chunks, AT_ONCE):
        i = begin + tl.arange(0, AT_ONCE)
        there = (i < num_chunks)[:, None] & (head < GROUP)[None, :]
        place = ((first + i).to(tl.int64) * tl.num_programs(1) + kv_head)[:, None] * HEADS + head[None, :]
        lse = tl.load(partial_lse + place, mask=there, other=float("-inf"), cache_modifier=".cg")
        tile = partial + place[:, :, None] * DIM + column[None, None, :]
        part = tl.load(tile, mask=there[:, :, None], other=0.0, cache_modifier=".cg")
        new_most = tl.maximum(tl.maximum(most, tl.max(lse, 0)), -1e30)  # finite in the padding heads too
        share = tl.exp2(lse - new_most[None, :])
        rest = tl.exp2(most - new_most)
        whole = whole * rest + tl.sum(share, 0)
        merged = merged * rest[:, None] + tl.sum(part * share[:, :, None], 0)
        most = new_most
    at = (row.to(tl.int64) * NUM_HEADS + kv_head * GROUP + head)[:, None] * HEAD_DIM + column[None, :]
    inside = (head < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(out + at, (merged / whole[:, None]).to(out.dtype.element_ty), mask=inside)


class SplitDecode:
    """Scratch for one stream; its launches may follow each other, not overlap."""

    def __init__(self, max_rows: int, num_kv_heads: int, group: int, head_dim: int, device: torch.device) -> None:
        self._heads = max(16, triton.next_power_of_2(group))
        self._dim = triton.next_power_of_2(head_dim)
        self._num_programs = -(-PROGRAMS_A_MULTIPROCESSOR * _num_multiprocessors(device) // num_kv_heads)
        places = (max_rows + self._num_programs) * num_kv_heads * self._heads
        self._partial = torch.zeros(places, self._dim, dtype=torch.float32, device=device)
        self._partial_lse = torch.zeros(places, dtype=torch.float32, device=device)
        self._arrived = torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device)  # chunks done, a row

    def run(
        self,
        q: Tensor,  # [num_rows, num_heads, head_dim] 16-bit, device
        out: Tensor,  # as q
        pages: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim], device
        tables: Tensor,  # [num_rows, max_pages] int32, device
        seq_lens: Tensor,  # [num_rows] int32, device: the current token counted, at least 1
        window: int | None,
    ) -> None:
        num_rows, num_heads, head_dim = q.shape
        num_kv_heads, page_size = pages.shape[2], pages.shape[3]
        num_programs = num_rows + self._num_programs
        _split_decode[(num_programs, num_kv_heads)](
            q, out, pages, tables, seq_lens, self._partial, self._partial_lse, self._arrived, num_rows, num_programs,
            tables.stride(0), pages.stride(0), pages.stride(1), pages.stride(2), head_dim**-0.5 * LOG2_E,
            window or 0,
            NUM_HEADS=num_heads, HEAD_DIM=head_dim, DIM=self._dim, PAGE_SIZE=page_size,
            GROUP=num_heads // num_kv_heads, MERGED=triton.next_power_of_2(num_heads // num_kv_heads),
            HEADS=self._heads, ROWS=triton.next_power_of_2(num_rows), BLOCK=BLOCK_TOKENS, AT_ONCE=8, **pdl(),
            num_warps=4, num_stages=2,
        )  # fmt: skip


@functools.cache
def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
