"""The tail of a step: logits of the rows that draw, what changes them, the draws, and what is told of those.

GPU thread. Kernels alone, on fixed places, so that a graph can hold it. It never knows models' insides or batches.

Order: shape (biases, allowed ids, bad words, penalties), mask (grammars), cut (top_k, top_p, min_p), draw, rank (log
probabilities, of the logits as the model left them).
"""

import torch
from torch import Tensor

from ..device.base import Device
from ..models.fused import Buffers, FusedDecoder
from ..types import MAX_LOGPROBS
from . import kernels as k
from .barring import bar
from .cutoff import NUM_KEYS, find_cuts
from .frame import Frame, Kind
from .penalties import shape
from .ranking import WIDTH, rank


class Tail:
    """Its buffers, and the kernels over them."""

    def __init__(
        self, device: Device, frame: Frame, model: FusedDecoder, buffers: Buffers, vocab: int, num_tokens: int
    ) -> None:
        self._frame, self._model, self._buffers, self._num_tokens = frame, model, buffers, num_tokens
        dtype, rows, blocks = model.decoder.embedding.dtype, frame.max_rows, -(-num_tokens // k.BLOCK_TOKENS)
        self._last = device.zeros((rows, model.hidden_size), dtype)  # normed, of the rows that draw
        self.logits = device.zeros((rows, vocab), dtype)
        self._raw = device.zeros((rows, vocab), dtype)  # the logits as they were, where a step changes and ranks them
        best, largest = (device.zeros((rows * blocks,), torch.float32) for _ in range(2))
        self._scratch = best, device.zeros((rows * blocks,), torch.int32), largest
        # Ranking comes after the draw, in its places.
        self._rank_scratch = largest, best, device.zeros((rows * blocks * MAX_LOGPROBS,), torch.int32)
        self._cut = device.zeros((rows,), torch.float32), device.zeros((rows,), torch.int32)
        self._counts = device.zeros((rows, NUM_KEYS), torch.int32)
        self._where = frame.meta, frame.slots, frame.positions, frame.params

    def run(self, num_rows: int, kind: Kind) -> None:
        """Of the step's rows that draw; padding rows draw for slot 0."""
        frame, where = self._frame, self._where
        rows, logits = frame.rows[:num_rows], self.logits[:num_rows]
        self._model.logits(self._buffers, rows, self._last[:num_rows], logits)
        raw = logits
        if kind.shape:
            if kind.rank:
                raw = self._raw[:num_rows].copy_(logits)
            shape(*where, frame.rules, frame.allowed, frame.counts, frame.token_pool, logits)
        if kind.mask:
            bar(frame.masks, logits, self._num_tokens, frame.max_rows)
        if kind.cut:
            find_cuts(*where, logits, self._counts, self._cut, self._num_tokens)
        k.draw(
            *where, logits, self._num_tokens, self._scratch, frame.outputs, frame.token_pool,
            self._cut if kind.cut else None, frame.counts if kind.shape else None, sample=kind.sample,
        )  # fmt: skip
        if kind.rank:
            rank(*where, raw, self._num_tokens, self._rank_scratch, frame.outputs, frame.ranked)

    def score(self, at: Tensor, slot: int, first: int, num_top: int) -> Tensor:
        """Of the tokens of a slot's text from position `first` on, which follow the step's tokens `at` ([n] int32,
        device): [n, WIDTH] int32, device. As many at a time as rows may draw, for no more logits fit."""
        frame, most = self._frame, self._frame.max_rows
        out = torch.empty((len(at), WIDTH), dtype=torch.int32, device=at.device)
        text = frame.token_pool[slot, first : first + len(at)].clone()  # aligned: else Triton compiles once more
        for begin in range(0, len(at), most):
            some = at[begin : begin + most]
            logits = self.logits[: len(some)]
            self._model.logits(self._buffers, some, self._last[: len(some)], logits)
            targets, rows = text[begin : begin + most], out[begin : begin + most]
            rank(*self._where, logits, self._num_tokens, self._rank_scratch, targets, rows, asked=num_top)
        return out
