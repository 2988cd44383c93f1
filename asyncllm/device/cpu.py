"""The CPU as a Device: memory is memory, so staging shares it and every fetch is ready.

GPU thread. It never knows models, batches or tokens.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class CpuPending:
    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def ready(self) -> bool:
        return True

    def numpy(self) -> NDArray[np.int32]:
        return self._tensor.numpy().copy()


class CpuStaging:
    def put(self, array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))

    def send(self) -> None:
        pass


class CpuDevice:
    name = "cpu"
    torch_device = torch.device("cpu")

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        # numpy's zeros are calloc's: pages nobody has touched take no memory. torch.zeros writes them all.
        zeros = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return torch.from_numpy(zeros).view(dtype).view(shape)

    def staging(self) -> CpuStaging:
        return CpuStaging()

    def compute(self) -> AbstractContextManager[None]:
        return nullcontext()

    def fetch(self, tensor: Tensor) -> CpuPending:
        return CpuPending(tensor)

    def synchronize(self) -> None:
        pass
