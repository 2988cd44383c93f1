"""Attention over our pages: our decode kernel and one of FlashInfer's prefill kernels, fa3 on Hopper, fa2 elsewhere.

GPU thread. It never knows tokens or sampling. FlashInfer's contracts are those of 0.6.18, read in its source.
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .base import Int64, Lacking
from .decode import Decode
from .kernels import rotate_and_store

_LIST_BYTES = 8 << 20
_FA2_PARTS_BYTES = 256 << 20  # of rows that are split; the planner splits only where there are few
_NUM_PINNED = 4  # two steps may be in flight
_HND = 1  # flashinfer.utils.TensorLayout.HND
_CAUSAL = 1  # flashinfer.utils.MaskMode.CAUSAL


@functools.cache
def _import() -> Any:
    import flashinfer

    return flashinfer


@functools.cache
def _prefill_module(backend: str, dtype: torch.dtype, head_dim: int, windowed: bool) -> Any:
    return _import().prefill.get_batch_prefill_module(
        backend, dtype, dtype, dtype, torch.int32, head_dim, head_dim, 0, windowed, False, False
    )


class Layer:
    """One layer's pages and window."""

    def __init__(self, pages: Tensor, window: int | None) -> None:
        self.pages = pages  # [num_pages, 2, num_kv_heads, page_size, head_dim] 16-bit, device
        self.keys, self.values = pages[:, 0], pages[:, 1]
        self.window = window
        self.window_left = -1 if window is None else window - 1

    @property
    def shape(self) -> tuple[int, int, int]:
        _, _, num_kv_heads, page_size, head_dim = self.pages.shape
        return num_kv_heads, page_size, head_dim


class Fa3Prefill:
    """Its kernel runs one program a multiprocessor over a work list in device memory, so a captured launch serves
    every step whose list is written before the replay. The list names page-table rows by offset: fa3 reads our page
    table itself, and no index array is ever gathered.
    """

    captured = True

    def __init__(self, num_heads: int, page_table: Tensor, max_tokens: int, max_prefills: int) -> None:
        self._num_heads, self._page_table = num_heads, page_table
        self._max_tokens, self._max_prefills = max_tokens, max_prefills
        device = page_table.device
        self._list = torch.zeros(_LIST_BYTES, dtype=torch.uint8, device=device)
        # The list is copied on the engine's stream, so one on the device will do; its source must outlive the copy.
        self._pinned = _pinned()
        self._unused = torch.zeros(1 << 20, dtype=torch.uint8, device=device)
        self._no_index = torch.zeros(max_prefills + 1, dtype=torch.int32, device=device)
        self._count = 0
        self._plan_info: Any = None

    def plan(self, layers: Sequence[Layer], first_token: int, slots: Int64, starts: Int64, lengths: Int64) -> None:
        """Straight to the C++ planner: the wrapper's plan() copies four pageable arrays, takes max() of a tensor
        in Python (0.4 to 0.6 ms in all), and its run() refuses the padding behind the last chunk.
        """
        num_kv_heads, page_size, head_dim = layers[0].shape
        count = len(slots)
        indptr = np.full(self._max_prefills + 1, first_token + int(lengths.sum()), np.int32)
        indptr[0] = first_token
        indptr[1 : count + 1] = first_token + np.cumsum(lengths)
        kv_indptr = np.zeros(self._max_prefills + 1, np.int32)  # where a row's pages begin in kv_indices
        kv_indptr[:count] = slots * self._page_table.stride(0)
        kv_lens = np.zeros(self._max_prefills, np.int32)
        kv_lens[:count] = starts + lengths
        pinned = self._pinned[self._count % _NUM_PINNED]
        self._count += 1
        module = _prefill_module("fa3", layers[0].pages.dtype, head_dim, False)
        self._plan_info = module.plan(
            self._unused, self._list, pinned, *map(torch.from_numpy, (indptr, kv_indptr, kv_lens)),
            # Always the largest, as for a graph: then the list's parts lie where the captured launches look.
            self._max_tokens, self._max_prefills, self._num_heads, num_kv_heads, page_size, True,
            head_dim, head_dim, True, -1,
        )  # fmt: skip

    def run(self, layer: Layer, q: Tensor, out: Tensor) -> None:
        _, _, head_dim = layer.shape
        _prefill_module("fa3", layer.pages.dtype, head_dim, layer.window is not None).paged_run(
            self._unused, self._list, self._plan_info, q, layer.keys, layer.values, self._no_index, self._no_index,
            self._page_table.view(-1), self._no_index, out, None, _CAUSAL, _HND, layer.window_left, False,
            None, None, None, None, None, None, 0.0, head_dim**-0.5, None, None, None, 1.0, 1e4, 0, 0,
        )  # fmt: skip


class Fa2Prefill:
    """For GPUs before and after Hopper. Its grid is the plan's, so a step with a prompt chunk is launched kernel by
    kernel: in a graph it would split every row and want 0.4 to 1 GB for the parts.
    """

    captured = False

    def __init__(self, num_heads: int, page_table: Tensor) -> None:
        self._num_heads, self._page_table = num_heads, page_table
        device = page_table.device
        self._parts = torch.zeros(_FA2_PARTS_BYTES, dtype=torch.uint8, device=device)
        self._count = 0
        # By window, for how rows are split depends on it.
        self._lists: dict[int, tuple[Tensor, list[Tensor]]] = {}
        self._plans: dict[int, Any] = {}
        # Of the running step.
        self._tokens = slice(0, 0)
        self._index: list[Tensor] = []
        self._places: Tensor | None = None  # [num_pages of all rows] int64, device: where in the flat page table
        self._pages: Tensor | None = None  # what stands there

    def plan(self, layers: Sequence[Layer], first_token: int, slots: Int64, starts: Int64, lengths: Int64) -> None:
        num_kv_heads, page_size, head_dim = layers[0].shape
        window_lefts = {layer.window_left for layer in layers}
        modules = {window_left: self._module(layers[0], window_left) for window_left in window_lefts}
        self._plans.clear()
        if not len(slots):  # at start: the modules are there now
            return
        self._tokens = slice(first_token, first_token + int(lengths.sum()))
        indptr = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(lengths, out=indptr[1:])
        kv_lens = (starts + lengths).astype(np.int32)
        num_pages = -(-kv_lens // page_size)
        kv_indptr = np.zeros(len(slots) + 1, np.int32)
        np.cumsum(num_pages, out=kv_indptr[1:])
        columns = np.arange(kv_indptr[-1]) - np.repeat(kv_indptr[:-1], num_pages)
        places = np.repeat(slots * self._page_table.stride(0), num_pages) + columns
        self._index = [self._send(array) for array in (indptr, kv_indptr, (kv_lens - 1) % page_size + 1)]
        self._places, self._pages = self._send(places.astype(np.int64)), None
        for window_left, module in modules.items():
            self._plans[window_left] = module.plan(
                self._parts, *self._list(window_left), *map(torch.from_numpy, (indptr, kv_indptr, kv_lens)),
                int(indptr[-1]), len(slots), self._num_heads, num_kv_heads, page_size, False, head_dim, head_dim,
                True, window_left, -1, False, 0, 0,
            )  # fmt: skip
        self._count += 1

    def run(self, layer: Layer, q: Tensor, out: Tensor) -> None:
        if not self._plans:
            return
        if self._pages is None:  # only now: this step's page deltas are in the table
            assert self._places is not None
            self._pages = self._page_table.view(-1).index_select(0, self._places)
        _, _, head_dim = layer.shape
        self._module(layer, layer.window_left).paged_run(
            self._parts, self._lists[layer.window_left][0], self._plans[layer.window_left], q[self._tokens],
            layer.keys, layer.values, *self._index[:2], self._pages, self._index[2], out[self._tokens], None,
            _CAUSAL, _HND, layer.window_left, False, None, None, None, None, None, None, 0.0, head_dim**-0.5,
            None, None, None, 1.0, 1e4, 0, 0,
        )  # fmt: skip

    def _module(self, layer: Layer, window_left: int) -> Any:
        return _prefill_module("fa2", layer.pages.dtype, layer.shape[2], window_left >= 0)

    def _list(self, window_left: int) -> tuple[Tensor, Tensor]:
        """The window's work list on the device, and this step's pinned source of it."""
        if window_left not in self._lists:
            device_list = torch.zeros(_LIST_BYTES, dtype=torch.uint8, device=self._page_table.device)
            self._lists[window_left] = device_list, _pinned()
        device_list, pinned = self._lists[window_left]
        return device_list, pinned[self._count % _NUM_PINNED]

    def _send(self, array: NDArray[Any]) -> Tensor:
        # torch's pinned allocator reuses no block before the copies made from it are over.
        return torch.from_numpy(array).pin_memory().to(self._page_table.device, non_blocking=True)


def _pinned() -> list[Tensor]:
    return [torch.zeros(_LIST_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(_NUM_PINNED)]


class PagedAttention:
    """kind: "fa3" or "fa2"; pages: per layer [num_pages, 2, num_kv_heads, page_size, head_dim] 16-bit, device."""

    def __init__(
        self,
        kind: str,
        pages: Sequence[Tensor],
        windows: Sequence[int | None],
        num_heads: int,
        page_table: Tensor,  # [num_slots, max_pages] int32, device
        max_tokens: int,
        max_rows: int,
    ) -> None:
        self._windows = windows
        self.use_pages(pages)
        self._page_table = page_table
        shape, max_pages = self._layers[0].shape, page_table.shape[1]
        self._decodes = {
            window: Decode(max_rows, max_pages, shape, num_heads, window, page_table.device) for window in set(windows)
        }
        self._prefill = (
            Fa3Prefill(num_heads, page_table, max_tokens, max_rows)
            if kind == "fa3"
            else Fa2Prefill(num_heads, page_table)
        )

    def use_pages(self, pages: Sequence[Tensor]) -> None:
        self._layers = [Layer(layer, window) for layer, window in zip(pages, self._windows, strict=False)]

    @property
    def captures_prefill(self) -> bool:
        return self._prefill.captured

    def store(
        self, layer: int, qkv: Tensor, lacking: Lacking | None, q: Tensor, norm_weight: Tensor | None, eps: float,
        cos_sin: Tensor, slots: Tensor, positions: Tensor,
    ) -> None:  # fmt: skip
        """Rotated queries to q [num_tokens, num_heads, head_dim], keys and values to their pages."""
        rotate_and_store(
            qkv, lacking, q, self._layers[layer].pages, norm_weight, eps, cos_sin, slots, positions, self._page_table
        )  # fmt: skip

    def plan_decode(self, tables: Tensor, seq_lens: Tensor) -> None:
        """On the device, once a step, before the first layer. tables: [num_rows, max_pages] int32, contiguous;
        seq_lens: [num_rows] int32, the current token counted, at least 1."""
        for decode in self._decodes.values():
            decode.plan(tables, seq_lens)

    def decode(self, layer: int, q: Tensor, out: Tensor) -> None:
        """One query for each planned row. q, out: [num_rows, num_heads, head_dim]."""
        one = self._layers[layer]
        self._decodes[one.window].run(q, out, one.pages)

    def plan_prefill(self, first_token: int, slots: Int64, starts: Int64, lengths: Int64) -> None:
        """Write the work list of a step's prompt chunks, which stand side by side from first_token on."""
        self._prefill.plan(self._layers, first_token, slots, starts, lengths)

    def prefill(self, layer: int, q: Tensor, out: Tensor) -> None:
        """Every chunk of the list, over its whole past. q, out: [num_tokens, num_heads, head_dim]; tokens that
        the list does not name are left as they are."""
        self._prefill.run(self._layers[layer], q, out)
