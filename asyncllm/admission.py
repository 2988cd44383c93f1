"""Whether one more request may come in, and when to come again if not.

Loop thread. It never knows texts, streams or sockets; of the engine, its heartbeat alone.
"""

import math
import time
from collections import Counter

from .bridge import EngineStats, Outbox
from .errors import QueueFull
from .types import CALLER, Delta, EngineLimits, FinishReason, Submission

RATE_S = 15.0
_ENOUGH = 10


class Rate:
    """Answers a second while others wait, over about the last RATE_S seconds: what the engine can do."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Nobody waits: what is answered now says how much is asked for, not how much could be."""
        self._weight = 0.0
        self._last_s = self._first_s = 0.0

    def add(self) -> None:
        now_s = time.monotonic()
        self._first_s = self._first_s or now_s
        self._weight = self._weight * math.exp((self._last_s - now_s) / RATE_S) + 1
        self._last_s = now_s

    @property
    def value(self) -> float:
        """0 until there have been enough to tell."""
        now_s = time.monotonic()
        seen_s = RATE_S * (1 - math.exp((self._first_s - now_s) / RATE_S))  # of a short life, what it can weigh
        weight = self._weight * math.exp((self._last_s - now_s) / RATE_S)
        return weight / seen_s if weight > _ENOUGH and seen_s > 0 else 0.0


class Admission:
    """How many are here, whose they are, and what they have sent."""

    def __init__(self, outbox: Outbox) -> None:
        self.num_live = 0  # requests that have not ended
        self.num_live_of: Counter[str] = Counter()  # by caller
        self.num_sent_tokens = 0  # of all prompts put into the inbox
        self._outbox = outbox
        self._rate = Rate()

    @property
    def _stats(self) -> EngineStats:
        return self._outbox.stats

    @property
    def expected_wait_s(self) -> float:
        """How long the queue takes at the rate at which requests have ended lately; 0 while that is not known."""
        rate = self._rate.value
        return self._stats.num_waiting / rate if rate else 0.0

    def check_room(self, limits: EngineLimits) -> None:
        """What the number of requests says against one more.

        Raises:
            QueueFull: all places are taken, or the caller has his share, or the queue takes too long.
        """
        num_places = limits.max_running + limits.max_waiting
        num_free = num_places - self.num_live
        if num_free <= 0:
            raise self._full(f"{self.num_live} requests are running or waiting")
        if caller := CALLER.get().name:
            # An even share is anybody's, and there may always be one more who comes; beyond it, as much must be free.
            num_own, num_callers = self.num_live_of[caller], len(self.num_live_of)
            if num_own >= num_places // max(2, num_callers) and num_own > num_free:
                raise self._full(f"{num_own} requests of this key are here already, and {num_free} places are left")
        wait_s = self.expected_wait_s
        if limits.queue_timeout_s and wait_s > limits.queue_timeout_s:
            raise self._full(f"a place would come up in about {wait_s:.0f} s")

    def check_backlog(self, submission: Submission, limits: EngineLimits) -> None:
        """What its size says against it. Alone in the queue, anything that fits the pool may wait.

        Raises:
            QueueFull: too many tokens wait.
        """
        # What the engine has not yet taken from the inbox waits too.
        backlog = self._stats.num_waiting_tokens + self.num_sent_tokens - self._stats.num_taken_tokens
        if backlog and backlog + len(submission.prompt_ids) > limits.max_waiting_tokens:
            raise self._full(f"prompts of {backlog} tokens are waiting")

    def enter(self, submission: Submission) -> None:
        """It is here, and counts."""
        self.num_live += 1
        self.num_live_of[submission.caller] += 1

    def sent(self, submission: Submission) -> None:
        """It has been put into the inbox."""
        self.num_sent_tokens += len(submission.prompt_ids)

    def leave(self, submission: Submission) -> None:
        """It has ended, or never was sent."""
        self.num_live -= 1
        self.num_live_of[submission.caller] -= 1
        if not self.num_live_of[submission.caller]:
            del self.num_live_of[submission.caller]

    def note_end(self, last: Delta) -> None:
        """How fast places come up."""
        if not self._stats.num_waiting:
            self._rate.clear()
        elif last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self._rate.add()

    def _full(self, why: str) -> QueueFull:
        error = QueueFull(f"{why}; try again later")
        error.retry_after_s = max(1.0, self.expected_wait_s)
        return error
