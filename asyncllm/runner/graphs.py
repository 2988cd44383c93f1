"""GraphRunner: a whole step in two graph replays, forward(shape) and tail(rows, kind), on FlashInfer and Triton.

GPU thread. It never waits for the device inside launch and never knows requests, text or why a row is in the batch.

Beside ModelRunner because every line of its step differs: fixed places instead of fresh tensors, padding to buckets
instead of exact sizes, one packed int32 entry that the graph's first kernel unpacks instead of one view an array.
What they share (models, loader, the sampler's numbers, Device) they share as functions and values.
Longer than most: start and step write and read the same fixed places, and an edge between streams is only seen whole.

Streams: see device/cuda.py. Here, beside those edges: a ring entry is overwritten (schedule stream) only after the
step that read it (event `done`); `outputs` of step N are overwritten by step N + 4, launched after N was committed.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from ..attention.base import Lacking
from ..attention.flashinfer import PagedAttention
from ..attention.kernels import cos_sin_table
from ..config import EngineConfig
from ..device.cuda import RING, CudaDevice, Driver, fatal
from ..engine.batch import Batch
from ..models.config import ModelConfig
from ..models.fused import MIN_ROWS, Buffers, Drawing, FusedDecoder
from ..models.layers import Decoder, RMSNorm, RotaryTable
from . import kernels as k
from .buckets import bucket, row_buckets, tail_buckets, token_buckets
from .frame import KINDS, Frame, Kind, Packed, Packer, Shape, TooLong, leading_ones
from .graph_step import GraphStep, More
from .masks import UndrawnStep
from .penalties import recount
from .ranking import WIDTH
from .state import OUTPUT_RING
from .tails import Tail

log = logging.getLogger(__name__)

Run = Callable[[], None]


def _decode_shape(num_rows: int) -> Shape:
    return Shape(num_rows if num_rows == 1 else max(num_rows, MIN_ROWS), num_rows, False)


class GraphRunner:
    """Made by build_graph_runner(); warm_up(), then use_pages(), then capture(), then launch()."""

    def __init__(
        self, model: FusedDecoder, model_config: ModelConfig, device: CudaDevice, config: EngineConfig, num_tokens: int,
        windows: Sequence[int | None],
    ) -> None:  # fmt: skip
        self._model, self._device, self._num_tokens = model, device, num_tokens
        self._frame = frame = Frame(device, config, RING, num_tokens)
        self._packer = Packer(frame, num_tokens)
        dtype = model.decoder.embedding.dtype
        self._heads = model_config.num_heads, model_config.num_kv_heads, model_config.head_dim
        num_heads, num_kv_heads, head_dim = self._heads
        self._buffers = model.buffers(frame.max_tokens)
        self._q = device.zeros((frame.max_tokens, num_heads, head_dim), dtype)
        self._attended = device.zeros((frame.max_tokens, num_heads, head_dim), dtype)
        num_rows = max(MIN_ROWS, frame.max_rows)
        widths = num_heads * head_dim, model.hidden_size
        self._drawing = Drawing(
            frame.rows, frame.meta[k.NUM_ROWS : k.NUM_ROWS + 1],
            *(device.zeros((num_rows, width), dtype) for width in widths),
        )  # fmt: skip
        self._tail = Tail(device, frame, model, self._buffers, model_config.vocab_size, num_tokens)
        rotary = RotaryTable(model_config, torch.float32, device.torch_device, frame.max_len)
        rotation = rotary.at(torch.arange(frame.max_len, device=device.torch_device))
        self._cos_sin = cos_sin_table(rotation.cos, rotation.sin)
        self._page_shape = (2, num_kv_heads, config.page_size, head_dim)
        self._num_layers, self._dtype = model_config.num_layers, dtype
        self._attention = PagedAttention(
            config.attention, self._make_pages(2), windows, num_heads, frame.page_table, frame.max_tokens,
            frame.max_rows,
        )  # fmt: skip
        self._host_ring = torch.zeros(RING, frame.entry_len, dtype=torch.int32, pin_memory=True)
        self._entries = self._host_ring.numpy()
        self._host_outputs = torch.zeros(RING, frame.max_rows, dtype=torch.int32, pin_memory=True)
        self._host_tokens = self._host_outputs.numpy()
        self._host_ranked = torch.zeros(RING, frame.max_rows, WIDTH, dtype=torch.int32, pin_memory=True)
        self._host_ranks = self._host_ranked.numpy()
        self._host_masks_tensor = torch.zeros(len(frame.masks), dtype=torch.int32, pin_memory=True)
        self._host_masks = self._host_masks_tensor.numpy()
        # The driver takes addresses. All of these tensors live as long as the runner and are never reallocated.
        self._ring_ptr, self._host_ring_ptr = frame.ring.data_ptr(), self._host_ring.data_ptr()
        self._outputs_ptr, self._host_outputs_ptr = frame.outputs.data_ptr(), self._host_outputs.data_ptr()
        self._ranked_ptr, self._host_ranked_ptr = frame.ranked.data_ptr(), self._host_ranked.data_ptr()
        self._driver = driver = Driver()
        self._sent, self._done, self._copied = ([driver.new_event() for _ in range(RING)] for _ in range(3))
        self._masked = driver.new_event()
        streams = device.schedule_stream, device.engine_stream, device.copy_stream
        self._schedule_stream, self._engine_stream, self._copy_stream = (stream.cuda_stream for stream in streams)
        self._count = 0  # launches begun; the device counts its forwards, and the same unless one has failed
        self._must_resync = True  # the device counts the runs before capture too
        self._row_buckets, self._token_buckets = row_buckets(frame.max_rows), token_buckets(frame.max_tokens)
        self._padded_rows = [bucket(size, self._row_buckets) for size in range(frame.max_rows + 1)]
        self._padded_draws = {
            kind: [bucket(size, self._tail_buckets(kind)) for size in range(frame.max_rows + 1)]
            for kind in KINDS
        }
        self._max_graph_rows = config.cuda_graph_max_batch
        self._forwards: dict[Shape, Run] = {}
        self._tails: dict[tuple[int, Kind], Run] = {}
        self._graphs: list[torch.cuda.CUDAGraph] = []  # what the runs replay
        self.num_pages = config.num_pages
        self.on_step: Callable[[int, str], None] | None = None  # for benchmarks: (step, "begin" | "end" on the stream)

    def __repr__(self) -> str:
        return (
            f"GraphRunner({self._frame!r}, {self.num_pages} pages, {len(self._forwards)} + {len(self._tails)} graphs)"
        )

    # -- start --

    def _make_pages(self, num_pages: int) -> list[Tensor]:
        shape = (num_pages, *self._page_shape)
        return [self._device.zeros(shape, self._dtype) for _ in range(self._num_layers)]  # HND

    def warm_up(self) -> None:
        """Run the largest step once, on padding alone: kernels load, workspaces grow to what they will be."""
        frame = self._frame
        self._plan_nothing()
        decodes = min(frame.max_rows, frame.max_tokens)
        self._forward(Shape(frame.max_tokens, decodes, True), self._drawing)
        for kind in KINDS:
            self._tail.run(frame.max_rows, kind)
        nothing = torch.zeros(1, dtype=torch.int32, device=frame.state.device)  # slot 0, or token 0 of the step
        self._tail.score(nothing, 0, 0, 0)
        recount(nothing, frame.params, frame.token_pool, frame.counts, 1)
        self._device.synchronize()

    def use_pages(self, num_pages: int) -> None:
        """Allocate the KV pool."""
        self.num_pages = num_pages
        self._attention.use_pages([])
        self._attention.use_pages(self._make_pages(num_pages))

    def capture(self) -> None:
        """Every graph, the largest first, so that the small ones find the pool's memory there."""
        began_s = time.monotonic()
        if not self._max_graph_rows:
            return
        pool = torch.cuda.graph_pool_handle()
        shapes, tails = list(self._shapes()), list(self._tail_keys())
        with tqdm(total=len(shapes) + len(tails), desc="capturing graphs", unit="graph", disable=None) as bar:
            self._plan_nothing()
            for shape in shapes:
                self._forwards[shape] = self._captured(partial(self._forward, shape, self._drawing), pool)
                bar.update()
            for key in tails:
                self._tails[key] = self._captured(partial(self._tail.run, *key), pool)
                bar.update()
        self._device.synchronize()
        log.info("captured %d graphs in %.1f s", len(shapes) + len(tails), time.monotonic() - began_s)

    def time_steps(self) -> tuple[float, int]:
        """Seconds that the largest step takes, and the tokens of context at which attention takes as long as the rest.

        Of padding alone, whose products are those of any tokens; then of a chunk at the end of the longest context
        (up to 16k), which is all on the dummy page. With sliding windows attention grows no further than they are
        wide, so that a deep chunk is shorter than it need be.
        """
        max_tokens, max_len = self._frame.max_tokens, min(self._frame.max_len, 16384)
        step_s = self._time_forward(max_tokens)
        length = max(1, min(max_len // 2, 2048, max_tokens))
        start, num_tokens = max_len - length, bucket(length, self._token_buckets)
        plain_s = self._time_forward(num_tokens)
        self._attention.plan_prefill(0, *(np.array([number]) for number in (0, start, length)))
        deep_s = self._time_forward(num_tokens)
        self._plan_nothing()
        attended_s = max(deep_s - plain_s, 1e-6) / (length * (start + length / 2))  # a token, a position
        return step_s, max(1, round(step_s / max_tokens / attended_s))

    def _time_forward(self, num_tokens: int) -> float:
        shape, times_s = Shape(num_tokens, 0, True), []
        for _ in range(3):
            began_s = time.perf_counter()
            self._run_forward(shape)
            self._device.synchronize()
            times_s.append(time.perf_counter() - began_s)
        return min(times_s)

    def _shapes(self) -> Iterator[Shape]:
        rows = [size for size in self._row_buckets if size <= self._max_graph_rows]
        for num_tokens in reversed(self._token_buckets if self._attention.captures_prefill else []):
            for decodes in self._mixed_decodes():
                if decodes <= num_tokens:
                    yield Shape(num_tokens, decodes, True)
        for size in reversed(rows):
            yield _decode_shape(size)

    def _mixed_decodes(self) -> list[int]:
        """Decode rows a mixed step is padded to: none, few or all. 256 padding rows take a decode kernel 10 us."""
        return [0, *(size for size in (32,) if size < self._frame.max_rows), self._frame.max_rows]

    def _tail_keys(self) -> Iterator[tuple[int, Kind]]:
        for kind in KINDS:
            for size in reversed(self._tail_buckets(kind)):
                if size <= self._max_graph_rows:
                    yield size, kind

    def _tail_buckets(self, kind: Kind) -> list[int]:
        return tail_buckets(self._frame.max_rows, is_rare=kind.shape or kind.rank or kind.mask)

    def _captured(self, run: Run, pool: Any) -> Run:
        """The run as one call."""
        # Not torch.cuda.graph(): it collects garbage and synchronizes for each, 0.1 s by 200 graphs.
        run()  # compiles and loads what this size needs
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            run()
        finally:
            graph.capture_end()
        self._graphs.append(graph)
        if not hasattr(graph, "raw_cuda_graph_exec"):
            return graph.replay
        return partial(self._driver.launch, graph.raw_cuda_graph_exec(), self._engine_stream)

    def _plan_nothing(self) -> None:
        none = np.zeros(0, np.int64)
        self._attention.plan_prefill(0, none, none, none)

    # -- one step --

    def launch(self, batch: Batch) -> GraphStep | UndrawnStep:
        """Raises EngineDead where the GPU is beyond repair, anything else for a step that failed alone."""
        with self._failing():
            return self._launch(batch)

    @contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self._must_resync = True
            raise fatal(error) or error from error

    def close(self) -> None:
        try:
            self._device.synchronize()
        finally:
            self._forwards.clear()
            self._tails.clear()
            self._graphs.clear()
            self._attention.use_pages([])

    def _launch(self, batch: Batch) -> GraphStep | UndrawnStep:
        self._device.assert_on_engine_stream()
        if batch.new_rows:
            self._packer.note(batch)
        count, entry = self._count, self._count % RING
        self._count += 1  # wherever this launch may fail: its entry can be on its way to the device by then
        assert self._driver.is_over(self._sent[entry]), "more steps in flight than the ring has entries"
        num_decodes = leading_ones(batch.lengths)
        num_rows = batch.num_rows if batch.wants_token.all() else int(np.count_nonzero(batch.wants_token))
        shape = self._shape_of(batch, num_decodes)
        packed = self._pack(batch, entry, shape, num_decodes, num_rows)
        self._send(count, packed.used)
        if shape.has_prefill:
            self._plan_prefill(batch, num_decodes)
        if self.on_step is not None:
            self.on_step(batch.step, "begin")
        if batch.scored and self._ends_early(shape):  # rare, so no graphs of whole ones
            self._run_eagerly(self._forward, shape, None)
        else:
            self._run_forward(shape)
        if batch.new_rows:
            self._recount(batch)
        scored = self._score(batch) if batch.scored else ()
        if not len(batch.masked):
            return self._finish(batch, entry, packed, scored)
        # No older step has them any more: this one is drawn only once those before it are committed.
        masks = self._host_masks[self._frame.max_rows :].reshape(self._frame.max_rows, -1)[: len(batch.masked)]
        return UndrawnStep(masks, lambda masks: self._draw(batch, entry, packed, scored))

    def _draw(self, batch: Batch, entry: int, packed: Packed, scored: tuple[Tensor, ...]) -> GraphStep:
        """The masks in the pinned ring to the device, and the tail behind them."""
        with self._failing():
            driver, frame = self._driver, self._frame
            numbers = self._host_masks[: frame.max_rows]
            numbers.fill(-1)
            rows = np.searchsorted(np.flatnonzero(batch.wants_token), batch.masked)
            numbers[rows] = np.arange(len(rows), dtype=np.int32)
            used = frame.max_rows + len(rows) * -(-self._num_tokens // 32)
            driver.copy_in(frame.masks.data_ptr(), self._host_masks_tensor.data_ptr(), 4 * used, self._schedule_stream)
            driver.record(self._masked, self._schedule_stream)
            driver.wait(self._engine_stream, self._masked)
            return self._finish(batch, entry, packed, scored)

    def _shape_of(self, batch: Batch, num_decodes: int) -> Shape:
        if num_decodes == batch.num_rows:
            return _decode_shape(self._padded_rows[num_decodes])
        num_tokens = bucket(batch.num_tokens, self._token_buckets)
        decodes = next(size for size in self._mixed_decodes() if size >= num_decodes)
        return Shape(num_tokens, min(decodes, num_tokens), True)

    def _pack(self, batch: Batch, entry: int, shape: Shape, num_decodes: int, num_rows: int) -> Packed:
        try:
            return self._packer.pack(batch, self._entries[entry], shape, num_decodes, num_rows)
        except TooLong:
            self._write_directly(batch)
            rest = msgspec.structs.replace(batch, new_rows=(), page_deltas=batch.page_deltas[:0])
            return self._packer.pack(rest, self._entries[entry], shape, num_decodes, num_rows)

    def _plan_prefill(self, batch: Batch, num_decodes: int) -> None:
        columns = (batch.slots, batch.starts, batch.lengths)
        self._attention.plan_prefill(num_decodes, *(column[num_decodes:].astype(np.int64) for column in columns))

    def _send(self, count: int, used: int) -> None:
        driver, entry = self._driver, count % RING
        # The step that read this entry last; committed long ago, so this never waits.
        driver.wait(self._schedule_stream, self._done[entry])
        offset = 4 * entry * self._frame.entry_len
        driver.copy_in(self._ring_ptr + offset, self._host_ring_ptr + offset, 4 * used, self._schedule_stream)
        driver.record(self._sent[entry], self._schedule_stream)
        driver.wait(self._engine_stream, self._sent[entry])
        if self._must_resync:
            self._run_eagerly(self._frame.counter.fill_, count)
            self._must_resync = False

    @torch.inference_mode()
    def _run_eagerly(self, run: Callable[..., Any], *args: Any) -> None:
        run(*args)

    def _run_forward(self, shape: Shape) -> None:
        if (run := self._forwards.get(shape)) is not None:
            run()
        else:
            self._run_eagerly(self._forward, shape, self._drawing)

    def _finish(self, batch: Batch, entry: int, packed: Packed, scored: tuple[Tensor, ...]) -> GraphStep:
        step, driver, count = batch.step, self._driver, packed.num_rows
        if count:
            key = self._padded_draws[packed.kind][count], packed.kind
            if (run := self._tails.get(key)) is not None:
                run()
            else:
                self._run_eagerly(self._tail.run, *key)
        driver.record(self._done[entry], self._engine_stream)
        if self.on_step is not None:
            self.on_step(step, "end")
        driver.wait(self._copy_stream, self._done[entry])
        width = 4 * self._frame.max_rows
        more = None
        if count:
            source = self._outputs_ptr + step % OUTPUT_RING * width
            driver.copy_out(self._host_outputs_ptr + entry * width, source, 4 * count, self._copy_stream)
        if scored or (count and packed.kind.rank):
            more = self._copy_more(batch, entry, packed, scored)
        driver.record(self._copied[entry], self._copy_stream)
        return GraphStep(step, driver, self._copied[entry], self._host_tokens[entry, :count], more)

    def _copy_more(self, batch: Batch, entry: int, packed: Packed, scored: tuple[Tensor, ...]) -> More:
        """Copies of what is told of tokens; of a prompt's, which are rare, by torch's own calls."""
        count, width = packed.num_rows, 4 * self._frame.max_rows * WIDTH
        num_top = self._packer.num_top[batch.slots[batch.wants_token]]
        asking = np.flatnonzero(num_top >= 0)
        if len(asking):
            source, host = self._ranked_ptr + batch.step % OUTPUT_RING * width, self._host_ranked_ptr + entry * width
            self._driver.copy_out(host, source, 4 * WIDTH * count, self._copy_stream)
        hosts = self._copy_scored(scored) if scored else ()
        return More(
            ranked=self._host_ranks[entry, :count] if len(asking) else None,
            asking=asking,
            num_top=int(num_top.max()) if len(asking) else 0,
            scored=tuple([host.numpy() for host in hosts]),
            wide=tuple([num_top for _, _, _, num_top in batch.scored]),
            held=(*hosts, *scored),
        )

    def _copy_scored(self, scored: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hosts = tuple([torch.empty(rows.shape, dtype=torch.int32, pin_memory=True) for rows in scored])
        with torch.cuda.stream(self._device.copy_stream):
            for host, rows in zip(hosts, scored, strict=True):
                host.copy_(rows, non_blocking=True)
        return hosts

    def _recount(self, batch: Batch) -> None:
        """Where a slot penalises, its new text is counted; eagerly, for rows are admitted and resumed now and then."""
        rows = [row for row in batch.new_rows if row.shaping is not None and row.shaping.counts]
        if rows:
            frame, longest = self._frame, max([len(row.token_ids) for row in rows])
            slots = self._put(np.array([row.slot for row in rows], np.int32))
            self._run_eagerly(recount, slots, frame.params, frame.token_pool, frame.counts, longest)

    @torch.inference_mode()
    def _score(self, batch: Batch) -> tuple[Tensor, ...]:
        """[n, WIDTH] of each stretch of prompt, device."""
        places = self._packer.token_places(batch)
        return tuple(
            [
                self._tail.score(self._put(at), int(batch.slots[row]), first + 1, num_top)
                for at, (row, first, _, num_top) in zip(places, batch.scored, strict=True)
            ]
        )

    def _put(self, array: NDArray[np.int32]) -> Tensor:
        # torch's pinned allocator reuses no block before the copies that were made from it are over.
        return torch.from_numpy(array).pin_memory().to(self._frame.state.device, non_blocking=True)

    @torch.inference_mode()
    def _write_directly(self, batch: Batch) -> None:
        """A step's writes to the tables that no ring entry holds: rare, long prompts admitted together."""
        places, values = (np.concatenate(arrays) for arrays in zip(*self._packer.writes(batch), strict=True))
        at, new = self._put(places.astype(np.int32)), self._put(values.astype(np.int32))
        self._frame.state.index_copy_(0, at.to(torch.int64), new)

    # -- what the graphs hold --

    def _forward(self, shape: Shape, drawing: Drawing | None) -> None:
        """Kernels alone, on fixed places: unpack, gather, every layer."""
        frame, model = self._frame, self._model
        num_tokens, num_decodes, has_prefill = shape
        slots, positions = frame.slots[:num_tokens], frame.positions[:num_tokens]
        tables, seq_lens = frame.tables[:num_decodes], frame.seq_lens[:num_decodes]
        buffers = Buffers(*(buffer[:num_tokens] for buffer in self._buffers))
        q, attended = self._q[:num_tokens], self._attended[:num_tokens]
        k.unpack(frame.ring, frame.counter, frame.meta, frame.state, frame.slots, frame.positions)
        k.gather(
            frame.meta, frame.counter, frame.token_pool, frame.page_table, slots, positions, model.decoder.embedding,
            buffers.residual, tables, seq_lens, frame.page_size,
        )  # fmt: skip

        if num_decodes:
            self._attention.plan_decode(tables, seq_lens)

        def attend(layer: int, qkv: Tensor, lacking: Lacking | None, norm: RMSNorm | None) -> Tensor:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            self._attention.store(layer, qkv, lacking, q, weight, eps, self._cos_sin, slots, positions)
            if num_decodes:
                self._attention.decode(layer, q[:num_decodes], attended[:num_decodes])
            if has_prefill:  # after decode, whose padding rows are prompt tokens here
                self._attention.prefill(layer, q, attended)
            return attended.view(num_tokens, -1)

        model.forward(buffers, attend, drawing if self._ends_early(shape) else None)

    def _ends_early(self, shape: Shape) -> bool:
        """Whether its last block is computed for the rows that draw alone: few tokens cost as little as those."""
        return shape.num_tokens >= 2 * len(self._drawing.residual)


def build_graph_runner(
    model: Decoder, model_config: ModelConfig, config: EngineConfig, device: CudaDevice, num_tokens: int
) -> GraphRunner:
    """Not yet captured: the caller sizes the KV pool between warm_up() and capture()."""
    return GraphRunner(FusedDecoder(model), model_config, device, config, num_tokens, model_config.windows)
