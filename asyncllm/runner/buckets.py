"""The sizes that steps are padded to, so that a captured graph serves them.

GPU thread. It never knows what a graph holds.
"""

from bisect import bisect_left
from collections.abc import Sequence


def row_buckets(most: int) -> list[int]:
    """Sizes of decode steps. A padding row reads one token of the dummy page, so wide gaps cost little."""
    sizes = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, most + 1, 32)]
    return [*(size for size in sizes if size < most), most]


def tail_buckets(most: int, *, is_rare: bool) -> list[int]:
    """Sizes of tails: few, for a graph takes some 40 ms at start, and few for what is rare. A padding row costs its
    logits and a third of a microsecond."""
    common = [1, 2, 4, 8, 16, 24, 32, 48, *range(64, most, 32)]
    rare = [1, 8, 32, *range(64, most, 64)]
    sizes = rare if is_rare else common
    return [*(size for size in sizes if size < most), most]


def token_buckets(most: int) -> list[int]:
    """Sizes of steps with a prompt chunk: at most a third is padding, from 1024 on a fifth."""
    sizes = [16, 32, 64, 128, 192, 256, 384, 512, 768, *range(1024, 2048, 256), *range(2048, 4096, 512)]
    sizes += [*range(4096, 8192, 1024), *range(8192, most, 2048)]
    return [*(size for size in sizes if size < most), most]


def bucket(size: int, buckets: Sequence[int]) -> int:
    return buckets[bisect_left(buckets, size)]
