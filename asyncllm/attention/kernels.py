"""Triton: what stands between the qkv projection and attention, in one pass over it.

GPU thread. It never knows sampling, batches or weights other than the head norm's.
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
def _rotate_and_store(
    qkv, q_out, pages, norm_weight, cos_sin, slots, positions, page_table, eps,
    max_pages, page_stride, value_offset, head_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One token and one KV head: its query heads and key are normed and rotated, key and value stored."""
    enter(PDL)
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots + token)
    position = tl.load(positions + token)
    row = tl.arange(0, ROWS)  # query heads of the group, then the key, then padding
    is_query = row < GROUP
    head = tl.where(is_query, kv_head * GROUP + row, NUM_HEADS + kv_head)
    column = tl.arange(0, HALF)
    inside = (row <= GROUP)[:, None] & (column < HEAD_DIM // 2)[None, :]
    at = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    low = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(at + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        weight = norm_weight + head[:, None] * HEAD_DIM + column[None, :]
        low = low * scale * tl.load(weight, mask=inside, other=0.0).to(tl.float32)
        high = high * scale * tl.load(weight + HEAD_DIM // 2, mask=inside, other=0.0).to(tl.float32)
    angle = cos_sin + position.to(tl.int64) * HEAD_DIM + column
    cos = tl.load(angle, mask=column < HEAD_DIM // 2, other=0.0)[None, :]
    sin = tl.load(angle + HEAD_DIM // 2, mask=column < HEAD_DIM // 2, other=0.0)[None, :]
    new_low = (low * cos - high * sin).to(q_out.dtype.element_ty)
    new_high = (high * cos + low * sin).to(q_out.dtype.element_ty)
    query_at = q_out + token * (NUM_HEADS * HEAD_DIM) + head[:, None] * HEAD_DIM + column[None, :]
    query_mask = inside & is_query[:, None]
    tl.store(query_at, new_low, mask=query_mask)
    tl.store(query_at + HEAD_DIM // 2, new_high, mask=query_mask)
    if slot != 0:  # slot 0 pads: page 0 keeps its zeros, so that no padding row can ever make a NaN there
        page = tl.load(page_table + slot.to(tl.int64) * max_pages + position // PAGE_SIZE).to(tl.int64)
        store_at = pages + page * page_stride + kv_head * head_stride + (position % PAGE_SIZE) * HEAD_DIM
        key_at = store_at + row[:, None] * 0 + column[None, :]
        key_mask = inside & (row == GROUP)[:, None]
        tl.store(key_at, new_low, mask=key_mask)
        tl.store(key_at + HEAD_DIM // 2, new_high, mask=key_mask)
        wide = tl.arange(0, 2 * HALF)
        value = qkv + token * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
        value += (NUM_HEADS + NUM_KV_HEADS + kv_head) * HEAD_DIM + wide
        loaded = tl.load(value, mask=wide < HEAD_DIM, other=0.0)
        tl.store(store_at + value_offset + wide, loaded, mask=wide < HEAD_DIM)


def rotate_and_store(
    qkv: Tensor,  # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim] bf16, device
    q_out: Tensor,  # [num_tokens, num_heads, head_dim] bf16, device
    pages: Tensor,  # [num_pages, 2, num_kv_heads, page_size, head_dim] bf16, device
    norm_weight: Tensor | None,  # [num_heads + num_kv_heads, head_dim], device
    eps: float,
    cos_sin: Tensor,  # [max_len, head_dim] float32, device: cosines, then sines
    slots: Tensor,  # [num_tokens] int32, device
    positions: Tensor,  # [num_tokens] int32, device
    page_table: Tensor,  # [num_slots, max_pages] int32, device
) -> None:
    """Norm (if any) and rotate queries and keys; queries to q_out, keys and values to their pages.

    One kernel for six: at 3.3 us each whatever their size they are 0.4 ms a step of 28 layers.
    """
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    num_tokens, num_heads = q_out.shape[0], q_out.shape[1]
    group = num_heads // num_kv_heads
    _rotate_and_store[(num_tokens, num_kv_heads)](
        qkv, q_out, pages, qkv if norm_weight is None else norm_weight, cos_sin, slots, positions, page_table, eps,
        page_table.stride(0), pages.stride(0), pages.stride(1), pages.stride(2),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, PAGE_SIZE=page_size,
        GROUP=group, ROWS=triton.next_power_of_2(group + 1), HALF=triton.next_power_of_2(head_dim // 2),
        HAS_NORM=norm_weight is not None, **pdl(), num_warps=1 if group < 8 else 4,
    )  # fmt: skip


def cos_sin_table(cos: Tensor, sin: Tensor) -> Tensor:
    """[max_len, head_dim] float32 from RotaryTable's doubled cosines and half-negated sines."""
    half = cos.shape[-1] // 2
    return torch.cat((cos[..., :half], sin[..., half:]), -1).reshape(cos.shape[0], -1).float().contiguous()
