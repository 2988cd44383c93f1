"""The reference attention: torch's own operators over gathered pages, in any dtype, on any device.

GPU thread. Every other backend must equal it. It never knows tokens, sampling or where pages come from.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Int64, Put, Rows

# Decode rows are padded to the longest of their group. One more group costs about five operators a
# layer (60 us), which is what 400 padded tokens cost at 3 KV heads of 64: split only when it saves more.
SPLIT_TOKENS = 400


class _Group(NamedTuple):
    """Decode rows that are gathered, padded and computed together."""

    tokens: Tensor | None  # [rows] int64, device; None when the group is the whole step in order
    table_at: Tensor  # [rows * pages] int64, device: where in the flat page table; 0 pads with the dummy page
    tail_at: Tensor  # [num_tail] int64, device: gathered positions that belong to no token of the row
    bias: Tensor  # [rows, pages * page_size] int64, device: 0 where the row sees the position, else 1
    num_rows: int
    num_pages: int


class _Chunk(NamedTuple):
    """A row of more than one token."""

    first: int  # its tokens in the step
    last: int
    table_at: Tensor  # [pages] int64, device
    base: int  # the position of the first gathered token
    start: int
    window: int | None


class _Writes(NamedTuple):
    table_at: Tensor  # [num_tokens] int64, device
    offset: Tensor  # [num_tokens, num_kv_heads] int64, device: place of a key within its page


class SdpaAttention:
    """pages: per layer [num_pages, 2, num_kv_heads, page_size, head_dim], kv dtype, device. Page 0 holds zeros."""

    def __init__(self, pages: Sequence[Tensor], windows: Sequence[int | None], max_pages: int) -> None:
        self._pages = tuple(pages)
        self._windows = tuple(windows)
        self._max_pages = max_pages  # columns of the page table

    def plan(self, rows: Rows, put: Put) -> "SdpaHostPlan":
        decode = np.flatnonzero(rows.lengths == 1)
        chunks = np.flatnonzero(rows.lengths > 1)
        views = {
            window: _View(
                tuple(self._groups(rows, decode, window, put)),
                tuple(self._chunk(rows, int(row), window, put) for row in chunks),
            )
            for window in dict.fromkeys(self._windows)
        }
        return SdpaHostPlan(self._pages, self._windows, self._writes(rows, put), views)

    @property
    def _page_size(self) -> int:
        return self._pages[0].shape[3]

    def _writes(self, rows: Rows, put: Put) -> _Writes:
        size, num_kv_heads = self._page_size, self._pages[0].shape[2]
        table_at = rows.slots[rows.token_rows] * self._max_pages + rows.positions // size
        offset = (rows.positions % size)[:, None] + np.arange(num_kv_heads) * size
        return _Writes(put(table_at), put(offset))

    def _groups(self, rows: Rows, decode: Int64, window: int | None, put: Put) -> Iterator[_Group]:
        if not len(decode):
            return
        ends = rows.starts[decode] + 1
        lows = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first_pages = lows // self._page_size
        num_pages = -(-ends // self._page_size) - first_pages
        for members in _split(num_pages, max(1, SPLIT_TOKENS // self._page_size)):
            whole = len(members) == len(rows.slots) and bool((np.diff(members) == 1).all())
            picked = decode[members]
            tokens = None if whole else put(rows.last_tokens[picked])
            spans = (first_pages[members], num_pages[members], lows[members], ends[members])
            yield self._group(rows.slots[picked], spans, tokens, put)

    def _group(self, slots: Int64, spans: tuple[Int64, Int64, Int64, Int64], tokens: Tensor | None, put: Put) -> _Group:
        first_pages, num_pages, lows, ends = (span[:, None] for span in spans)
        size, widest = self._page_size, int(num_pages.max())
        column = np.arange(widest)
        table_at = np.where(column < num_pages, slots[:, None] * self._max_pages + first_pages + column, 0)
        position = first_pages * size + np.arange(widest * size)
        hidden = (position < lows) | (position >= ends)
        # Padding pages are the dummy page, which holds zeros; only the row's own last page can be stale.
        stale = (position >= ends) & (position < (first_pages + num_pages) * size)
        return _Group(
            tokens,
            put(table_at.reshape(-1)),
            put(np.flatnonzero(stale)),
            put(hidden.astype(np.int64)),
            len(slots),
            widest,
        )

    def _chunk(self, rows: Rows, row: int, window: int | None, put: Put) -> _Chunk:
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        low = 0 if window is None else max(start + 1 - window, 0)
        first_page, end_page = low // self._page_size, -(-(start + length) // self._page_size)
        table_at = rows.slots[row] * self._max_pages + np.arange(first_page, end_page)
        last = int(rows.last_tokens[row]) + 1
        return _Chunk(last - length, last, put(table_at), first_page * self._page_size, start, window)


def _split(num_pages: Int64, worth: int) -> Iterator[Int64]:
    """Members of each group: in one group unless splitting by length saves more than `worth` padded pages."""
    order = np.argsort(-num_pages, kind="stable")
    begin = 0
    for i in range(1, len(order)):
        rest = len(order) - i
        if rest * int(num_pages[order[begin]] - num_pages[order[i]]) > worth and i > begin:
            yield order[begin:i]
            begin = i
    yield np.sort(order[begin:])


class _View(NamedTuple):
    """What layers of one window see."""

    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]


class SdpaHostPlan(NamedTuple):
    pages: tuple[Tensor, ...]
    windows: tuple[int | None, ...]
    writes: _Writes
    views: dict[int | None, _View]

    def bind(self, page_table: Tensor) -> "SdpaPlan":
        flat = page_table.view(-1)
        sample = self.pages[0]
        key_stride = sample.shape[2] * sample.shape[3]  # rows of head_dim from a page's keys to its values
        page_of_token = flat[self.writes.table_at]
        keys_at = torch.add(self.writes.offset, page_of_token[:, None], alpha=2 * key_stride).view(-1)
        bound = {
            window: (
                tuple(_bind_group(group, flat) for group in view.groups),
                tuple(_bind_chunk(chunk, flat) for chunk in view.chunks),
            )
            for window, view in self.views.items()
        }
        return SdpaPlan(self.pages, keys_at, keys_at + key_stride, tuple(bound[w] for w in self.windows))


class _DecodeRows(NamedTuple):
    tokens: Tensor | None
    page_ids: Tensor  # [rows * pages] int64, device
    tail_at: Tensor
    bias: Tensor  # [rows, 1, 1, pages * page_size] float32, device: 0 or -inf
    num_rows: int
    num_pages: int


class _ChunkRow(NamedTuple):
    first: int
    last: int
    page_ids: Tensor  # [pages] int64, device
    end: int  # gathered tokens that are the row's
    mask: Tensor | None  # [length, end] bool, device; None is plain causal


def _bind_group(group: _Group, flat_table: Tensor) -> _DecodeRows:
    bias = torch.zeros(group.bias.shape, device=flat_table.device).masked_fill_(group.bias.bool(), -math.inf)
    page_ids = flat_table[group.table_at]
    return _DecodeRows(group.tokens, page_ids, group.tail_at, bias[:, None, None], group.num_rows, group.num_pages)


def _bind_chunk(chunk: _Chunk, flat_table: Tensor) -> _ChunkRow:
    length = chunk.last - chunk.first
    end = chunk.start + length - chunk.base
    mask = None
    if chunk.start > 0 or (chunk.window is not None and chunk.window < end):
        position = torch.arange(end, device=flat_table.device)
        own = position[end - length :, None]
        mask = position <= own
        if chunk.window is not None:
            mask &= position > own - chunk.window
    return _ChunkRow(chunk.first, chunk.last, flat_table[chunk.table_at], end, mask)


class SdpaPlan(NamedTuple):
    pages: tuple[Tensor, ...]
    keys_at: Tensor  # [num_tokens * num_kv_heads] int64, device: rows of the pages seen as [-1, head_dim]
    values_at: Tensor
    layers: tuple[tuple[tuple[_DecodeRows, ...], tuple[_ChunkRow, ...]], ...]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See attention.base.Plan.run: all writes of the step come before its first read."""
        pages = self.pages[layer]
        self._write(pages, k, v)
        groups, chunks = self.layers[layer]
        if len(groups) == 1 and groups[0].tokens is None:
            return _decode(groups[0], pages, q).view(q.shape[0], -1)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        for group in groups:
            if group.tokens is None:
                out = _decode(group, pages, q)
            else:
                out.index_copy_(0, group.tokens, _decode(group, pages, q[group.tokens]))
        for chunk in chunks:
            out[chunk.first : chunk.last] = _extend(chunk, pages, q[chunk.first : chunk.last])
        return out.view(q.shape[0], -1)

    def _write(self, pages: Tensor, k: Tensor, v: Tensor) -> None:
        rows = pages.view(-1, pages.shape[-1])
        # index_copy_ over rows of head_dim: 12 us where advanced indexing took 21.
        rows.index_copy_(0, self.keys_at, k.reshape(-1, k.shape[-1]).to(rows.dtype))
        rows.index_copy_(0, self.values_at, v.reshape(-1, v.shape[-1]).to(rows.dtype))


def _decode(group: _DecodeRows, pages: Tensor, q: Tensor) -> Tensor:
    """q: [rows, num_heads, head_dim] -> the same shape."""
    _, _, num_kv_heads, size, head_dim = pages.shape
    rows, num_pages = group.num_rows, group.num_pages
    gathered = pages.index_select(0, group.page_ids)  # [rows * pages, 2, num_kv_heads, page_size, head_dim]
    if group.tail_at.shape[0]:
        # 0 * NaN is NaN, so a masked score does not keep a stale value out: the value itself must go.
        page = torch.div(group.tail_at, size, rounding_mode="floor")
        gathered[page, :, :, group.tail_at % size] = 0
    kv = torch.empty(2, rows, num_kv_heads, num_pages, size, head_dim, dtype=q.dtype, device=q.device)
    kv.copy_(gathered.view(rows, num_pages, 2, num_kv_heads, size, head_dim).permute(2, 0, 3, 1, 4, 5))
    k, v = kv.view(2, rows, num_kv_heads, num_pages * size, head_dim).unbind(0)
    # Query heads of one KV head stand as its queries, so keys and values are never repeated.
    queries = q.reshape(rows, num_kv_heads, -1, head_dim)
    return F.scaled_dot_product_attention(queries, k, v, attn_mask=group.bias.to(q.dtype)).reshape(q.shape)


def _extend(chunk: _ChunkRow, pages: Tensor, q: Tensor) -> Tensor:
    """q: [length, num_heads, head_dim] -> the same shape."""
    gathered = pages.index_select(0, chunk.page_ids).permute(1, 2, 0, 3, 4)  # [2, num_kv_heads, pages, size, head_dim]
    kv = gathered.to(q.dtype, memory_format=torch.contiguous_format).flatten(2, 3)[:, None, :, : chunk.end]
    mask, causal = chunk.mask, chunk.mask is None
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None], kv[0], kv[1], attn_mask=mask, is_causal=causal, enable_gqa=True
    )  # [1, num_heads, length, head_dim]
    return out[0].transpose(0, 1)
