"""When a failed attempt is made again, and after how long.

Any thread. It never knows how an attempt is made, or whether anything of an answer had come.
"""

import email.utils
import random
import time
from collections.abc import Mapping

import msgspec

from .errors import APIConnectionError, APIError, APIStatusError


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """When to try again, and after how long. OpenAI's formula."""

    max_retries: int = 2
    first_delay_s: float = 0.5
    max_delay_s: float = 8.0
    max_retry_after_s: float = 120.0  # a server that asks for more is not waited for

    def delay_s(self, error: APIError, attempt: int) -> float | None:
        """How long to wait after the failed attempt of this number, from 0; None: give up."""
        if attempt >= self.max_retries or not _is_worth_it(error):
            return None
        asked_s = retry_after_s(error.headers) if isinstance(error, APIStatusError) else None
        if asked_s is not None and asked_s > self.max_retry_after_s:
            return None
        if asked_s is not None and asked_s > 0:
            # Never sooner than asked; spread out, as all who were refused were told the same second.
            return asked_s + min(asked_s, self.max_delay_s) * random.uniform(0, 0.25)
        return min(self.first_delay_s * 2.0**attempt, self.max_delay_s) * random.uniform(0.75, 1)


def _is_worth_it(error: APIError) -> bool:
    if not isinstance(error, APIStatusError):
        return isinstance(error, APIConnectionError)
    said = error.headers.get("x-should-retry")
    if said in ("true", "false"):
        return said == "true"
    return error.status_code in (408, 409, 429) or error.status_code >= 500


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The seconds that `retry-after-ms` or `retry-after` asks for, as a number or a date; None for nonsense."""
    for name, unit_s in (("retry-after-ms", 1e-3), ("retry-after", 1.0)):
        try:
            return float(headers[name]) * unit_s
        except (KeyError, ValueError):
            pass
    date = email.utils.parsedate_tz(headers.get("retry-after", ""))
    return None if date is None else email.utils.mktime_tz(date) - time.time()
