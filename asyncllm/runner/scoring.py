"""Log probabilities of tokens, in torch: of those drawn, and of a prompt's own.

GPU thread. They are the model's, of the logits as they left it. It never knows how a token was chosen or who asks.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..engine.batch import Logprobs
from ..types import LEAST_LOGPROB

SCORED_ROWS = 64  # positions whose logits are there at once: 64 of 151,936 take 39 MB


def score(logits: Tensor, ids: Tensor, num_top: int) -> Tensor:
    """How likely each row's id is, and the likeliest ids: [num_rows, 1 + 2 * num_top] int32, device, floats as bits.

    logits: [num_rows, num_tokens]; ids: [num_rows] int64, device.
    """
    likely = logits.float().log_softmax(-1).clamp_min_(LEAST_LOGPROB)
    own = likely.gather(-1, ids.clamp_min(0)[:, None])
    top_ids = _largest(likely, min(num_top, likely.shape[-1]))
    values = likely.gather(-1, top_ids)
    return torch.cat((own.view(torch.int32), top_ids.to(torch.int32), values.view(torch.int32)), -1)


def _largest(x: Tensor, count: int) -> Tensor:
    """Ids of the largest, the lowest id first among equals; topk alone would choose among those as it likes."""
    bits = x.view(torch.int32).to(torch.int64)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # as the floats are
    ids = torch.arange(x.shape[-1], device=x.device)
    keys = ((ordered << 31) - ids).topk(count, -1).values
    return -keys & 0x7FFFFFFF


def read(packed: NDArray[np.int32], num_rows: int) -> Logprobs:
    """score()'s rows on the host."""
    rows = packed.reshape(num_rows, -1)
    num_top = rows.shape[1] // 2
    floats = rows.view(np.float32)
    return Logprobs(floats[:, 0], rows[:, 1 : 1 + num_top], floats[:, 1 + num_top :])


def split(packed: NDArray[np.int32], sizes: Sequence[tuple[int, int]]) -> list[Logprobs]:
    """Blocks of score(), one behind the other; sizes: (rows, num_top) of each."""
    ends = np.cumsum([rows * (1 + 2 * num_top) for rows, num_top in sizes])
    blocks = np.split(packed, ends[:-1]) if sizes else []
    return [read(block, rows) for block, (rows, _) in zip(blocks, sizes, strict=True)]
