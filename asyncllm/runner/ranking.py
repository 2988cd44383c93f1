"""Triton: log probabilities of tokens and the likeliest in their places, of logits as the model left them.

GPU thread. It never knows how a token was chosen or who asks.

A block of a row finds its own largest by maxima over one int32 that holds a logit's order and, below it, its place:
a maximum costs less than an argmax, and among equals the lowest id wins by itself. A second kernel merges the blocks.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import triton
import triton.language as tl
from torch import Tensor

from ..types import LEAST_LOGPROB, MAX_LOGPROBS
from . import kernels as k
from .cutoff import key_of
from .kernels import place_of

BLOCK = 4096  # 16 bits of order and 12 of place fit an int32
WIDTH = 1 + 2 * MAX_LOGPROBS  # of a result: the token's own, the likeliest ids, theirs; floats as their bits


@triton.jit
def _num_top(
    meta, slots, positions, sampling, row, asked,
    P_TOP: tl.constexpr, NUM_PARAMS: tl.constexpr, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr,
):  # fmt: skip
    """Alternatives the row asks for; -1: not even its own. `asked` of a prompt's rows, else what the slot says."""
    slot, _ = place_of(meta, slots, positions, row, HEADER_LEN, H_ROWS)
    return tl.where(asked >= 0, asked, tl.load(sampling + slot * NUM_PARAMS + P_TOP) - 1)


@triton.jit(do_not_specialize=["asked"])
def _rank_block(
    meta, slots, positions, sampling, logits, largest, sums, found, vocab, num_tokens, num_blocks, asked,
    P_TOP: tl.constexpr, NUM_PARAMS: tl.constexpr, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr,
    MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_top = _num_top(meta, slots, positions, sampling, row, asked, P_TOP, NUM_PARAMS, HEADER_LEN, H_ROWS)
    if num_top >= 0:
        lane = tl.arange(0, BLOCK)
        inside = block * BLOCK + lane < num_tokens
        x = tl.load(logits + row * vocab + block * BLOCK + lane, mask=inside, other=float("-inf"))
        value = x.to(tl.float32)
        top = tl.max(value, 0)
        at = row * num_blocks + block
        tl.store(largest + at, top)
        tl.store(sums + at, tl.sum(tl.exp(value - tl.where(top > float("-inf"), top, 0.0)), 0))
        packed = tl.where(inside, key_of(x) * BLOCK + (BLOCK - 1 - lane), -1)
        for j in range(0, num_top):
            best = tl.max(packed, 0)
            tl.store(found + at * MOST + j, best)
            packed = tl.where(packed == best, -1, packed)


@triton.jit(do_not_specialize=["asked"])
def _rank_row(
    meta, slots, positions, sampling, logits, largest, sums, found, targets, out, vocab, num_blocks, max_rows, asked,
    P_TOP: tl.constexpr, NUM_PARAMS: tl.constexpr, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr,
    H_OUTPUT: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LANES: tl.constexpr,
    WIDTH: tl.constexpr, LEAST: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """targets: the token of each row; DRAWN: in the step's row of the output ring, as the results are."""
    row = tl.program_id(0).to(tl.int64)
    num_top = _num_top(meta, slots, positions, sampling, row, asked, P_TOP, NUM_PARAMS, HEADER_LEN, H_ROWS)
    if num_top >= 0:
        block = tl.arange(0, BLOCKS)
        inside = block < num_blocks
        tops = tl.load(largest + row * num_blocks + block, mask=inside, other=float("-inf"))
        top = tl.max(tops, 0)
        part = tl.load(sums + row * num_blocks + block, mask=inside, other=0.0)
        # A block without a finite number has a sum of nothing.
        total = tl.sum(tl.where(tops > float("-inf"), part * tl.exp(tops - top), 0.0), 0)
        whole = top + tl.log(total)
        place = row
        if DRAWN:
            place += tl.load(meta + H_OUTPUT) * max_rows
        result = out + place * WIDTH
        token_id = tl.maximum(tl.load(targets + place), 0)
        own = tl.load(logits + row * vocab + token_id).to(tl.float32) - whole
        tl.store(result, tl.maximum(own, LEAST).to(tl.int32, bitcast=True))
        lane = tl.arange(0, LANES)
        candidate = (lane // MOST < num_blocks) & (lane % MOST < num_top)
        packed = tl.load(found + row * num_blocks * MOST + lane, mask=candidate, other=-1)
        ids = lane // MOST * BLOCK + (BLOCK - 1 - packed % BLOCK)
        merged = tl.where(packed >= 0, ((packed // BLOCK).to(tl.int64) << 31) | (0x7FFFFFFF - ids), -1)
        for j in range(0, num_top):
            best = tl.max(merged, 0)
            likely = tl.where(best >= 0, 0x7FFFFFFF - (best & 0x7FFFFFFF), 0)
            value = tl.load(logits + row * vocab + likely).to(tl.float32) - whole
            value = tl.where(best >= 0, tl.maximum(value, LEAST), LEAST)
            tl.store(result + 1 + j, likely.to(tl.int32))
            tl.store(result + 1 + MOST + j, value.to(tl.int32, bitcast=True))
            merged = tl.where(merged == best, -1, merged)


def rank(
    meta: Tensor,
    slots: Tensor,
    positions: Tensor,
    sampling: Tensor,  # [num_slots, NUM_PARAMS] int32, device
    logits: Tensor,  # [num_rows, vocab_size] 16-bit, device
    num_tokens: int,
    scratch: tuple[Tensor, Tensor, Tensor],  # [max_rows * blocks] float32 twice; [the same * MAX_LOGPROBS] int32
    targets: Tensor,  # [..., max_rows] int32, device: the tokens in question
    out: Tensor,  # [..., max_rows, WIDTH] int32, device: written for rows that ask
    *,
    asked: int | None = None,  # alternatives, of every row; None: the step's drawn rows, as their slots say
) -> None:
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(num_tokens, BLOCK)
    places = {"P_TOP": k.NUM_TOP, "NUM_PARAMS": k.NUM_PARAMS, "HEADER_LEN": k.HEADER, "H_ROWS": k.NUM_ROWS,
              "MOST": MAX_LOGPROBS, "BLOCK": BLOCK}  # fmt: skip
    number = -1 if asked is None else asked
    _rank_block[(num_rows, num_blocks)](
        meta, slots, positions, sampling, logits, *scratch, vocab, num_tokens, num_blocks, number, **places, num_warps=8
    )
    _rank_row[(num_rows,)](
        meta, slots, positions, sampling, logits, *scratch, targets, out, vocab, num_blocks,
        targets.shape[-1] if asked is None else 0, number, **places,
        H_OUTPUT=k.OUTPUT, BLOCKS=triton.next_power_of_2(num_blocks),
        LANES=triton.next_power_of_2(num_blocks * MAX_LOGPROBS), WIDTH=WIDTH, LEAST=LEAST_LOGPROB,
        DRAWN=asked is None, num_warps=4,
    )  # fmt: skip
