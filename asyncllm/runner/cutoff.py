"""Triton: top_k, top_p and min_p without a sort: the least logit each row keeps, and the last id at that logit.

GPU thread. It never knows how a token is drawn from what is left.

A 16-bit logit has 65,536 values, so a histogram of a row is the row, sorted: counts and masses of everything more
likely follow from a scan over it. Sorting 256 rows of 151,936 takes torch about 15 ms.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import triton
import triton.language as tl
from torch import Tensor

from .kernels import HEADER, LOG_MIN_P, NUM_PARAMS, NUM_ROWS, TEMPERATURE, TOP_K, TOP_P, place_of

NUM_KEYS = 1 << 16
_TILE = tl.constexpr(2048)


@triton.jit
def key_of(x):
    """Order-preserving: a larger logit has a larger key; -0.0 is 0.0."""
    bits = (x.to(tl.float32) + 0.0).to(x.dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return tl.where(bits >= 0x8000, 0xFFFF - bits, bits + 0x8000)


@triton.jit
def _value_of(key, like):
    bits = tl.where(key >= 0x8000, key - 0x8000, 0xFFFF - key)
    return bits.to(tl.uint16).to(tl.int16, bitcast=True).to(like, bitcast=True).to(tl.float32)


@triton.jit
def _filters(
    meta, slots, positions, sampling, row, P_T: tl.constexpr, P_K: tl.constexpr, P_P: tl.constexpr, P_M: tl.constexpr,
    NUM_PARAMS: tl.constexpr, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr,
):  # fmt: skip
    slot, _ = place_of(meta, slots, positions, row, HEADER_LEN, H_ROWS)
    sampling += slot * NUM_PARAMS
    temperature = tl.load(sampling + P_T).to(tl.float32, bitcast=True)
    top_k = tl.load(sampling + P_K)
    top_p = tl.load(sampling + P_P).to(tl.float32, bitcast=True)
    log_min_p = tl.load(sampling + P_M).to(tl.float32, bitcast=True)
    active = (temperature > 0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf")))
    return temperature, top_k, top_p, log_min_p, active


@triton.jit
def _histogram(
    meta, slots, positions, sampling, logits, counts, vocab, num_tokens,
    P_T: tl.constexpr, P_K: tl.constexpr, P_P: tl.constexpr, P_M: tl.constexpr, NUM_PARAMS: tl.constexpr,
    HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    _, _, _, _, active = _filters(
        meta, slots, positions, sampling, row, P_T, P_K, P_P, P_M, NUM_PARAMS, HEADER_LEN, H_ROWS
    )
    if active:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        key = key_of(tl.load(logits + row * vocab + i, mask=i < num_tokens, other=0.0))
        tl.atomic_add(counts + row * 65536 + key, 1, mask=i < num_tokens, sem="relaxed")


@triton.jit
def _cut(
    meta, slots, positions, sampling, logits, counts, cutoff, cut_id, vocab, num_tokens,
    P_T: tl.constexpr, P_K: tl.constexpr, P_P: tl.constexpr, P_M: tl.constexpr, NUM_PARAMS: tl.constexpr,
    HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    temperature, top_k, top_p, log_min_p, active = _filters(
        meta, slots, positions, sampling, row, P_T, P_K, P_P, P_M, NUM_PARAMS, HEADER_LEN, H_ROWS
    )
    low_value = float("-inf")
    last_id = num_tokens
    if active:
        like = logits.dtype.element_ty
        limit = tl.where(top_k > 0, top_k, num_tokens)
        histogram = counts + row * 65536
        lane = tl.arange(0, TILE)
        seen = 0
        total = 0.0
        largest = float("-inf")
        for begin in range(0, 65536, TILE):  # from the largest key down: what top_k keeps, and its mass
            key = 65535 - begin - lane
            count = tl.load(histogram + key)
            value = _value_of(key, like)
            largest = tl.maximum(largest, tl.max(tl.where(count > 0, value, float("-inf")), 0))
            before = seen + tl.cumsum(count, 0) - count
            kept = tl.minimum(tl.maximum(limit - before, 0), count)
            mass = tl.where(kept > 0, kept * tl.exp((value - largest) / temperature), 0.0)
            total += tl.sum(mass, 0)
            seen += tl.sum(count, 0)
        allowed = top_p * total
        seen = 0
        passed = 0.0
        cut_key = 65536
        cut_kept = 0
        cut_count = 0
        for begin in range(0, 65536, TILE):
            key = 65535 - begin - lane
            count = tl.load(histogram + key)
            tl.store(histogram + key, lane * 0)  # clean for the next step
            value = _value_of(key, like)
            scaled = (value - largest) / temperature
            before = seen + tl.cumsum(count, 0) - count
            kept = tl.minimum(tl.maximum(limit - before, 0), count)
            one = tl.exp(scaled)
            mass = tl.where(kept > 0, kept * one, 0.0)
            mass_before = passed + tl.cumsum(mass, 0) - mass
            # The j-th of equals stays while mass_before + j * one < allowed.
            fitting = tl.ceil(tl.minimum((allowed - mass_before) / tl.maximum(one, 1e-38), 1e9)).to(tl.int32)
            fitting = tl.where(top_p < 1.0, tl.minimum(tl.maximum(fitting, 0), kept), kept)
            fitting = tl.where(scaled < log_min_p, 0, fitting)
            fitting = tl.where((before == 0) & (count > 0), tl.maximum(fitting, 1), fitting)  # the most likely stays
            lowest = tl.min(tl.where(fitting > 0, key, 65536), 0)
            here = key == lowest
            has = lowest < 65536
            cut_key = tl.where(has, lowest, cut_key)
            cut_kept = tl.where(has, tl.sum(tl.where(here, fitting, 0), 0), cut_kept)
            cut_count = tl.where(has, tl.sum(tl.where(here, count, 0), 0), cut_count)
            seen += tl.sum(count, 0)
            passed += tl.sum(mass, 0)
        low_value = tl.max(_value_of(cut_key + lane * 0, like), 0)
        if cut_kept < cut_count:  # equals beyond the cut: the lowest ids stay
            found = 0
            block = 0
            while found < cut_kept:
                i = block * BLOCK + tl.arange(0, BLOCK)
                x = tl.load(logits + row * vocab + i, mask=i < num_tokens, other=0.0)
                equal = ((i < num_tokens) & (key_of(x) == cut_key)).to(tl.int32)
                rank = found + tl.cumsum(equal, 0)
                last_id = tl.where(
                    found + tl.sum(equal, 0) >= cut_kept,
                    tl.max(tl.where((equal > 0) & (rank == cut_kept), i, 0), 0),
                    last_id,
                )
                found += tl.sum(equal, 0)
                block += 1
                found = tl.where(block * BLOCK >= num_tokens, cut_kept, found)  # NaN rows: never for ever
    tl.store(cutoff + row, low_value)
    tl.store(cut_id + row, last_id)


def find_cuts(
    meta: Tensor,
    slots: Tensor,
    positions: Tensor,
    sampling: Tensor,  # [num_slots, NUM_PARAMS] int32, device
    logits: Tensor,  # [num_rows, vocab_size] 16-bit, device; banned places are -inf already
    counts: Tensor,  # [max_rows, NUM_KEYS] int32, device; all 0, and all 0 again afterwards
    cut: tuple[Tensor, Tensor],  # [max_rows] float32 and int32, device: written
    num_tokens: int,
) -> None:
    """What rows without a filter keep is everything: (-inf, num_tokens)."""
    num_rows, vocab = logits.shape
    places = {"P_T": TEMPERATURE, "P_K": TOP_K, "P_P": TOP_P, "P_M": LOG_MIN_P, "NUM_PARAMS": NUM_PARAMS,
              "HEADER_LEN": HEADER, "H_ROWS": NUM_ROWS, "BLOCK": 4096, "num_warps": 8}  # fmt: skip
    _histogram[(num_rows, triton.cdiv(num_tokens, 4096))](
        meta, slots, positions, sampling, logits, counts, vocab, num_tokens, **places
    )
    _cut[(num_rows,)](meta, slots, positions, sampling, logits, counts, *cut, vocab, num_tokens, **places, TILE=_TILE)
