"""Whose time is over: the deadlines of live sequences.

GPU thread. It never knows what becomes of whom it names.
"""

import math

from .sequence import Sequence


class Deadlines:
    """Few have one, and none is over in most steps: a look is one comparison."""

    def __init__(self) -> None:
        self._of: dict[Sequence, float] = {}
        self._first_s = math.inf  # no later than the first of them

    def __len__(self) -> int:
        return len(self._of)

    def add(self, sequence: Sequence, deadline_s: float) -> None:
        self._of[sequence] = deadline_s
        self._first_s = min(self._first_s, deadline_s)

    def discard(self, sequence: Sequence) -> None:
        """It has ended, and may have had one."""
        self._of.pop(sequence, None)

    def overdue(self, now_s: float) -> list[Sequence]:
        """Those whose deadline has come; they are named once."""
        if now_s < self._first_s:
            return []
        overdue = [sequence for sequence, deadline_s in self._of.items() if deadline_s <= now_s]
        for sequence in overdue:
            del self._of[sequence]
        self._first_s = min(self._of.values(), default=math.inf)
        return overdue

    def check(self, live: set[Sequence]) -> None:
        """Raise AssertionError where an invariant does not hold. For tests."""
        assert self._of.keys() <= live, "a deadline outlived its sequence"
