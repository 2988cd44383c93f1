"""Triton: what stands between logits and temperature, in place: biases, allowed ids, bad words, penalties, and counts.

GPU thread. The numbers are shaping.py's, rounded once to the logits' 16 bits. It never knows how a token is drawn.

A slot's rules are one stretch of int32, written with its row: ids and values of its biases, its stop ids, and its bad
words, each as (begin, length) of a stretch of ids. A slot's counts are one int32 an id, as shaping.py has them.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import triton
import triton.language as tl
from torch import Tensor

from ..types import MAX_BAD_IDS, MAX_BAD_WORDS, MAX_BIASES
from . import kernels as k
from .kernels import place_of
from .shaping import IN_PROMPT

MAX_STOPS = 256  # stop ids: a request's 64, and the model's own
MAX_SPELLINGS = 2 * MAX_BAD_WORDS
# Places in a slot's rules.
BIAS_VALUES = MAX_BIASES
STOPS = 2 * MAX_BIASES
WORDS = STOPS + MAX_STOPS  # begins, then lengths
WORD_IDS = WORDS + 2 * MAX_SPELLINGS
NUM_RULES = WORD_IDS + MAX_BAD_IDS

_BLOCK = 4096


@triton.jit
def _edit(
    meta, slots, positions, sampling, rules, token_pool, logits, vocab, max_len,
    P_BIASES: tl.constexpr, P_STOPS: tl.constexpr, P_WORDS: tl.constexpr, P_MIN: tl.constexpr, P_PROMPT: tl.constexpr,
    NUM_PARAMS: tl.constexpr, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr, NUM_RULES: tl.constexpr,
    BIAS_VALUES: tl.constexpr, STOPS: tl.constexpr, WORDS: tl.constexpr, WORD_IDS: tl.constexpr,
    SPELLINGS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What touches few ids. Biases first: an id may be biased and banned."""
    row = tl.program_id(0).to(tl.int64)
    slot, position = place_of(meta, slots, positions, row, HEADER_LEN, H_ROWS)
    sampling += slot * NUM_PARAMS
    rules += slot * NUM_RULES
    logits += row * vocab
    num_biases = tl.load(sampling + P_BIASES)
    for begin in range(0, num_biases, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < num_biases
        at = logits + tl.load(rules + i, mask=inside, other=0)
        bias = tl.load(rules + BIAS_VALUES + i, mask=inside, other=0).to(tl.float32, bitcast=True)
        x = tl.load(at, mask=inside, other=0.0).to(tl.float32)
        tl.store(at, (x + bias).to(logits.dtype.element_ty), mask=inside)
    tl.debug_barrier()
    num_stops = tl.where(position < tl.load(sampling + P_MIN), tl.load(sampling + P_STOPS), 0)
    for begin in range(0, num_stops, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        stop = tl.load(rules + STOPS + i, mask=i < num_stops, other=0)
        tl.store(logits + stop, float("-inf"), mask=i < num_stops)
    num_words = tl.load(sampling + P_WORDS)
    if num_words > 0:
        word = tl.arange(0, SPELLINGS)
        is_word = word < num_words
        first = tl.load(rules + WORDS + word, mask=is_word, other=0)
        num_before = tl.load(rules + WORDS + SPELLINGS + word, mask=is_word, other=1) - 1
        # Of the output alone: a word that the prompt begins is not the model's.
        fits = is_word & (position - num_before >= tl.load(sampling + P_PROMPT))
        for j in range(0, tl.max(num_before, 0)):
            compared = fits & (j < num_before)
            there = tl.load(token_pool + slot * max_len + position - num_before + j, mask=compared, other=0)
            fits = fits & ((j >= num_before) | (there == tl.load(rules + WORD_IDS + first + j, mask=compared, other=0)))
        last = tl.load(rules + WORD_IDS + first + num_before, mask=fits, other=0)
        tl.store(logits + last, float("-inf"), mask=fits)


@triton.jit
def _penalise(
    meta, slots, positions, sampling, allowed, counts, logits, vocab, num_tokens, num_words,
    P_PRESENCE: tl.constexpr, P_FREQUENCY: tl.constexpr, P_REPETITION: tl.constexpr, P_COUNTS: tl.constexpr,
    P_RESTRICTED: tl.constexpr, NUM_PARAMS: tl.constexpr, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr,
    OUTPUT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """What may touch every id; a block of a row that has nothing of it ends at once."""
    row = tl.program_id(0).to(tl.int64)
    slot, _ = place_of(meta, slots, positions, row, HEADER_LEN, H_ROWS)
    sampling += slot * NUM_PARAMS
    counting = tl.load(sampling + P_COUNTS)
    restricted = tl.load(sampling + P_RESTRICTED)
    if counting + restricted > 0:
        i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = i < num_tokens
        count = tl.load(counts + slot * num_tokens + i, mask=i < counting * num_tokens, other=0)
        changed = (count > 0) | (i < restricted * num_tokens)
        at = logits + row * vocab + i
        x = tl.load(at, mask=changed, other=0.0).to(tl.float32)
        if restricted > 0:
            word = tl.load(allowed + slot * num_words + i // 32, mask=inside, other=0)
            x = tl.where(((word >> (i % 32)) & 1) != 0, x, float("-inf"))
        if counting > 0:
            presence = tl.load(sampling + P_PRESENCE).to(tl.float32, bitcast=True)
            frequency = tl.load(sampling + P_FREQUENCY).to(tl.float32, bitcast=True)
            repetition = tl.load(sampling + P_REPETITION).to(tl.float32, bitcast=True)
            num_output = (count & OUTPUT).to(tl.float32)
            x = tl.where(count > 0, tl.where(x > 0, x / repetition, x * repetition), x)
            x = x - frequency * num_output - tl.where(num_output > 0, presence, 0.0)
        tl.store(at, x.to(logits.dtype.element_ty), mask=changed)


def shape(
    meta: Tensor,
    slots: Tensor,
    positions: Tensor,
    sampling: Tensor,  # [num_slots, NUM_PARAMS] int32, device
    rules: Tensor,  # [num_slots, NUM_RULES] int32, device
    allowed: Tensor,  # [num_slots, num_tokens / 32] int32, device: a bit an id
    counts: Tensor,  # [num_slots, num_tokens] int32, device
    token_pool: Tensor,
    logits: Tensor,  # [num_rows, vocab_size] 16-bit, device: changed in place
) -> None:
    num_rows, vocab = logits.shape
    num_tokens = counts.shape[1]
    places = {"NUM_PARAMS": k.NUM_PARAMS, "HEADER_LEN": k.HEADER, "H_ROWS": k.NUM_ROWS}
    _edit[(num_rows,)](
        meta, slots, positions, sampling, rules, token_pool, logits, vocab, token_pool.shape[1], **places,
        P_BIASES=k.NUM_BIASES, P_STOPS=k.NUM_STOPS, P_WORDS=k.NUM_WORDS, P_MIN=k.MIN_LEN, P_PROMPT=k.PROMPT_LEN,
        NUM_RULES=NUM_RULES, BIAS_VALUES=BIAS_VALUES, STOPS=STOPS, WORDS=WORDS, WORD_IDS=WORD_IDS,
        SPELLINGS=MAX_SPELLINGS, BLOCK=128, num_warps=4,
    )  # fmt: skip
    _penalise[(num_rows, triton.cdiv(num_tokens, _BLOCK))](
        meta, slots, positions, sampling, allowed, counts, logits, vocab, num_tokens, allowed.shape[1], **places,
        P_PRESENCE=k.PRESENCE, P_FREQUENCY=k.FREQUENCY, P_REPETITION=k.REPETITION, P_COUNTS=k.COUNTS,
        P_RESTRICTED=k.RESTRICTED, OUTPUT=IN_PROMPT - 1, BLOCK=_BLOCK, num_warps=8,
    )  # fmt: skip


@triton.jit
def _forget(slots, counts, num_tokens, BLOCK: tl.constexpr):
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(counts + slot * num_tokens + i, i * 0, mask=i < num_tokens)


@triton.jit
def _count(
    slots, sampling, token_pool, counts, num_tokens, max_len,
    P_KNOWN: tl.constexpr, P_PROMPT: tl.constexpr, NUM_PARAMS: tl.constexpr, MARK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    known_len = tl.load(sampling + slot * NUM_PARAMS + P_KNOWN)
    prompt_len = tl.load(sampling + slot * NUM_PARAMS + P_PROMPT)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token_id = tl.load(token_pool + slot * max_len + i, mask=i < known_len, other=0)
    at = counts + slot * num_tokens + token_id
    tl.atomic_or(at, i * 0 + MARK, mask=i < prompt_len, sem="relaxed")
    tl.atomic_add(at, i * 0 + 1, mask=(i >= prompt_len) & (i < known_len), sem="relaxed")


def recount(slots: Tensor, sampling: Tensor, token_pool: Tensor, counts: Tensor, longest: int) -> None:
    """Count the texts of these slots anew, from the token pool. slots: [n] int32, device; longest: of their texts."""
    num_tokens = counts.shape[1]
    _forget[(len(slots), triton.cdiv(num_tokens, _BLOCK))](slots, counts, num_tokens, BLOCK=_BLOCK, num_warps=4)
    _count[(len(slots), triton.cdiv(longest, 1024))](
        slots, sampling, token_pool, counts, num_tokens, token_pool.shape[1],
        P_KNOWN=k.KNOWN_LEN, P_PROMPT=k.PROMPT_LEN, NUM_PARAMS=k.NUM_PARAMS, MARK=IN_PROMPT, BLOCK=1024, num_warps=4,
    )  # fmt: skip
