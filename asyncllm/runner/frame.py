"""The fixed places of a step on a CUDA device, and the packing of a Batch into the one array that fills them.

GPU thread. It never knows kernels' insides, models or streams.

A packed entry, int32, dense:
    header [HEADER] | last token of each row that draws [max_rows] | slots [T] | positions [T]
    | table places, values [2, num_writes]
T is the step's padded number of tokens. Padding has slot 0, position 0; padding rows draw greedily for slot 0.
What a decode step sends is its slots and starts, and a page here and there: all else is on the device.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import EngineConfig
from ..device.base import Device
from ..engine.batch import Batch, NewRow
from . import kernels as k
from .penalties import BIAS_VALUES, MAX_SPELLINGS, MAX_STOPS, NUM_RULES, STOPS, WORD_IDS, WORDS
from .ranking import WIDTH
from .sampler import TINIEST
from .state import OUTPUT_RING

Int32 = NDArray[np.int32]


class Kind(NamedTuple):
    """Which tail a step needs, by what some row of it uses; nobody pays for what no row uses."""

    sample: bool = False
    cut: bool = False  # top_k, top_p or min_p
    shape: bool = False  # biases, allowed ids, bad words, stop ids before min_tokens, penalties
    rank: bool = False  # log probabilities
    mask: bool = False  # grammars

    @classmethod
    def of(cls, uses: int) -> "Kind":
        """Of SAMPLES, CUTS, SHAPES, RANKS and MASKS together. With the latter three the first come along, with MASKS
        all but RANKS: kernels that find no row of theirs cost less than graphs of every combination."""
        more, masks = uses >= SHAPES, bool(uses & MASKS)
        return cls(more or uses > 0, more or bool(uses & CUTS), masks or bool(uses & SHAPES), bool(uses & RANKS), masks)

    def __str__(self) -> str:
        return "+".join(name for name, on in self._asdict().items() if on) or "greedy"


SAMPLES, CUTS, SHAPES, RANKS, MASKS = 1, 2, 4, 8, 16
KIND_OF = tuple(Kind.of(uses) for uses in range(32))
KINDS = tuple(Kind.of(u) for u in (0, SAMPLES, SAMPLES | CUTS, SHAPES, RANKS, SHAPES | RANKS, MASKS, MASKS | RANKS))


class Shape(NamedTuple):
    """Which graphs serve a step: the buckets its numbers of tokens, decode rows and drawing rows fall into."""

    num_tokens: int
    num_decodes: int
    has_prefill: bool


class Packed(NamedTuple):
    used: int  # int32s of the entry
    num_decodes: int  # leading rows of one token
    num_rows: int  # that want a token
    kind: Kind


class Frame:
    """Device tables and the running step's arrays."""

    def __init__(self, device: Device, config: EngineConfig, ring: int, num_tokens: int) -> None:
        num_slots = config.max_running + 1
        self.max_rows = config.max_running
        self.max_len = config.max_model_len + 1  # a step launched ahead of a finish draws one token too many
        self.max_pages = -(-self.max_len // config.page_size)
        self.page_size = config.page_size
        self.max_tokens = config.max_step_tokens
        self.head = k.HEADER + self.max_rows
        # Room for the longest prompt twice over, or 64 pages for every slot; Packer raises TooLong beyond.
        self.entry_len = self.head + 2 * self.max_tokens + max(4 * self.max_len, 2 * num_slots * 64) + 4096
        num_words = -(-num_tokens // 32)
        widths = (self.max_len, self.max_pages, k.NUM_PARAMS, NUM_RULES, num_words)
        parts = [num_slots * width for width in widths]
        self.table_at, self.params_at, self.rules_at, self.allowed_at = np.cumsum(parts[:-1]).tolist()
        self.state = device.zeros((sum(parts),), torch.int32)  # one allocation, so that one list of writes serves all
        pool, table, params, rules, allowed = torch.split(self.state, parts)
        self.token_pool = pool.view(num_slots, self.max_len)
        self.page_table = table.view(num_slots, self.max_pages)
        self.params = params.view(num_slots, k.NUM_PARAMS)  # what each slot samples by
        self.rules = rules.view(num_slots, NUM_RULES)
        self.allowed = allowed.view(num_slots, num_words)
        self.counts = device.zeros((num_slots, num_tokens), torch.int32)  # of slots that penalise
        self.ring = device.zeros((ring, self.entry_len), torch.int32)
        self.counter = device.zeros((1,), torch.int32)  # steps whose forward has begun: the ring's place
        self.meta = device.zeros((self.head,), torch.int32)
        self.rows = self.meta[k.HEADER :]  # [max_rows]
        self.slots = device.zeros((self.max_tokens,), torch.int32)
        self.positions = device.zeros((self.max_tokens,), torch.int32)
        self.tables = device.zeros((self.max_rows, self.max_pages), torch.int32)  # of the step's decode rows
        self.seq_lens = device.zeros((self.max_rows,), torch.int32)
        self.outputs = device.zeros((OUTPUT_RING, self.max_rows), torch.int32)
        self.masks = device.zeros((self.max_rows * (1 + num_words),), torch.int32)  # of the step, by barring.py
        self.ranked = device.zeros((OUTPUT_RING, self.max_rows, WIDTH), torch.int32)  # log probabilities, by ranking.py

    def __repr__(self) -> str:
        return f"Frame({self.max_rows} rows, {self.max_tokens} tokens, {self.max_pages} pages a slot)"


class TooLong(Exception):
    """More to write than an entry holds: the caller writes new rows in steps of their own."""


class Packer:
    """Batches into entries. Every numpy call is some 2 us of the step, so a decode step makes a dozen."""

    def __init__(self, frame: Frame, num_tokens: int) -> None:
        self._frame = frame
        self._num_tokens = num_tokens
        num_slots = frame.max_rows + 1
        self._uses = np.zeros(num_slots, np.int8)  # SAMPLES, CUTS, SHAPES, RANKS
        self.num_top = np.full(num_slots, -1)  # alternatives that a slot asks for; -1: no log probabilities at all
        self._arange = np.arange(frame.max_rows, dtype=np.int32)
        self._arange_tokens = np.arange(frame.max_tokens, dtype=np.int32)
        # Of the last step in which every row decoded: the next one mostly has the same rows.
        self._last_slots: Int32 = np.zeros(0, np.int32)
        self._last_uses = 0

    def note(self, batch: Batch) -> None:
        """Remember what the host must know of the step's new rows."""
        self._last_slots = self._last_slots[:0]
        for row in batch.new_rows:
            filters = row.top_k > 0 or row.top_p < 1 or row.min_p > 0
            uses = 0 if row.temperature <= 0 else SAMPLES | CUTS if filters else SAMPLES
            if row.shaping is not None or (row.stop_ids and row.min_len > len(row.token_ids)):
                uses |= SHAPES
            if row.num_logprobs >= 0:
                uses |= RANKS
            self._uses[row.slot], self.num_top[row.slot] = uses, row.num_logprobs

    def pack(self, batch: Batch, entry: Int32, shape: Shape, num_decodes: int, num_rows: int) -> Packed:
        """Fill an entry. num_decodes: leading rows of one token; num_rows: those that draw.

        Raises TooLong where the step writes more than fits.
        """
        frame = self._frame
        num_tokens, head = shape.num_tokens, frame.head
        everyone = num_rows == batch.num_rows
        token_slots, token_positions = entry[head : head + num_tokens], entry[head + num_tokens : head + 2 * num_tokens]
        count = num_decodes
        if everyone and not shape.has_prefill:
            uses = self._same_uses(batch)
        else:
            uses = int(np.bitwise_or.reduce(self._uses[batch.slots[batch.wants_token]])) if num_rows else 0
        if len(batch.masked):
            uses |= MASKS
        token_slots[:count], token_positions[:count] = batch.slots[:count], batch.starts[:count]
        rows = entry[k.HEADER : k.HEADER + num_rows]
        last: Int32
        if shape.has_prefill:
            last = np.cumsum(batch.lengths, dtype=np.int32) - np.int32(1)
            lengths, starts, ends = batch.lengths[count:], batch.starts[count:], last[count:]
            end = int(last[-1]) + 1
            token_slots[count:end] = np.repeat(batch.slots[count:], lengths)
            shifts = np.repeat(starts + lengths - 1 - ends, lengths)
            token_positions[count:end] = np.arange(count, end, dtype=np.int32) + shifts
            count = end
            rows[:] = last if everyone else last[batch.wants_token]
        else:
            rows[:] = self._arange[:count] if everyone else np.flatnonzero(batch.wants_token)
        token_slots[count:], token_positions[count:] = 0, 0
        used, num_writes = self._pack_writes(batch, entry, head + 2 * num_tokens)
        entry[: k.NUM_ROWS + 1] = (num_tokens, num_decodes, batch.step % OUTPUT_RING, num_writes, num_rows)
        return Packed(used, num_decodes, num_rows, KIND_OF[uses])

    def _same_uses(self, batch: Batch) -> int:
        """Those of the last step where it had the same rows."""
        if not np.array_equal(batch.slots, self._last_slots):
            self._last_slots = batch.slots
            self._last_uses = int(np.bitwise_or.reduce(self._uses[batch.slots]))
        return self._last_uses

    def token_places(self, batch: Batch) -> list[NDArray[np.int32]]:
        """Where the tokens of the batch's `scored` stand in the step."""
        begins = np.cumsum(batch.lengths, dtype=np.int32) - batch.lengths - batch.starts
        steps = self._arange_tokens
        return [begins[row] + first + steps[:length] for row, first, length, _ in batch.scored]

    def writes(self, batch: Batch) -> list[tuple[Int32, Int32]]:
        """(places in the state, values): the step's new rows and page-table deltas."""
        frame = self._frame
        lists: list[tuple[Int32, Int32]] = []
        for row in batch.new_rows:
            first = row.slot * frame.max_len
            lists.append((np.arange(first, first + len(row.token_ids), dtype=np.int32), row.token_ids))
            first = frame.params_at + row.slot * k.NUM_PARAMS
            stops = np.array([i for i in row.stop_ids if 0 <= i < self._num_tokens], np.int32)
            lists.append((np.arange(first, first + k.NUM_PARAMS, dtype=np.int32), _params(row, len(stops))))
            if len(stops) or row.shaping is not None:
                lists += self._rules(row, stops)
        if len(deltas := batch.page_deltas):
            lists.append((deltas[:, 0] * np.int32(frame.max_pages) + deltas[:, 1] + frame.table_at, deltas[:, 2]))
        return lists

    def _pack_writes(self, batch: Batch, entry: Int32, used: int) -> tuple[int, int]:
        if not batch.new_rows and not len(batch.page_deltas):
            return used, 0
        lists = self.writes(batch)
        num_writes = sum(len(places) for places, _ in lists)
        _check_room(entry, used + 2 * num_writes)
        at = used
        for places, values in lists:
            end = at + len(places)
            entry[at:end] = places
            entry[at + num_writes : end + num_writes] = values
            at = end
        return used + 2 * num_writes, num_writes

    def _rules(self, row: NewRow, stops: Int32) -> Iterator[tuple[Int32, Int32]]:
        """The stretches of a slot's rules that its row uses; what is beyond their numbers is never read."""
        assert len(stops) <= MAX_STOPS, "a model with hundreds of EOS ids"
        stretches = [(STOPS, stops)]
        if (shaping := row.shaping) is not None:
            lengths = np.array([len(word) for word in shaping.bad], np.int32)
            stretches += [
                (0, shaping.bias_ids), (BIAS_VALUES, shaping.biases.view(np.int32)),
                (WORDS, np.cumsum(lengths, dtype=np.int32) - lengths), (WORDS + MAX_SPELLINGS, lengths),
                (WORD_IDS, np.array([token_id for word in shaping.bad for token_id in word], np.int32)),
            ]  # fmt: skip
            if shaping.allowed is not None:
                yield self._allowed(row.slot, shaping.allowed)
        first = self._frame.rules_at + row.slot * NUM_RULES
        for at, values in stretches:
            if len(values):
                yield np.arange(first + at, first + at + len(values), dtype=np.int32), values

    def _allowed(self, slot: int, ids: Int32) -> tuple[Int32, Int32]:
        num_words = self._frame.allowed.shape[1]
        bits = np.zeros(32 * num_words, np.uint8)
        bits[ids] = 1
        first = self._frame.allowed_at + slot * num_words
        words = np.packbits(bits, bitorder="little").view(np.int32)
        return np.arange(first, first + num_words, dtype=np.int32), words


def _params(row: NewRow, num_stops: int = 0) -> Int32:
    params = np.zeros(k.NUM_PARAMS, np.int32)
    temperature = min(max(row.temperature, TINIEST), np.finfo(np.float32).max) if row.temperature > 0 else 0.0
    log_min_p = math.log(row.min_p) if row.min_p > 0 else -math.inf
    floats = np.array([temperature, row.top_p, log_min_p], np.float32)
    params[[k.TEMPERATURE, k.TOP_P, k.LOG_MIN_P]] = floats.view(np.int32)
    # The low word first: every host of a CUDA device is little-endian.
    params[[k.SEED_LOW, k.SEED_HIGH]] = np.array([row.seed & (2**64 - 1)], np.uint64).view(np.int32)
    params[k.TOP_K] = max(row.top_k, 0)
    params[[k.MIN_LEN, k.NUM_STOPS]] = row.min_len, num_stops
    params[[k.KNOWN_LEN, k.NUM_TOP]] = len(row.token_ids), row.num_logprobs + 1
    if (shaping := row.shaping) is not None:
        floats = np.array([shaping.presence, shaping.frequency, shaping.repetition], np.float32)
        params[[k.PRESENCE, k.FREQUENCY, k.REPETITION]] = floats.view(np.int32)
        params[[k.COUNTS, k.RESTRICTED]] = shaping.counts, shaping.allowed is not None
        params[[k.PROMPT_LEN, k.NUM_BIASES, k.NUM_WORDS]] = shaping.prompt_len, len(shaping.biases), len(shaping.bad)
    return params


def leading_ones(lengths: Int32) -> int:
    """Rows of one token before the first longer one: those the decode kernel serves."""
    if lengths.max() == 1:
        return len(lengths)
    return int((lengths != 1).argmax())


def _check_room(entry: Int32, needed: int) -> None:
    if needed > len(entry):
        raise TooLong(f"a step writes {needed} words; an entry holds {len(entry)}")
