"""Every size up to the largest has a bucket that holds it, without much padding."""

from collections.abc import Callable
from functools import partial

import pytest

from asyncllm.runner.buckets import bucket, row_buckets, tail_buckets, token_buckets

MAKERS = {
    "rows": row_buckets,
    "tails": partial(tail_buckets, is_rare=False),
    "rare tails": partial(tail_buckets, is_rare=True),
    "tokens": token_buckets,
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("most", [1, 2, 16, 17, 48, 256, 300, 1024, 8192, 20_000])
def test_every_size_has_the_least_bucket_that_holds_it(make: Callable[[int], list[int]], most: int) -> None:
    buckets = make(most)
    assert buckets == sorted(set(buckets)) and buckets[-1] == most
    for size in range(1, most + 1, max(1, most // 500)):
        assert bucket(size, buckets) == min(one for one in buckets if one >= size)


def test_padding_is_bounded() -> None:
    rows, tokens = row_buckets(1024), token_buckets(8192)
    assert all(bucket(size, rows) - size < max(8, size / 4) for size in range(1, 1025))
    assert all(bucket(size, tokens) <= 2 * size for size in range(8, 8193))
    assert len(tail_buckets(256, is_rare=True)) < len(tail_buckets(256, is_rare=False)) < len(row_buckets(256))
