"""Triton: one token's linear, bound by reading the weights; norm and activation ride along.

GPU thread. It never knows pages, slots or why a token is computed.

A step of one token is some 200 kernels of 2 to 10 us, so what counts is their number and how early each one's first
weights are on their way: a program asks for its first ones before it waits for the kernel that makes its input. One
layer of Qwen3-0.6B so takes 12.4 us where cuBLAS, norms and activation took 32, of 8B 97 where they took 116. From two
tokens on the tensor cores are wanted, and a Triton product of 16 rows lost to cuBLAS by 10% and more.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .kernels import enter, pdl


class Norm(NamedTuple):
    """What is left of a norm whose weight is in the linear's: the input is multiplied by gain / rms."""

    eps: float
    gain: float


@triton.jit
def _matvec(
    x, weight, bias, out, eps, gain, num_out,
    IN: tl.constexpr, BLOCK_OUT: tl.constexpr, BLOCK_IN: tl.constexpr, NORM: tl.constexpr, GLU: tl.constexpr,
    ADD: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_OUT outputs. With GLU `weight` holds the gates' rows, then the ups'."""
    row = tl.program_id(0) * BLOCK_OUT + tl.arange(0, BLOCK_OUT)
    column = tl.arange(0, BLOCK_IN)
    at = weight + row.to(tl.int64)[:, None] * IN + column[None, :]
    up_at = at + num_out.to(tl.int64) * IN
    inside = row[:, None] < num_out
    tile = tl.load(at, mask=inside & (column < IN)[None, :], other=0.0)
    if GLU:
        up_tile = tl.load(up_at, mask=inside & (column < IN)[None, :], other=0.0)
    enter(PDL)
    if ADD:  # asked for now: behind the sums it would be waited for
        held = tl.load(out + row, mask=row < num_out, other=0.0).to(tl.float32)
    sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    up_sums = tl.zeros((BLOCK_OUT, BLOCK_IN), tl.float32)
    squares = tl.zeros((BLOCK_IN,), tl.float32)
    for begin in range(0, IN, BLOCK_IN):
        i = begin + column
        a = tl.load(x + i, mask=i < IN, other=0.0).to(tl.float32)
        if NORM:
            squares += a * a
        now = tile.to(tl.float32)
        ahead = inside & (i + BLOCK_IN < IN)[None, :]
        tile = tl.load(at + begin + BLOCK_IN, mask=ahead, other=0.0)
        sums += now * a[None, :]
        if GLU:
            up_now = up_tile.to(tl.float32)
            up_tile = tl.load(up_at + begin + BLOCK_IN, mask=ahead, other=0.0)
            up_sums += up_now * a[None, :]
    # Of the whole row: a factor of every product.
    scale = tl.rsqrt(tl.sum(squares, 0) / IN + eps) * gain if NORM else 1.0
    result = tl.sum(sums, 1) * scale
    if HAS_BIAS:
        result += tl.load(bias + row, mask=row < num_out, other=0.0).to(tl.float32)
    if GLU:
        up = tl.sum(up_sums, 1) * scale
        if HAS_BIAS:
            up += tl.load(bias + num_out + row, mask=row < num_out, other=0.0).to(tl.float32)
        result = result / (1 + tl.exp(-result)) * up
    if ADD:
        result += held
    tl.store(out + row, result.to(out.dtype.element_ty), mask=row < num_out)


def matvec(
    x: Tensor,  # [1, in_features] 16-bit, device
    weight: Tensor,  # [out_features, in_features], device; with glu the gates' rows, then the ups'
    bias: Tensor | None,  # [out_features]
    out: Tensor,  # [1, out_features], with glu half of it
    *,
    norm: Norm | None = None,  # of x, before anything else
    glu: bool = False,  # silu(gate) * up
    add: bool = False,  # to what `out` holds
) -> None:
    size, num_out = x.shape[1], out.shape[1]
    eps, gain = norm or (0.0, 1.0)
    block_out, block_in, num_warps = _blocks(size, num_out, glu)
    _matvec[(triton.cdiv(num_out, block_out),)](
        x, weight, x if bias is None else bias, out, eps, gain, num_out, IN=size, BLOCK_OUT=block_out,
        BLOCK_IN=min(block_in, triton.next_power_of_2(size)), NORM=norm is not None, GLU=glu, ADD=add,
        HAS_BIAS=bias is not None, **pdl(), num_warps=num_warps,
    )  # fmt: skip


def _blocks(size: int, num_out: int, glu: bool) -> tuple[int, int, int]:
    """(outputs, inputs, warps) of a program: within 5% of the best of 30 for every product of Qwen3-0.6B and 8B."""
    if glu:
        return 4, 1024, 2
    if num_out <= 2048:  # few outputs: many programs
        return (2, 2048, 8) if size > 2048 else (2, 1024, 4)
    return 8, 1024, 4
