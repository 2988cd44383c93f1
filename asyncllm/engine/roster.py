"""Who is in the engine and what he holds: every live sequence, its slot, its pages and its place in the queue.

GPU thread; numpy only. It never knows what a step computes, nor why a sequence ends.

A slot or a page goes back only when its sequence is done and no step in flight names it: everything
that ends or leaves goes through end() and preempt(), and both through _release().
"""

from collections.abc import Collection, Iterable

from ..bridge import Deltas, Token
from ..errors import QueueFull, TimedOut
from ..types import Delta, FinishReason, Logprob, Progress
from .cache import Cache
from .deadlines import Deadlines
from .progress import Watched
from .sequence import Sequence
from .waiting import Waiting


class Roster:
    """A live sequence waits or runs; one that has ended in a step in flight is retired until that is over."""

    def __init__(self, cache: Cache, num_slots: int) -> None:
        self.live: dict[str, Sequence] = {}  # waiting and running
        self.waiting = Waiting()
        # In order of admission. Without priorities that is the order of arrival: who is preempted was the youngest
        # and waits in front of all others, so the last one here is always the youngest.
        self.running: dict[str, Sequence] = {}
        self.retired: dict[Sequence, None] = {}
        self.stale: dict[Sequence, None] = {}  # live, and their sampling parameters on the device are old
        self.has_priorities = False
        self.num_matched = 0  # live sequences that follow a grammar
        self.num_preemptions = 0
        self.deadlines = Deadlines()
        self.deltas: list[Delta | Progress | Token] = []
        self.cache = cache
        self._num_slots = num_slots
        self._free_slots = list(range(num_slots, 0, -1))  # slot 0 is the dummy
        self._watched = Watched()

    def __repr__(self) -> str:
        return f"Roster({len(self.running)} running, {len(self.waiting)} waiting, {len(self.retired)} retired)"

    @property
    def has_place(self) -> bool:
        """Whether somebody waits, and there is a slot."""
        return bool(self.waiting and self._free_slots)

    def enter(self, sequence: Sequence) -> None:
        """A new one, last of its rank in the queue."""
        submission = sequence.submission
        assert submission.request_id not in self.live, "request ids are made by us and unique"
        self.live[submission.request_id] = sequence
        self.waiting.add(sequence)
        self.num_matched += sequence.matcher is not None
        self.has_priorities |= submission.priority != 0
        if submission.wants_progress:
            self._watched.add(sequence)
        if submission.deadline_s is not None:
            self.deadlines.add(sequence, submission.deadline_s)

    def admit(self) -> bool:
        """Give the first in the queue a slot, and pages for all it knows, if one free page stays for each row."""
        sequence = self.waiting.first
        if not self.cache.place(sequence, len(self.running)):
            return False
        sequence.slot = self._free_slots.pop()
        self.stale.pop(sequence, None)
        self.running[sequence.request_id] = self.waiting.admit()
        return True

    def preempt(self, sequence: Sequence, *, publish: bool = True) -> None:
        """Take a running sequence off the device; it goes on from its committed tokens, first in the queue."""
        assert not sequence.num_in_flight
        if publish:
            self.cache.publish(sequence)
        self._release(sequence)
        del self.running[sequence.request_id]
        self.waiting.put_back(sequence)
        self.num_preemptions += 1

    def end(
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
        del self.live[sequence.request_id]
        self.num_matched -= sequence.matcher is not None
        self.stale.pop(sequence, None)
        self.deadlines.discard(sequence)
        if self.running.pop(sequence.request_id, None) is None:
            self.waiting.remove(sequence)
        elif sequence.num_in_flight:
            self.retired[sequence] = None
        else:
            self._publish_and_release(sequence)
        self.deltas.append(sequence.delta(token_ids, error, logprobs))

    def end_overdue(self, now_s: float) -> None:
        """End what is past its deadline: complete as far as it came, or an error if it never began."""
        for sequence in self.deadlines.overdue(now_s):
            if sequence.num_output:
                self.end(sequence, FinishReason.LENGTH)
            else:
                error = TimedOut("the request's timeout came before its first token")
                self.end(sequence, FinishReason.ERROR, error=error)

    def end_impatient(self, limit_s: float) -> None:
        """End what has waited for a slot for too long: nothing has been computed for it."""
        for sequence in self.waiting.impatient(limit_s):
            error = QueueFull(f"no place came up within {limit_s:g} s; try again later")
            self.end(sequence, FinishReason.ERROR, error=error)

    def settle(self, sequences: Iterable[Sequence]) -> None:
        """A step that named these is over: whoever is done, and in no other, gives back what he holds."""
        for sequence in sequences:
            if not sequence.num_in_flight and sequence in self.retired:
                del self.retired[sequence]
                self._publish_and_release(sequence)

    def leave_device(self) -> None:
        """Everybody, and no page is trusted: who runs starts over from what is committed. Nothing is in flight."""
        while self.retired:
            self._release(self.retired.popitem()[0])
        while self.running:
            self.preempt(next(reversed(self.running.values())), publish=False)
        self.cache.clear()

    def take_deltas(self) -> Deltas:
        if self._watched:
            self.deltas += self._watched.changes(self.waiting)
        deltas, self.deltas = Deltas(self.deltas), []
        return deltas

    def check(self, in_flight: Collection[Sequence]) -> None:
        """Raise AssertionError where an invariant does not hold. For tests; walks everything."""
        on_device = [*self.running.values(), *self.retired]
        self.cache.check(on_device)
        slots = self._free_slots + [sequence.slot for sequence in on_device]
        assert sorted(slots) == list(range(1, self._num_slots + 1)), "a slot is lost or shared"
        assert self.live == {**self.running, **{waiting.request_id: waiting for waiting in self.waiting}}
        self.waiting.check()
        self.deadlines.check(set(self.live.values()))
        assert set(in_flight) <= set(on_device), "a step in flight names a sequence that gave its slot back"

    def _publish_and_release(self, sequence: Sequence) -> None:
        if sequence.finish_reason is not FinishReason.ERROR:
            self.cache.publish(sequence)
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        assert not sequence.num_in_flight
        self.cache.release(sequence)
        self._free_slots.append(sequence.slot)
        sequence.leave_device()
