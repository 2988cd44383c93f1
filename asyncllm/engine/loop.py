"""The GPU thread's life: receive, schedule, launch, wait, commit, hand off.

GPU thread. It never knows tensors or text; what a step does is the runner's affair.
"""

import logging
import time
from collections import deque
from contextlib import suppress
from typing import cast

from ..bridge import Abort, Close, Finish, Inbox, Outbox, Submit, Update
from ..errors import EngineDead, OutOfMemory, StepFailed
from .batch import Batch, Launched, Runner, Undrawn
from .scheduler import Scheduler

log = logging.getLogger(__name__)

# Between two looks at a step that should be done. A sleep of 50 us takes about 100 on the H200 machine; a
# spin would starve the event loop for up to 261 ms (measured there).
POLL_S = 50e-6
EXPECTED_SHARE = 0.9
# Rows whose masks take longer sit the step out: the others' tokens do not wait for them.
MASKS_S = 5e-3
MASKS_SHARE = 0.5  # or this share of the step, in which the device computes its forward
OOM_STEPS = 100


class Engine:
    """Everything the GPU thread owns, and the two loops."""

    def __init__(self, scheduler: Scheduler, runner: Runner, inbox: Inbox, outbox: Outbox, *, overlap: bool) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.inbox = inbox
        self.outbox = outbox
        self._step = self.overlap_step if overlap else self.serial_step
        self._launched: deque[tuple[Batch, Launched]] = deque()
        self._undrawn: tuple[Batch, Undrawn] | None = None  # newer than those, if there is one
        self._closing = False
        self._shed_at: list[int] = []  # steps that found no memory
        self._step_s: dict[int, float] = {}  # running mean duration, by the bit length of the token count
        self._last_end_s = time.monotonic()
        self._overslept = False  # the step was over when a long wait for it ended

    def run(self) -> None:
        """Serve until Close. Whatever this raises is not one request's fault and ends the engine."""
        try:
            while not self._closing or not self.scheduler.idle:
                if self.scheduler.idle:
                    self._sleep()
                self.turn()
        except BaseException:
            with suppress(Exception):  # a lost device says so again, and would hide why
                self.runner.close()
            raise
        self.runner.close()

    def turn(self) -> None:
        """Take the messages, go one step on, hand off what came of it."""
        self._receive()
        self._step()
        self._hand_off()

    def serial_step(self) -> None:
        """Schedule, launch, wait, commit: the baseline that the overlap must equal token for token."""
        batch = self.scheduler.schedule()
        if batch is not None and self._launch(batch) and self._draw():
            self._commit_oldest()

    def overlap_step(self) -> None:
        """Schedule and launch N+1, then wait for N and commit it while the device computes N+1. Where rows of
        N+1 need the masks that N's tokens allow, they are filled meanwhile too, before its tail is launched.

        Fill: the first step commits nothing. Drain: without a new step, the last one is committed.
        """
        batch = self.scheduler.schedule()
        launched = batch is not None and self._launch(batch)
        if len(self._launched) > (launched and self._undrawn is None):
            self._commit_oldest()
        self._draw()

    def _sleep(self) -> None:
        """Nothing to do: until there is a message."""
        self._hand_off()
        self.inbox.wait(None)
        self._last_end_s = time.monotonic()

    def _receive(self) -> None:
        """Apply every message; each takes effect at this step boundary."""
        for message in self.inbox.drain():
            match message:
                case Submit(submission):
                    self.scheduler.submit(submission)
                case Abort(request_id):
                    self.scheduler.abort(request_id)
                case Finish(request_id):
                    self.scheduler.finish(request_id)
                case Update(request_id=request_id, max_tokens=max_tokens, temperature=temperature):
                    self.scheduler.update(request_id, max_tokens, temperature)
                case Close():
                    self._closing = True
                    self.scheduler.abort_all()

    def _launch(self, batch: Batch) -> bool:
        try:
            step = self.runner.launch(batch)
            if len(batch.masked):
                self._undrawn = batch, cast(Undrawn, step)
            else:
                self._launched.append((batch, cast(Launched, step)))
        except EngineDead:
            raise
        except Exception as error:
            while self._launched:  # older steps are whole: their tokens count
                self._commit_oldest()
            if self.scheduler.num_in_flight:  # unless one of those failed too, and took this one with it
                self._fail(batch, error)
            else:
                log.error("step %d could not be launched either", batch.step, exc_info=error)
            return False
        return True

    def _draw(self) -> bool:
        """Fill the masks that the newest step waits for, if it does, and launch its tail. False if that failed."""
        if self._undrawn is None:
            return True
        self._hand_off()  # the loop has the GIL while masks are filled
        (batch, undrawn), self._undrawn = self._undrawn, None
        try:
            step_s = self._step_s.get(batch.num_tokens.bit_length(), 0.0)
            self.scheduler.fill_masks(undrawn.masks, max(MASKS_S, MASKS_SHARE * step_s))
            self._launched.append((batch, undrawn.draw()))
        except EngineDead:
            raise
        except Exception as error:
            self._fail(batch, error)
            return False
        return True

    def _commit_oldest(self) -> None:
        batch, launched = self._launched.popleft()
        try:
            self._wait(batch, launched)
            result = launched.result()
        except EngineDead:
            raise
        except Exception as error:
            self._drain_device()
            self._fail(batch, error)
            return
        self._note_end(batch)
        self.scheduler.commit(result)

    def _wait(self, batch: Batch, launched: Launched) -> None:
        """Poll between waits that let the GIL go: a long one until the step should be nearly done, then short
        ones. All wait on the inbox, so a message is applied at once; it is scheduled at the next step."""
        step_s = self._step_s.get(batch.num_tokens.bit_length(), 0.0)
        expected_s = self._last_end_s + EXPECTED_SHARE * step_s
        self._overslept = False
        while not launched.ready():
            wait_s = expected_s - time.monotonic()
            if self.inbox.wait(max(POLL_S, wait_s)):
                self._receive()
                self._hand_off()
            self._overslept = wait_s > POLL_S

    def _note_end(self, batch: Batch) -> None:
        now, size = time.monotonic(), batch.num_tokens.bit_length()
        took_s = now - self._last_end_s
        mean_s = self._step_s.setdefault(size, took_s)
        # What was slept through was not measured: else one slow step, as the first is, would be waited for ever after.
        self._step_s[size] = mean_s / 2 if self._overslept else mean_s + 0.2 * (took_s - mean_s)
        self._last_end_s = now

    def _drain_device(self) -> None:
        """Let steps launched after a failed one run out; their results mean nothing. One without its tail has none:
        what its forward writes is overwritten in the stream's order."""
        self._undrawn = None
        while self._launched:
            batch, launched = self._launched.popleft()
            try:
                self._wait(batch, launched)
                launched.result()
            except EngineDead:
                raise
            except Exception as error:
                log.info("a step launched after the failed one failed too: %s", error)

    def _fail(self, batch: Batch, error: Exception) -> None:
        log.error("step %d with %d rows failed", batch.step, batch.num_rows, exc_info=error)
        if isinstance(error, OutOfMemory | MemoryError):
            self._shed(batch, error)
            return
        self.scheduler.fail(StepFailed(f"step {batch.step} failed; the request can be sent again"))

    def _shed(self, batch: Batch, error: Exception) -> None:
        """Without its largest row the step may fit. Where that has not helped twice, nothing in here will.

        Raises:
            EngineDead: the third time within OOM_STEPS.
        """
        self._shed_at = [*self._shed_at[-2:], batch.step]
        if len(self._shed_at) == 3 and batch.step - self._shed_at[0] < OOM_STEPS:
            raise EngineDead("out of memory again and again") from error
        self.scheduler.fail(OutOfMemory("out of memory; the request can be sent again"), largest_only=True)

    def _hand_off(self) -> None:
        self.outbox.stats = self.scheduler.stats()
        if deltas := self.scheduler.take_deltas():
            self.outbox.put(deltas)
