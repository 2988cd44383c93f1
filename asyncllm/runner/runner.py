"""ModelRunner: one Batch in, one step launched, one Launched out.

GPU thread. It never waits for the device and never reads it back inside launch: no `.item()`, no `nonzero`,
one packed transfer a step. It never knows requests, text or why a row is in the batch.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.base import HostPlan, Int64, Put, Rows
from ..attention.sdpa import SdpaAttention
from ..config import EngineConfig
from ..device.base import Device, Pending
from ..device.cpu import CpuDevice
from ..engine.batch import Batch, NewRow, StepResult
from ..models.config import ModelConfig
from ..models.layers import Decoder, Placement, PlainLinear, pack_linear
from ..models.loader import load_model
from .masks import Mask, UndrawnStep
from .sampler import Draw, SamplingRows, pick
from .scoring import SCORED_ROWS, score, split
from .shaping import Counted, Shape, SlotShaping, stage_recount
from .state import OUTPUT_RING, Deltas, SlotSampling, Tables


class LaunchedStep:
    """A step's tokens on their way to the host, and the log probabilities behind them."""

    def __init__(self, step: int, pending: Pending, output: "_Output") -> None:
        self._step = step
        self._pending = pending
        self._output = output  # held: the copy may still read it

    def ready(self) -> bool:
        return self._pending.ready()

    def result(self) -> StepResult:
        packed, output = self._pending.numpy(), self._output
        if not output.blocks:
            return StepResult(step=self._step, token_ids=packed)
        blocks = split(packed[output.num_rows :], output.blocks)
        logprobs = blocks.pop(0) if output.has_drawn else None
        return StepResult(
            step=self._step, token_ids=packed[: output.num_rows], logprobs=logprobs, scores=tuple(blocks)
        )  # fmt: skip


class _Output(NamedTuple):
    """What a step leaves for the host."""

    packed: Tensor  # int32, device: the drawn ids, then blocks of score()
    num_rows: int  # drawn ids
    has_drawn: bool  # the first block is of drawn tokens
    blocks: tuple[tuple[int, int], ...]  # (rows, num_top)


class _Step(NamedTuple):
    """A batch as the device will see it: views into the staging entry, filled by its send()."""

    deltas: Deltas
    ids_at: Tensor  # [num_tokens] int64, device: places in the flat token pool
    positions: Tensor  # [num_tokens] int64, device
    plan: HostPlan
    tail: "_Tail | None"
    recount: tuple[Tensor, Tensor] | None  # places in the flat counts and their values
    scored: "tuple[_Stretch, ...]"


class _Stretch(NamedTuple):
    """Prompt tokens to be scored."""

    at: Tensor  # [n] int64, device: the step's tokens that they follow
    ids_at: Tensor  # [n] int64, device: where they stand in the flat token pool
    num_top: int


class _Tail(NamedTuple):
    """What follows the forward for the rows that want a token."""

    last_tokens: Tensor  # [num_rows] int64, device: their last tokens in the step
    drawn_at: Tensor  # [num_rows] int64, device: where in the flat token pool the drawn ids go
    banned: Tensor | None
    draw: Draw | None
    num_rows: int
    shape: Shape | None
    counted: Counted | None
    asking: Tensor | None  # [n] int64, device: among the rows, those whose log probabilities are asked for
    num_top: int


class ModelRunner:
    def __init__(
        self, model: Decoder, device: Device, tables: Tables, attention: SdpaAttention, num_tokens: int
    ) -> None:
        self._model = model
        self._device = device
        self._tables = tables
        self._attention = attention
        self._num_tokens = num_tokens
        self._sampling = SlotSampling(len(tables.page_table))
        self._shaping = SlotShaping()
        self._counts: Tensor | None = None  # [num_slots, num_tokens] int32, device; once a row counts its tokens

    def __repr__(self) -> str:
        return f"ModelRunner({self._device.name}, {getattr(self, '_tables', 'closed')!r})"

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep | UndrawnStep:
        self._sampling.write(batch.new_rows)
        self._shaping.write(batch.new_rows)
        staging = self._device.staging()
        step = self._stage(batch, staging.put)
        with self._device.compute():
            staging.send()
            if step.recount is not None:
                self._recount(batch.new_rows, *step.recount)
            hidden, scores = self._run_forward(step)
            if not len(batch.masked):
                return self._finish(batch.step, step, hidden, scores, None)
        masks = np.zeros((len(batch.masked), -(-self._num_tokens // 32)), np.int32)
        rows = np.searchsorted(np.flatnonzero(batch.wants_token), batch.masked)
        return UndrawnStep(masks, partial(self._draw_masked, batch.step, step, hidden, scores, rows))

    @torch.inference_mode()
    def _draw_masked(
        self, number: int, step: _Step, hidden: Tensor, scores: list[Tensor], rows: Int64, masks: NDArray[np.int32]
    ) -> LaunchedStep:
        staging = self._device.staging()
        mask = Mask.of(rows, masks, self._num_tokens, staging.put)
        with self._device.compute():
            staging.send()
            return self._finish(number, step, hidden, scores, mask)

    def close(self) -> None:
        self._device.synchronize()
        del self._model, self._attention, self._tables

    def _stage(self, batch: Batch, put: Put) -> _Step:
        rows = Rows.of(*(column.astype(np.int64) for column in (batch.slots, batch.starts, batch.lengths)))
        return _Step(
            deltas=Deltas.of(batch, self._tables, put),
            ids_at=put(rows.slots[rows.token_rows] * self._tables.max_len + rows.positions),
            positions=put(rows.positions),
            plan=self._attention.plan(rows, put),
            tail=self._stage_tail(rows, np.flatnonzero(batch.wants_token), put),
            recount=stage_recount(batch.new_rows, self._num_tokens, put) if self._shaping else None,
            scored=self._stage_scored(batch, rows, put) if batch.scored else (),
        )

    def _stage_scored(self, batch: Batch, rows: Rows, put: Put) -> tuple[_Stretch, ...]:
        firsts = np.cumsum(rows.lengths) - rows.lengths
        stretches = []
        for row, first, length, num_top in batch.scored:
            steps = np.arange(length)
            at = firsts[row] + first - rows.starts[row] + steps
            ids_at = rows.slots[row] * self._tables.max_len + first + 1 + steps
            stretches.append(_Stretch(put(at), put(ids_at), num_top))
        return tuple(stretches)

    def _stage_tail(self, rows: Rows, wanting: Int64, put: Put) -> _Tail | None:
        if not len(wanting):
            return None
        slots, positions = rows.slots[wanting], (rows.starts + rows.lengths)[wanting]
        shape = counted = None
        if self._shaping:
            shape = self._shaping.stage(slots, positions, self._num_tokens, self._tables.max_len, put)
            counted = self._shaping.stage_counted(slots, self._num_tokens, put)
        num_top = self._sampling.num_logprobs[slots]
        asking = np.flatnonzero(num_top >= 0)
        banned = self._sampling.banned(slots, positions, self._num_tokens)
        return _Tail(
            last_tokens=put(rows.last_tokens[wanting]),
            drawn_at=put(slots * self._tables.max_len + positions),
            banned=None if banned is None else put(banned),
            draw=self._stage_draw(slots, positions, put),
            num_rows=len(wanting),
            shape=shape,
            counted=counted,
            asking=put(asking) if len(asking) else None,
            num_top=int(num_top.max()),
        )

    def _stage_draw(self, slots: Int64, positions: Int64, put: Put) -> Draw | None:
        sampling = self._sampling
        at = np.flatnonzero(sampling.temperature[slots] > 0)
        if not len(at):
            return None
        of = slots[at]
        rows = SamplingRows(
            at, sampling.temperature[of], sampling.top_k[of], sampling.top_p[of], sampling.min_p[of],
            sampling.seed[of], positions[at],
        )  # fmt: skip
        return Draw.of(rows, put)

    def _run_forward(self, step: _Step) -> tuple[Tensor, list[Tensor]]:
        """(hidden states, scores of prompt tokens)"""
        tables = self._tables
        step.deltas.apply(tables)
        ids = tables.token_pool.view(-1).index_select(0, step.ids_at)  # [num_tokens] int32, device
        hidden = self._model(ids, step.positions, step.plan.bind(tables.page_table))
        return hidden, [self._score(stretch, hidden) for stretch in step.scored]

    def _finish(
        self, number: int, step: _Step, hidden: Tensor, scores: list[Tensor], mask: Mask | None
    ) -> LaunchedStep:
        output = self._run_rest(number, step, hidden, scores, mask)
        return LaunchedStep(number, self._device.fetch(output.packed), output)

    def _run_rest(
        self, number: int, step: _Step, hidden: Tensor, scores: list[Tensor], mask: Mask | None
    ) -> _Output:
        """What follows the forward. The drawn ids are in the output ring unless more goes with them."""
        out, tail = self._tables.outputs[number % OUTPUT_RING], step.tail
        if tail is None:
            drawn, logprobs = out[:0], None
        else:
            drawn, logprobs = self._run_tail(tail, hidden, out, mask)
        blocks = scores if logprobs is None else [logprobs, *scores]
        return _Output(
            packed=torch.cat([drawn, *(block.view(-1) for block in blocks)]) if blocks else drawn,
            num_rows=len(drawn),
            has_drawn=logprobs is not None,
            blocks=tuple((len(block), block.shape[1] // 2) for block in blocks),
        )

    def _run_tail(
        self, tail: _Tail, hidden: Tensor, out: Tensor, mask: Mask | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits of the rows that draw, what changes them, their draws. Then the log probabilities, if wanted."""
        pool = self._tables.token_pool
        logits = self._model.logits(hidden.index_select(0, tail.last_tokens))  # [num_rows, num_tokens]
        own = None if tail.asking is None else logits.index_select(0, tail.asking)  # a copy: as the model has them
        if tail.shape is not None:
            tail.shape.apply(logits, pool, self._counts)
        if mask is not None:
            mask.apply(logits)
        drawn = out[: tail.num_rows]
        drawn.copy_(pick(logits, tail.banned, tail.draw))
        # The pool takes a harmless id where none was drawn: the row may be in the next step already.
        pool.view(-1).index_copy_(0, tail.drawn_at, drawn.clamp_min(0))
        if tail.counted is not None and self._counts is not None:
            tail.counted.add(drawn, self._counts)
        if own is None or tail.asking is None:
            return drawn, None
        return drawn, score(own, drawn.index_select(0, tail.asking).to(torch.int64), tail.num_top)

    def _recount(self, rows: tuple[NewRow, ...], places: Tensor, values: Tensor) -> None:
        if self._counts is None:
            num_slots = len(self._tables.page_table)
            self._counts = self._device.zeros((num_slots, self._num_tokens), torch.int32)
        for row in rows:
            if row.shaping is not None and row.shaping.counts:
                self._counts[row.slot].zero_()
        self._counts.view(-1).index_copy_(0, places, values.to(torch.int32))

    def _score(self, stretch: _Stretch, hidden: Tensor) -> Tensor:
        """[n, 1 + 2 * num_top] int32, device; a few positions at a time, for their logits are large."""
        ids = self._tables.token_pool.view(-1).index_select(0, stretch.ids_at).to(torch.int64)
        chunks = zip(torch.split(stretch.at, SCORED_ROWS), torch.split(ids, SCORED_ROWS), strict=True)
        return torch.cat(
            [score(self._model.logits(hidden.index_select(0, at)), own, stretch.num_top) for at, own in chunks]
        )


def build_runner(
    folder: str | Path, config: EngineConfig, num_tokens: int | None = None, device: Device | None = None
) -> ModelRunner:
    """Load a model and make its tables; call it in the thread that will launch.

    num_tokens: ids the tokenizer knows; the model's padding ids beyond are never drawn.

    Raises:
        ModelError: the folder cannot be computed, and why.
    """
    torch.set_num_threads(config.threads)
    device = device or CpuDevice()
    model_config = ModelConfig.from_folder(folder)
    limit = min(num_tokens or model_config.vocab_size, model_config.vocab_size)
    dtype = getattr(torch, config.dtype)
    with torch.inference_mode():
        model = load_model(folder, model_config, _placement(device, dtype, limit, config.max_model_len + 1))
        kv_shape = (model_config.num_layers, model_config.num_kv_heads, model_config.head_dim)
        tables = Tables(device, config, kv_shape, dtype)
    attention = SdpaAttention(tables.kv, model_config.windows, tables.max_pages)
    return ModelRunner(model, device, tables, attention, limit)


def _placement(device: Device, dtype: torch.dtype, num_tokens: int, max_len: int) -> Placement:
    if dtype in (torch.bfloat16, torch.float16) and _wants_packed(device):
        return Placement(device.torch_device, dtype, torch.float32, pack_linear, num_tokens, max_len)
    return Placement(device.torch_device, dtype, dtype, PlainLinear, num_tokens, max_len)


def _wants_packed(device: Device) -> bool:
    """A CPU with AVX2 and nothing better. With AVX512 torch has 16-bit kernels of its own; unmeasured, so left be."""
    if device.torch_device.type != "cpu" or "fbgemm" not in torch.backends.quantized.supported_engines:
        return False
    return torch.backends.cpu.get_cpu_capability() == "AVX2"
