"""ModelRunner: one Batch in, one step launched, one Launched out.

GPU thread. It never waits for the device and never reads it back inside launch: no `.item()`, no `nonzero`,
one packed transfer a step. It never knows requests, text or why a row is in the batch.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..attention.base import HostPlan, Int64, Put, Rows
from ..attention.sdpa import SdpaAttention
from ..config import EngineConfig
from ..device.base import Device, Pending
from ..device.cpu import CpuDevice
from ..engine.batch import Batch, StepResult
from ..models.config import ModelConfig
from ..models.layers import Decoder, Placement, PlainLinear, pack_linear
from ..models.loader import load_model
from .sampler import Draw, SamplingRows, pick
from .state import OUTPUT_RING, Deltas, SlotSampling, Tables


class LaunchedStep:
    """A step's tokens on their way to the host."""

    def __init__(self, step: int, pending: Pending) -> None:
        self._step = step
        self._pending = pending

    def ready(self) -> bool:
        return self._pending.ready()

    def result(self) -> StepResult:
        return StepResult(step=self._step, token_ids=self._pending.numpy())


class _Step(NamedTuple):
    """A batch as the device will see it: views into the staging entry, filled by its send()."""

    deltas: Deltas
    ids_at: Tensor  # [num_tokens] int64, device: places in the flat token pool
    positions: Tensor  # [num_tokens] int64, device
    plan: HostPlan
    tail: "_Tail | None"


class _Tail(NamedTuple):
    """What follows the forward for the rows that want a token."""

    last_tokens: Tensor  # [num_rows] int64, device: their last tokens in the step
    drawn_at: Tensor  # [num_rows] int64, device: where in the flat token pool the drawn ids go
    banned: Tensor | None
    draw: Draw | None
    num_rows: int


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

    def __repr__(self) -> str:
        return f"ModelRunner({self._device.name}, {getattr(self, '_tables', 'closed')!r})"

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        self._sampling.write(batch.new_rows)
        staging = self._device.staging()
        step = self._stage(batch, staging.put)
        with self._device.compute():
            staging.send()
            return LaunchedStep(batch.step, self._device.fetch(self._run(batch.step, step)))

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
        )

    def _stage_tail(self, rows: Rows, wanting: Int64, put: Put) -> _Tail | None:
        if not len(wanting):
            return None
        slots, positions = rows.slots[wanting], (rows.starts + rows.lengths)[wanting]
        banned = self._sampling.banned(slots, positions, self._num_tokens)
        return _Tail(
            last_tokens=put(rows.last_tokens[wanting]),
            drawn_at=put(slots * self._tables.max_len + positions),
            banned=None if banned is None else put(banned),
            draw=self._stage_draw(slots, positions, put),
            num_rows=len(wanting),
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

    def _run(self, number: int, step: _Step) -> Tensor:
        """Everything the device does for a step. Returns the drawn ids, [num_rows] int32, in the output ring."""
        tables = self._tables
        step.deltas.apply(tables)
        ids = tables.token_pool.view(-1).index_select(0, step.ids_at)  # [num_tokens] int32, device
        hidden = self._model(ids, step.positions, step.plan.bind(tables.page_table))
        out = tables.outputs[number % OUTPUT_RING]
        return out[:0] if step.tail is None else self._run_tail(step.tail, hidden, out)

    def _run_tail(self, tail: _Tail, hidden: Tensor, out: Tensor) -> Tensor:
        logits = self._model.logits(hidden.index_select(0, tail.last_tokens))  # [num_rows, num_tokens]
        drawn = out[: tail.num_rows]
        drawn.copy_(pick(logits, tail.banned, tail.draw))
        # The pool takes a harmless id where there is NO_TOKEN: the row may be in the next step already.
        self._tables.token_pool.view(-1).index_copy_(0, tail.drawn_at, drawn.clamp_min(0))
        return drawn


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
