"""Whose turn it is: callers share the engine, however many requests each of them sends (start-time fair queueing).

GPU thread. It never knows sequences: a request is its caller and what it may cost.
"""

# Of an answer's limit, what is counted as its cost: most end long before it, and many name none.
_ANSWER_TOKENS = 512


class Turns:
    """Each request gets a start on a clock that counts tokens; the lowest start goes first.

    A caller's next request starts where his last one would end, so a thousand of one caller stand behind each other
    and not before another's first. With one caller it is first come, first served.
    """

    def __init__(self) -> None:
        self._now = 0.0  # the start of who was admitted last
        self._ends: dict[str, float] = {}  # of each caller's last request; as many as there are keys

    def start(self, caller: str, prompt_len: int, max_tokens: int) -> float:
        """The start of a new request."""
        start = max(self._now, self._ends.get(caller, 0.0))
        self._ends[caller] = start + prompt_len + min(max_tokens, _ANSWER_TOKENS)
        return start

    def admitted(self, start: float) -> None:
        """Its turn has come. Who was idle meanwhile has saved nothing up."""
        self._now = max(self._now, start)
