"""How often each caller may ask.

Loop thread. It never knows keys, only the names of their holders.
"""

import time

from aiohttp import web

from ..errors import AsyncLLMError
from ..types import CALLER


class RateLimited(AsyncLLMError):
    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Rates:
    """What each caller may still ask this minute: a bucket that fills steadily."""

    def __init__(self, per_minute: float) -> None:
        self._per_s = per_minute / 60
        self._most = max(1.0, per_minute)
        self._left: dict[str, tuple[float, float]] = {}  # caller -> what was left, and when; an entry a key

    def spend(self) -> None:
        """One request of the caller at hand. Nothing, if there is no limit.

        Raises:
            RateLimited: and when there will be another.
        """
        if not self._per_s:
            return
        caller, now_s = CALLER.get().name, time.monotonic()
        left, since_s = self._left.get(caller, (self._most, now_s))
        left = min(self._most, left + (now_s - since_s) * self._per_s)
        self._left[caller] = (left if left < 1 else left - 1), now_s
        if left < 1:
            error = RateLimited("this key's requests of the minute are used up")
            error.retry_after_s = (1 - left) / self._per_s
            raise error


RATES = web.AppKey("rates", Rates)
