"""What has been served since the start: counts and times for metrics.

Loop thread: it counts, /metrics reads. It never knows Prometheus.
"""

from collections import Counter

from .pace import Histogram
from .types import Delta, FinishReason

_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
_REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Totals:
    """Tokens are counted when their sequence ends, aborted ones with those that were drawn for them.

    The times of a sequence that never got its first token are not in the histograms.
    """

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()  # by finish_reason
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.first_token = Histogram(_REQUEST_BOUNDS_S)  # from arrival
        self.between_tokens = Histogram(_TOKEN_BOUNDS_S)  # as they reach the loop
        self.queue = Histogram(_REQUEST_BOUNDS_S)
        self.prefill = Histogram(_REQUEST_BOUNDS_S)
        self.decode = Histogram(_REQUEST_BOUNDS_S)
        self.whole = Histogram(_REQUEST_BOUNDS_S)

    def add(self, last: Delta) -> None:
        """A sequence has ended."""
        assert last.finish_reason is not None
        self.finished[last.finish_reason.value] += 1
        self.num_prompt_tokens += last.num_prompt_tokens
        self.num_cached_tokens += last.num_cached_tokens
        self.num_output_tokens += last.num_output_tokens
        if last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.add_times(last)

    def add_times(self, last: Delta) -> None:
        """The histograms' part. A stop string's end has no times of its own: they come with the engine's."""
        if (times := last.timings) is not None and times.first_token_s:
            self.queue.add(times.admitted_s - times.arrival_s)
            self.prefill.add(times.first_token_s - times.admitted_s)
            self.first_token.add(times.first_token_s - times.arrival_s)
            self.decode.add(times.finished_s - times.first_token_s)
            self.whole.add(times.finished_s - times.arrival_s)

    def add_gap(self, now_s: float, since_s: float, times: int) -> None:
        """So many tokens have come at now_s, each the next of one that came at since_s; 0: the first of theirs.

        Counted together, as a histogram's line for each token would cost more than all else that is done for it.
        """
        if since_s and times:
            self.between_tokens.add(now_s - since_s, times)
