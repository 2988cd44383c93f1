"""A Decoder's forward over preallocated buffers, fused for the GPU: nothing allocates, so a graph can hold it.

GPU thread. It never knows pages, rows or sampling: attention arrives as a function of the packed projection.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.base import Lacking
from .kernels import norm_rows, put_rows, silu_mul, take_rows
from .layers import Block, Decoder, Linear, PlainLinear, RMSNorm
from .matvec import Norm, matvec

# (layer, qkv [num_tokens, (heads + 2 kv_heads) * head_dim], what it lacks, norm of q and k)
# -> [num_tokens, heads * head_dim]
Attend = Callable[[int, Tensor, Lacking | None, RMSNorm | None], Tensor]

# cuBLAS picks a slow kernel for a skinny product: 1024x2048 takes 13.4 us at 1 to 4 rows and 6.0 at 16, and no
# other shape of Qwen3 0.6B or 8B loses by it; so no product has fewer rows.
MIN_ROWS = 16


class Buffers(NamedTuple):
    """What a forward writes, for as many tokens as a step may have. All bf16 (or the weights' dtype), device."""

    residual: Tensor  # [max_tokens, hidden_size]
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


class FusedDecoder:
    """The same numbers as Decoder, up to rounding, in fewer kernels: 5 a layer besides attention's.

    No block's norm is a kernel. Its weight is folded into the product behind it, whose rows can then wait for their
    1 / rms: the kernel that reads the product multiplies by it. And the products that end a block's halves add to
    the residual themselves. An add + norm took 3 to 4 us twice a layer, and with 3,000 tokens 28.
    """

    def __init__(self, decoder: Decoder) -> None:
        """Folds the decoder's norms, in place: it stays the same function.

        Raises:
            TypeError: its weights are not plain ones.
        """
        self.decoder = decoder
        plain(decoder.head)
        for block in decoder.blocks:  # all of them, before any is changed
            attention, feed_forward = block.attention, block.feed_forward
            for linear in (attention.qkv, attention.output, feed_forward.gate_up, feed_forward.down):
                plain(linear)
        self._norms = [
            (
                _fold(block.attention_norm, plain(block.attention.qkv)),
                _fold(block.feed_forward_norm, plain(block.feed_forward.gate_up)),
            )
            for block in decoder.blocks
        ]

    @property
    def hidden_size(self) -> int:
        return self.decoder.embedding.shape[1]

    def buffers(self, max_tokens: int) -> Buffers:
        block, like = self.decoder.blocks[0], self.decoder.embedding

        def zeros(width: int) -> Tensor:
            return torch.zeros(max_tokens, width, dtype=like.dtype, device=like.device)

        wide = plain(block.feed_forward.gate_up).weight.shape[0]
        qkv = plain(block.attention.qkv).weight.shape[0]
        return Buffers(zeros(self.hidden_size), zeros(qkv), zeros(wide), zeros(wide // 2))

    def forward(self, buffers: Buffers, attend: Attend, drawing: Drawing | None = None) -> None:
        """`residual`: from the embeddings to what the last norm takes. With `drawing`, which has fewer rows than the
        step tokens, only its tokens have that."""
        if len(buffers.residual) == 1:
            self._forward_one(buffers, attend)
        else:
            self._forward_many(buffers, attend, drawing)

    def _forward_many(self, buffers: Buffers, attend: Attend, drawing: Drawing | None) -> None:
        blocks, last = self.decoder.blocks, len(self.decoder.blocks) - 1
        for layer, (block, (norm, feed_norm)) in enumerate(zip(blocks, self._norms, strict=True)):
            qkv = plain(block.attention.qkv)
            torch.mm(buffers.residual, qkv.weight.t(), out=buffers.qkv)
            lacking = Lacking(buffers.residual, *norm, qkv.bias)
            attended = attend(layer, buffers.qkv, lacking, block.attention.qk_norm)
            if layer == last and drawing is not None:
                _feed_forward_some(block, feed_norm, attended, buffers, drawing)
            else:
                _feed_forward(block, feed_norm, attended, buffers)

    def _forward_one(self, buffers: Buffers, attend: Attend) -> None:
        """One token, in 4 kernels a layer besides attention's: norms and activation are part of the products."""
        residual, qkv, _, activated = buffers
        for layer, (block, (norm, feed_norm)) in enumerate(zip(self.decoder.blocks, self._norms, strict=True)):
            one_token(block.attention.qkv, residual, qkv, norm=norm)
            attended = attend(layer, qkv, None, block.attention.qk_norm)
            one_token(block.attention.output, attended, residual, add=True)
            one_token(block.feed_forward.gate_up, residual, activated, norm=feed_norm, glu=True)
            one_token(block.feed_forward.down, activated, residual, add=True)

    def logits(self, buffers: Buffers, rows: Tensor, normed: Tensor, out: Tensor) -> None:
        """Of the tokens `rows` ([num_rows] int32, device) alone. normed: [num_rows, hidden_size] scratch;
        out: [num_rows, vocab_size]."""
        norm = self.decoder.norm  # not folded: the head may be the embedding
        norm_rows(buffers.residual, rows, norm.weight, normed, norm.eps)
        torch.mm(normed, plain(self.decoder.head).weight.t(), out=out)


def _feed_forward(block: Block, norm: Norm, attended: Tensor, buffers: Buffers) -> None:
    """And the attention's last product before it."""
    residual, _, gate_up, activated = buffers
    wide = plain(block.feed_forward.gate_up)
    _add_linear(block.attention.output, attended, residual)
    torch.mm(residual, wide.weight.t(), out=gate_up)
    silu_mul(gate_up, Lacking(residual, *norm, wide.bias), activated)
    _add_linear(block.feed_forward.down, activated, residual)


def _feed_forward_some(block: Block, norm: Norm, attended: Tensor, buffers: Buffers, drawing: Drawing) -> None:
    at, number, some_attended, residual = drawing
    some = Buffers(*(buffer[: len(residual)] for buffer in buffers))._replace(residual=residual)
    take_rows(attended, at, number, some_attended)
    take_rows(buffers.residual, at, number, residual)
    _feed_forward(block, norm, some_attended, some)
    put_rows(residual, at, number, buffers.residual)


def _add_linear(layer: Linear, x: Tensor, residual: Tensor) -> None:
    linear = plain(layer)
    residual.addmm_(x, linear.weight.t())
    if linear.bias is not None:
        residual += linear.bias


def one_token(
    layer: Linear, x: Tensor, out: Tensor, *, norm: Norm | None = None, glu: bool = False, add: bool = False
) -> None:
    linear = plain(layer)
    matvec(x, linear.weight, linear.bias, out, norm=norm, glu=glu, add=add)


def plain(linear: Linear) -> PlainLinear:
    if not isinstance(linear, PlainLinear):
        raise TypeError("the fused forward takes plain weights")
    return linear


def _fold(norm: RMSNorm, linear: PlainLinear) -> Norm:
    """Move a norm's weight into the linear behind it, but for a gain.

    The gain is a power of two that leaves the largest weight between 1/32 and 1/16: so float16 has room for products
    of rows that are not normed, and for small weights too.
    """
    low, high = torch.aminmax(linear.weight, dim=0)
    largest = (torch.maximum(high, -low).float() * norm.weight.float().abs()).amax()
    _, exponent = math.frexp(float(largest))
    gain = 2.0 ** (exponent + 4)
    linear.weight.mul_(norm.weight.float() / gain)
    norm.weight.fill_(gain)
    return Norm(norm.eps, gain)
