"""The seam between the runner and a machine: memory, staging towards it, fetching from it.

GPU thread. It never knows models, batches or tokens.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Pending(Protocol):
    """A copy on its way to the host."""

    def ready(self) -> bool:
        """Whether numpy() would return at once. Never blocks."""

    def numpy(self) -> NDArray[np.int32]:
        """The copied values; waits if need be."""


class Staging(Protocol):
    """One step's host arrays, packed for one transfer. Comes from a ring: valid until its step has run."""

    def put(self, array: NDArray[np.int64]) -> Tensor:
        """A device view of the array's shape, to be filled by send(). Kernels that read it are launched after."""

    def send(self) -> None:
        """Enqueue the one transfer."""


class Device(Protocol):
    name: str
    torch_device: torch.device

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...

    def staging(self) -> Staging:
        """The next entry of the staging ring."""

    def compute(self) -> AbstractContextManager[None]:
        """Kernels launched inside go to the engine's stream."""

    def fetch(self, tensor: Tensor) -> Pending:
        """Copy to the host behind what was launched so far.

        The tensor is read when the copy runs, which may be after the next step has been launched:
        whoever owns it must not write it again before the copy is ready.
        """

    def synchronize(self) -> None: ...
