"""Who waits for a slot, in what order, and for how long at most.

GPU thread. It never knows pages or steps, nor what becomes of whom it lets go.
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Iterator
from operator import attrgetter

from ..clock import CLOCK
from .sequence import Sequence
from .turns import Turns

RANK = attrgetter("rank")
_LOOK_S = 0.1  # between two looks for who has waited too long


class Waiting:
    """A queue by rank: priority, then turn, then arrival. Who was preempted is in it again, by his old rank."""

    def __init__(self) -> None:
        self.num_tokens = 0  # of the prompts of those who have never had a slot
        self._queue: deque[Sequence] = deque()
        self._turns = Turns()
        self._num_added = 0
        self._next_look_s = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue)

    @property
    def first(self) -> Sequence:
        return self._queue[0]

    def add(self, sequence: Sequence) -> None:
        """A new one."""
        submission = sequence.submission
        self._num_added += 1
        sequence.waits_since_s = CLOCK.now_s() - (time.monotonic() - submission.arrival_s)
        start = self._turns.start(submission.caller, sequence.prompt_len, submission.max_tokens)
        sequence.rank = submission.priority, start, self._num_added
        self.num_tokens += sequence.prompt_len
        insort(self._queue, sequence, key=RANK)

    def put_back(self, sequence: Sequence) -> None:
        """One that was preempted."""
        insort(self._queue, sequence, key=RANK)

    def admit(self) -> Sequence:
        """The first has its place, and leaves."""
        sequence = self._queue.popleft()
        if not sequence.admitted_s:
            self.num_tokens -= sequence.prompt_len
            self._turns.admitted(sequence.rank[1])
            sequence.admitted_s, sequence.cached_len = time.monotonic(), sequence.planned_len
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """It has ended."""
        self._queue.remove(sequence)
        self.num_tokens -= 0 if sequence.admitted_s else sequence.prompt_len

    def impatient(self, limit_s: float) -> list[Sequence]:
        """Those who have waited for longer, and for whom nothing has been computed; looked for now and then. A stop of
        the process is no wait: after it all of them would be sent away at once."""
        if (now_s := time.monotonic()) < self._next_look_s:
            return []
        self._next_look_s = now_s + _LOOK_S
        since_s = CLOCK.now_s() - limit_s
        return [one for one in self._queue if not one.admitted_s and one.waits_since_s < since_s]

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. For tests."""
        assert list(self._queue) == sorted(self._queue, key=RANK), "the queue is out of order"
        assert self.num_tokens == sum([one.prompt_len for one in self._queue if not one.admitted_s])
