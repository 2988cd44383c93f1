"""Every request that has not ended, and the way of the engine's output to its mailbox.

Loop thread. It never knows prompts or parameters; text, sockets and HTTP are behind the mailboxes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from .admission import Admission
from .bridge import Abort, Close, Finish, Inbox, Outbox, Submit, Token
from .config import PacePolicy
from .errors import Aborted, AsyncLLMError, EngineDead, QueueFull
from .mailbox import Mailbox
from .pace import Pace, Reader
from .totals import Totals
from .types import Delta, Progress

log = logging.getLogger(__name__)

# Deltas taken in one go, at 0.7 us each, or three where there are stop strings. Fewer, and at 4,096 rows the
# flushes between the turns let the engine run half a second ahead.
ROWS_A_TURN = 1024


class Registry:
    """The mailboxes by request id; whoever is in it counts for admission, and is counted when it leaves."""

    def __init__(
        self, inbox: Inbox, outbox: Outbox, policy: PacePolicy, on_broken: Callable[[AsyncLLMError], None]
    ) -> None:
        self.mailboxes: dict[str, Mailbox] = {}
        self.admission = Admission(outbox)
        self.totals = Totals()
        self._inbox = inbox
        self._outbox = outbox
        self._on_broken = on_broken  # nothing is delivered any more
        self._finishing: set[str] = set()  # ended by a stop string; the engine's word is still to come
        self._empty = asyncio.Event()
        self._empty.set()
        self._busy_since_s = 0.0  # when it was last left idle
        self._rest: Iterator[Delta | Progress | Token] = iter(())  # of the step being delivered
        self._num_rest = 0
        self._loop = asyncio.get_running_loop()
        self.pace = Pace(self._loop, policy, self._abandon)
        outbox.bind(self._loop, self._receive)

    @property
    def num_unread_bytes(self) -> int:
        """What the tokens take that no reader has taken yet, about."""
        return sum([mailbox.num_unread_bytes for mailbox in self.mailboxes.values()])

    @property
    def silent_s(self) -> float:
        """For how long no step has ended while somebody waits for one; 0 while nobody does."""
        since_s = max(self._outbox.stats.monotonic_s, self._busy_since_s)
        return time.monotonic() - since_s if self.mailboxes else 0.0

    async def wait_empty(self) -> None:
        """Sleep until every request has ended."""
        await self._empty.wait()

    def submit(self, mailbox: Mailbox) -> None:
        """Send its submission to the engine.

        Raises:
            QueueFull: the inbox takes none now.
        """
        submission = mailbox.submission
        self.mailboxes[submission.request_id] = mailbox  # before the engine can answer
        self.admission.enter(submission)
        if self._empty.is_set():
            self._busy_since_s = submission.arrival_s
        self._empty.clear()
        try:
            self._inbox.put(Submit(submission))
        except QueueFull:
            self._forget(submission.request_id)
            raise
        self.admission.sent(submission)

    def abort(self, request_id: str) -> None:
        """End a request. Its reader, if any, gets Aborted; unknown and ended ones are no news."""
        if request_id in self.mailboxes:
            self.fail(request_id, Aborted("the request was aborted"))

    def abort_soon(self, request_id: str) -> None:
        """abort(), from any thread. On a closed loop there is nothing left to abort."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.abort, request_id)

    def fail(self, request_id: str, error: AsyncLLMError) -> None:
        """End a request with an error, here and in the engine."""
        self.mailboxes[request_id].fail(error)
        self._forget(request_id)
        self._inbox.put(Abort(request_id))

    def fail_all(self, error: AsyncLLMError) -> None:
        """End all. Everybody hears before anything is counted: it may be the counting that has broken."""
        for mailbox in list(self.mailboxes.values()):
            mailbox.fail(error)
        for request_id in list(self.mailboxes):
            self._forget(request_id)
            self._inbox.put(Abort(request_id))

    # -- from the engine --

    def _receive(self) -> None:
        """Deliver what the engine has put. A bug here would leave every stream waiting behind a healthy face: it
        counts as the engine's death, which everybody hears of."""
        try:
            self._receive_rows()
        except Exception as error:
            log.critical("deltas cannot be delivered: %r", error, exc_info=error)
            self._inbox.put(Close())
            self._on_broken(EngineDead("the engine's output cannot be delivered; the server must be restarted"))

    def _receive_rows(self) -> None:
        """A turn of the loop for each ROWS_A_TURN deltas."""
        num_left = ROWS_A_TURN
        while num_left > 0:
            if not self._num_rest:
                if (step := self._outbox.take()) is None:
                    return
                put_s, deltas = step
                self._rest, self._num_rest = iter(deltas.entries), len(deltas)
                self.pace.step(put_s, self._num_rest)
            rows = min(num_left, self._num_rest)
            num_left -= rows
            self._num_rest -= rows
            self._deliver(islice(self._rest, rows))
        self._loop.call_soon(self._receive)

    def _deliver(self, entries: Iterable[Delta | Progress | Token]) -> None:
        """Those of requests that have ended here are the engine's overrun: dropped."""
        get, now_s = self.mailboxes.get, time.monotonic()
        since_s, num_since = 0.0, 0  # rows whose last token came with the same step stand together
        for entry in entries:
            if isinstance(entry, tuple):  # nearly always
                if (mailbox := get(entry[0][0])) is None:
                    continue
                if mailbox.add_token(entry):
                    self._finish(mailbox)
            elif (mailbox := get(entry.request_id)) is None:
                self._note_overrun(entry)
                continue
            elif isinstance(entry, Progress):
                mailbox.note_progress(entry)
                continue
            else:
                mailbox.deliver(entry)
                if entry.finish_reason is not None:  # the engine's own end
                    self._forget(entry.request_id)
                elif mailbox.ended:
                    self._finish(mailbox)
                if not entry.token_ids:
                    continue
            if mailbox.seen_s != since_s:
                self.totals.add_gap(now_s, since_s, num_since)
                since_s, num_since = mailbox.seen_s, 0
            num_since += 1
            mailbox.seen_s = now_s
        self.totals.add_gap(now_s, since_s, num_since)
        self.pace.settle()

    def _finish(self, mailbox: Mailbox) -> None:
        """Its text has ended it, of which the engine is to hear."""
        request_id = mailbox.submission.request_id
        self._finishing.add(request_id)
        self._inbox.put(Finish(request_id))
        self._forget(request_id)

    def _note_overrun(self, delta: Delta | Progress) -> None:
        """The engine's own end of a sequence that a stop string ended here has the times of it."""
        if isinstance(delta, Delta) and delta.finish_reason is not None and delta.request_id in self._finishing:
            self._finishing.remove(delta.request_id)
            self.totals.add_times(delta)

    def _abandon(self, reader: Reader) -> None:
        """This reader is broken: whatever it read ends here, and tells it so no more."""
        for request_id, mailbox in list(self.mailboxes.items()):
            if mailbox.reader is reader:
                mailbox.listen(None)
                self.fail(request_id, AsyncLLMError("internal error"))

    def _forget(self, request_id: str) -> None:
        mailbox = self.mailboxes.pop(request_id)
        self.admission.leave(mailbox.submission)
        if mailbox.last is not None and mailbox.ended:
            self.totals.add(mailbox.last)
            self.admission.note_end(mailbox.last)
        if not self.mailboxes:
            self._empty.set()
