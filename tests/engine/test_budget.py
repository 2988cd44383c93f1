"""How much of a prompt a step takes, beside running streams and alone."""

import random

import pytest

from asyncllm.engine.budget import Budget, StepLimits
from asyncllm.runner.buckets import token_buckets

SIZES = (256, 512, 1024, 1536, 2048, 2560, 3072, 4096, 8192)
QWEN3_8B = StepLimits(8192, 3072, break_even_context=17_000, sizes=SIZES)


def worth(start: int, length: int, depth: int) -> float:
    """In tokens without a context, one by one."""
    return sum(1 + (start + i + 0.5) / depth for i in range(length))


def test_alone_a_prompt_takes_all_there_is() -> None:
    assert Budget(QWEN3_8B, 0).take(100_000, 9000) == 8192


def test_short_prompts_fill_a_mixed_step() -> None:
    budget, taken = Budget(QWEN3_8B, 64), []
    while budget.left:
        taken.append(budget.take(0, 1024))
    assert taken == [1024, 1024, 960]


@pytest.mark.parametrize("start", [0, 2_000, 6_000, 30_000, 100_000])
def test_a_deep_chunk_is_shorter_and_pads_nothing(start: int) -> None:
    budget = Budget(QWEN3_8B, 64)
    length = budget.take(start, 50_000)
    assert not budget.left and length + 64 in SIZES
    most = 3072 * (1 + 512 / 17_000) - 64
    assert worth(start, length, 17_000) <= most
    larger = min(size for size in SIZES if size > length + 64) - 64
    assert worth(start, larger, 17_000) > most or larger + 64 > 3072


def test_where_no_size_fits_the_chunk_is_what_can_be_paid() -> None:
    length = Budget(QWEN3_8B._replace(sizes=()), 64).take(100_000, 5_000)
    most = 3072 * (1 + 512 / 17_000) - 64
    assert worth(100_000, length, 17_000) <= most < worth(100_000, length + 1, 17_000)
    assert Budget(QWEN3_8B._replace(sizes=(512,)), 512).take(100_000, 5_000) == 384, "512 is passed already"
    assert Budget(QWEN3_8B._replace(break_even_context=10), 64).take(1_000_000, 5_000) == 1, "it goes on all the same"


def test_a_chunk_is_never_cut_to_next_to_nothing() -> None:
    """Each of its tokens reads the whole context again, and so does the padding of a step that takes more."""
    tight = QWEN3_8B._replace(sizes=token_buckets(8192), max_mixed_tokens=1024)
    assert Budget(tight, 255).take(100_000, 10**6) == 116, "1 would fill 256"
    budget = Budget(QWEN3_8B, 64)
    assert [budget.take(*chunk) for chunk in ((0, 1000), (0, 983), (30_000, 10**6))] == [1000, 983, 381]


def test_work_may_be_more_than_tokens() -> None:
    small = StepLimits(8192, 8192, mixed_work=26_624, break_even_context=3_800)
    assert Budget(small, 64).take(0, 10**6) == 8128 and 3_000 < Budget(small, 64).take(30_000, 10**6) < 3_500
    assert Budget(StepLimits(64), 4).left == 60


def test_any_prompts_cost_no_more_than_a_step_has() -> None:
    rng = random.Random(0)
    for _ in range(200):
        depth, num_decodes = rng.randint(1, 5000), rng.randint(1, 200)
        budget = Budget(StepLimits(1024, 512, break_even_context=depth, sizes=SIZES), num_decodes)
        spent, num_tokens = 0.0, 0
        while budget.left:
            start = rng.randint(0, 3000)
            length = budget.take(start, rng.randint(1, 400))
            assert length >= 1
            spent, num_tokens, last = spent + worth(start, length, depth), num_tokens + length, worth(start, 1, depth)
        assert num_tokens <= 512 - num_decodes
        assert spent <= 512 * (1 + 512 / depth) - num_decodes + last
