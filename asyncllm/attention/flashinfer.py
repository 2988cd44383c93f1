"""FlashInfer's attention over our pages: XQA for decode rows, fa3 for prompt chunks, both inside CUDA graphs.

GPU thread. It never knows tokens or sampling. The kernels' contracts are FlashInfer 0.6.18's, read in its source.

XQA has no plan: tables and lengths are on the device. fa3 has one, but its kernel runs one program a multiprocessor
over a work list in device memory, so a captured launch serves every step whose list is written before the replay.
The list names page-table rows by offset, so fa3 reads our page table itself and no index array is ever gathered.
"""

import functools
import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .base import Int64
from .kernels import rotate_and_store

log = logging.getLogger(__name__)

XQA_HEAD_DIMS = (64, 128, 256)
_XQA_WORKSPACE_BYTES = 128 << 20  # the first 8 MB are semaphores, which reset themselves: zeroed once
_FA3_LIST_BYTES = 8 << 20
_NUM_PINNED = 4  # two steps may be in flight
_HND = 1  # flashinfer.utils.TensorLayout.HND
_CAUSAL = 1  # flashinfer.utils.MaskMode.CAUSAL


def missing() -> str | None:
    """Why FlashInfer cannot be used here, or None."""
    try:
        _import()
    except ImportError as error:
        return f"FlashInfer cannot be imported ({error}); install asyncllm[cuda]"
    return None


@functools.cache
def _import() -> Any:
    import flashinfer

    return flashinfer


class FlashInferAttention:
    """pages: per layer [num_pages, 2, num_kv_heads, page_size, head_dim] bf16, device."""

    def __init__(
        self,
        pages: Sequence[Tensor],
        windows: Sequence[int | None],
        num_heads: int,
        page_table: Tensor,  # [num_slots, max_pages] int32, device
        max_tokens: int,
        max_prefills: int,
    ) -> None:
        self._flashinfer = _import()
        self.use_pages(pages)
        self._windows = [-1 if window is None else window - 1 for window in windows]  # as "window_left"
        self._num_heads = num_heads
        self._page_table = page_table
        self._max_tokens, self._max_prefills = max_tokens, max_prefills
        device = page_table.device
        self._xqa_workspace = torch.zeros(_XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._list = torch.zeros(_FA3_LIST_BYTES, dtype=torch.uint8, device=device)
        # The list is copied on the engine's stream, so one on the device will do; its source must outlive the copy.
        self._pinned = [torch.zeros(_FA3_LIST_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_PINNED)]
        self._unused = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        self._no_index = torch.zeros(max_prefills + 1, dtype=torch.int32, device=device)
        self._next_pinned = 0
        self._plan_info: Any = None

    def use_pages(self, pages: Sequence[Tensor]) -> None:
        self._pages = [(layer, layer[:, 0], layer[:, 1]) for layer in pages]

    @property
    def _shape(self) -> tuple[int, int, int]:
        _, _, num_kv_heads, page_size, head_dim = self._pages[0][0].shape
        return num_kv_heads, page_size, head_dim

    def store(
        self, layer: int, qkv: Tensor, q: Tensor, norm_weight: Tensor | None, eps: float, cos_sin: Tensor,
        slots: Tensor, positions: Tensor,
    ) -> None:  # fmt: skip
        """Rotated queries to q [num_tokens, num_heads, head_dim], keys and values to their pages."""
        rotate_and_store(
            qkv, q, self._pages[layer][0], norm_weight, eps, cos_sin, slots, positions, self._page_table
        )  # fmt: skip

    def decode(self, layer: int, q: Tensor, out: Tensor, tables: Tensor, seq_lens: Tensor) -> None:
        """One query a row. q, out: [num_rows, num_heads, head_dim]; tables: [num_rows, max_pages] int32,
        contiguous; seq_lens: [num_rows] int32, the current token counted, at least 1."""
        _, page_size, head_dim = self._shape
        _, keys, values = self._pages[layer]
        self._flashinfer.decode.xqa_batch_decode_with_kv_cache(
            query=q,
            kv_cache=(keys, values),
            workspace_buffer=self._xqa_workspace,
            block_tables=tables,
            seq_lens=seq_lens,
            max_seq_len=tables.shape[1] * page_size,
            bmm1_scale=head_dim**-0.5,
            bmm2_scale=1.0,
            window_left=self._windows[layer],
            out=out,
            kv_layout="HND",
        )

    def plan_prefill(self, first_token: int, slots: Int64, starts: Int64, lengths: Int64) -> None:
        """Write the work list of a step's prompt chunks, which stand side by side from first_token on.

        Straight to the C++ planner: the wrapper's plan() copies four pageable arrays, takes max() of a tensor
        in Python (0.4 to 0.6 ms in all), and its run() refuses the padding behind the last chunk.
        """
        num_kv_heads, page_size, head_dim = self._shape
        count = len(slots)
        indptr = np.full(self._max_prefills + 1, first_token + int(lengths.sum()), np.int32)
        indptr[0] = first_token
        indptr[1 : count + 1] = first_token + np.cumsum(lengths)
        kv_indptr = np.zeros(self._max_prefills + 1, np.int32)  # where a row's pages begin in kv_indices
        kv_indptr[:count] = slots * self._page_table.stride(0)
        kv_lens = np.zeros(self._max_prefills, np.int32)
        kv_lens[:count] = starts + lengths
        pinned = self._pinned[self._next_pinned % _NUM_PINNED]
        self._next_pinned += 1
        self._plan_info = self._fa3(-1).plan(
            self._unused, self._list, pinned, torch.from_numpy(indptr), torch.from_numpy(kv_indptr),
            torch.from_numpy(kv_lens),
            # Always the largest, as for a graph: then the list's parts lie where the captured launches look.
            self._max_tokens, self._max_prefills, self._num_heads, num_kv_heads, page_size, True,
            head_dim, head_dim, True, -1,
        )  # fmt: skip

    def prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Every chunk of the list, over its whole past. q, out: [num_tokens, num_heads, head_dim]; tokens that
        the list does not name are left as they are."""
        _, _, head_dim = self._shape
        _, keys, values = self._pages[layer]
        window = self._windows[layer]
        self._fa3(window).paged_run(
            self._unused, self._list, self._plan_info, q, keys, values, self._no_index, self._no_index,
            self._page_table.view(-1), self._no_index, out, None, _CAUSAL, _HND, window, False,
            None, None, None, None, None, None, 0.0, head_dim**-0.5, None, None, None, 1.0, 1e4, 0, 0,
        )  # fmt: skip

    def _fa3(self, window: int) -> Any:
        return _fa3_module(self._pages[0][0].dtype, self._shape[2], window >= 0)


@functools.cache
def _fa3_module(dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    return _import().prefill.get_batch_prefill_module(
        "fa3", dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, windowed, False, False
    )
