"""Triton: the ids that grammars do not allow, to minus infinity. The bits are masks.py's.

GPU thread. It never knows grammars or how a token is drawn.

A step's masks are one stretch of int32: for each row that draws the number of its mask or -1, then the masks.
"""

# mypy: ignore-errors
# Triton's language has no types, and its functions no signatures that Python would understand.

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _bar(masks, logits, vocab, num_tokens, num_words, max_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.load(masks + row).to(tl.int64)
    if number >= 0:
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        words = masks + max_rows + number * num_words
        word = tl.load(words + at // 32, mask=at < num_tokens, other=0)
        is_barred = ((word >> (at % 32)) & 1) == 0
        tl.store(logits + row * vocab + at, float("-inf"), mask=is_barred & (at < num_tokens))


def bar(masks: Tensor, logits: Tensor, num_tokens: int, max_rows: int) -> None:
    """logits: [num_rows, vocab], changed in place."""
    num_words = -(-num_tokens // 32)
    grid = (len(logits), triton.cdiv(num_tokens, _BLOCK))
    _bar[grid](masks, logits, logits.shape[1], num_tokens, num_words, max_rows, BLOCK=_BLOCK)
