"""How much of a prompt a step takes.

GPU thread; numbers alone. It never knows sequences, or what is computed.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

# Prompts up to twice this long are what max_mixed_tokens is meant for: their attention is no reason to take less.
FREE_CONTEXT = 512


class Terms(NamedTuple):
    """What bounds every step of an engine."""

    max_step_tokens: int
    max_mixed_tokens: int = 0  # of a step in which answers go on beside prompts; 0: as of any
    break_even_context: int = 0  # tokens that a token attends to at the price of its products; 0: attention is free
    sizes: Sequence[int] = ()  # that steps are padded to, ascending


class Budget:
    """Of one step, after its decode rows.

    A stream that runs waits for the whole step. So where there are such rows a step has fewer tokens, and a token deep
    in its context counts for more than one: at 100k a token of Qwen3-8B costs what seven at the start do.
    """

    def __init__(self, terms: Terms, num_decodes: int) -> None:
        self._terms = terms
        self._most = (terms.max_mixed_tokens or terms.max_step_tokens) if num_decodes else terms.max_step_tokens
        self.left = self._most - num_decodes  # tokens
        self._depth = terms.break_even_context if num_decodes else 0
        self._work = self.left + self._most * FREE_CONTEXT / self._depth if self._depth else math.inf  # tokens' worth

    def take(self, start: int, num_missing: int) -> int:
        """Of a prompt that is computed up to `start`, the length of the chunk: at least 1 while any tokens are left."""
        length = min(self.left, num_missing)
        if self._depth and (affordable := self._affordable(start)) < length:
            length = self._filling(max(1, affordable))
            self.left = 0
            return length
        if self._depth:
            self._work -= length * (1 + (start + length / 2) / self._depth)
        self.left -= length
        return length

    def _affordable(self, start: int) -> int:
        """The n for which n * (1 + (start + n / 2) / depth) is the work that is left."""
        reach = self._depth + start
        return int(math.sqrt(reach * reach + 2 * max(0.0, self._work) * self._depth) - reach)

    def _filling(self, length: int) -> int:
        """No longer than that, and so that the step needs no padding, where it can be."""
        used = self._most - self.left
        at = bisect_right(self._terms.sizes, used + length)
        size = self._terms.sizes[at - 1] if at else 0
        return size - used if size > used else length
