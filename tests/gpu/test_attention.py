"""XQA and fa3 equal plain attention over random page tables, at page edges, beside poisoned memory."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncllm.attention.flashinfer import FlashInferAttention

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


def expected(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    """q: [n, heads, head_dim], the last n positions of kv's row."""
    n, length = q.shape[0], kv.shape[2]
    position = torch.arange(length, device=DEVICE)
    mask = position <= position[length - n :, None]
    queries = q.transpose(0, 1)[None].float()
    out = F.scaled_dot_product_attention(queries, kv[:1], kv[1:], attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    error = (got.float() - want).norm() / want.norm()
    assert error < 8e-3, f"relative error {error:.2e}"  # NaN fails too


@pytest.mark.parametrize("heads,kv_heads,head_dim", SHAPES)
@pytest.mark.parametrize("batch", [1, 2, 9, 33])
def test_xqa(heads: int, kv_heads: int, head_dim: int, batch: int) -> None:
    rng = np.random.default_rng(batch)
    edges = [1, 63, 64, 65, 127, 128, 129, 8191, 8192]
    lengths = (edges + rng.integers(1, 8193, 40).tolist())[:batch] if batch > 1 else [8192]
    pool = Pool(lengths, kv_heads, head_dim, seed=batch)
    attention = FlashInferAttention([pool.kv], [None], heads, pool.page_table, 512, 64)
    q = torch.randn(batch, heads, head_dim, device=DEVICE).to(torch.bfloat16)
    out = torch.full_like(q, float("nan"))
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    attention.decode(0, q, out, pool.page_table[1:].contiguous(), seq_lens)
    for i in range(batch):
        close(out[i : i + 1], expected(q[i : i + 1], pool.row(i + 1)))


@pytest.mark.parametrize("heads,kv_heads,head_dim", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_fa3_through_one_captured_launch(heads: int, kv_heads: int, head_dim: int, seed: int) -> None:
    """Three work lists for one graph, rows behind decode tokens; other tokens are left as they are."""
    rng = np.random.default_rng(seed)
    lengths = [1, 64, 65, 200, 2048, 8192, *rng.integers(1, 4000, 4).tolist()]
    pool = Pool(lengths, kv_heads, head_dim, seed)
    max_tokens = 4096
    attention = FlashInferAttention([pool.kv], [None], heads, pool.page_table, max_tokens, 16)
    q = torch.randn(max_tokens, heads, head_dim, device=DEVICE).to(torch.bfloat16)
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
            slots = rng.permutation(np.arange(1, len(lengths) + 1))[: 3 + trial]
            counts = np.array([int(rng.integers(1, min(lengths[s - 1], 700) + 1)) for s in slots])
            starts = np.array([lengths[s - 1] for s in slots]) - counts
            out.fill_(7)
            attention.plan_prefill(first := 5 * trial, slots, starts, counts)
            graph.replay()
            stream.synchronize()
            at = first
            for slot, count in zip(slots.tolist(), counts.tolist(), strict=True):
                close(out[at : at + count], expected(q[at : at + count], pool.row(slot)))
                at += count
            assert (out[:first] == 7).all() and (out[at:] == 7).all()
