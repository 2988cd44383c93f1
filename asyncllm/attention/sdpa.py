"""The reference attention: torch's own operators over gathered pages, in any dtype, on any device.

GPU thread. Every other backend must equal it. It never knows tokens, sampling or where pages come from.

What a page holds beyond its row's tokens is masked, but 0 * NaN is NaN: stale values must be finite. So the step
in which a row enters its last page zeroes the rest of that page, in all layers with one operator; from then on
only the row itself writes there, for a page that is not full is never shared. (Zeroing what was gathered, in every
layer of every step, cost 38 us a layer: 1.1 of 38 ms a step.)
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
# Queries of a chunk go in blocks, each against the keys it may see: 8.9 ms a layer where one causal call over
# 512 tokens took 11.9 (9 heads of 64, 2 threads of AVX2).
BLOCK_TOKENS = 128


class SdpaAttention:
    """kv: [num_layers, num_pages, 2, num_kv_heads, page_size, head_dim], device. Page 0 pads, and is finite."""

    def __init__(self, kv: Tensor, windows: Sequence[int | None], max_pages: int) -> None:
        self._kv = kv
        self._windows = tuple(windows)  # one a layer
        self._max_pages = max_pages  # columns of the page table
        self._page_size = kv.shape[4]

    def plan(self, rows: Rows, put: Put) -> "SdpaHostPlan":
        views = {window: self._view(rows, window, put) for window in dict.fromkeys(self._windows)}
        written = self._places(rows.slots[rows.token_rows], rows.positions, put)
        return SdpaHostPlan(self._kv, self._windows, written, self._stale(rows, put), views)

    def _places(self, slots: Int64, positions: Int64, put: Put) -> "_Places":
        page, offset = np.divmod(positions, self._page_size)
        # A token's rows of head_dim within its page: its keys' heads, then its values' heads.
        heads = np.arange(2 * self._kv.shape[3]) * self._page_size
        return _Places(put(slots * self._max_pages + page), put(offset[:, None] + heads))

    def _stale(self, rows: Rows, put: Put) -> "_Places | None":
        """The rest of every page that a row enters in this step and does not fill."""
        ends = rows.starts + rows.lengths
        page_ends = -(-ends // self._page_size) * self._page_size
        num_stale = np.where(page_ends - self._page_size >= rows.starts, page_ends - ends, 0)
        if not num_stale.any():
            return None
        before = np.cumsum(num_stale) - num_stale
        positions = np.arange(num_stale.sum()) + np.repeat(ends - before, num_stale)
        return self._places(np.repeat(rows.slots, num_stale), positions, put)

    def _view(self, rows: Rows, window: int | None, put: Put) -> "_View":
        decode, chunks = np.flatnonzero(rows.lengths == 1), np.flatnonzero(rows.lengths > 1)
        return _View(
            tuple(self._groups(rows, decode, window, put)),
            tuple(self._chunk(rows, int(row), window, put) for row in chunks),
        )

    def _groups(self, rows: Rows, decode: Int64, window: int | None, put: Put) -> Iterator["_Group"]:
        ends = rows.starts[decode] + 1
        lows = np.zeros_like(ends) if window is None else np.maximum(ends - window, 0)
        first_pages = lows // self._page_size
        num_pages = -(-ends // self._page_size) - first_pages
        for members in _split(num_pages, max(1, SPLIT_TOKENS // self._page_size)):
            tokens = None if len(members) == len(rows.slots) else put(rows.last_tokens[decode[members]])
            spans = _Spans(first_pages[members], num_pages[members], lows[members], ends[members])
            yield self._group(rows.slots[decode[members]], spans, tokens, put)

    def _group(self, slots: Int64, spans: "_Spans", tokens: Tensor | None, put: Put) -> "_Group":
        first_pages, num_pages, lows, ends = (span[:, None] for span in spans)
        columns = np.arange(num_pages.max())
        table_at = np.where(columns < num_pages, slots[:, None] * self._max_pages + first_pages + columns, 0)
        positions = first_pages * self._page_size + np.arange(len(columns) * self._page_size)
        hidden = (positions < lows) | (positions >= ends)
        return _Group(tokens, put(table_at), put(hidden.astype(np.int64)))

    def _chunk(self, rows: Rows, row: int, window: int | None, put: Put) -> "_Chunk":
        start, length = int(rows.starts[row]), int(rows.lengths[row])
        low = 0 if window is None else max(start + 1 - window, 0)
        first_page, end_page = low // self._page_size, -(-(start + length) // self._page_size)
        table_at = rows.slots[row] * self._max_pages + np.arange(first_page, end_page)[None]
        first = int(rows.last_tokens[row]) + 1 - length
        return _Chunk(first, length, start - first_page * self._page_size, window, put(table_at))


def _split(num_pages: Int64, worth: int) -> Iterator[Int64]:
    """Members of each group: in one group unless splitting by length saves more than `worth` padded pages."""
    order = np.argsort(-num_pages, kind="stable")
    begin = 0
    for i in range(1, len(order)):
        if (len(order) - i) * int(num_pages[order[begin]] - num_pages[order[i]]) > worth:
            yield order[begin:i]
            begin = i
    if len(order):
        yield np.sort(order[begin:])


class _Spans(NamedTuple):
    """[rows] each: what decode rows gather and see."""

    first_pages: Int64
    num_pages: Int64
    lows: Int64  # the first position in the window
    ends: Int64


class _Places(NamedTuple):
    """Tokens whose keys and values are written."""

    table_at: Tensor  # [num_tokens] int64, device: where in the flat page table
    offsets: Tensor  # [num_tokens, 2 * num_kv_heads] int64, device: rows of head_dim within the page

    def bind(self, flat_table: Tensor, kv: Tensor) -> Tensor:
        """Rows of a layer's pages seen as [-1, head_dim]: [num_tokens * 2 * num_kv_heads] int64, device."""
        rows_a_page = 2 * kv.shape[3] * kv.shape[4]
        return torch.add(self.offsets, flat_table[self.table_at][:, None], alpha=rows_a_page).view(-1)


class _Group(NamedTuple):
    """Decode rows that are gathered, padded and computed together."""

    tokens: Tensor | None  # [rows] int64, device; None when the group is the whole step in order
    table_at: Tensor  # [rows, pages] int64, device: where in the flat page table; 0 is the dummy page
    hidden: Tensor  # [rows, pages * page_size] int64, device: 1 where the row must not see the position

    def bind(self, flat_table: Tensor, kv: Tensor) -> "_DecodeRows":
        _, _, _, num_kv_heads, page_size, head_dim = kv.shape
        bias = torch.zeros(self.hidden.shape, dtype=kv.dtype, device=kv.device)
        bias.masked_fill_(self.hidden.bool(), -math.inf)
        gather_at = _gather_at(self.table_at, flat_table, kv)
        gathered = torch.empty((len(gather_at), page_size * head_dim), dtype=kv.dtype, device=kv.device)
        k, v = gathered.view(2, len(bias), num_kv_heads, -1, head_dim).unbind(0)
        return _DecodeRows(self.tokens, gather_at, gathered, k, v, bias[:, None, None])


class _Chunk(NamedTuple):
    """A row of more than one token."""

    first: int  # its first token in the step
    length: int
    offset: int  # of its first token among the gathered
    window: int | None
    table_at: Tensor  # [1, pages] int64, device

    def bind(self, flat_table: Tensor, kv: Tensor) -> "_ChunkRow":
        blocks = tuple(self._block(begin, kv.device) for begin in range(0, self.length, BLOCK_TOKENS))
        return _ChunkRow(self.first, _gather_at(self.table_at, flat_table, kv), blocks)

    def _block(self, begin: int, device: torch.device) -> "_Block":
        end = min(begin + BLOCK_TOKENS, self.length)
        low = 0 if self.window is None else max(self.offset + begin + 1 - self.window, 0)
        high = self.offset + end
        key = torch.arange(low, high, device=device)
        query = torch.arange(self.offset + begin, high, device=device)[:, None]
        mask = key <= query if self.window is None else (key <= query) & (key > query - self.window)
        return _Block(begin, end, low, high, mask)


def _gather_at(table_at: Tensor, flat_table: Tensor, kv: Tensor) -> Tensor:
    """Rows of a layer's pages seen as [-1, page_size * head_dim], in the order keys and values are wanted:
    [2 * rows * num_kv_heads * pages] int64, device. (Gathering whole pages and permuting copied twice.)
    """
    num_kv_heads = kv.shape[3]
    parts = torch.arange(2 * num_kv_heads, device=kv.device).view(2, 1, num_kv_heads, 1)
    return torch.add(parts, flat_table[table_at][None, :, None], alpha=2 * num_kv_heads).view(-1)


class _View(NamedTuple):
    """What layers of one window see."""

    groups: tuple[_Group, ...]
    chunks: tuple[_Chunk, ...]


class SdpaHostPlan(NamedTuple):
    kv: Tensor
    windows: tuple[int | None, ...]
    written: _Places
    stale: _Places | None
    views: dict[int | None, _View]

    def bind(self, page_table: Tensor) -> "SdpaPlan":
        flat, kv = page_table.view(-1), self.kv
        if self.stale is not None:
            kv.view(len(kv), -1, kv.shape[-1]).index_fill_(1, self.stale.bind(flat, kv), 0)
        bound = {
            window: _BoundView(
                tuple(group.bind(flat, kv) for group in view.groups),
                tuple(chunk.bind(flat, kv) for chunk in view.chunks),
            )
            for window, view in self.views.items()
        }
        layers = tuple(zip(kv.unbind(0), (bound[window] for window in self.windows), strict=True))
        return SdpaPlan(self.written.bind(flat, kv), layers)


class _DecodeRows(NamedTuple):
    """One buffer serves all layers: it stays in the cache, and 2.5 MB is not allocated anew 30 times a step."""

    tokens: Tensor | None  # as in _Group
    gather_at: Tensor
    gathered: Tensor  # [2 * rows * num_kv_heads * pages, page_size * head_dim] kv dtype, device
    k: Tensor  # [rows, num_kv_heads, pages * page_size, head_dim], a view of gathered
    v: Tensor
    bias: Tensor  # [rows, 1, 1, pages * page_size] kv dtype, device: 0 or -inf


class _Block(NamedTuple):
    """Some queries of a chunk, and the gathered keys that any of them sees."""

    begin: int
    end: int
    low: int
    high: int
    mask: Tensor  # [end - begin, high - low] bool, device


class _ChunkRow(NamedTuple):
    first: int
    gather_at: Tensor
    blocks: tuple[_Block, ...]


class _BoundView(NamedTuple):
    groups: tuple[_DecodeRows, ...]
    chunks: tuple[_ChunkRow, ...]


class SdpaPlan(NamedTuple):
    written_at: Tensor  # [num_tokens * 2 * num_kv_heads] int64, device
    layers: tuple[tuple[Tensor, _BoundView], ...]  # pages [num_pages, 2, num_kv_heads, page_size, head_dim]

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """See attention.base.Plan.run: all writes of the step come before its first read."""
        pages, (groups, chunks) = self.layers[layer]
        written = torch.cat((k, v), dim=1).to(pages.dtype)  # [num_tokens, 2 * num_kv_heads, head_dim]
        # index_copy_ over rows of head_dim: 12 us where advanced indexing took 21.
        pages.view(-1, pages.shape[-1]).index_copy_(0, self.written_at, written.view(-1, pages.shape[-1]))
        if len(groups) == 1 and groups[0].tokens is None:
            return _decode(groups[0], pages, q).flatten(1)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for group in groups:
            assert group.tokens is not None, "only a group that is the whole step has none"
            out.index_copy_(0, group.tokens, _decode(group, pages, q.index_select(0, group.tokens)))
        for chunk in chunks:
            _extend(chunk, pages, q, out)
        return out.flatten(1)


def _decode(group: _DecodeRows, pages: Tensor, q: Tensor) -> Tensor:
    """q: [rows, num_heads, head_dim] -> the same shape.

    In the pages' dtype: over bf16 pages SDPA took 0.75 of the time of widening them to float32 first
    (8 rows of 208 tokens), even without bf16 instructions.
    """
    flat_pages = pages.view(-1, group.gathered.shape[1])
    torch.index_select(flat_pages, 0, group.gather_at, out=group.gathered)
    # Query heads of one KV head stand as its queries, so keys and values are never repeated.
    queries = q.to(pages.dtype).view(q.shape[0], pages.shape[2], -1, q.shape[2])
    out = F.scaled_dot_product_attention(queries, group.k, group.v, attn_mask=group.bias)
    return out.reshape(q.shape).to(q.dtype)


def _extend(chunk: _ChunkRow, pages: Tensor, q: Tensor, out: Tensor) -> None:
    """q, out: [num_tokens, num_heads, head_dim]; the chunk's tokens of them."""
    _, _, num_kv_heads, page_size, head_dim = pages.shape
    gathered = pages.view(-1, page_size * head_dim).index_select(0, chunk.gather_at)
    k, v = gathered.to(q.dtype).view(2, 1, num_kv_heads, -1, head_dim).unbind(0)
    for begin, end, low, high, mask in chunk.blocks:
        tokens = slice(chunk.first + begin, chunk.first + end)
        queries = q[tokens].transpose(0, 1)[None]  # [1, num_heads, end - begin, head_dim]
        done = F.scaled_dot_product_attention(
            queries, k[:, :, low:high], v[:, :, low:high], attn_mask=mask, enable_gqa=True
        )
        out[tokens] = done[0].transpose(0, 1)
