"""When unread text goes out: after every step while the loop keeps up, every 22 ms while it does not.

Loop thread. It never knows text, sockets or the engine.

A wake-up and a write a token cost 9 us; at 256 streams and 4 ms steps that is 58% of a core, and more where the
core is slow, and what is left is little to take new requests with. So readers are flushed in slices of a batch,
and gathered as soon as flushing each step would take half of the time between steps, or the hand-off comes late.
"""

import asyncio
import logging
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Protocol

from .config import PacePolicy

log = logging.getLogger(__name__)

SLICE_S = 1e-3
BATCH = 256  # readers whose texts are made before any is written: 2 to 5 ms with the writes, as the core is
GATHER_S = 22e-3  # 256 streams at 45 Hz are 12,000 writes a second: a sixth of a core
GATHER_ABOVE_LAG_S, EVERY_STEP_BELOW_LAG_S = 4e-3, 2e-3
GATHER_ABOVE_SHARE, EVERY_STEP_BELOW_SHARE = 0.5, 0.35
_PROBE_S = 20e-3
_SMOOTH = 0.1
_LATE_BUCKETS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5)


class Reader(Protocol):
    """Whoever writes one client's text. `dirty`: a flush is due."""

    dirty: bool

    def flush(self) -> bool:
        """Write what is unread. False if the client takes nothing now: to be asked again in GATHER_S."""

    def cut_off(self) -> None:
        """flush() has raised, which is a bug: close what it writes to, as nothing more will come."""


class Writer(Protocol):
    """One client's connection."""

    def write(self, data: bytes) -> None:
        """Send it now, or as soon as the client takes it; to one that is gone, nothing."""

    def cut_off(self) -> None:
        """Close at once."""


def _write_now(item: tuple[Writer, bytes]) -> None:
    writer, data = item
    writer.write(data)


class Histogram:
    """Counts by upper bound, as Prometheus has them."""

    def __init__(self, bounds: tuple[float, ...] = _LATE_BUCKETS_S) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Pace:
    """The readers that have something to write, and when they are let."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        policy: PacePolicy = "adaptive",
        on_broken: Callable[[Reader], None] = lambda reader: None,
    ) -> None:
        self.policy: PacePolicy = policy
        self.gathering = policy == "gather"
        self.lag = Histogram()  # of a timer
        self.hand_off = Histogram()  # from the engine's put to the loop
        self.num_flushes = 0
        self.num_turns = 0  # changes between the modes
        self._loop = loop
        self._on_broken = on_broken  # told before the reader is: what it read has nobody any more
        # Readers of this step, dirty: who delivers it puts them here, and calls settle() when he has.
        self.due: list[Reader] = []
        # Send it; while readers are flushed, together with what the others of the batch have. A client that reads
        # faster than texts are made sleeps between any two writes, and waking it costs the writer 20 us (measured,
        # 2 cores, a virtual machine). Writes back to back wake it once.
        self.write: Callable[[tuple[Writer, bytes]], None] = _write_now
        self._now: deque[Reader] = deque()
        self._later: list[Reader] = []
        self._flushing = False  # a slice is scheduled
        self._timer: asyncio.TimerHandle | None = None
        self._probe: asyncio.TimerHandle | None = None
        self._active = False  # a step came since the last probe
        self._last_step_s = 0.0
        self._lag_s = 0.0  # smoothed, as the three below
        self._gap_s = 1.0
        self._flush_s = 0.0
        self._num_rows = 0.0

    def __repr__(self) -> str:
        mode = "gathering" if self.gathering else "every step"
        return f"Pace({mode}, lag {self._lag_s * 1e3:.2f} ms, {len(self._now)} + {len(self._later)} to flush)"

    def mark(self, reader: Reader, *, at_once: bool) -> None:
        """This reader has something. `at_once`: a first token or an end does not wait."""
        if reader.dirty and not at_once:
            return
        reader.dirty = True
        if at_once or not self.gathering:
            self._now.append(reader)
            if not self._flushing:
                self._flush_soon()
        else:
            self._later.append(reader)
            self._tick_later()

    def settle(self) -> None:
        """mark() all that are due."""
        if not self.due:
            return
        if self.gathering:
            self._later += self.due
            self._tick_later()
        else:
            self._now += self.due
            self._flush_soon()
        self.due.clear()

    def step(self, put_s: float, num_rows: int) -> None:
        """A step of the engine's has arrived, put at put_s (time.monotonic)."""
        late_s = time.monotonic() - put_s
        self.hand_off.add(late_s)
        gap_s, self._last_step_s = put_s - self._last_step_s, put_s
        if gap_s > 1.0:  # after a rest nothing is known
            self._lag_s, self._gap_s, self._num_rows = late_s, gap_s, num_rows
        self._lag_s += _SMOOTH * (late_s - self._lag_s)
        self._gap_s += _SMOOTH * (gap_s - self._gap_s)
        self._num_rows += _SMOOTH * (num_rows - self._num_rows)
        self._choose()
        self._active = True
        if self._probe is None:
            self._probe = self._loop.call_later(_PROBE_S, self._look, time.monotonic() + _PROBE_S)

    def close(self) -> None:
        for timer in (self._timer, self._probe):
            if timer is not None:
                timer.cancel()

    def _choose(self) -> None:
        if self.policy != "adaptive":
            return
        share = self._flush_s * self._num_rows / max(self._gap_s, 1e-6)
        if not self.gathering:
            turn = self._lag_s > GATHER_ABOVE_LAG_S or share > GATHER_ABOVE_SHARE
        else:
            turn = self._lag_s < EVERY_STEP_BELOW_LAG_S and share < EVERY_STEP_BELOW_SHARE
        if turn:
            self.gathering = not self.gathering
            self.num_turns += 1

    def _flush_soon(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.call_soon(self._flush_slice)

    def _flush_slice(self) -> None:
        """Flush a batch of readers, small ones for 1 ms, then let the loop do something else."""
        start_s = time.perf_counter()
        queue, num = self._now, 0
        while queue:
            num += self._flush_batch()
            if time.perf_counter() - start_s > SLICE_S:
                break
        if num >= 8:  # fewer tell more of the clock than of the flushes
            self._flush_s += _SMOOTH * ((time.perf_counter() - start_s) / num - self._flush_s)
        self.num_flushes += num
        self._flushing = False
        if queue:
            self._flush_soon()

    def _flush_batch(self) -> int:
        """The next readers: first all their texts, then all their writes. Returns how many."""
        queue, num = self._now, 0
        batch: list[tuple[Writer, bytes]] = []
        self.write = batch.append
        try:
            while queue and num < BATCH:
                reader = queue.popleft()
                if reader.dirty:  # or it had been flushed at once in between
                    reader.dirty = False
                    num += 1
                    try:
                        if not reader.flush():
                            self._again(reader)
                    except Exception as error:
                        self._break_off(reader, error)
        finally:
            self.write = _write_now
        for writer, data in batch:
            try:
                writer.write(data)
            except Exception:  # what is missing from a stream now cannot be made good
                log.exception("unexpected error while sending to a client, who is cut off")
                writer.cut_off()
        return num

    def _break_off(self, reader: Reader, error: Exception) -> None:
        """One reader's bug stops no other, and its own client does not wait for a flush that will never come."""
        log.error("unexpected error while writing to a client, who is cut off", exc_info=error)
        for end in (partial(self._on_broken, reader), reader.cut_off):
            try:
                end()
            except Exception:
                log.exception("unexpected error while cutting a client off")

    def _again(self, reader: Reader) -> None:
        reader.dirty = True
        self._later.append(reader)
        self._tick_later()

    def _tick_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(GATHER_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._now += self._later
        self._later.clear()
        self._flush_soon()

    def _look(self, due_s: float) -> None:
        """The probe: how late a timer is. It runs while steps come, so an idle process sleeps."""
        late_s = max(0.0, time.monotonic() - due_s)
        self.lag.add(late_s)
        self._lag_s += _SMOOTH * (late_s - self._lag_s)
        self._probe = None
        if self._active:
            self._active = False
            self._probe = self._loop.call_later(_PROBE_S, self._look, time.monotonic() + _PROBE_S)
