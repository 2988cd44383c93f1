"""The rows of one step, while they are chosen and while it is in flight.

GPU thread; numpy only. It never knows who is chosen, or why.
"""

import numpy as np
from numpy.typing import NDArray

from .batch import NO_PAGES, NO_ROWS, Batch, Int32, NewRow, Scored
from .budget import Budget
from .sequence import Sequence


class Step:
    """A list a column.

    256 rows are scheduled and committed in every step of 2 to 8 ms, so what a row costs here is counted in
    hundreds of nanoseconds: a NamedTuple a row took 0.25 us to make and four passes to turn into arrays.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.budget: Budget  # once its decode rows are known
        self.sequences: list[Sequence] = []
        self.starts: list[int] = []
        self.lengths: list[int] = []
        self.wants_token: list[bool] = []
        self.num_decodes = 0  # leading rows of one token
        self.new_rows: list[NewRow] = []
        self.page_deltas: list[tuple[int, int, int]] = []
        self.scored: list[Scored] = []
        self.masked: list[int] = []  # rows whose tokens a grammar masks
        self.late: set[Sequence] = set()  # of those, the ones whose masks were late: their draws mean nothing
        self._columns: tuple[Int32, Int32, Int32, NDArray[np.bool_]]  # slots, starts, lengths, wants_token
        self.held: set[Sequence] = set()  # sit this step out, so that the next can preempt them

    def add(self, sequence: Sequence, length: int) -> None:
        start = sequence.planned_len
        if sequence.num_unscored:
            self._add_scored(sequence, start, length)
        wants_token = start + length == sequence.committed_len + sequence.num_drawing
        self.sequences.append(sequence)
        self.starts.append(start)
        self.lengths.append(length)
        self.wants_token.append(wants_token)
        sequence.planned_len = start + length
        sequence.num_drawing += wants_token
        sequence.num_in_flight += 1

    def _add_scored(self, sequence: Sequence, start: int, length: int) -> None:
        """The chunk's positions that a prompt token follows."""
        length = min(length, sequence.prompt_len - 1 - start)
        wide = sequence.params.prompt_logprobs
        if length > 0 and wide is not None:
            self.scored.append(Scored(len(self.sequences), start, length, wide))

    def map_pages(self, sequence: Sequence, columns: range) -> None:
        """Tell the device of these pages of the sequence's."""
        self.page_deltas += [(sequence.slot, column, sequence.pages[column]) for column in columns]

    def batch(self, before: "Step | None") -> Batch:
        """`before`: the step before this one. Where the same rows decode on, its columns are this one's, but that
        each row starts one later."""
        if before is not None and self._decodes_on(before):
            slots, starts, lengths, wants_token = before._columns
            self._columns = slots, starts + np.int32(1), lengths, wants_token
        else:
            self._columns = (
                np.array([sequence.slot for sequence in self.sequences], np.int32),
                np.array(self.starts, np.int32),
                np.array(self.lengths, np.int32),
                np.array(self.wants_token, np.bool_),
            )
        slots, starts, lengths, wants_token = self._columns
        return Batch(
            step=self.number,
            slots=slots,
            starts=starts,
            lengths=lengths,
            wants_token=wants_token,
            new_rows=tuple(self.new_rows),
            page_deltas=np.array(self.page_deltas, np.int32).reshape(-1, 3) if self.page_deltas else NO_PAGES,
            scored=tuple(self.scored),
            masked=np.array(self.masked, np.int32) if self.masked else NO_ROWS,
        )

    def _decodes_on(self, before: "Step") -> bool:
        same = self.num_decodes == before.num_decodes == len(self.sequences) and not before.late
        return same and self.sequences == before.sequences
