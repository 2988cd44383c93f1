"""A Decoder's forward over preallocated buffers, fused for the GPU: nothing allocates, so a graph can hold it.

GPU thread. It never knows pages, rows or sampling: attention arrives as a function of the packed projection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import add_norm, add_norm_rows, silu_mul
from .layers import Decoder, PlainLinear, RMSNorm
from .matvec import Norm, matvec

# (layer, qkv [num_tokens, (heads + 2 kv_heads) * head_dim], norm of q and k) -> [num_tokens, heads * head_dim]
Attend = Callable[[int, Tensor, RMSNorm | None], Tensor]

# cuBLAS picks a slow kernel for a skinny product: 1024x2048 takes 13.4 us at 1 to 4 rows and 6.0 at 16, and no
# other shape of Qwen3 0.6B or 8B loses by it; so no product has fewer rows.
MIN_ROWS = 16


class Buffers(NamedTuple):
    """What a forward writes, for as many tokens as a step may have. All bf16 (or the weights' dtype), device."""

    residual: Tensor  # [max_tokens, hidden_size]
    normed: Tensor  # [max_tokens, hidden_size]
    x: Tensor  # [max_tokens, hidden_size]: what the residual still lacks
    qkv: Tensor  # [max_tokens, (num_heads + 2 num_kv_heads) * head_dim]
    gate_up: Tensor  # [max_tokens, 2 * intermediate_size]
    activated: Tensor  # [max_tokens, intermediate_size]


@dataclass(frozen=True, slots=True)
class FusedDecoder:
    """The same numbers as Decoder, up to rounding, in fewer kernels: 7 a layer besides attention's."""

    decoder: Decoder

    def __post_init__(self) -> None:
        block = self.decoder.blocks[0]
        parts = (block.attention.qkv, block.attention.output, block.feed_forward.gate_up, block.feed_forward.down)
        if not all(isinstance(linear, PlainLinear) for linear in (*parts, self.decoder.head)):
            raise TypeError("the fused forward takes plain weights")

    @property
    def hidden_size(self) -> int:
        return self.decoder.embedding.shape[1]

    def buffers(self, max_tokens: int) -> Buffers:
        block, like = self.decoder.blocks[0], self.decoder.embedding

        def zeros(width: int) -> Tensor:
            return torch.zeros(max_tokens, width, dtype=like.dtype, device=like.device)

        wide = block.feed_forward.gate_up.weight.shape[0]  # type: ignore[attr-defined]
        qkv = block.attention.qkv.weight.shape[0]  # type: ignore[attr-defined]
        hidden = self.hidden_size
        return Buffers(zeros(hidden), zeros(hidden), zeros(hidden), zeros(qkv), zeros(wide), zeros(wide // 2))

    def forward(self, buffers: Buffers, attend: Attend) -> None:
        """From `normed` and `residual` of the embeddings to `residual` and the `x` still to be added to it."""
        if len(buffers.x) == 1:
            self._forward_one(buffers, attend)
        else:
            self._forward_many(buffers, attend)

    def _forward_many(self, buffers: Buffers, attend: Attend) -> None:
        blocks = self.decoder.blocks
        residual, normed, x, qkv, gate_up, activated = buffers
        for layer, block in enumerate(blocks):
            linear(block.attention.qkv, normed, qkv)
            linear(block.attention.output, attend(layer, qkv, block.attention.qk_norm), x)
            norm = block.feed_forward_norm
            add_norm(x, residual, norm.weight, normed, norm.eps)
            linear(block.feed_forward.gate_up, normed, gate_up)
            silu_mul(gate_up, activated)
            linear(block.feed_forward.down, activated, x)
            if layer + 1 < len(blocks):
                norm = blocks[layer + 1].attention_norm
                add_norm(x, residual, norm.weight, normed, norm.eps)

    def _forward_one(self, buffers: Buffers, attend: Attend) -> None:
        """One token, in 4 kernels a layer besides attention's: norms and activation are part of the products.

        A norm writes the new residual where its neighbours still read the old one, so two places take turns.
        """
        residual, spare, x, qkv, _, activated = buffers
        for layer, block in enumerate(self.decoder.blocks):
            feed_norm = block.feed_forward_norm
            if layer == 0:  # gather has normed the embedding
                one_token(block.attention.qkv, spare, qkv)
                one_token(block.attention.output, attend(layer, qkv, block.attention.qk_norm), x)
                add_norm(x, residual, feed_norm.weight, spare, feed_norm.eps)
                one_token(block.feed_forward.gate_up, spare, activated, glu=True)
            else:
                norm = block.attention_norm
                one_token(block.attention.qkv, x, qkv, norm=Norm(residual, spare, norm.weight, norm.eps))
                one_token(block.attention.output, attend(layer, qkv, block.attention.qk_norm), x)
                feed = Norm(spare, residual, feed_norm.weight, feed_norm.eps)
                one_token(block.feed_forward.gate_up, x, activated, glu=True, norm=feed)
            one_token(block.feed_forward.down, activated, x)

    def logits(self, buffers: Buffers, rows: Tensor, normed: Tensor, out: Tensor) -> None:
        """Of the tokens `rows` ([num_rows] int32, device) alone. normed: [num_rows, hidden_size] scratch;
        out: [num_rows, vocab_size]."""
        norm = self.decoder.norm
        add_norm_rows(buffers.x, buffers.residual, rows, norm.weight, normed, norm.eps)
        linear(self.decoder.head, normed, out)


def one_token(
    layer: Callable[[Tensor], Tensor], x: Tensor, out: Tensor, *, glu: bool = False, norm: Norm | None = None
) -> None:
    assert isinstance(layer, PlainLinear)
    matvec(x, layer.weight, layer.bias, out, glu=glu, norm=norm)


def linear(layer: Callable[[Tensor], Tensor], x: Tensor, out: Tensor) -> None:
    assert isinstance(layer, PlainLinear)
    if layer.bias is None:
        torch.mm(x, layer.weight.t(), out=out)
    else:
        torch.addmm(layer.bias, x, layer.weight.t(), out=out)
