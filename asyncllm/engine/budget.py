"""How much of a prompt a step takes.

GPU thread; numbers alone. It never knows sequences, or what is computed.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

FREE_CONTEXT = 512  # the mean of a prompt of 1,024 tokens: up to that long, prompts fill a step


class StepLimits(NamedTuple):
    """What bounds every step of an engine."""

    max_step_tokens: int
    max_mixed_tokens: int = 0  # of a step in which answers go on beside prompts; 0: as of any
    mixed_work: int = 0  # of such a step, in tokens without a context; 0: as max_mixed_tokens
    break_even_context: int = 0  # tokens of context whose attention costs a token as much as its products; 0: nothing
    sizes: Sequence[int] = ()  # that steps are padded to, ascending


class Budget:
    """Of one step, after its decode rows.

    A stream that runs waits for the whole step. So where there are such rows a step has fewer tokens, and a token deep
    in its context counts for more than one: at 100k a token of Qwen3-8B costs what seven at the start do.
    """

    def __init__(self, limits: StepLimits, num_decodes: int) -> None:
        self._sizes = limits.sizes
        self._most = (limits.max_mixed_tokens or limits.max_step_tokens) if num_decodes else limits.max_step_tokens
        self.left = self._most - num_decodes  # tokens
        self._break_even = limits.break_even_context if num_decodes else 0
        if self._break_even:
            self._work = (limits.mixed_work or self._most) * (1 + FREE_CONTEXT / self._break_even) - num_decodes

    def take(self, start: int, num_missing: int) -> int:
        """Of a prompt that is computed up to `start`, the length of the chunk: at least 1 while any tokens are left."""
        length = min(self.left, num_missing)
        if self._break_even:
            if (affordable := self._affordable(start)) < length:
                length = self._unpadded(max(1, affordable))
                self.left = 0
                return length
            self._work -= length * (1 + (start + length / 2) / self._break_even)
        self.left -= length
        return length

    def _affordable(self, start: int) -> int:
        """The n for which n * (1 + (start + n / 2) / break_even) is the work that is left."""
        reach = self._break_even + start
        return int(math.sqrt(reach * reach + 2 * max(0.0, self._work) * self._break_even) - reach)

    def _unpadded(self, length: int) -> int:
        """No longer, so that the step needs no padding; but a padded step costs less than one that takes little."""
        used = self._most - self.left
        at = bisect_right(self._sizes, used + length)
        fitting = self._sizes[at - 1] - used if at else 0
        return fitting if 2 * fitting > length else length
