"""The fused forward, apart from any runner."""

import os
from pathlib import Path

import torch
from torch import Tensor

from asyncllm.models.config import ModelConfig
from asyncllm.models.fused import MIN_ROWS, Buffers, Drawing, FusedDecoder
from asyncllm.models.layers import Placement, PlainLinear, RMSNorm
from asyncllm.models.loader import load_model
from tests.tiny import make_checkpoint

DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET") == "1" else "cuda")
NUM_TOKENS = 48


@torch.inference_mode()
def test_a_last_block_of_the_drawing_rows_alone_has_their_numbers(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny", "qwen3")
    config, dtype = ModelConfig.from_folder(folder), torch.bfloat16
    model = FusedDecoder(load_model(folder, config, Placement(DEVICE, dtype, dtype, PlainLinear, None, 1)))
    width = config.num_heads * config.head_dim
    generator = torch.Generator().manual_seed(0)
    residual, normed = (
        torch.randn(NUM_TOKENS, model.hidden_size, generator=generator).to(DEVICE, dtype) for _ in range(2)
    )
    at = torch.tensor([3, 17, 47, 0, 0], dtype=torch.int32, device=DEVICE)
    number, widths = torch.tensor([3], dtype=torch.int32, device=DEVICE), (width, model.hidden_size, model.hidden_size)
    drawing = Drawing(at, number, *(torch.zeros(MIN_ROWS, size, dtype=dtype, device=DEVICE) for size in widths))

    def attend(layer: int, qkv: Tensor, norm: RMSNorm | None) -> Tensor:
        return qkv[:, :width].contiguous()

    def run(drawing: Drawing | None) -> Buffers:
        buffers = model.buffers(NUM_TOKENS)
        buffers.residual.copy_(residual)
        buffers.normed.copy_(normed)
        model.forward(buffers, attend, drawing)
        return buffers

    whole, some = run(None), run(drawing)
    rows = at[:3].long()
    for name in ("residual", "x"):
        expected, got = getattr(whole, name)[rows].float(), getattr(some, name)[rows].float()
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
