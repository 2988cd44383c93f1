"""The seam between models and attention: Rows (which tokens of which slots), Attention, HostPlan, Plan, Lacking.

GPU thread. It never knows sampling, how a model names its layers, or of its weights more than a projection's bias.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Int64 = NDArray[np.int64]
# Stages a host array with the step's one transfer. The view is filled before any kernel of the step runs.
Put = Callable[[Int64], Tensor]


class Rows(NamedTuple):
    """The rows of one step on the host. Row i computes positions starts[i] .. starts[i] + lengths[i] - 1."""

    slots: Int64  # [num_rows]
    starts: Int64  # [num_rows]
    lengths: Int64  # [num_rows]
    token_rows: Int64  # [num_tokens]: the row of each token
    positions: Int64  # [num_tokens]

    @classmethod
    def of(cls, slots: Int64, starts: Int64, lengths: Int64) -> "Rows":
        token_rows = np.repeat(np.arange(len(slots)), lengths)
        first_tokens = np.cumsum(lengths) - lengths
        positions = np.arange(len(token_rows)) + (starts - first_tokens)[token_rows]
        return cls(slots, starts, lengths, token_rows, positions)

    @property
    def last_tokens(self) -> Int64:
        return np.cumsum(self.lengths) - 1  # [num_rows]


class Lacking(NamedTuple):
    """What a product of rows that were not normed before it is still to get: gain / rms(row), then the bias."""

    rows: Tensor  # [num_tokens, in_features] 16-bit, device
    eps: float
    gain: float
    bias: Tensor | None  # [out_features], device


class Plan(Protocol):
    """One step's attention, ready to run. A value: two steps' plans may be in flight."""

    def run(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Write k and v of every row into the pages, then let every row read its whole past.

        All writes come before any read, because a row may read a page that another row of the same
        step fills: the scheduler publishes a prompt's pages when the step that fills them is launched.
        What a page holds beyond a row's length (stale values, NaN) must not reach that row's result.

        q: [num_tokens, num_heads, head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], rotated already.
        Returns [num_tokens, num_heads * head_dim] in q's dtype.
        """


class HostPlan(Protocol):
    """A plan whose arrays are staged but whose page numbers are still to be read on the device."""

    def bind(self, page_table: Tensor) -> Plan:
        """page_table: [num_slots, max_pages] int64, device; this step's deltas are in it already."""


class Attention(Protocol):
    def plan(self, rows: Rows, put: Put) -> HostPlan:
        """The host's share, once a step: numpy only, and off the device's critical path."""
