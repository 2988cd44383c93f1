"""One step, frozen: what schedule() hands to the runner and what the runner hands back to commit().

GPU thread; numpy only. It never knows tensors, requests or text.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]


NO_ROWS: Int32 = np.zeros(0, np.int32)
NO_PAGES: Int32 = np.zeros((0, 3), np.int32)


class Shaping(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """What stands between a row's logits and its temperature. Order: bias, allowed, bad, then the penalties."""

    prompt_len: int  # the tokens behind it are output: what presence and frequency count, where bad words begin
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    bias_ids: Int32
    biases: NDArray[np.float32]
    allowed: Int32 | None = None  # None: every id
    bad: tuple[tuple[int, ...], ...] = ()  # the last id of each is not drawn behind the ids before it

    @property
    def counts(self) -> bool:
        """Whether the row's tokens must be counted."""
        return bool(self.presence or self.frequency or self.repetition != 1)


class NewRow(msgspec.Struct, frozen=True, eq=False):
    """A slot's fresh content: written to the device tables before the step's rows are computed.

    The whole known text enters the token pool here, so a prompt chunk is afterwards a row like any
    other, (slot, start, length), and needs no ids of its own.
    """

    slot: int
    token_ids: Int32  # [known_len]: prompt and, after a preemption, committed output
    temperature: float  # 0 is greedy
    top_k: int  # 0 is off
    top_p: float
    min_p: float
    seed: int  # uint64 bits
    stop_ids: tuple[int, ...]  # may not be drawn at a position below min_len
    min_len: int  # prompt_len + min_tokens
    shaping: Shaping | None = None
    num_logprobs: int = -1  # alternatives to report beside each drawn token's log probability; -1: not even that


class Scored(NamedTuple):
    """A stretch of prompt whose tokens' log probabilities are to be reported: those that follow positions
    first .. first + length - 1 of the row, which the step computes."""

    row: int
    first: int
    length: int
    num_logprobs: int


class Batch(msgspec.Struct, frozen=True, eq=False):
    """The rows of one step. Row i computes positions starts[i] .. starts[i] + lengths[i] - 1 of slots[i].

    A row with wants_token then draws the token for position starts[i] + lengths[i], which the runner
    puts into the token pool at that position; an unfinished prompt chunk wants none and draws none.
    """

    step: int
    slots: Int32  # [num_rows], each at most once, never 0
    starts: Int32  # [num_rows]
    lengths: Int32  # [num_rows], at least 1
    wants_token: NDArray[np.bool_]  # [num_rows]
    new_rows: tuple[NewRow, ...]
    page_deltas: Int32  # [num_deltas, 3]: page_table[slot, column] = page, applied before the step
    masked: Int32 = NO_ROWS  # [num_masked], rising: rows whose token a grammar masks; each of them wants one
    scored: tuple[Scored, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())


Logprobed = tuple[float, list[int], list[float]]  # of one token: its own, the likeliest ids and theirs


class Logprobs(msgspec.Struct, frozen=True, eq=False):
    """Of n tokens: how likely each was, and the likeliest in its place; among equals the lowest id comes first."""

    logprobs: NDArray[np.float32]  # [n], finite
    top_ids: Int32  # [n, the largest number any of them asked for]
    top_logprobs: NDArray[np.float32]  # [n, the same], falling

    def entries(self) -> Iterator[Logprobed]:
        columns = (self.logprobs, self.top_ids, self.top_logprobs)
        return zip(*[column.tolist() for column in columns], strict=True)


class StepResult(msgspec.Struct, frozen=True, eq=False):
    """The drawn tokens of one step, in the order of the rows that wanted one.

    NO_TOKEN marks a row whose logits were broken, ALL_BARRED one whose logits were all minus infinity.
    """

    step: int
    token_ids: Int32  # [num rows that wanted a token]
    logprobs: Logprobs | None = None  # of the drawn tokens of those among them whose slots asked
    scores: tuple[Logprobs, ...] = ()  # of the batch's `scored`


NO_TOKEN = -1
ALL_BARRED = -2


class Launched(Protocol):
    """A step on its way through the device."""

    def ready(self) -> bool:
        """Whether result() would return at once. Never blocks."""

    def result(self) -> StepResult:
        """The step's tokens; waits if need be. Raises what the step raised."""


class Undrawn(Protocol):
    """A step with masked rows: its forward is on its way, its tail waits for the masks."""

    @property
    def masks(self) -> Int32:
        """[num_masked, ceil(vocab / 32)]: to be filled before draw(). Bit i of a row: its token may be i."""

    def draw(self) -> Launched:
        """Enqueue the tail; once."""


class Masker(Protocol):
    """The grammars' side: many rows in one call each."""

    def fill(self, rows: list[tuple[Any, int]], masks: Int32, budget_s: float) -> int:
        """Write the mask of each matcher into its row, until the time is over. Returns how many: at least one."""

    def accept(self, tokens: list[tuple[Any, int]]) -> list[bool]:
        """Move each matcher over its token; False: it does not fit, or cannot be followed."""


class Runner(Protocol):
    """The torch side of the GPU thread, as the engine sees it."""

    def launch(self, batch: Batch) -> Launched | Undrawn:
        """Enqueue one step, without its tail where rows are masked, and return at once.

        Raises if it could not be enqueued.
        """

    def close(self) -> None:
        """Wait for the device and let its memory go."""
