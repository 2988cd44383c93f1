"""Time as patience has it: without what this process was stopped for, by SIGSTOP or by a machine that slept.

Any thread reads it; the loop's thread keeps it. It never knows who is waiting for what.
"""

import asyncio
import time

TICK_S = 0.25
MAX_TICK_S = 2.0  # a loop that has not turned for longer was not given the time to


class Clock:
    """Runs as time.monotonic() does while it is kept, and stands still where the loop does; not kept, it just runs."""

    def __init__(self) -> None:
        self._tick: tuple[float, float] | None = None  # when it was, and what was lost before it: replaced whole

    def now_s(self) -> float:
        """Seconds; they never go back while it is kept."""
        now_s = time.monotonic()
        if self._tick is None:
            return now_s
        ticked_s, lost_s = self._tick
        return min(now_s, ticked_s + MAX_TICK_S) - lost_s

    def tick(self) -> None:
        """The loop turns."""
        now_s = time.monotonic()
        ticked_s, lost_s = self._tick or (now_s, 0.0)
        self._tick = now_s, lost_s + max(0.0, now_s - ticked_s - MAX_TICK_S)

    async def keep(self) -> None:
        """Tick until cancelled."""
        try:
            while True:
                self.tick()
                await asyncio.sleep(TICK_S)
        finally:
            self._tick = None


CLOCK = Clock()  # one, as the process is
