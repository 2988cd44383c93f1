"""What outlives a step: the device's tables and pages, and the host's note of how each slot samples.

GPU thread. Device tables are written by the launch's own kernels alone. It never knows schedules or requests.

Dimensions, here and in every shape comment of this floor:
    num_slots = max_running + 1 (slot 0 is a dummy) · max_pages columns of the page table
    max_len = max_model_len + 1 columns of the token pool: a step launched ahead of a finish draws one token too many
There is no table of lengths: every Batch says its rows' starts, and a second truth could only disagree.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.base import Int64, Put
from ..config import EngineConfig
from ..device.base import Device
from ..engine.batch import Batch, NewRow

OUTPUT_RING = 4  # outputs of step N stay while N+1 and N+2 run and N's copy is still to land


class Tables:
    """Device tables and KV pages."""

    def __init__(
        self, device: Device, config: EngineConfig, kv_shape: tuple[int, int, int], dtype: torch.dtype
    ) -> None:
        num_layers, num_kv_heads, head_dim = kv_shape
        num_slots = config.max_running + 1
        self.max_len = config.max_model_len + 1
        self.max_pages = -(-self.max_len // config.page_size)
        self.token_pool = device.zeros((num_slots, self.max_len), torch.int32)
        self.page_table = device.zeros((num_slots, self.max_pages), torch.int64)
        self.outputs = device.zeros((OUTPUT_RING, config.max_running), torch.int32)
        # HND. Zeros, because page 0 pads what attention gathers and must hold no NaN.
        self.kv = device.zeros((num_layers, config.num_pages, 2, num_kv_heads, config.page_size, head_dim), dtype)

    def __repr__(self) -> str:
        slots, columns = self.page_table.shape
        return f"Tables({slots} slots, {columns} pages a slot, {self.kv.shape[1]} pages in {len(self.kv)} layers)"


class Deltas(NamedTuple):
    """A step's writes to the device tables, staged."""

    pool_at: Tensor | None  # [num_new_tokens] int64, device: places in the flat token pool
    token_ids: Tensor | None  # [num_new_tokens] int64, device
    table_at: Tensor | None  # [num_deltas] int64, device: places in the flat page table
    page_ids: Tensor | None  # [num_deltas] int64, device

    @classmethod
    def of(cls, batch: Batch, tables: Tables, put: Put) -> "Deltas":
        pool_at = token_ids = table_at = page_ids = None
        if batch.new_rows:
            rows = batch.new_rows
            pool_at = put(np.concatenate([row.slot * tables.max_len + np.arange(len(row.token_ids)) for row in rows]))
            token_ids = put(np.concatenate([row.token_ids for row in rows]).astype(np.int64))
        if len(batch.page_deltas):
            slot, column, page = batch.page_deltas.astype(np.int64).T
            table_at, page_ids = put(slot * tables.max_pages + column), put(page)
        return cls(pool_at, token_ids, table_at, page_ids)

    def apply(self, tables: Tables) -> None:
        if self.pool_at is not None and self.token_ids is not None:
            tables.token_pool.view(-1).index_copy_(0, self.pool_at, self.token_ids.to(torch.int32))
        if self.table_at is not None and self.page_ids is not None:
            tables.page_table.view(-1).index_copy_(0, self.table_at, self.page_ids)


class SlotSampling:
    """How each slot samples, on the host: the launch must know which kernels a step needs without asking
    the device. What a step's rows need of it is staged with the step, so the device keeps no second copy.
    """

    def __init__(self, num_slots: int) -> None:
        self.temperature = np.zeros(num_slots, np.float64)
        self.top_k = np.zeros(num_slots, np.int64)
        self.top_p = np.ones(num_slots, np.float64)
        self.min_p = np.zeros(num_slots, np.float64)
        self.seed = np.zeros(num_slots, np.uint64)
        self.min_len = np.zeros(num_slots, np.int64)
        self.num_logprobs = np.full(num_slots, -1, np.int64)  # -1: none are asked for
        self._stop_ids: list[Int64] = [np.zeros(0, np.int64)] * num_slots

    def write(self, rows: Sequence[NewRow]) -> None:
        for row in rows:
            slot = row.slot
            self.temperature[slot] = row.temperature
            self.top_k[slot] = max(row.top_k, 0)
            self.top_p[slot] = row.top_p
            self.min_p[slot] = row.min_p
            self.seed[slot] = row.seed & 0xFFFF_FFFF_FFFF_FFFF
            self.min_len[slot] = row.min_len
            self.num_logprobs[slot] = row.num_logprobs
            self._stop_ids[slot] = np.array(row.stop_ids, np.int64)

    def banned(self, slots: Int64, positions: Int64, num_tokens: int) -> Int64 | None:
        """Places in the flat logits of rows that may not stop yet; None when every row may."""
        early = np.flatnonzero(positions < self.min_len[slots])
        if not len(early):
            return None
        return np.concatenate([row * num_tokens + self._known(slots[row], num_tokens) for row in early])

    def _known(self, slot: np.int64, num_tokens: int) -> Int64:
        ids = self._stop_ids[slot]
        return ids[(ids >= 0) & (ids < num_tokens)]
