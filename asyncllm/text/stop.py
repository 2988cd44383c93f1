"""Stop strings in text that arrives in pieces.

Loop thread, one per sequence that has stops. It never knows tokens or the engine.
"""

from collections import deque
from collections.abc import Iterable


class StopMatcher:
    """Finds the stop string that is complete first; of two complete at once, the one that began first.

    So the answer does not depend on how the text was cut into pieces, nor on the order of the stops.
    Text is held back only while it can still become a stop. An Aho-Corasick automaton: linear in the
    text whatever the stops (re-scanning the last max(len) characters is quadratic in a long stop).
    """

    __slots__ = ("_depth", "_fail", "_found", "_held", "_include", "_match", "_next", "_state")

    def __init__(self, stops: Iterable[str], *, include: bool = False) -> None:
        """`stops` are not empty strings; the edge refuses those. include: show the stop that is found."""
        self._include = include
        self._next: list[dict[str, int]] = [{}]
        self._found: list[str | None] = [None]  # the longest stop that ends in this state
        self._depth = [0]
        for stop in stops:
            self._insert(stop)
        self._fail = [0] * len(self._next)
        self._link()
        self._state = 0
        self._held = ""
        self._match: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """The text that is safe to show now, and the stop string found, if one is.

        Once a stop is found nothing more is shown; the stop itself only where it was asked for.
        """
        if self._match is not None:
            return "", self._match
        if not self._next[0]:  # no stops at all
            return text, None
        whole = self._held + text
        for end, char in enumerate(text, len(self._held) + 1):
            self._advance(char)
            if (stop := self._found[self._state]) is not None:
                self._held, self._match = "", stop
                return whole[: end if self._include else end - len(stop)], stop
        safe_len = len(whole) - self._depth[self._state]
        self._held = whole[safe_len:]
        return whole[:safe_len], None

    def finish(self) -> str:
        """What was held back: the sequence is over, so it became no stop."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> None:
        state = self._state
        while (following := self._next[state].get(char)) is None and state:
            state = self._fail[state]
        self._state = following or 0

    def _insert(self, stop: str) -> None:
        state = 0
        for char in stop:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._found.append(None)
                self._depth.append(self._depth[state] + 1)
            state = self._next[state][char]
        self._found[state] = stop

    def _link(self) -> None:
        """Give each state its longest proper suffix that is a state too, breadth first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, child in self._next[state].items():
                fail = self._fail[state]
                while char not in self._next[fail] and fail:
                    fail = self._fail[fail]
                self._fail[child] = self._next[fail].get(char, 0)
                # A longer stop that ends here began earlier; only without one does the suffix's count.
                self._found[child] = self._found[child] or self._found[self._fail[child]]
                queue.append(child)
