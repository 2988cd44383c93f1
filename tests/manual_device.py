"""A Device whose copies land when the test says so, and too late for whoever reuses a buffer too early."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from asyncllm.device.cpu import CpuDevice

GARBAGE = 2**62  # as an index it is out of every range


class ManualPending:
    """A copy that has not run yet: the tensor is read when the result is asked for, not when it was launched."""

    def __init__(self, device: "ManualDevice", tensor: torch.Tensor) -> None:
        self._device = device
        self._tensor = tensor
        self._number = device.num_launched

    def ready(self) -> bool:
        return self._device.num_landed >= self._number or self._device.is_impatient()

    def numpy(self) -> Any:
        return self._tensor.numpy().copy()


class ManualStaging:
    """Views hold garbage until send(); the entry is overwritten when the ring comes round."""

    def __init__(self) -> None:
        self._puts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def put(self, array: np.ndarray) -> torch.Tensor:
        view = torch.full(array.shape, GARBAGE)
        self._puts.append((view, torch.from_numpy(array.astype(np.int64))))
        return view

    def send(self) -> None:
        for view, array in self._puts:
            view.copy_(array)

    def spoil(self) -> None:
        for view, _ in self._puts:
            view.fill_(GARBAGE)


class ManualDevice(CpuDevice):
    """`land()` lets the next step's copy arrive. With patience, a result asked for that often arrives by itself:
    so a loop can run alone, and every copy still lands after all that the loop launches before it waits."""

    def __init__(self, patience: int | None = None) -> None:
        self.num_launched = 0
        self.num_landed = 0
        self._patience = patience
        self._asked = 0
        self._ring: list[ManualStaging] = []

    def land(self) -> None:
        self.num_landed += 1

    def is_impatient(self) -> bool:
        self._asked += 1
        return self._patience is not None and self._asked % (self._patience + 1) == self._patience

    def staging(self) -> ManualStaging:  # type: ignore[override]
        self._ring.append(ManualStaging())
        if len(self._ring) > 2:
            self._ring.pop(0).spoil()
        return self._ring[-1]

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fetch(self, tensor: torch.Tensor) -> ManualPending:  # type: ignore[override]
        self.num_launched += 1
        return ManualPending(self, tensor)
