"""Faults on purpose: a Runner around the real one that breaks at a given step, so that every way of failing can be
tried on a running server (ASYNCLLM_FAULT=KIND@STEP, and only with --allow-fault-injection).

GPU thread. It never knows who asked; without a fault it is not there at all.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any, NoReturn, cast

import msgspec
import numpy as np

from ..engine.batch import NO_TOKEN, Batch, Int32, Launched, Runner, StepResult, Undrawn
from ..errors import DeviceFailed, OutOfMemory

log = logging.getLogger(__name__)

Step = Launched | Undrawn
Change = Callable[[StepResult], StepResult]


class Fault(msgspec.Struct, frozen=True):
    """What happens, and at which launch, counted from 1."""

    kind: str
    step: int


class FaultyRunner:
    """The real runner, until the step has come; and after it, if it is still to be had."""

    def __init__(self, runner: Runner, fault: Fault, on_gpu: bool) -> None:
        self._runner = runner
        self._fault = fault
        self._on_gpu = on_gpu
        self._num_launches = 0

    def __repr__(self) -> str:
        return f"FaultyRunner({self._fault}, {self._runner!r})"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def launch(self, batch: Batch) -> Step:
        self._num_launches += 1
        if not self._is_due(batch):
            return self._runner.launch(batch)
        self._num_launches = -(1 << 62)  # once
        log.warning("injecting %s into step %d", self._fault.kind, batch.step)
        return _KINDS[self._fault.kind](self, batch)

    def close(self) -> None:
        self._runner.close()

    def _is_due(self, batch: Batch) -> bool:
        """A row is broken where there is one beside it to be spared."""
        is_kind = self._fault.kind != "nan_row" or (batch.num_rows > 1 and bool(batch.wants_token.all()))
        return self._num_launches >= self._fault.step and is_kind

    # -- the kinds --

    def _step_exception(self, batch: Batch) -> Step:
        return _broken(self._runner.launch(batch), _raising(RuntimeError("injected: the step failed")))

    def _out_of_memory(self, batch: Batch) -> NoReturn:
        raise OutOfMemory("injected: no memory for this step")

    def _nan_row(self, batch: Batch) -> Step:
        return _broken(self._runner.launch(batch), _first_row_is_nan)

    def _dead_thread(self, batch: Batch) -> NoReturn:
        raise SystemExit("injected: the thread ends")

    def _stuck_step(self, batch: Batch) -> NoReturn:
        threading.Event().wait()
        raise AssertionError("nobody sets it")

    def _device_assert(self, batch: Batch) -> Step:
        """On a GPU an index outside of a tensor: the context is lost. A CPU can only say so."""
        if not self._on_gpu:
            raise DeviceFailed("injected: device-side assert triggered")
        import torch

        torch.zeros(4, device="cuda")[torch.tensor([1 << 20], device="cuda")]
        return self._runner.launch(batch)

    def _stuck_kernel(self, batch: Batch) -> Step:
        """A kernel that does not end, before the step's own; on a CPU as stuck_step."""
        if not self._on_gpu:
            self._stuck_step(batch)
        import torch

        torch.cuda._sleep(1 << 62)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return self._runner.launch(batch)


_KINDS: dict[str, Callable[[FaultyRunner, Batch], Step]] = {
    "step_exception": FaultyRunner._step_exception,
    "out_of_memory": FaultyRunner._out_of_memory,
    "nan_row": FaultyRunner._nan_row,
    "dead_thread": FaultyRunner._dead_thread,
    "stuck_step": FaultyRunner._stuck_step,
    "device_assert": FaultyRunner._device_assert,
    "stuck_kernel": FaultyRunner._stuck_kernel,
}


def _broken(step: Step, change: Change) -> Step:
    if hasattr(step, "draw"):
        return _BrokenTail(cast(Undrawn, step), change)
    return _Broken(step, change)


class _BrokenTail:
    """A step that waits for its masks, and breaks then."""

    def __init__(self, step: Undrawn, change: Change) -> None:
        self._step, self._change = step, change

    @property
    def masks(self) -> Int32:
        return self._step.masks

    def draw(self) -> Launched:
        return _Broken(self._step.draw(), self._change)


class _Broken:
    """A step whose result is something else."""

    def __init__(self, launched: Launched, change: Change) -> None:
        self._launched = launched
        self._change = change

    def ready(self) -> bool:
        return self._launched.ready()

    def result(self) -> StepResult:
        return self._change(self._launched.result())


def _raising(error: Exception) -> Change:
    def change(result: StepResult) -> StepResult:
        raise error

    return change


def _first_row_is_nan(result: StepResult) -> StepResult:
    token_ids = np.concatenate([np.array([NO_TOKEN], np.int32), result.token_ids[1:]])
    return msgspec.structs.replace(result, token_ids=token_ids)


def parse(text: str) -> Fault:
    """A fault from KIND@STEP.

    Raises:
        ValueError: it is none, and which there are.
    """
    kind, _, step = text.partition("@")
    if kind not in _KINDS or not (step.isdecimal() and int(step) > 0):
        raise ValueError(f"a fault is KIND@STEP with KIND one of {', '.join(_KINDS)}; got {text!r}")
    return Fault(kind, int(step))
