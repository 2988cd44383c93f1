"""The fixed places of a step on a CUDA device, and the packing of a Batch into the one array that fills them.

GPU thread. It never knows kernels' insides, models or streams.

A packed entry, int32, dense:
    header [HEADER] | row fields [NUM_FIELDS, max_rows] | slots [T] | positions [T]
    | pool places, tokens [2, num_pool] | table places, pages [2, num_table] | banned rows, ids [2, num_banned]
T is the step's padded number of tokens. Padding has slot 0, position 0; padding rows draw greedily into slot 0.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..config import EngineConfig
from ..device.base import Device
from ..engine.batch import Batch
from . import kernels as k
from .sampler import TINIEST, mix
from .state import OUTPUT_RING, SlotSampling

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


class Kind(NamedTuple):
    """Which tail a step needs, by what some row of it uses; nobody pays for what no row uses."""

    sample: bool = False
    cut: bool = False  # top_k, top_p or min_p
    ban: bool = False  # stop ids before min_tokens

    def __str__(self) -> str:
        return "+".join(name for name, on in self._asdict().items() if on) or "greedy"


class Shape(NamedTuple):
    """Which graphs serve a step: the buckets its numbers of tokens, decode rows and drawing rows fall into."""

    num_tokens: int
    num_decodes: int
    has_prefill: bool


class Packed(NamedTuple):
    used: int  # int32s of the entry
    num_tokens: int
    num_decodes: int  # leading rows of one token
    num_rows: int  # that want a token
    kind: Kind


class Frame:
    """Device tables and the running step's arrays."""

    def __init__(self, device: Device, config: EngineConfig, ring: int) -> None:
        num_slots = config.max_running + 1
        self.max_rows = config.max_running
        self.max_len = config.max_model_len + 1  # a step launched ahead of a finish draws one token too many
        self.max_pages = -(-self.max_len // config.page_size)
        self.page_size = config.page_size
        self.max_tokens = config.max_step_tokens
        self.head = k.HEADER + k.NUM_FIELDS * self.max_rows
        # Room for the longest prompt twice over, or a table of pages for every slot; see Packer for more.
        self.entry_len = self.head + 2 * self.max_tokens + max(4 * self.max_len, 2 * num_slots * 64) + 4096
        self.token_pool = device.zeros((num_slots, self.max_len), torch.int32)
        self.page_table = device.zeros((num_slots, self.max_pages), torch.int32)
        self.ring = device.zeros((ring, self.entry_len), torch.int32)
        self.counter = device.zeros((1,), torch.int32)  # steps whose forward has begun: the ring's place
        self.meta = device.zeros((self.head,), torch.int32)
        self.fields = self.meta[k.HEADER :].view(k.NUM_FIELDS, self.max_rows)
        self.slots = device.zeros((self.max_tokens,), torch.int32)
        self.positions = device.zeros((self.max_tokens,), torch.int32)
        self.tables = device.zeros((self.max_rows, self.max_pages), torch.int32)  # of the step's decode rows
        self.seq_lens = device.zeros((self.max_rows,), torch.int32)
        self.outputs = device.zeros((OUTPUT_RING, self.max_rows), torch.int32)

    def __repr__(self) -> str:
        return f"Frame({self.max_rows} rows, {self.max_tokens} tokens, {self.max_pages} pages a slot)"


class TooLong(Exception):
    """More to write than an entry holds: the caller writes new rows in steps of their own."""


class Packer:
    """Batches into entries. Keeps what each slot samples by, as the bits the device wants."""

    def __init__(self, frame: Frame, num_tokens: int) -> None:
        self._frame = frame
        self._num_tokens = num_tokens
        num_slots = frame.max_rows + 1
        self._sampling = SlotSampling(num_slots)
        # Rows TEMPERATURE, TOP_K, TOP_P, LOG_MIN_P of the fields, by slot.
        self._bits = np.zeros((k.NUM_FIELDS, num_slots), np.int32)
        self._bits[k.TOP_P] = _bits(np.ones(num_slots))
        self._bits[k.LOG_MIN_P] = _bits(np.full(num_slots, -np.inf))
        self._kinds = np.zeros(num_slots, np.int8)  # 1: samples, 2: and filters

    def note(self, batch: Batch) -> None:
        """Remember how the step's new rows sample."""
        self._sampling.write(batch.new_rows)
        for row in batch.new_rows:
            slot, filters = row.slot, row.top_k > 0 or row.top_p < 1 or row.min_p > 0
            self._bits[k.TEMPERATURE, slot] = _bits(max(row.temperature, TINIEST) if row.temperature > 0 else 0.0)
            self._bits[k.TOP_K, slot] = max(row.top_k, 0)
            self._bits[k.TOP_P, slot] = _bits(row.top_p)
            self._bits[k.LOG_MIN_P, slot] = _bits(np.log(row.min_p) if row.min_p > 0 else -np.inf)
            self._kinds[slot] = 0 if row.temperature <= 0 else 2 if filters else 1

    def pack(self, batch: Batch, entry: Int32, shape: Shape, num_rows_padded: int) -> Packed:
        """Fill an entry. Raises TooLong where the step writes more than fits."""
        frame, lengths = self._frame, batch.lengths
        num_tokens, head = shape.num_tokens, frame.head
        ends = batch.starts + lengths
        wanting: NDArray[np.intp] | slice = (
            slice(None) if batch.wants_token.all() else np.flatnonzero(batch.wants_token)
        )
        slots, positions = batch.slots[wanting].astype(np.int64), ends[wanting].astype(np.int64)
        num_rows = len(slots)
        fields = entry[k.HEADER : head].reshape(k.NUM_FIELDS, frame.max_rows)
        fields[:, num_rows:num_rows_padded] = 0
        fields[k.DRAWN_AT, :num_rows] = slots * frame.max_len + positions
        kind = self._pack_sampling(fields, slots, positions)
        token_slots, token_positions = entry[head : head + num_tokens], entry[head + num_tokens : head + 2 * num_tokens]
        if shape.has_prefill:
            last = np.cumsum(lengths, dtype=np.int32) - np.int32(1)
            count = int(last[-1]) + 1
            token_slots[:count] = np.repeat(batch.slots, lengths)
            token_positions[:count] = np.arange(count, dtype=np.int32) + np.repeat(ends - 1 - last, lengths)
            fields[k.LAST_TOKEN, :num_rows] = last[wanting]
        else:
            count = batch.num_rows
            token_slots[:count], token_positions[:count] = batch.slots, batch.starts
            fields[k.LAST_TOKEN, :num_rows] = np.arange(count, dtype=np.int32)[wanting]
        token_slots[count:], token_positions[count:] = 0, 0
        used, counts = self._pack_writes(batch, entry, head + 2 * num_tokens)
        banned = self._sampling.banned(slots, positions, self._num_tokens) if num_rows else None
        num_banned = 0
        if banned is not None and len(banned):
            num_banned = len(banned)
            _check_room(entry, used + 2 * num_banned)
            entry[used : used + num_banned] = banned // self._num_tokens
            entry[used + num_banned : used + 2 * num_banned] = banned % self._num_tokens
            used += 2 * num_banned
        num_decodes = leading_ones(lengths)
        entry[:7] = (num_tokens, num_decodes, batch.step % OUTPUT_RING, *counts, num_banned, num_rows)
        return Packed(used, count, num_decodes, num_rows, kind._replace(ban=num_banned > 0))

    def _pack_sampling(self, fields: Int32, slots: Int64, positions: Int64) -> Kind:
        num_rows = len(slots)
        most = self._kinds[slots].max() if num_rows else 0
        fields[k.TEMPERATURE, :num_rows] = self._bits[k.TEMPERATURE, slots]
        if most:
            key = mix(self._sampling.seed[slots], positions)
            # The low word first: x86 and every CUDA host are little-endian.
            fields[k.KEY_LOW : k.KEY_HIGH + 1, :num_rows] = key.view(np.int32).reshape(-1, 2).T
        if most == 2:
            fields[k.TOP_K : k.LOG_MIN_P + 1, :num_rows] = self._bits[k.TOP_K : k.LOG_MIN_P + 1, slots]
        return Kind(sample=bool(most), cut=bool(most == 2))

    def _pack_writes(self, batch: Batch, entry: Int32, used: int) -> tuple[int, tuple[int, int]]:
        num_pool = sum(len(row.token_ids) for row in batch.new_rows)
        num_table = len(batch.page_deltas)
        _check_room(entry, used + 2 * (num_pool + num_table))
        at = used
        for row in batch.new_rows:
            end = at + len(row.token_ids)
            entry[at:end] = np.arange(len(row.token_ids), dtype=np.int32) + np.int32(row.slot * self._frame.max_len)
            entry[at + num_pool : end + num_pool] = row.token_ids
            at = end
        used += 2 * num_pool
        if num_table:
            deltas = batch.page_deltas
            entry[used : used + num_table] = deltas[:, 0] * np.int32(self._frame.max_pages) + deltas[:, 1]
            entry[used + num_table : used + 2 * num_table] = deltas[:, 2]
        return used + 2 * num_table, (num_pool, num_table)


def leading_ones(lengths: Int32) -> int:
    """Rows of one token before the first longer one: those the decode kernel serves."""
    longer = lengths != 1
    first = int(longer.argmax())
    return first if longer[first] else len(lengths)


def _check_room(entry: Int32, needed: int) -> None:
    if needed > len(entry):
        raise TooLong(f"a step writes {needed} words; an entry holds {len(entry)}")


def _bits(values: object) -> Int32:
    return np.asarray(values, np.float32).view(np.int32)
