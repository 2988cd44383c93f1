"""What a sequence's submitter may be told before its first token: its place in the queue, its prefill.

GPU thread; numpy only. It never knows who asked, or how it is told.
"""

from collections.abc import Iterable

from ..types import Progress
from .sequence import Sequence


class Watched:
    """The sequences somebody asked about, each until its first token or its end."""

    def __init__(self) -> None:
        self._told: dict[Sequence, Progress | None] = {}

    def __bool__(self) -> bool:
        return bool(self._told)

    def add(self, sequence: Sequence) -> None:
        self._told[sequence] = None

    def changes(self, waiting: Iterable[Sequence]) -> list[Progress]:
        """What is new since the last call."""
        places = {sequence: i for i, sequence in enumerate(waiting)}
        changed = []
        for sequence, told in tuple(self._told.items()):
            if sequence.first_token_s or sequence.finish_reason is not None:
                del self._told[sequence]
            elif (progress := _progress(sequence, places.get(sequence))) != told:
                self._told[sequence] = progress
                changed.append(progress)
        return changed


def _progress(sequence: Sequence, place: int | None) -> Progress:
    return Progress(
        request_id=sequence.request_id,
        queue_position=place,
        num_prompt_tokens=sequence.prompt_len,
        num_computed_tokens=sequence.computed_len,
    )
