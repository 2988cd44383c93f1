"""Who computes what in the next step, and what its tokens mean: schedule() and commit().

GPU thread; numpy only. It never knows tensors, text or clients.

A slot or a page goes back only when its sequence is done and no step in flight names it: everything
that ends or leaves goes through _end() and _preempt(), and both through _release().

Longer than most files here: admission, growth, preemption and endings all move the same pages and slots, and
check() must see them all; cut apart, each part would need the others' insides.
"""

import time
from collections import deque
from collections.abc import Iterator

import msgspec

from ..bridge import Deltas, EngineStats, Token
from ..errors import AsyncLLMError, InvalidRequest, QueueFull, TimedOut
from ..types import Delta, EngineLimits, FinishReason, Logprob, Progress, Submission
from .batch import NO_TOKEN, Batch, Int32, Logprobs, Masker, StepResult
from .cache import Cache
from .deadlines import Deadlines
from .matching import Matching, unmatched
from .progress import Watched
from .sequence import Sequence
from .step import Step
from .waiting import RANK, Waiting


class Scheduler:
    """Every sequence, page and slot of the engine."""

    def __init__(
        self,
        limits: EngineLimits,
        *,
        page_size: int,
        num_pages: int,
        max_step_tokens: int,
        max_mixed_tokens: int | None = None,
        prefix_cache: bool = True,
        masker: Masker | None = None,
    ) -> None:
        self.limits = limits
        self.cache = Cache(num_pages, page_size, shares_prefixes=prefix_cache)
        self.max_step_tokens = max_step_tokens
        self.max_mixed_tokens = max_step_tokens if max_mixed_tokens is None else max_mixed_tokens
        self.num_preemptions = 0
        self._free_slots = list(range(limits.max_running, 0, -1))  # slot 0 is the dummy
        self._waiting = Waiting()
        # In order of admission. Without priorities that is the order of arrival: who is preempted was the youngest
        # and waits in front of all others, so the last one here is always the youngest.
        self._running: dict[str, Sequence] = {}
        self._has_priorities = False
        self._num_taken_tokens = 0  # of all prompts submitted
        self._matching = Matching(masker)
        self._num_matched = 0  # live sequences that follow a grammar
        self._deadlines = Deadlines()
        self._retired: dict[Sequence, None] = {}  # done, but named by a step in flight
        self._live: dict[str, Sequence] = {}  # waiting and running
        self._in_flight: deque[Step] = deque()
        self._stale: dict[Sequence, None] = {}  # their sampling parameters on the device are old
        self._watched = Watched()
        self._logprobs: Iterator[Logprobed] = iter(())  # of the step being committed, for rows that asked
        self._num_steps = 0
        self._before: Step | None = None  # the step scheduled last
        self._deltas: list[Delta | Progress | Token] = []

    def __repr__(self) -> str:
        return (
            f"Scheduler(step {self._num_steps}, {len(self._running)} running, {len(self._waiting)} waiting, "
            f"{len(self._in_flight)} in flight, {self.cache!r})"
        )

    # -- messages --

    def submit(self, submission: Submission) -> None:
        """Queue a submission, or end it at once with the reason it cannot be served."""
        sequence = Sequence(submission)
        self._num_taken_tokens += sequence.prompt_len
        if problem := submission.problem(self.limits):
            sequence.finish_reason = FinishReason.ERROR
            self._deltas.append(sequence.delta((), InvalidRequest(problem.message, problem.param)))
            return
        assert submission.request_id not in self._live, "request ids are made by us and unique"
        self._live[submission.request_id] = sequence
        self._waiting.add(sequence)
        self._num_matched += sequence.matcher is not None
        self._has_priorities |= submission.priority != 0
        if submission.wants_progress:
            self._watched.add(sequence)
        if submission.deadline_s is not None:
            self._deadlines.add(sequence, submission.deadline_s)

    def update(self, request_id: str, max_tokens: int | None, temperature: float | None) -> None:
        """Other limits from the first step not yet scheduled. Tokens past a lowered one are discarded."""
        if (sequence := self._live.get(request_id)) is None:
            return
        if temperature is not None:
            sequence.params = msgspec.structs.replace(sequence.params, temperature=temperature)
            self._stale[sequence] = None
        if max_tokens is not None:
            sequence.final_len = sequence.prompt_len + max_tokens
            if sequence.num_output >= max_tokens:
                self._end(sequence, FinishReason.LENGTH)

    def abort(self, request_id: str) -> None:
        """End a sequence whose reader is gone. Unknown and ended ones are no news."""
        if sequence := self._live.get(request_id):
            self._end(sequence, FinishReason.ABORT)

    def finish(self, request_id: str) -> None:
        """End a sequence whose text met a stop string."""
        if sequence := self._live.get(request_id):
            self._end(sequence, FinishReason.STOP)

    def abort_all(self) -> None:
        for request_id in list(self._live):
            self.abort(request_id)

    def take_deltas(self) -> Deltas:
        if self._watched:
            self._deltas += self._watched.changes(self._waiting)
        deltas, self._deltas = Deltas(self._deltas), []
        return deltas

    # -- one step --

    @property
    def idle(self) -> bool:
        """Nothing to schedule and nothing to commit."""
        return not self._live and not self._in_flight

    @property
    def num_in_flight(self) -> int:
        """Steps scheduled and neither committed nor failed."""
        return len(self._in_flight)

    def schedule(self) -> Batch | None:
        """Choose the rows of the next step; None if no sequence can go on before a commit.

        Decode rows come first and always, so a running stream waits for no more than the rest of one
        step's token budget, which is less where there are such rows; then prompts under way, then new
        ones, by priority and first come first served.
        """
        if self._deadlines:
            self._end_overdue()
        if self._waiting:
            self._end_impatient()
        step = Step(self._num_steps + 1, self.max_step_tokens)
        # Rewriting a row on the device takes its whole text, so its last token must be known: a step's rest.
        step.held.update([sequence for sequence in self._stale if sequence.num_in_flight])
        stale = [sequence for sequence in self._stale if sequence not in step.held]
        self._plan_prefills(step, self._plan_decodes(step))
        self._admit(step)
        if not step.sequences:
            if self._live and not self._in_flight:
                raise RuntimeError(f"no sequence can go on: {self!r}")  # better dead than spinning
            return None
        for sequence in stale:
            if sequence in self._stale:  # it may have ended, or been admitted with a row that is fresh
                del self._stale[sequence]
                if sequence.slot:  # or its new row is still to come
                    step.new_rows.append(sequence.new_row())
        if self._num_matched:
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
            self._end(sequence, FinishReason.ERROR, error=unmatched(sequence))
        for sequence in step.late:
            self._sit_out(sequence)

    def _sit_out(self, sequence: Sequence) -> None:
        """Of the newest step: its last position is computed again in the next one, and draws there."""
        sequence.num_drawing -= 1
        sequence.planned_len -= 1
        if sequence.params.counts_tokens:
            self._stale[sequence] = None  # the device counts what it draws

    def commit(self, result: StepResult) -> None:
        """Apply the oldest step in flight. Tokens of sequences that ended meanwhile are discarded."""
        step = self._in_flight.popleft()
        assert step.number == result.step, f"step {result.step} committed, {step.number} is the oldest"
        now = time.monotonic()
        self._logprobs = iter(()) if result.logprobs is None else _entries(result.logprobs)
        for scored, scores in zip(step.scored, result.scores, strict=True):
            step.sequences[scored.row].add_scores(scored.first, scores)
        if step.num_decodes == len(step.sequences) and not step.late:
            self._commit_decodes(step.sequences, result.token_ids.tolist(), now)
        else:
            self._commit_rows(step, iter(result.token_ids.tolist()), now)
        if step.masked:
            self._accept(step)
        if self._retired:
            for sequence in step.sequences:
                if not sequence.num_in_flight and sequence in self._retired:
                    del self._retired[sequence]
                    self._publish_and_release(sequence)

    def _commit_rows(self, step: Step, tokens: Iterator[int], now: float) -> None:
        for sequence, start, length, wants_token in zip(
            step.sequences, step.starts, step.lengths, step.wants_token, strict=True
        ):
            sequence.num_in_flight -= 1
            if sequence in step.late:
                sequence.computed_len = start + length - 1
                next(tokens)
                self._skip_logprob(sequence)
                continue
            sequence.computed_len = start + length
            if wants_token:
                sequence.num_drawing -= 1
                self._commit_token(sequence, next(tokens), now)

    def _commit_decodes(self, sequences: list[Sequence], tokens: list[int], now: float) -> None:
        """_commit_rows of a step in which every row decoded: 0.6 us a row instead of 1.9.

        Nearly every token is one more of a sequence that goes on, written out here; the others take the long way.
        """
        add_delta = self._deltas.append
        for sequence, token_id in zip(sequences, tokens, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_drawing -= 1
            committed_len = sequence.committed_len + 1
            if (
                committed_len < sequence.final_len
                and token_id not in sequence.ending_ids
                and sequence.told
                and sequence.finish_reason is None
            ):
                sequence.output_ids.append(token_id)
                sequence.committed_len = committed_len
                add_delta((sequence.told, token_id, committed_len - sequence.prompt_len))
            else:
                self._commit_token(sequence, token_id, now)

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
                self._end(sequence, FinishReason.ERROR, error=error)
        while self._retired:
            self._release(self._retired.popitem()[0])
        while self._running:
            self._preempt(next(reversed(self._running.values())), publish=False)
        self.cache.clear()

    def stats(self) -> EngineStats:
        pool, num_cached = self.cache.pool, self.cache.tree.num_evictable
        return EngineStats(
            step=self._num_steps,
            active=not self.idle,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_waiting_tokens=self._waiting.num_tokens,
            num_taken_tokens=self._num_taken_tokens,
            num_preemptions=self.num_preemptions,
            pages_used=pool.num_usable - pool.num_free - num_cached,
            pages_cached=num_cached,
            pages_total=pool.num_usable,
            monotonic_s=time.monotonic(),
        )

    def check(self) -> None:
        """Raise AssertionError where an invariant does not hold. For tests; walks everything."""
        on_device = [*self._running.values(), *self._retired]
        self.cache.check(on_device)
        slots = self._free_slots + [sequence.slot for sequence in on_device]
        assert sorted(slots) == list(range(1, self.limits.max_running + 1)), "a slot is lost or shared"
        assert self._live == {**self._running, **{waiting.request_id: waiting for waiting in self._waiting}}
        self._waiting.check()
        self._deadlines.check(set(self._live.values()))
        in_flight = [sequence for step in self._in_flight for sequence in step.sequences]
        for sequence in on_device:
            assert 0 <= sequence.computed_len <= sequence.planned_len <= sequence.device_len, sequence
            assert sequence.num_in_flight == in_flight.count(sequence), sequence
        assert set(in_flight) <= set(on_device), "a step in flight names a sequence that gave its slot back"

    # -- choosing rows --

    def _plan_decodes(self, step: Step) -> list[Sequence]:
        """A row for every sequence that lacks one token's KV. Returns those that lack more: prompts under way."""
        prefills: list[Sequence] = []
        held, sequences = step.held, step.sequences
        add_sequence, add_start = sequences.append, step.starts.append
        for sequence in tuple(self._running.values()):
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
        step.budget = (self.max_mixed_tokens if num_rows else self.max_step_tokens) - num_rows
        return prefills

    def _plan_prefills(self, step: Step, prefills: list[Sequence]) -> None:
        for sequence in prefills:
            if sequence.slot and sequence not in step.held and step.budget > 0:
                step.map_pages(sequence, self.cache.share_further(sequence))
                self._add_chunk(sequence, step)

    def _admit(self, step: Step) -> None:
        while self._waiting and self._free_slots and step.budget > 0 and not step.held:
            sequence = self._waiting.first
            if not self.cache.fits(sequence.committed_len):
                self._end(sequence, FinishReason.LENGTH)  # preempted, and now longer than the whole pool
                continue
            if not self._place(sequence, step):
                break
            self._running[sequence.request_id] = self._waiting.admit()
            self._add_chunk(sequence, step)

    def _add_chunk(self, sequence: Sequence, step: Step) -> None:
        """As much of the prompt as the budget allows. Its full pages are matchable from now on: whoever
        shares them reads them in this step, after all its rows have written, or in a later one."""
        step.add(sequence, min(step.budget, sequence.device_len - sequence.planned_len))
        self.cache.publish(sequence)

    def _place(self, sequence: Sequence, step: Step) -> bool:
        """Give a waiting sequence a slot and pages for all it knows, if one free page stays for each row."""
        if not self.cache.place(sequence, len(self._running)):
            return False
        sequence.slot = self._free_slots.pop()
        self._stale.pop(sequence, None)
        step.new_rows.append(sequence.new_row())
        step.map_pages(sequence, range(len(sequence.pages)))
        return True

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
        running = self._running.values()
        youngest = max(running, key=RANK) if self._has_priorities else next(reversed(running))
        if youngest is needy:
            if len(self._running) == 1 and not needy.num_in_flight and not self._retired:
                self._end(needy, FinishReason.LENGTH)  # alone, and the pool is full
            return False
        if youngest.num_in_flight:
            step.held.add(youngest)
            return False
        self._preempt(youngest)
        return True

    # -- endings --

    def _skip_logprob(self, sequence: Sequence) -> None:
        if sequence.num_logprobs >= 0:
            next(self._logprobs)

    def _commit_token(self, sequence: Sequence, token_id: int, now: float) -> None:
        wide = sequence.num_logprobs
        logprobs = (_logprob(token_id, wide, *next(self._logprobs)),) if wide >= 0 else ()
        if sequence.finish_reason is not None:
            return
        if token_id == NO_TOKEN:
            self.cache.lose(sequence)  # its pages, and those it read, may hold the reason
            error = AsyncLLMError(
                "the model's output for this request was not a number"
                if sequence.matcher is None
                else "no token that the grammar allows is left by the request's other parameters"
            )
            self._end(sequence, FinishReason.ERROR, error=error)
            return
        sequence.append(token_id)
        if not sequence.first_token_s:
            sequence.first_token_s = now
            if sequence.num_logprobs < 0:
                sequence.told = (sequence.request_id, sequence.prompt_len, sequence.cached_len)
        if token_id in sequence.submission.stop_ids:  # a stop id beats the limit
            self._end(sequence, FinishReason.STOP, token_ids=(token_id,), logprobs=logprobs)
        elif sequence.committed_len >= sequence.final_len:
            self._end(sequence, FinishReason.LENGTH, token_ids=(token_id,), logprobs=logprobs)
        else:
            self._deltas.append(sequence.delta((token_id,), logprobs=logprobs))

    def _accept(self, step: Step) -> None:
        """Let the grammars follow what the step drew; an answer that is complete ends."""
        for sequence, fits in self._matching.accept(step):
            if not fits:
                self._end(sequence, FinishReason.ERROR, error=unmatched(sequence))
            elif sequence.matcher is not None and sequence.matcher.is_stopped():
                self._end(sequence, FinishReason.STOP)

    def _end_overdue(self) -> None:
        """End what is past its deadline: complete as far as it came, or an error if it never began."""
        for sequence in self._deadlines.overdue(time.monotonic()):
            if sequence.num_output:
                self._end(sequence, FinishReason.LENGTH)
            else:
                error = TimedOut("the request's timeout came before its first token")
                self._end(sequence, FinishReason.ERROR, error=error)

    def _end_impatient(self) -> None:
        """End what has waited for a slot for too long: nothing has been computed for it."""
        if limit_s := self.limits.queue_timeout_s:
            for sequence in self._waiting.impatient(limit_s):
                error = QueueFull(f"no place came up within {limit_s:g} s; try again later")
                self._end(sequence, FinishReason.ERROR, error=error)

    def _end(
        self,
        sequence: Sequence,
        reason: FinishReason,
        *,
        token_ids: tuple[int, ...] = (),
        error: Exception | None = None,
        logprobs: tuple[Logprob, ...] = (),
    ) -> None:
        """The one terminal delta of a sequence; its pages go back now or with its last step in flight."""
        sequence.finish_reason = reason
        del self._live[sequence.request_id]
        self._num_matched -= sequence.matcher is not None
        self._stale.pop(sequence, None)
        self._deadlines.discard(sequence)
        if self._running.pop(sequence.request_id, None) is None:
            self._waiting.remove(sequence)
        elif sequence.num_in_flight:
            self._retired[sequence] = None
        else:
            self._publish_and_release(sequence)
        self._deltas.append(sequence.delta(token_ids, error, logprobs))

    def _preempt(self, sequence: Sequence, *, publish: bool = True) -> None:
        """Take a running sequence off the device; it goes on from its committed tokens, first in the queue."""
        assert not sequence.num_in_flight
        if publish:
            self.cache.publish(sequence)
        self._release(sequence)
        del self._running[sequence.request_id]
        self._waiting.put_back(sequence)
        self.num_preemptions += 1

    def _publish_and_release(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not FinishReason.ERROR:
            self.cache.publish(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight
        self.cache.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.leave_device()


Logprobed = tuple[float, list[int], list[float]]  # of one token: its own, the likeliest ids and theirs


def _entries(logprobs: Logprobs) -> Iterator[Logprobed]:
    columns = (logprobs.logprobs, logprobs.top_ids, logprobs.top_logprobs)
    return zip(*[column.tolist() for column in columns], strict=True)


def _logprob(token_id: int, num_top: int, logprob: float, ids: list[int], values: list[float]) -> Logprob:
    return Logprob(token_id, logprob, tuple(zip(ids[:num_top], values[:num_top], strict=True)))
