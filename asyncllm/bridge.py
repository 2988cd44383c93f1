"""The only stair between the two threads: an Inbox down to the GPU thread, an Outbox up to the loop.

Each side is written by one thread's calls and read by the other's; both ends are named below.
It never knows what a token means.
"""

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import msgspec

from .errors import QueueFull
from .types import Delta, Progress, Submission

# What a plain token's delta says of its sequence: request_id, num_prompt_tokens, num_cached_tokens.
Told = tuple[str, int, int]
Token = tuple[Told, int, int]  # told, token id, num_output_tokens


class Deltas:
    """What one step has to tell. Frozen; the loop iterates.

    A token of a sequence that goes on, which nearly all are, comes as a tuple and becomes a Delta when the loop
    looks: the GPU thread pays 0.1 us for it instead of 0.5, 256 times a step, and the loop has the time.
    """

    __slots__ = ("_entries",)

    def __init__(self, entries: Sequence[Delta | Progress | Token] = ()) -> None:
        self._entries = entries

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Delta | Progress]:
        for entry in self._entries:
            yield plain_delta(*entry) if isinstance(entry, tuple) else entry

    @property
    def entries(self) -> Sequence[Delta | Progress | Token]:
        """As they were put: for who can do without a Delta for each token."""
        return self._entries


def plain_delta(told: Told, token_id: int, num_output_tokens: int) -> Delta:
    """One more token, and no end."""
    request_id, num_prompt_tokens, num_cached_tokens = told
    return Delta(
        request_id=request_id,
        token_ids=(token_id,),
        num_prompt_tokens=num_prompt_tokens,
        num_cached_tokens=num_cached_tokens,
        num_output_tokens=num_output_tokens,
    )


class Submit(msgspec.Struct, frozen=True):
    submission: Submission


class Abort(msgspec.Struct, frozen=True):
    """Nobody reads this request any more."""

    request_id: str


class Finish(msgspec.Struct, frozen=True):
    """The text side met a stop string: the sequence is complete."""

    request_id: str


class Update(msgspec.Struct, frozen=True, kw_only=True):
    """Other limits for a running sequence, from the first step not yet scheduled. None: as it was."""

    request_id: str
    max_tokens: int | None = None  # resolved: it fits behind the prompt
    temperature: float | None = None


class Close(msgspec.Struct, frozen=True):
    """End every sequence and leave the thread."""


Message = Submit | Abort | Finish | Update | Close


class Inbox:
    """Messages to the GPU thread. Any thread puts; the GPU thread waits and drains.

    queue.SimpleQueue is implemented in C: its timed get() lets the GIL go, so a waiting GPU thread
    costs the loop nothing and a message still wakes it at once.
    """

    def __init__(self, capacity: int) -> None:
        self._queue: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._first: Message | None = None  # taken by wait(), not yet by drain()
        self._capacity = capacity

    def put(self, message: Message) -> None:
        """Hand a message over; it takes effect at the next step boundary.

        Raises:
            QueueFull: for a Submit while `capacity` messages are unread. Whatever ends work gets in.
        """
        if isinstance(message, Submit) and self._queue.qsize() >= self._capacity:
            raise QueueFull("the engine has not taken the last submissions yet; try again later")
        self._queue.put(message)

    def wait(self, timeout_s: float | None) -> bool:
        """GPU thread: sleep until there is a message (True) or the time is up (False)."""
        if self._first is None:
            try:
                self._first = self._queue.get(timeout=timeout_s)
            except queue.Empty:
                return False
        return True

    def drain(self) -> Iterator[Message]:
        """GPU thread: every message put so far, in order."""
        if self._first is not None:
            first, self._first = self._first, None
            yield first
        while True:
            try:
                yield self._queue.get_nowait()
            except queue.Empty:
                return


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's heartbeat, replaced whole at every turn: reading it asks nothing of the engine."""

    step: int = 0
    active: bool = False  # a step is in flight or could be scheduled
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0  # of the prompts that have never had a slot
    num_taken_tokens: int = 0  # of all prompts taken from the inbox since the start
    num_preemptions: int = 0
    pages_used: int = 0  # held by running sequences, shared prefixes included
    pages_cached: int = 0  # in the radix tree, held by nobody
    pages_total: int = 0
    monotonic_s: float = 0.0


class Outbox:
    """Deltas to the loop: one wake-up a step, however many rows it had. The GPU thread puts.

    Losing a wake-up is impossible: put() appends before it looks at the flag, and the loop lowers
    the flag before it finds nothing left.
    """

    def __init__(self) -> None:
        self.stats = EngineStats()  # written by the GPU thread, read by anyone
        self._steps: deque[tuple[float, Deltas]] = deque()
        self._wake_pending = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: Callable[[], None] | None = None

    def bind(self, loop: asyncio.AbstractEventLoop, wake: Callable[[], None]) -> None:
        """Loop thread, once, before the first submission: what is to run when there is something to take."""
        self._loop, self._wake = loop, wake

    def put(self, deltas: Deltas) -> None:
        """GPU thread: one step's deltas."""
        self._steps.append((time.monotonic(), deltas))
        if not self._wake_pending:
            self._wake_pending = True
            assert self._wake is not None, "bind() comes first"
            self.call(self._wake)

    def call(self, callback: Callable[..., None], *args: object) -> None:
        """GPU thread: run a callback on the loop. A closed loop has nobody left to tell."""
        assert self._loop is not None, "bind() comes first"
        try:
            self._loop.call_soon_threadsafe(callback, *args)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def take(self) -> tuple[float, Deltas] | None:
        """Loop thread: the oldest step and when it was put. After None, the next put wakes again."""
        if not self._steps:
            self._wake_pending = False
        # Looked at again: a put between the two lines saw a flag that was still up.
        return self._steps.popleft() if self._steps else None
