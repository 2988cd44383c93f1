"""Triton: what stands between the qkv projection and attention, in one pass over it.

GPU thread. It never knows sampling, batches or weights other than the head norm's and the projection's bias.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .base import Lacking

# Every program reads a token's whole row for its scale: so there is one a token, but where those are too few for the
# GPU's processors.
FEW_TOKENS = 128


@functools.cache
def pdl() -> dict[str, bool]:
    """As models.kernels.pdl; floors share no kernels."""
    on = not triton.knobs.runtime.interpret and torch.cuda.get_device_capability() >= (9, 0)
    return {"PDL": on, "launch_pdl": on} if on else {"PDL": False}


@triton.jit
def enter(PDL: tl.constexpr):
    """As models.kernels.enter."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def _rotated(
    heads, weight, bias, head, column, inside, scale, cos, sin, eps,
    HEAD_DIM: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Some of a token's heads, normed and rotated: the low and the high half of each."""
    at = head[:, None] * HEAD_DIM + column[None, :]
    low = tl.load(heads + at, mask=inside, other=0.0).to(tl.float32) * scale
    high = tl.load(heads + at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        low += tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
        high += tl.load(bias + at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        head_scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        low = low * head_scale * tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        high = high * head_scale * tl.load(weight + at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    return low * cos - high * sin, high * cos + low * sin


@triton.jit
def _rotate_and_store(
    qkv, q_out, pages, norm_weight, cos_sin, slots, positions, page_table, rows, bias, eps, row_eps, gain,
    max_pages, page_stride, value_offset, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, SIZE: tl.constexpr,
    BLOCK: tl.constexpr, HAS_NORM: tl.constexpr, SCALED: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KV_HEADS KV heads of one token: their query heads and keys are normed and rotated, keys and values stored."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    scale = 1.0
    if SCALED:
        i = tl.arange(0, BLOCK)
        x = tl.load(rows + token * SIZE + i, mask=i < SIZE, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, 0) / SIZE + row_eps) * gain
    column = tl.arange(0, HALF)
    here = column < HEAD_DIM // 2
    angle = cos_sin + position.to(tl.int64) * HEAD_DIM + column
    cos = tl.load(angle, mask=here, other=0.0)[None, :]
    sin = tl.load(angle + HEAD_DIM // 2, mask=here, other=0.0)[None, :]
    heads = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    kv_head = tl.program_id(1) * KV_HEADS + tl.arange(0, KV_HEADS)
    there = (kv_head < NUM_KV_HEADS)[:, None]
    head = tl.program_id(1) * (KV_HEADS * GROUP) + tl.arange(0, HEADS)
    inside = ((tl.arange(0, HEADS) < KV_HEADS * GROUP) & (head < NUM_HEADS))[:, None] & here[None, :]
    low, high = _rotated(
        heads, norm_weight, bias, head, column, inside, scale, cos, sin, eps, HEAD_DIM, HAS_NORM, HAS_BIAS
    )  # fmt: skip
    key_low, key_high = _rotated(
        heads, norm_weight, bias, NUM_HEADS + kv_head, column, there & here[None, :], scale, cos, sin, eps, HEAD_DIM,
        HAS_NORM, HAS_BIAS,
    )  # fmt: skip
    wide = tl.arange(0, 2 * HALF)
    filled = there & (wide < HEAD_DIM)[None, :]
    value_at = (NUM_HEADS + NUM_KV_HEADS + kv_head)[:, None] * HEAD_DIM + wide[None, :]
    value = tl.load(heads + value_at, mask=filled, other=0.0).to(tl.float32) * scale
    if HAS_BIAS:
        value += tl.load(bias + value_at, mask=filled, other=0.0).to(tl.float32)
    at = q_out + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    tl.store(at, low.to(q_out.dtype.element_ty), mask=inside)
    tl.store(at + HEAD_DIM // 2, high.to(q_out.dtype.element_ty), mask=inside)
    if slot != 0:  # slot 0 pads: page 0 keeps its zeros, so that no padding row can ever make a NaN there
        page = tl.load(page_table + slot.to(tl.int64) * max_pages + position // PAGE_SIZE).to(tl.int64)
        store_at = pages + page * page_stride + (kv_head * head_stride + position % PAGE_SIZE * HEAD_DIM)[:, None]
        key_at = store_at + column[None, :]
        tl.store(key_at, key_low.to(pages.dtype.element_ty), mask=there & here[None, :])
        tl.store(key_at + HEAD_DIM // 2, key_high.to(pages.dtype.element_ty), mask=there & here[None, :])
        tl.store(store_at + value_offset + wide[None, :], value.to(pages.dtype.element_ty), mask=filled)


def rotate_and_store(
    qkv: Tensor,  # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim] bf16, device
    lacking: Lacking | None,  # of qkv
    q_out: Tensor,  # [num_tokens, num_heads, head_dim] bf16, device
    pages: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim] bf16, device
    norm_weight: Tensor | None,  # [num_heads + num_kv_heads, head_dim], device
    eps: float,
    cos_sin: Tensor,  # [max_len, head_dim] float32, device: cosines, then sines
    slots: Tensor,  # [num_tokens] int32, device
    positions: Tensor,  # [num_tokens] int32, device
    page_table: Tensor,  # [num_slots, max_pages] int32, device
) -> None:
    """Complete the product by what it lacks, norm (if any) and rotate queries and keys; queries to q_out, keys and
    values to their pages.

    One kernel for eight: at 3.3 us each whatever their size they are 0.7 ms a step of 28 layers.
    """
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    num_tokens, num_heads = q_out.shape[0], q_out.shape[1]
    rows, row_eps, gain, bias = lacking or Lacking(qkv, 0.0, 1.0, None)
    size = rows.shape[1]
    group = num_heads // num_kv_heads
    if lacking is None:
        kv_heads, num_warps = 1, 1 if group < 8 else 4
    else:
        kv_heads, num_warps = triton.next_power_of_2(num_kv_heads), 4
        if num_tokens <= FEW_TOKENS:
            kv_heads = min(kv_heads, 4)
    _rotate_and_store[(num_tokens, triton.cdiv(num_kv_heads, kv_heads))](
        qkv, q_out, pages, qkv if norm_weight is None else norm_weight, cos_sin, slots, positions, page_table,
        rows, qkv if bias is None else bias, eps, row_eps, gain,
        page_table.stride(0), pages.stride(0), pages.stride(1), pages.stride(2),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        GROUP=group, HEADS=triton.next_power_of_2(kv_heads * group), KV_HEADS=kv_heads,
        HALF=triton.next_power_of_2(head_dim // 2), SIZE=size, BLOCK=triton.next_power_of_2(size),
        HAS_NORM=norm_weight is not None, SCALED=lacking is not None, HAS_BIAS=bias is not None, **pdl(),
        num_warps=num_warps,
    )  # fmt: skip


def cos_sin_table(cos: Tensor, sin: Tensor) -> Tensor:
    """[max_len, head_dim] float32 from RotaryTable's doubled cosines and half-negated sines."""
    half = cos.shape[-1] // 2
    return torch.cat((cos[..., :half], sin[..., half:]), -1).reshape(cos.shape[0], -1).float().contiguous()
