"""Triton: what stands between a decoder's products.

GPU thread. They never know pages, slots or why a token is computed.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..attention.base import Lacking


@functools.cache
def pdl() -> dict[str, bool]:
    """Programmatic dependent launch, where the GPU knows it: a kernel's start overlaps the end of the one before."""
    on = not triton.knobs.runtime.interpret and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": on, "launch_pdl": on} if on else {"PDL": False}


@triton.jit
def enter(PDL: tl.constexpr):
    """Let the next kernel of the stream come up already, then wait for what the last one wrote."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def row_scale(row, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """1 / rms of one row."""
    column = tl.arange(0, BLOCK)
    x = tl.load(row + column, mask=column < SIZE, other=0.0).to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)


@triton.jit
def _norm_rows(x, at, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    enter(PDL)
    row = tl.program_id(0)
    source = x + tl.load(at + row).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    normed = tl.load(source + column, mask=inside, other=0.0).to(tl.float32) * row_scale(source, eps, SIZE, BLOCK)
    normed *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)


def norm_rows(x: Tensor, at: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """out[i] = rms_norm(x[at[i]]) * weight. x: [num_tokens, size] bf16, device; at: [num_rows] int32, device."""
    size = x.shape[1]
    _norm_rows[(out.shape[0],)](
        x, at, weight, out, eps, size, triton.next_power_of_2(size), **pdl(), num_warps=4 if size <= 2048 else 8
    )  # fmt: skip


@triton.jit
def _silu_mul(
    gate_up, rows, bias, out, eps, gain,
    IN: tl.constexpr, IN_BLOCK: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    scale = row_scale(rows + row * IN, eps, IN, IN_BLOCK) * gain
    gate *= scale
    up *= scale
    if HAS_BIAS:
        gate += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
        up += tl.load(bias + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, lacking: Lacking, out: Tensor) -> None:
    """gate_up: [num_tokens, 2 * size] bf16, device -> out: [num_tokens, size]."""
    rows, eps, gain, bias = lacking
    size, hidden = out.shape[1], triton.next_power_of_2(rows.shape[1])
    block = min(max(hidden, 1024), 4096)  # each program reads a whole row of `rows`: about as much as it writes
    _silu_mul[(out.shape[0], triton.cdiv(size, block))](
        gate_up, rows, gate_up if bias is None else bias, out, eps, gain, IN=rows.shape[1],
        IN_BLOCK=hidden, SIZE=size, BLOCK=block, HAS_BIAS=bias is not None, **pdl(), num_warps=8 if block > 2048 else 4,
    )  # fmt: skip


@triton.jit
def _move_rows(
    source, target, at, count, SIZE: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    enter(PDL)
    i = tl.program_id(0)
    if i < tl.load(count):
        one, other = i.to(tl.int64), tl.load(at + i).to(tl.int64)
        begin = (other if GATHER else one) * SIZE
        end = (one if GATHER else other) * SIZE
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = column < SIZE
        tl.store(target + end + column, tl.load(source + begin + column, mask=inside), mask=inside)


def take_rows(source: Tensor, at: Tensor, count: Tensor, target: Tensor) -> None:
    """target[i] = source[at[i]] for i < count. source, target: [.., size], device; at: [max_count] int32, device;
    count: [1] int32, device."""
    _launch_move_rows(source, target, at, count, gather=True)


def put_rows(source: Tensor, at: Tensor, count: Tensor, target: Tensor) -> None:
    """target[at[i]] = source[i] for i < count."""
    _launch_move_rows(source, target, at, count, gather=False)


def _launch_move_rows(source: Tensor, target: Tensor, at: Tensor, count: Tensor, *, gather: bool) -> None:
    size = source.shape[1]
    _move_rows[(len(at), triton.cdiv(size, 1024))](
        source, target, at, count, SIZE=size, BLOCK=1024, GATHER=gather, **pdl(), num_warps=4
    )  # fmt: skip
