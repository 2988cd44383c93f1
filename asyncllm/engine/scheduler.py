"""Who computes what in the next step: schedule(); and what becomes of it: commit(), or fail().

GPU thread; numpy only. It never knows tensors, text or clients.
"""

import time
from collections import deque

import msgspec

from ..bridge import Deltas, EngineStats
from ..types import EngineLimits, FinishReason, Submission
from .batch import Batch, Int32, Masker, StepResult
from .budget import Budget, StepLimits
from .cache import Cache
from .commit import commit_rows
from .matching import Matching, unmatched
from .roster import Roster
from .sequence import Sequence
from .step import Step
from .waiting import RANK


class Scheduler:
    """The steps in flight, and what every sequence on the roster does in the next one."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        page_size: int,
        num_pages: int,
        step_limits: StepLimits,
        prefix_cache: bool,
        masker: Masker | None,
    ) -> None:
        self.limits = limits
        self.step_limits = step_limits
        self.cache = Cache(num_pages, page_size, shares_prefixes=prefix_cache)
        self.roster = Roster(self.cache, limits.max_running)
        self._matching = Matching(masker)
        self._num_taken_tokens = 0  # of all prompts submitted
        self._in_flight: deque[Step] = deque()
        self._before: Step | None = None  # the step scheduled last
        self._num_steps = 0

    def __repr__(self) -> str:
        in_flight = len(self._in_flight)
        return f"Scheduler(step {self._num_steps}, {in_flight} in flight, {self.roster!r}, {self.cache!r})"

    # -- messages --

    def submit(self, submission: Submission) -> None:
        """Queue a submission, or end it at once with the reason it cannot be served."""
        sequence = Sequence(submission)
        self._num_taken_tokens += sequence.prompt_len
        if problem := submission.problem(self.limits):
            sequence.finish_reason = FinishReason.ERROR
            self.roster.deltas.append(sequence.delta((), problem))
            return
        self.roster.enter(sequence)

    def update(self, request_id: str, max_tokens: int | None, temperature: float | None) -> None:
        """Other limits from the first step not yet scheduled. Tokens past a lowered one are discarded."""
        if (sequence := self.roster.live.get(request_id)) is None:
            return
        if temperature is not None:
            sequence.params = msgspec.structs.replace(sequence.params, temperature=temperature)
            self.roster.stale[sequence] = None
        if max_tokens is not None:
            sequence.final_len = sequence.prompt_len + max_tokens
            if sequence.num_output >= max_tokens:
                self.roster.end(sequence, FinishReason.LENGTH)

    def abort(self, request_id: str) -> None:
        """End a sequence whose reader is gone. Unknown and ended ones are no news."""
        if sequence := self.roster.live.get(request_id):
            self.roster.end(sequence, FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """End a sequence whose text met a stop string."""
        if sequence := self.roster.live.get(request_id):
            self.roster.end(sequence, FinishReason.STOP)

    def abort_all(self) -> None:
        for request_id in list(self.roster.live):
            self.abort(request_id)

    def take_deltas(self) -> Deltas:
        """Everything there is to tell since the last call."""
        return self.roster.take_deltas()

    # -- one step --

    @property
    def idle(self) -> bool:
        """Nothing to schedule and nothing to commit."""
        return not self.roster.live and not self._in_flight

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and neither committed nor failed."""
        return len(self._in_flight)

    def schedule(self) -> Batch | None:
        """Choose the rows of the next step; None if no sequence can go on before a commit.

        Decode rows come first and always, so a running stream waits for no more than the rest of one
        step's budget, which is less where there are such rows; then prompts under way, then new
        ones, by priority and first come first served.
        """
        if self.roster.deadlines:
            self.roster.end_overdue(time.monotonic())
        if self.roster.waiting and self.limits.queue_timeout_s:
            self.roster.end_impatient(self.limits.queue_timeout_s)
        step = Step(self._num_steps + 1)
        # Rewriting a row on the device takes its whole text, so its last token must be known: a step's rest.
        step.held.update([sequence for sequence in self.roster.stale if sequence.num_in_flight])
        stale = [sequence for sequence in self.roster.stale if sequence not in step.held]
        self._plan_prefills(step, self._plan_decodes(step))
        self._admit(step)
        if not step.sequences:
            if self.roster.live and not self._in_flight:
                raise RuntimeError(f"no sequence can go on: {self!r}")  # better dead than spinning
            return None
        self._rewrite(step, stale)
        if self.roster.num_matched:
            step.masked = [
                row for row, sequence in enumerate(step.sequences) if sequence.matcher and step.wants_token[row]
            ]
        self._num_steps += 1
        self._in_flight.append(step)
        before, self._before = self._before, step
        return step.batch(before)

    def fill_masks(self, masks: Int32, budget_s: float) -> None:
        """Of the newest step, once all before it are committed: what its masked rows may draw.

        A row whose sequence has ended draws what it likes. One whose grammar cannot be followed ends here. One whose
        mask does not come in time sits the step out, and is the first in the next.
        """
        step = self._in_flight[-1]
        for sequence in self._matching.fill(step, masks, budget_s):
            self.roster.end(sequence, FinishReason.ERROR, error=unmatched(sequence))
        for sequence in step.late:
            self._sit_out(sequence)

    def _sit_out(self, sequence: Sequence) -> None:
        """Of the newest step: its last position is computed again in the next one, and draws there."""
        sequence.num_drawing -= 1
        sequence.planned_len -= 1
        if sequence.params.counts_tokens:
            self.roster.stale[sequence] = None  # the device counts what it draws

    def commit(self, result: StepResult) -> None:
        """Apply the oldest step in flight. Tokens of sequences that ended meanwhile are discarded."""
        step = self._in_flight.popleft()
        assert step.number == result.step, f"step {result.step} committed, {step.number} is the oldest"
        commit_rows(self.roster, step, result)
        if step.masked:
            self._accept(step)
        if self.roster.retired:
            self.roster.settle(step.sequences)

    def _accept(self, step: Step) -> None:
        """Let the grammars follow what the step drew; an answer that is complete ends."""
        for sequence, fits in self._matching.accept(step):
            if not fits:
                self.roster.end(sequence, FinishReason.ERROR, error=unmatched(sequence))
            elif sequence.matcher is not None and sequence.matcher.is_stopped():
                self.roster.end(sequence, FinishReason.STOP)

    def fail(self, error: Exception, *, largest_only: bool = False) -> None:
        """The oldest step in flight failed and the device is idle: its requests end, or the largest one where that
        makes room for the others; all others start over.

        What the failed step and those after it wrote is not trusted: the tree is emptied, and every
        survivor is computed anew from its committed tokens. A failure is rare; a wrong page is for ever.
        """
        failed = list(self._in_flight[0].sequences)
        for step in self._in_flight:
            for sequence in step.sequences:
                sequence.num_in_flight = sequence.num_drawing = 0
        self._in_flight.clear()
        if largest_only:
            failed = sorted([one for one in failed if one.finish_reason is None], key=lambda one: one.device_len)[-1:]
        for sequence in failed:
            if sequence.finish_reason is None:
                self.roster.end(sequence, FinishReason.ERROR, error=error)
        self.roster.leave_device()

    def stats(self) -> EngineStats:
        roster, pool, num_cached = self.roster, self.cache.pool, self.cache.tree.num_evictable
        return EngineStats(
            step=self._num_steps,
            active=not self.idle,
            num_running=len(roster.running),
            num_waiting=len(roster.waiting),
            num_waiting_tokens=roster.waiting.num_tokens,
            num_taken_tokens=self._num_taken_tokens,
            num_preemptions=roster.num_preemptions,
            pages_used=pool.num_usable - pool.num_free - num_cached,
            pages_cached=num_cached,
            pages_total=pool.num_usable,
            monotonic_s=time.monotonic(),
        )

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. For tests; walks everything."""
        in_flight = [sequence for step in self._in_flight for sequence in step.sequences]
        self.roster.check(in_flight)
        for sequence in {*in_flight, *self.roster.running.values(), *self.roster.retired}:
            assert 0 <= sequence.computed_len <= sequence.planned_len <= sequence.device_len, sequence
            assert sequence.num_in_flight == in_flight.count(sequence), sequence

    # -- choosing rows --

    def _plan_decodes(self, step: Step) -> list[Sequence]:
        """A row for every sequence that lacks one token's KV. Returns those that lack more: prompts under way."""
        prefills: list[Sequence] = []
        held, sequences = step.held, step.sequences
        add_sequence, add_start = sequences.append, step.starts.append
        for sequence in tuple(self.roster.running.values()):
            # Properties and Step.add() written out: 0.9 us a row where calling them took 2.2.
            planned_len = sequence.planned_len
            num_missing = sequence.committed_len + sequence.num_drawing - planned_len
            if num_missing > 1:
                prefills.append(sequence)
            elif num_missing == 1 and planned_len + 1 < sequence.final_len and not (held and sequence in held):
                # One that was preempted meanwhile has no places either.
                if planned_len < sequence.num_places or (sequence.slot and self._grow(sequence, step)):
                    add_sequence(sequence)
                    add_start(planned_len)
                    sequence.planned_len = planned_len + 1
                    sequence.num_drawing += 1
                    sequence.num_in_flight += 1
        num_rows = step.num_decodes = len(sequences)
        step.lengths += [1] * num_rows
        step.wants_token += [True] * num_rows
        step.budget = Budget(self.step_limits, num_rows)
        return prefills

    def _plan_prefills(self, step: Step, prefills: list[Sequence]) -> None:
        for sequence in prefills:
            if sequence.slot and sequence not in step.held and step.budget.left > 0:
                step.map_pages(sequence, self.cache.share_further(sequence))
                self._add_chunk(sequence, step)

    def _admit(self, step: Step) -> None:
        while self.roster.has_place and step.budget.left > 0 and not step.held:
            sequence = self.roster.waiting.first
            if not self.cache.fits(sequence.committed_len):
                self.roster.end(sequence, FinishReason.LENGTH)  # preempted, and now longer than the whole pool
                continue
            if not self.roster.admit():
                break
            step.new_rows.append(sequence.new_row())
            step.map_pages(sequence, range(len(sequence.pages)))
            self._add_chunk(sequence, step)

    def _rewrite(self, step: Step, stale: list[Sequence]) -> None:
        """Tell the device of what has changed."""
        for sequence in stale:
            if sequence in self.roster.stale:  # it may have ended, or been admitted with a row that is fresh
                del self.roster.stale[sequence]
                if sequence.slot:  # or its new row is still to come
                    step.new_rows.append(sequence.new_row())

    def _add_chunk(self, sequence: Sequence, step: Step) -> None:
        """As much of the prompt as the budget allows. Its full pages are matchable from now on: whoever
        shares them reads them in this step, after all its rows have written, or in a later one."""
        start = sequence.planned_len
        step.add(sequence, step.budget.take(start, sequence.device_len - start))
        self.cache.publish(sequence)

    def _grow(self, sequence: Sequence, step: Step) -> bool:
        """A page for the next position; False if the row must sit this step out."""
        while not self.cache.num_available:
            if not self._make_room(sequence, step):
                return False
        self.cache.grow(sequence)
        step.map_pages(sequence, range(len(sequence.pages) - 1, len(sequence.pages)))
        return True

    def _make_room(self, needy: Sequence, step: Step) -> bool:
        """Preempt the youngest, of the least urgent. False if that must wait for steps in flight, or there is nobody
        to preempt.

        The youngest itself waits for a page instead: an older one finishes, or takes its pages.
        """
        running = self.roster.running.values()
        youngest = max(running, key=RANK) if self.roster.has_priorities else next(reversed(running))
        if youngest is needy:
            if len(running) == 1 and not needy.num_in_flight and not self.roster.retired:
                self.roster.end(needy, FinishReason.LENGTH)  # alone, and the pool is full
            return False
        if youngest.num_in_flight:
            step.held.add(youngest)
            return False
        self.roster.preempt(youngest)
        return True
