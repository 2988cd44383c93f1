"""Triton: the first and the last kernels of a step: unpack, gather, sample, scatter.

GPU thread. They never know a model; the sampler's numbers are sampler.py's, draw for draw.

A step's arrays travel packed in one int32 entry, dense, in the order of Packer (frame.py):
header | rows | slots | positions | table writes.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import triton
import triton.language as tl
from torch import Tensor

from ..models.kernels import enter, pdl

# Places in the header.
NUM_TOKENS, NUM_DECODES, OUTPUT, NUM_WRITES, NUM_ROWS = range(5)
HEADER = 16
# What a slot samples by, in the device's table: floats as their bits.
TEMPERATURE, SEED_LOW, SEED_HIGH, TOP_K, TOP_P, LOG_MIN_P, PRESENCE, FREQUENCY, REPETITION = range(9)
# COUNTS and RESTRICTED are flags; NUM_TOP is one more than the alternatives to report, 0 for no report at all.
COUNTS, RESTRICTED, PROMPT_LEN, KNOWN_LEN, MIN_LEN, NUM_BIASES, NUM_STOPS, NUM_WORDS, NUM_TOP = range(9, 18)
NUM_PARAMS = 18
_UNPACKERS = 128  # programs; each strides over whatever there is
_H = {"H_TOKENS": NUM_TOKENS, "H_WRITES": NUM_WRITES}

# __nv_logf is exact to 1 ulp; __nv_fast_logf is lg2.approx, good to 2^-22, absolutely. The interpreter knows neither.
if triton.knobs.runtime.interpret:

    @triton.jit
    def _log(x):
        return tl.log(x)

    @triton.jit
    def _fast_log(x):
        return tl.log(x)

else:
    from triton.language.extra import libdevice

    @triton.jit
    def _log(x):
        return libdevice.log(x)

    @triton.jit
    def _fast_log(x):
        return libdevice.fast_logf(x)


@triton.jit
def _unpack(
    ring, counter, meta, state, slots, positions, entry_len,
    RING: tl.constexpr, HEAD: tl.constexpr, H_TOKENS: tl.constexpr, H_WRITES: tl.constexpr,
    BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Copy the entry's arrays to where the graph's kernels look for them; write the tables."""
    entry = ring + (tl.load(counter) % RING).to(tl.int64) * entry_len
    num_tokens = tl.load(entry + H_TOKENS)
    num_writes = tl.load(entry + H_WRITES)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    for begin in range(0, HEAD, PROGRAMS * BLOCK):
        i = begin + lane
        tl.store(meta + i, tl.load(entry + i, mask=i < HEAD), mask=i < HEAD)
    for begin in range(0, num_tokens, PROGRAMS * BLOCK):
        i = begin + lane
        tl.store(slots + i, tl.load(entry + HEAD + i, mask=i < num_tokens), mask=i < num_tokens)
        tl.store(positions + i, tl.load(entry + HEAD + num_tokens + i, mask=i < num_tokens), mask=i < num_tokens)
    writes = entry + HEAD + 2 * num_tokens
    for begin in range(0, num_writes, PROGRAMS * BLOCK):
        i = begin + lane
        at = tl.load(writes + i, mask=i < num_writes, other=0)
        tl.store(state + at, tl.load(writes + num_writes + i, mask=i < num_writes), mask=i < num_writes)


def unpack(
    ring: Tensor,  # [RING, entry_len] int32, device
    counter: Tensor,  # [1] int32, device: steps so far
    meta: Tensor,  # [head] int32, device: header and rows of the running step
    state: Tensor,  # [state_len] int32, device: token pool, page table and sampling parameters, side by side
    slots: Tensor,  # [max_tokens] int32, device
    positions: Tensor,  # [max_tokens] int32, device
) -> None:
    _unpack[(_UNPACKERS,)](
        ring, counter, meta, state, slots, positions, ring.shape[1], RING=ring.shape[0], HEAD=meta.shape[0],
        **_H, BLOCK=128, PROGRAMS=_UNPACKERS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_tables"])  # else three compilations for one
def _gather(
    meta, counter, token_pool, page_table, slots, positions, embedding, residual, tables, seq_lens,
    max_len, max_pages, num_tables,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr, HEADER_DECODES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token: its embedding; for a decode row also its pages, side by side, and its length."""
    enter(PDL)
    token = tl.program_id(0)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    if token == 0:
        tl.store(counter, tl.load(counter) + 1)
    token_id = tl.load(token_pool + slot * max_len + position).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(embedding + token_id * SIZE + column, mask=inside, other=0.0)
    tl.store(residual + token.to(tl.int64) * SIZE + column, x, mask=inside)
    if token < num_tables:
        # A token that is no decode row reads one zero of the dummy page: a row of length 0 would be nobody's share.
        decodes = token < tl.load(meta + HEADER_DECODES)
        length = tl.where(decodes, position + 1, 1)
        tl.store(seq_lens + token, length)
        num_pages = (length + PAGE_SIZE - 1) // PAGE_SIZE
        source = page_table + tl.where(decodes, slot, 0) * max_pages
        for begin in range(0, num_pages, 256):
            i = begin + tl.arange(0, 256)
            page = tl.load(source + i, mask=i < num_pages, other=0)
            tl.store(tables + token.to(tl.int64) * max_pages + i, tl.where(decodes, page, 0), mask=i < num_pages)


def gather(
    meta: Tensor,
    counter: Tensor,
    token_pool: Tensor,
    page_table: Tensor,
    slots: Tensor,  # [num_tokens] int32, device
    positions: Tensor,
    embedding: Tensor,  # [vocab_size, hidden_size] bf16, device
    residual: Tensor,  # [num_tokens, hidden_size] bf16, device
    tables: Tensor,  # [num_decodes padded, max_pages] int32, device
    seq_lens: Tensor,  # [num_decodes padded] int32, device
    page_size: int,
) -> None:
    size = embedding.shape[1]
    _gather[(slots.shape[0],)](
        meta, counter, token_pool, page_table, slots, positions, embedding, residual, tables, seq_lens,
        token_pool.shape[1], page_table.shape[1], seq_lens.shape[0],
        SIZE=size, BLOCK=triton.next_power_of_2(size), PAGE_SIZE=page_size, HEADER_DECODES=NUM_DECODES, **pdl(),
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip


@triton.jit
def place_of(meta, slots, positions, row, HEADER_LEN: tl.constexpr, H_ROWS: tl.constexpr):
    """(slot, position) of the token that a row draws; the dummy's (0, 0) for a padding row."""
    live = row < tl.load(meta + H_ROWS)
    last = tl.where(live, tl.load(meta + HEADER_LEN + row), 0)
    slot = tl.where(live, tl.load(slots + last), 0)
    position = tl.where(live, tl.load(positions + last) + 1, 0)
    return slot.to(tl.int64), position.to(tl.int64)


@triton.jit
def _key(low, high, position):
    """sampler.mix: SplitMix64's finaliser over seed + (position + 1) * golden."""
    seed = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    x = seed + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(word):
    return ((word >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23; exact


@triton.jit
def _noise(counter, key):
    """sampler.gumbel of the token ids 4 * counter .. 4 * counter + 3, interleaved, to about 1e-6.

    Exact logarithms of all ids took 0.15 ms a step at 256 rows; only the best of each block needs them.
    """
    zero = counter * 0
    a, b, c, d = tl.philox(key, counter, zero, zero, zero)
    words = tl.interleave(tl.interleave(a, c), tl.interleave(b, d)).to(tl.uint32, bitcast=True)
    rest = ((0x7FFFFF - (words >> 9)).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 1 - uniform; exact
    # -log(1 - rest): near 0, where the largest noise comes from, by its series, for lg2.approx is useless there.
    series = rest * (1 + rest * (0.5 + rest * (0.3333333 + rest * 0.25)))
    return -_fast_log(tl.where(rest < 0.03, series, -_fast_log(_uniform(words))))


@triton.jit
def _exact_noise(token_id, key):
    counter = token_id // 4
    zero = counter * 0
    a, b, c, d = tl.philox(key, counter, zero, zero, zero)
    rest = token_id % 4
    word = tl.where(rest == 0, a, tl.where(rest == 1, b, tl.where(rest == 2, c, d))).to(tl.uint32, bitcast=True)
    return -_log(-_log(_uniform(word)))


@triton.jit
def _draw_block(
    meta, slots, positions, sampling, logits, best, best_id, largest, cutoff, cut_id, vocab, num_tokens, num_blocks,
    P_T: tl.constexpr, P_LOW: tl.constexpr, P_HIGH: tl.constexpr, NUM_PARAMS: tl.constexpr, H_ROWS: tl.constexpr,
    HEADER_LEN: tl.constexpr, BLOCK: tl.constexpr, SAMPLE: tl.constexpr, FILTER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best token among BLOCK of one row: by logit, or by scaled logit plus noise; relative to the block's
    largest logit, so that no temperature overflows."""
    enter(PDL)
    row, block = tl.program_id(0), tl.program_id(1)
    token_id = block * BLOCK + tl.arange(0, BLOCK)
    inside = token_id < num_tokens
    x = tl.load(logits + row.to(tl.int64) * vocab + token_id, mask=inside, other=float("-inf")).to(tl.float32)
    top = tl.max(x, 0)
    top = tl.where(tl.max((x != x).to(tl.int32), 0) > 0, float("nan"), top)
    finite_top = tl.where(top > float("-inf"), top, 0.0)
    value = x - finite_top
    if SAMPLE:
        slot, position = place_of(meta, slots, positions, row, HEADER_LEN, H_ROWS)
        temperature = tl.load(sampling + slot * NUM_PARAMS + P_T).to(tl.float32, bitcast=True)
        low = tl.load(sampling + slot * NUM_PARAMS + P_LOW)
        key = _key(low, tl.load(sampling + slot * NUM_PARAMS + P_HIGH), position)
        if temperature > 0:
            value = value / temperature
            if FILTER:
                least, last = tl.load(cutoff + row), tl.load(cut_id + row)
                value = tl.where((x > least) | ((x == least) & (token_id <= last)), value, float("-inf"))
            value += _noise(block * (BLOCK // 4) + tl.arange(0, BLOCK // 4), key)
    winner = block * BLOCK + tl.argmax(value, 0, tie_break_left=True)
    winning = tl.max(value, 0)
    if SAMPLE:
        if temperature > 0:
            if winning > float("-inf"):
                logit = tl.load(logits + row.to(tl.int64) * vocab + winner).to(tl.float32)
                winning = (logit - finite_top) / temperature + _exact_noise(winner, key)
    at = row * num_blocks + block
    tl.store(best + at, winning)
    tl.store(best_id + at, winner)
    tl.store(largest + at, top)


@triton.jit
def _draw_row(
    meta, slots, positions, sampling, best, best_id, largest, outputs, token_pool, counts, max_rows, max_len,
    num_tokens, num_blocks,
    P_T: tl.constexpr, P_COUNTS: tl.constexpr, NUM_PARAMS: tl.constexpr, H_ROWS: tl.constexpr,
    HEADER_LEN: tl.constexpr, H_OUTPUT: tl.constexpr, BLOCKS: tl.constexpr, COUNT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The best of a row's blocks, to the output ring and to the token pool; counted, where the slot counts."""
    enter(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    inside = block < num_blocks
    at = row * num_blocks + block
    top = tl.load(largest + at, mask=inside, other=float("-inf"))
    is_nan = tl.max((top != top).to(tl.int32), 0) > 0
    overall = tl.max(top, 0)
    slot, position = place_of(meta, slots, positions, row, HEADER_LEN, H_ROWS)
    temperature = tl.load(sampling + slot * NUM_PARAMS + P_T).to(tl.float32, bitcast=True)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    value = tl.load(best + at, mask=inside, other=float("-inf")) + (top - overall) / temperature
    value = tl.where(top > float("-inf"), value, float("-inf"))
    winner = tl.argmax(value, 0, tie_break_left=True)
    token_id = tl.max(tl.where(block == winner, tl.load(best_id + at, mask=inside, other=0), 0), 0)
    broken = is_nan | (overall == float("inf")) | (overall == float("-inf"))
    undrawn = tl.where(is_nan | (overall == float("inf")), -1, -2)  # NO_TOKEN, ALL_BARRED
    output = tl.load(meta + H_OUTPUT)
    tl.store(outputs + output * max_rows + row, tl.where(broken, undrawn, token_id))
    # The pool takes a harmless id where there is none: the row may be in the next step already.
    tl.store(token_pool + slot * max_len + position, tl.where(broken, 0, token_id))
    if COUNT:
        if tl.load(sampling + slot * NUM_PARAMS + P_COUNTS) > 0:
            count = counts + slot * num_tokens + token_id
            tl.store(count, tl.load(count) + tl.where(broken, 0, 1))


BLOCK_TOKENS = 4096  # of a row's logits a program draws from; 38 programs a row at 151,936


def draw(
    meta: Tensor,
    slots: Tensor,
    positions: Tensor,
    sampling: Tensor,  # [num_slots, NUM_PARAMS] int32, device
    logits: Tensor,  # [num_rows, vocab_size] bf16, device
    num_tokens: int,  # ids that may be drawn; the head's rows beyond are padding
    scratch: tuple[Tensor, Tensor, Tensor],  # [max_rows * blocks]: best float32, id int32, largest float32
    outputs: Tensor,  # [RING, max_rows] int32, device
    token_pool: Tensor,
    cut: tuple[Tensor, Tensor] | None,  # [max_rows]: least logit kept float32, last id kept at that logit int32
    counts: Tensor | None = None,  # [num_slots, num_tokens] int32, device
    *,
    sample: bool,
) -> None:
    """One token a row, into the step's row of `outputs` and into the token pool."""
    num_rows, vocab = logits.shape
    num_blocks = triton.cdiv(num_tokens, BLOCK_TOKENS)
    best, best_id, largest = scratch
    cutoff, cut_id = cut or (best, best_id)
    places = {"NUM_PARAMS": NUM_PARAMS, "H_ROWS": NUM_ROWS, "HEADER_LEN": HEADER, "P_T": TEMPERATURE}
    _draw_block[(num_rows, num_blocks)](
        meta, slots, positions, sampling, logits, best, best_id, largest, cutoff, cut_id, vocab, num_tokens, num_blocks,
        **places, P_LOW=SEED_LOW, P_HIGH=SEED_HIGH, BLOCK=BLOCK_TOKENS, SAMPLE=sample, FILTER=cut is not None,
        **pdl(), num_warps=4,
    )  # fmt: skip
    _draw_row[(num_rows,)](
        meta, slots, positions, sampling, best, best_id, largest, outputs, token_pool,
        outputs if counts is None else counts, outputs.shape[1], token_pool.shape[1], num_tokens, num_blocks, **places,
        P_COUNTS=COUNTS, H_OUTPUT=OUTPUT, BLOCKS=triton.next_power_of_2(num_blocks), COUNT=counts is not None,
        **pdl(), num_warps=1,
    )  # fmt: skip
