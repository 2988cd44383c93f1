"""A GraphRunner's step on its way to the host: its tokens, and the log probabilities that some steps leave beside them.

GPU thread. It never knows how a step is launched.
"""

import time
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ..device.cuda import Driver, fatal
from ..engine.batch import Logprobs, StepResult
from .scoring import read

POLL_S = 50e-6


class GraphStep:
    """A step's tokens on their way to the host, and what is told of them."""

    def __init__(self, step: int, driver: Driver, copied: int, host: NDArray[np.int32], more: "More | None") -> None:
        self._step, self._driver, self._copied, self._host, self._more = step, driver, copied, host, more

    def ready(self) -> bool:
        try:
            return self._driver.is_over(self._copied)
        except RuntimeError as error:
            raise fatal(error) or error from error

    def result(self) -> StepResult:
        while not self.ready():  # the engine polls before it asks
            time.sleep(POLL_S)
        tokens, more = self._host.copy(), self._more
        if more is None:
            return StepResult(step=self._step, token_ids=tokens)
        return StepResult(step=self._step, token_ids=tokens, logprobs=more.logprobs(), scores=more.scores())


class More(NamedTuple):
    """What some steps leave beside their tokens."""

    ranked: NDArray[np.int32] | None  # [num_rows, WIDTH], in the pinned ring
    asking: NDArray[np.intp]  # those of the rows that asked
    num_top: int
    scored: tuple[NDArray[np.int32], ...]  # [n, WIDTH] of each stretch of prompt, pinned
    wide: tuple[int, ...]
    held: tuple[Tensor, ...]  # what the copies read

    def logprobs(self) -> Logprobs | None:
        return None if self.ranked is None else _read(self.ranked[self.asking], self.num_top)

    def scores(self) -> tuple[Logprobs, ...]:
        return tuple([_read(rows.copy(), num_top) for rows, num_top in zip(self.scored, self.wide, strict=True)])


def _read(rows: NDArray[np.int32], num_top: int) -> Logprobs:
    whole = read(rows, len(rows))
    return Logprobs(whole.logprobs, whole.top_ids[:, :num_top], whole.top_logprobs[:, :num_top])
