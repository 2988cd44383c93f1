"""What grammars let the rows of a step draw, and whether what was drawn fits.

GPU thread; numpy only. It never knows grammars' insides, nor how a sequence ends.
"""

from ..types import Grammar
from .batch import Int32, Masker
from .sequence import Sequence
from .step import Step


class Matching:
    """The matchers of the sequences that have one, and who of them came too late."""

    def __init__(self, masker: Masker | None) -> None:
        self.masker = masker
        self._late: set[Sequence] = set()  # those whose masks were late in the last step

    def fill(self, step: Step, masks: Int32, budget_s: float) -> list[Sequence]:
        """Write what the step's masked rows may draw, and into `step.late` whose masks did not come in time: those
        are the first in the next step. Returns the sequences whose grammar cannot be followed any further.

        A row whose sequence has ended draws what it likes.
        """
        assert self.masker is not None
        masked = enumerate([step.sequences[row] for row in step.masked])
        live = [(i, sequence) for i, sequence in masked if sequence.finish_reason is None]
        if self._late:
            live.sort(key=lambda entry: entry[1] not in self._late)
        rows = [(sequence.matcher, i) for i, sequence in live]
        num_filled = self.masker.fill(rows, masks, budget_s) if rows else 0
        self._late = step.late = {sequence for _, sequence in live[num_filled:]}
        if num_filled < len(step.masked):
            masks[sorted(set(range(len(step.masked))) - {i for i, _ in live[:num_filled]})] = -1
        filled = [sequence for _, sequence in live[:num_filled]]
        return [sequence for sequence in filled if sequence.matcher is not None and sequence.matcher.is_error()]

    def accept(self, step: Step) -> list[tuple[Sequence, bool]]:
        """Move the matchers of the step's sequences over their tokens. Which of them fit?"""
        assert self.masker is not None
        masked = [step.sequences[row] for row in step.masked]
        sequences = [one for one in masked if one.finish_reason is None and one not in step.late]
        tokens = [(sequence.matcher, sequence.output_ids[-1]) for sequence in sequences]
        accepted = self.masker.accept(tokens) if tokens else []
        return list(zip(sequences, accepted, strict=True))


def unmatched(sequence: Sequence) -> Exception:
    """Its grammar cannot be followed any further, and nobody else is to try."""
    grammar: Grammar = sequence.params.grammar
    grammar.wear_out()
    assert sequence.matcher is not None
    return grammar.failure(sequence.matcher)
