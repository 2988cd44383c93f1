"""The fused forward, apart from any runner."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncllm.attention.base import Lacking
from asyncllm.attention.kernels import rotate_and_store
from asyncllm.models.config import ModelConfig
from asyncllm.models.fused import MIN_ROWS, Buffers, Drawing, FusedDecoder
from asyncllm.models.layers import Decoder, Placement, PlainLinear, RMSNorm
from asyncllm.models.loader import load_model
from tests.tiny import make_checkpoint

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
NUM_TOKENS = 48


class Alone:
    """A Plan of tokens that see themselves alone: each is given its own values."""

    def __init__(self, num_heads: int) -> None:
        self._num_heads = num_heads

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v.repeat_interleave(self._num_heads // v.shape[1], 1).flatten(1)


def load(folder: Path, dtype: torch.dtype) -> tuple[ModelConfig, Decoder]:
    config = ModelConfig.from_folder(folder)
    return config, load_model(folder, config, Placement(DEVICE, dtype, dtype, PlainLinear, None, 8))


BIASED = {"attention_bias": True, "mlp_bias": True}


@pytest.mark.parametrize("family,overrides", [("qwen3", {}), ("qwen2", {}), ("llama", BIASED)])
@pytest.mark.parametrize("dtype,error", [(torch.float32, 1e-5), (torch.float16, 3e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("num_tokens", [1, 5])
@torch.inference_mode()
def test_it_computes_what_the_decoder_does(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: torch.dtype, error: float, num_tokens: int
) -> None:
    """Before its norms are folded and after."""
    folder = make_checkpoint(tmp_path / "tiny", family, **overrides)
    config, decoder = load(folder, dtype)
    for block in decoder.blocks:  # unlike each other, and small as real ones are
        block.attention_norm.weight.mul_(torch.linspace(0.01, 0.1, config.hidden_size, device=DEVICE))
    ids, positions = torch.arange(7, 7 + num_tokens, device=DEVICE), torch.zeros(num_tokens, device=DEVICE).long()
    plan = Alone(config.num_heads)
    before = decoder(ids, positions, plan).float()
    model = FusedDecoder(decoder)
    after = decoder(ids, positions, plan).float()

    # Token i is at position 0 of page i + 1.
    pages_of = torch.arange(num_tokens + 1, dtype=torch.int32, device=DEVICE)[:, None]
    zeros = torch.zeros(num_tokens, dtype=torch.int32, device=DEVICE)
    cos_sin = torch.ones(1, config.head_dim, device=DEVICE)
    pages = torch.zeros(num_tokens + 1, 2, config.num_kv_heads, 16, config.head_dim, dtype=dtype, device=DEVICE)
    q = torch.empty(num_tokens, config.num_heads, config.head_dim, dtype=dtype, device=DEVICE)

    def attend(layer: int, qkv: Tensor, lacking: Lacking | None, norm: RMSNorm | None) -> Tensor:
        rotate_and_store(qkv, lacking, q, pages, None, 0.0, cos_sin, pages_of[1:, 0], zeros, pages_of)
        v = pages[1:, 1, :, 0]
        return plan.run(layer, v, v, v)

    buffers = model.buffers(num_tokens)
    buffers.residual.copy_(decoder.embedding[ids])
    model.forward(buffers, attend)
    for got in (after, buffers.residual.float()):
        assert (got - before).norm() <= error * before.norm()
    rows, normed = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE), torch.empty_like(buffers.residual)
    logits = torch.empty(num_tokens, config.vocab_size, dtype=dtype, device=DEVICE)
    model.logits(buffers, rows, normed, logits)
    expected = decoder.logits(before.to(dtype)).float()
    assert (logits.float() - expected).norm() <= error * expected.norm()


@torch.inference_mode()
def test_folding_twice_changes_nothing(tmp_path: Path) -> None:
    _, decoder = load(make_checkpoint(tmp_path / "tiny", "qwen3"), torch.bfloat16)
    FusedDecoder(decoder)
    block = decoder.blocks[1]
    folded = block.attention.qkv.weight.clone(), block.attention_norm.weight.clone()  # type: ignore[attr-defined]
    FusedDecoder(decoder)
    assert torch.equal(block.attention.qkv.weight, folded[0])  # type: ignore[attr-defined]
    assert torch.equal(block.attention_norm.weight, folded[1])
    assert 1 / 32 <= float(folded[0].abs().max()) <= 1 / 16


@torch.inference_mode()
def test_a_last_block_of_the_drawing_rows_alone_has_their_numbers(tmp_path: Path) -> None:
    dtype = torch.bfloat16
    config, decoder = load(make_checkpoint(tmp_path / "tiny", "qwen3"), dtype)
    model = FusedDecoder(decoder)
    width = config.num_heads * config.head_dim
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(NUM_TOKENS, model.hidden_size, generator=generator).to(DEVICE, dtype)
    at = torch.tensor([3, 17, 47, 0, 0], dtype=torch.int32, device=DEVICE)
    number, widths = torch.tensor([3], dtype=torch.int32, device=DEVICE), (width, model.hidden_size)
    drawing = Drawing(at, number, *(torch.zeros(MIN_ROWS, size, dtype=dtype, device=DEVICE) for size in widths))

    def attend(layer: int, qkv: Tensor, lacking: Lacking | None, norm: RMSNorm | None) -> Tensor:
        return qkv[:, :width].contiguous()

    def run(drawing: Drawing | None) -> Buffers:
        buffers = model.buffers(NUM_TOKENS)
        buffers.residual.copy_(residual)
        model.forward(buffers, attend, drawing)
        return buffers

    whole, some = run(None).residual, run(drawing).residual
    rows = at[:3].long()
    expected, got = whole[rows].float(), some[rows].float()
    torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
