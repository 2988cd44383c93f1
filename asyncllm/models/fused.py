"""A Decoder's forward over preallocated buffers, fused for the GPU: nothing allocates, so a graph can hold it.

GPU thread. It never knows pages, rows or sampling: attention arrives as a function of the packed projection.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .kernels import add_norm, add_norm_rows, put_rows, silu_mul, take_rows
from .layers import Block, Decoder, PlainLinear, RMSNorm
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


class Drawing(NamedTuple):
    """The tokens of a step whose logits are wanted: for them alone does the last block compute more than attention.

    All on the device. num_rows: max_rows, at least MIN_ROWS; rows past `number` hold anything, and are not put back.
    """

    at: Tensor  # [max_rows] int32: where in the step
    number: Tensor  # [1] int32: how many
    attended: Tensor  # [num_rows, num_heads * head_dim]
    residual: Tensor  # [num_rows, hidden_size]
    x: Tensor  # [num_rows, hidden_size]


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

    def forward(self, buffers: Buffers, attend: Attend, drawing: Drawing | None = None) -> None:
        """From `normed` and `residual` of the embeddings to `residual` and the `x` still to be added to it. With
        `drawing`, which has fewer rows than the step tokens, only its tokens have them."""
        if len(buffers.x) == 1:
            self._forward_one(buffers, attend)
        else:
            self._forward_many(buffers, attend, drawing)

    def _forward_many(self, buffers: Buffers, attend: Attend, drawing: Drawing | None) -> None:
        blocks, last = self.decoder.blocks, len(self.decoder.blocks) - 1
        for layer, block in enumerate(blocks):
            linear(block.attention.qkv, buffers.normed, buffers.qkv)
            attended = attend(layer, buffers.qkv, block.attention.qk_norm)
            if layer == last and drawing is not None:
                self._feed_forward_some(block, attended, buffers, drawing)
            else:
                self._feed_forward(block, attended, buffers)
            if layer < last:
                norm = blocks[layer + 1].attention_norm
                add_norm(buffers.x, buffers.residual, norm.weight, buffers.normed, norm.eps)

    def _feed_forward(self, block: Block, attended: Tensor, buffers: Buffers) -> None:
        residual, normed, x, _, gate_up, activated = buffers
        norm = block.feed_forward_norm
        linear(block.attention.output, attended, x)
        add_norm(x, residual, norm.weight, normed, norm.eps)
        linear(block.feed_forward.gate_up, normed, gate_up)
        silu_mul(gate_up, activated)
        linear(block.feed_forward.down, activated, x)

    def _feed_forward_some(self, block: Block, attended: Tensor, buffers: Buffers, drawing: Drawing) -> None:
        at, number, some_attended, residual, x = drawing
        num_rows = len(x)
        some = Buffers(*(buffer[:num_rows] for buffer in buffers))._replace(residual=residual, x=x)
        take_rows(attended, at, number, some_attended)
        take_rows(buffers.residual, at, number, residual)
        self._feed_forward(block, some_attended, some)
        put_rows(residual, at, number, buffers.residual)
        put_rows(x, at, number, buffers.x)

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
