"""What grammars leave of a step's logits: bits to minus infinity, with torch as the reference.

GPU thread. It never knows grammars or which request a row is.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..attention.base import Int64, Put
from ..engine.batch import Launched


class UndrawnStep(NamedTuple):
    """A step whose forward is launched and whose tail waits for its masks."""

    masks: NDArray[np.int32]  # [num_masked, num_words]: to be filled
    tail: Callable[[NDArray[np.int32]], Launched]

    def draw(self) -> Launched:
        return self.tail(self.masks)


class Mask(NamedTuple):
    """The masks of one step, staged."""

    rows: Tensor  # [num_masked] int64, device: of the logits
    bits: Tensor  # [num_masked, num_words] int64, device: bit i of a row is set where its token may be i
    num_tokens: int

    @classmethod
    def of(cls, rows: Int64, masks: NDArray[np.int32], num_tokens: int, put: Put) -> "Mask":
        words = np.zeros((len(masks), -(-masks.shape[1] // 2)), np.int64)  # a transfer is of int64
        words.view(np.int32)[:, : masks.shape[1]] = masks
        return cls(put(rows), put(words), num_tokens)

    def apply(self, logits: Tensor) -> None:
        """logits: [num_rows, num_tokens], changed in place."""
        places = torch.arange(8, dtype=torch.uint8, device=logits.device)
        bits = (self.bits.view(torch.uint8)[:, :, None] >> places) & 1
        barred = bits.view(len(self.rows), -1)[:, : logits.shape[1]] == 0
        logits.index_copy_(0, self.rows, logits.index_select(0, self.rows).masked_fill_(barred, -math.inf))
