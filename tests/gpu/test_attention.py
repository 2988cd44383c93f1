"""Every kernel equals plain attention over random page tables, at page edges, beside poisoned memory."""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncllm.attention.flashinfer import PagedAttention

DEVICE = torch.device("cuda")
PAGE = 64
SHAPES = [(16, 8, 128), (32, 8, 128), (4, 2, 64), (32, 8, 64)]


class Pool:
    """Rows with pages in random order; what no row holds, and what lies behind a row's end, is NaN."""

    def __init__(self, lengths: list[int], kv_heads: int, head_dim: int, seed: int) -> None:
        rng = torch.Generator(DEVICE).manual_seed(seed)
        counts = [-(-length // PAGE) for length in lengths]
        num_pages = sum(counts) + 9
        kv = torch.randn(num_pages, 2, kv_heads, PAGE, head_dim, generator=rng, device=DEVICE).to(torch.bfloat16)
        order = torch.randperm(num_pages - 1, generator=rng, device=DEVICE).to(torch.int32) + 1
        self.page_table = torch.zeros(len(lengths) + 1, max(counts) + 2, dtype=torch.int32, device=DEVICE)
        self.kv, self.lengths = kv, lengths
        begin = 0
        for slot, (count, length) in enumerate(zip(counts, lengths, strict=True), 1):
            self.page_table[slot, :count] = order[begin : begin + count]
            if length % PAGE:
                kv[order[begin + count - 1], :, :, length % PAGE :] = float("nan")
            begin += count
        kv[order[begin:].long()] = float("nan")
        kv[0] = 0

    def row(self, slot: int) -> torch.Tensor:
        """[2, kv_heads, length, head_dim] float32"""
        length = self.lengths[slot - 1]
        pages = self.kv[self.page_table[slot, : -(-length // PAGE)].long()]
        return pages.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()


def expected(q: torch.Tensor, kv: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """q: [n, heads, head_dim], the last n positions of kv's row."""
    n, length = q.shape[0], kv.shape[2]
    position = torch.arange(length, device=DEVICE)
    query = position[length - n :, None]
    mask = (position <= query) & (position > query - (window or length + 1))
    queries = q.transpose(0, 1)[None].float()
    out = F.scaled_dot_product_attention(queries, kv[:1], kv[1:], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.float() - want).norm() / want.norm()
    assert error < 8e-3, f"relative error {error:.2e}"  # NaN fails too


def attention_over(pool: Pool, heads: int, kind: str = "fa3", window: int | None = None) -> PagedAttention:
    return PagedAttention(kind, [pool.kv], [window], heads, pool.page_table, 4096, 64)


def check_decode(pool: Pool, heads: int, window: int | None = None) -> None:
    attention = attention_over(pool, heads, window=window)
    batch, head_dim = len(pool.lengths), pool.kv.shape[-1]
    q = torch.randn(batch, heads, head_dim, device=DEVICE).to(torch.bfloat16)
    seq_lens = torch.tensor(pool.lengths, dtype=torch.int32, device=DEVICE)
    attention.plan_decode(pool.page_table[1:].contiguous(), seq_lens)
    for _ in range(2):  # the second finds what the first left in the scratch
        out = torch.full_like(q, float("nan"))
        attention.decode(0, q, out)
    for i in range(batch):
        close(out[i : i + 1], expected(q[i : i + 1], pool.row(i + 1), window))


EDGES = [1, 63, 64, 65, 127, 128, 129, 8191, 8192]
MORE_SHAPES = [(8, 8, 128), (12, 2, 128), (14, 2, 64), (16, 1, 256)]


@pytest.mark.parametrize("heads,kv_heads,head_dim", [*SHAPES, *MORE_SHAPES])
@pytest.mark.parametrize("batch", [1, 2, 9, 33])
def test_decode(heads: int, kv_heads: int, head_dim: int, batch: int) -> None:
    rng = np.random.default_rng(batch)
    lengths = (EDGES + rng.integers(1, 8193, 40).tolist())[:batch] if batch > 1 else [8192]
    check_decode(Pool(lengths, kv_heads, head_dim, seed=batch), heads)


@pytest.mark.parametrize("heads,kv_heads,head_dim", [*SHAPES, *MORE_SHAPES])
@pytest.mark.parametrize("window", [1, 31, 64, 100, 4096])
def test_decode_with_a_window(heads: int, kv_heads: int, head_dim: int, window: int) -> None:
    check_decode(Pool([*EDGES, 32, 4000], kv_heads, head_dim, seed=window), heads, window)


@pytest.mark.parametrize("batch", [2, 16, 64])
def test_one_long_row_among_short_ones(batch: int) -> None:
    lengths = [100_000, *np.random.default_rng(batch).integers(1, 600, batch - 1).tolist()]
    check_decode(Pool(lengths, 8, 128, seed=batch), 16)


def test_a_row_that_is_nan_spoils_no_other() -> None:
    """Shares run over the rows' ends: what a program holds of one row must not reach the next."""
    pool = Pool([700] * 40, 8, 128, seed=3)
    pool.kv[pool.page_table[7, 2].long()] = float("nan")
    attention = attention_over(pool, 16)
    q = torch.randn(40, 16, 128, device=DEVICE).to(torch.bfloat16)
    out = torch.empty_like(q)
    attention.plan_decode(pool.page_table[1:].contiguous(), torch.full((40,), 700, dtype=torch.int32, device=DEVICE))
    attention.decode(0, q, out)
    assert out[6].isnan().all() and not out[:6].isnan().any() and not out[7:].isnan().any()


@pytest.mark.parametrize("heads,kv_heads,head_dim,window", [*((*shape, None) for shape in SHAPES), (16, 8, 128, 100)])
@pytest.mark.parametrize("seed", range(3))
def test_fa2(heads: int, kv_heads: int, head_dim: int, window: int | None, seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [1, 64, 65, 200, 2048, 8192, *rng.integers(1, 4000, 4).tolist()]
    pool = Pool(lengths, kv_heads, head_dim, seed)
    attention = attention_over(pool, heads, "fa2", window)
    q = torch.randn(4096, heads, head_dim, device=DEVICE).to(torch.bfloat16)
    out = torch.empty_like(q)
    for trial in range(3):
        out.fill_(7)
        check_prefill(attention, pool, q, out, rng, trial, lambda: attention.prefill(0, q, out), window)


@pytest.mark.skipif("ASYNCLLM_COMPILE" not in os.environ, reason="compiles fa3 with a window: ASYNCLLM_COMPILE=1")
def test_fa3_with_a_window() -> None:
    rng = np.random.default_rng(0)
    pool = Pool([1, 64, 65, 200, 2048, 8192, 3000], 8, 128, 0)
    attention = attention_over(pool, 16, "fa3", 100)
    q = torch.randn(4096, 16, 128, device=DEVICE).to(torch.bfloat16)
    out = torch.full_like(q, 7)
    check_prefill(attention, pool, q, out, rng, 0, lambda: attention.prefill(0, q, out), 100)


def check_prefill(
    attention: PagedAttention, pool: Pool, q: torch.Tensor, out: torch.Tensor, rng: np.random.Generator, trial: int,
    run: Callable[[], None], window: int | None = None,
) -> None:  # fmt: skip
    """Chunks that end some rows, behind decode tokens; tokens of nobody are left as they are."""
    lengths = pool.lengths
    slots = rng.permutation(np.arange(1, len(lengths) + 1))[: 3 + trial]
    counts = np.array([int(rng.integers(1, min(lengths[s - 1], 700) + 1)) for s in slots])
    starts = np.array([lengths[s - 1] for s in slots]) - counts
    attention.plan_prefill(first := 5 * trial, slots, starts, counts)
    run()
    torch.cuda.current_stream().synchronize()
    at = first
    for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
        close(out[at : at + count], expected(q[at : at + count], pool.row(slot), window))
        at += count
    assert (out[:first] == 7).all() and (out[at:] == 7).all()


@pytest.mark.parametrize("heads,kv_heads,head_dim", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_fa3_through_one_captured_launch(heads: int, kv_heads: int, head_dim: int, seed: int) -> None:
    """Three work lists for one graph, rows behind decode tokens; other tokens are left as they are."""
    rng = np.random.default_rng(seed)
    pool = Pool([1, 64, 65, 200, 2048, 8192, *rng.integers(1, 4000, 4).tolist()], kv_heads, head_dim, seed)
    attention = attention_over(pool, heads)
    q = torch.randn(4096, heads, head_dim, device=DEVICE).to(torch.bfloat16)
    out = torch.empty_like(q)
    nothing = np.zeros(0, np.int64)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        attention.plan_prefill(0, nothing, nothing, nothing)
        attention.prefill(0, q, out)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            attention.prefill(0, q, out)
        for trial in range(3):
            out.fill_(7)
            check_prefill(attention, pool, q, out, rng, trial, graph.replay)
