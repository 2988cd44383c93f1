"""Triton: the small operators of a decoder block, fused so that each tensor is read once.

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
def _add_norm(
    x, residual, weight, out, at, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out[row] = norm(residual[i] + x[i]) with i = row, the sum kept in residual; or i = at[row], nothing kept."""
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(at + row).to(tl.int64) if GATHER else row
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    total = tl.load(residual + source * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    total += tl.load(x + source * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    total = total.to(residual.dtype.element_ty)  # rounded as the stream of residuals is, in every path
    if not GATHER:
        tl.store(residual + source * SIZE + column, total, mask=inside)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    normed = total * scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, normed.to(out.dtype.element_ty), mask=inside)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """residual += x; out = rms_norm(residual) * weight. All [num_tokens, hidden_size] bf16, device."""
    size = x.shape[1]
    _add_norm[(x.shape[0],)](x, residual, weight, out, x, eps, size, triton.next_power_of_2(size), False, **pdl(),
                             num_warps=_warps(size))  # fmt: skip


def add_norm_rows(x: Tensor, residual: Tensor, at: Tensor, weight: Tensor, out: Tensor, eps: float) -> None:
    """out[i] = rms_norm(residual[at[i]] + x[at[i]]) * weight, for the rows that want a token.

    at: [num_rows] int32, device; out: [num_rows, hidden_size].
    """
    size = x.shape[1]
    _add_norm[(out.shape[0],)](x, residual, weight, out, at, eps, size, triton.next_power_of_2(size), True, **pdl(),
                               num_warps=_warps(size))  # fmt: skip


@triton.jit
def _silu_mul(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    enter(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, (gate / (1 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """gate_up: [num_tokens, 2 * size] bf16, device -> out: [num_tokens, size]."""
    size = out.shape[1]
    _silu_mul[(out.shape[0], triton.cdiv(size, 1024))](gate_up, out, size, 1024, **pdl(), num_warps=4)


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


def _warps(size: int) -> int:
    return 4 if size <= 2048 else 8
