"""GraphRunner: graph equals eager at every bucket's edges, padding leaves no trace, nothing waits for the device."""

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncllm.engine.batch import NO_TOKEN, Scored
from asyncllm.runner.frame import TooLong
from asyncllm.runner.graphs import GraphRunner
from tests.gpu.houses import TINY, graph_runner, needs, no_sync
from tests.runner.driving import Driver, make_batch, new_row, shaping
from tests.tiny import EOS_ID, make_checkpoint

SAMPLING: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "seed": 1}, {"temperature": 1.2, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "min_p": 0.02},
]  # fmt: skip
Pair = tuple[tuple[GraphRunner, Driver], tuple[GraphRunner, Driver]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", "bfloat16", head_dim=64, seed=5)


@pytest.fixture(scope="module")
def pair(folder: Path) -> Pair:
    """The same runner twice: captured for up to 40 rows, and not at all."""
    sizes = {"max_running": 48, "num_pages": 400, "max_step_tokens": 1024, "max_model_len": 448}
    captured, eager = (graph_runner(folder, cuda_graph_max_batch=rows, **sizes)[:2] for rows in (40, 0))
    assert captured[0]._forwards and captured[0]._tails and not eager[0]._forwards
    return captured, eager


def test_steps_are_timed_at_start(folder: Path) -> None:
    config = graph_runner(folder, max_running=4, max_step_tokens=512)[2]
    assert 8 <= config.max_mixed_tokens <= 512 and config.max_mixed_tokens in config.step_sizes
    assert config.break_even_context >= 1 and config.step_sizes[-1] == 512


def prompt(i: int, length: int) -> list[int]:
    return [3 + (7 * i + 13 * j) % 400 for j in range(length)]


def admit_all(driver: Driver, lengths: list[int], sampling: list[dict[str, Any]]) -> None:
    for slot, length in enumerate(lengths, 1):
        driver.admit(slot, prompt(slot, length), **sampling[slot % len(sampling)])
    with no_sync():
        driver.step(*((slot, length, True) for slot, length in enumerate(lengths, 1)))


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33, 39, 40, 41, 48])
def test_GRAPH_1_equal_prompts_and_shrinking_batches(pair: Pair, batch: int) -> None:
    """Equal greedy prompts answer equally; different ones, ending one by one, as they do without graphs."""
    for _, driver in pair:
        for slot in range(1, batch + 1):
            driver.admit(slot, prompt(1, 9))
        with no_sync():
            driver.step(*((slot, 9, True) for slot in range(1, batch + 1)))
            for _ in range(12):
                driver.step(*((slot, 1, True) for slot in range(1, batch + 1)))
        assert len({tuple(driver.outputs[slot]) for slot in range(1, batch + 1)}) == 1
    assert pair[0][1].outputs[1] == pair[1][1].outputs[1]
    for _, driver in pair:
        admit_all(driver, list(range(1, min(batch, 31) + 1)), SAMPLING)
        for left in range(min(batch, 31), 0, -1):
            with no_sync():
                driver.step(*((slot, 1, True) for slot in range(1, left + 1)))
    captured, eager = pair[0][1].outputs, pair[1][1].outputs
    assert all(NO_TOKEN not in tokens for tokens in captured.values())
    assert {slot: captured[slot] for slot in range(1, min(batch, 31) + 1)} == {
        slot: eager[slot] for slot in range(1, min(batch, 31) + 1)
    }


def test_mixed_steps_equal_eager(pair: Pair) -> None:
    rng = np.random.default_rng(0)
    plans = [[int(rng.integers(1, 200)) for _ in range(6)] for _ in range(8)]
    outputs = []
    for _, driver in pair:
        drawn = []
        for plan in plans:
            for slot, length in enumerate(plan, 1):
                driver.admit(slot, prompt(slot, length), **SAMPLING[slot % 4])
            with no_sync():
                drawn.append(driver.step((1, plan[0], True)))
                drawn.append(driver.step((1, 1, True), (2, plan[1], True), (3, max(1, plan[2] // 2), plan[2] == 1)))
                if plan[2] > 1:
                    drawn.append(driver.step((1, 1, True), (2, 1, True), (3, plan[2] - max(1, plan[2] // 2), True)))
                drawn.append(driver.step((1, 1, True), (3, 1, True), (2, 1, True), (4, plan[3], True)))
                drawn.append(driver.step((5, plan[4], True), (1, 1, True), (6, plan[5], True)))  # no decode row leads
                drawn.append(driver.step(*((slot, 1, True) for slot in (6, 2, 4, 1, 5, 3))))
        outputs.append(drawn)
    assert outputs[0] == outputs[1]


def test_permuting_rows_permutes_tokens(pair: Pair) -> None:
    _, driver = pair[0]
    lengths = list(range(5, 35))
    results = []
    for order in (np.arange(1, 31), np.random.default_rng(1).permutation(np.arange(1, 31))):
        admit_all(driver, lengths, SAMPLING)
        for _ in range(8):
            driver.step(*((int(slot), 1, True) for slot in order))
        results.append({slot: driver.outputs[slot] for slot in range(1, 31)})
    assert results[0] == results[1]


def test_ten_thousand_padded_replays_do_not_drift(pair: Pair) -> None:
    """Sizes that pad, over and over the same step: the same tokens, page 0 all zeros, tables of others untouched."""
    runner, driver = pair[0]
    admit_all(driver, [20] * 13, SAMPLING)
    table = runner._frame.page_table.clone()
    first: dict[int, list[int]] = {}
    launched = []
    for i in range(10_000):
        size = (3, 5, 13, 9)[i % 4]
        batch = make_batch(driver._step + i, [(slot, 20, 1, True) for slot in range(1, size + 1)])
        launched.append(runner.launch(batch))
        if len(launched) == 2:
            tokens = launched.pop(0).result().token_ids.tolist()
            assert tokens == first.setdefault(len(tokens), tokens), f"step {i}"
    driver._step += 10_000
    assert not any(layer.pages[0].any() for layer in runner._attention._layers)
    assert torch.equal(table, runner._frame.page_table) and not table[0].any()


def test_poisoned_pages_and_a_used_slot_leave_no_trace(pair: Pair) -> None:
    runner, driver = pair[0]
    admit_all(driver, [70, 30], SAMPLING[1:3])
    expected = [driver.step((1, 1, True), (2, 1, True)) for _ in range(20)]
    for pages in (layer.pages for layer in runner._attention._layers):
        pages[1:] = math.nan
    runner._frame.token_pool.fill_(10**8)
    runner._frame.tables.fill_(10**8)
    runner._frame.token_pool[0] = 0
    admit_all(driver, [70, 30], SAMPLING[1:3])
    assert [driver.step((1, 1, True), (2, 1, True)) for _ in range(20)] == expected


def test_a_row_of_nan_ends_alone(pair: Pair) -> None:
    runner, driver = pair[0]
    admit_all(driver, [30, 30, 30], SAMPLING)
    alone = [driver.step((1, 1, True), (3, 1, True)) for _ in range(6)]
    admit_all(driver, [30, 30, 30], SAMPLING)
    for pages in (layer.pages for layer in runner._attention._layers):
        pages[driver.pages_of(2)[0]] = math.nan
    steps = [driver.step((1, 1, True), (2, 1, True), (3, 1, True)) for _ in range(6)]
    assert [step[1] for step in steps] == [NO_TOKEN] * 6
    assert [[step[0], step[2]] for step in steps] == alone
    for pages in (layer.pages for layer in runner._attention._layers):
        pages[driver.pages_of(2)[0]] = 0


def test_stop_ids_are_banned_below_min_len(pair: Pair) -> None:
    _, driver = pair[0]
    driver.admit(1, prompt(1, 9))
    driver.step((1, 9, True))
    greedy = [driver.outputs[1][0], *(driver.step((1, 1, True))[0] for _ in range(3))]
    stop_ids = (greedy[1], greedy[2], EOS_ID, 10**9)
    for min_len, kept in ((11, False), (10, True)):
        driver.admit(1, prompt(1, 9), stop_ids=stop_ids, min_len=min_len)
        driver.admit(2, prompt(2, 9))
        driver.step((2, 9, True), (1, 9, True))
        got = [driver.outputs[1][0], driver.step((2, 1, True), (1, 1, True))[1]]
        assert (got == greedy[:2]) is kept
        assert kept or got[1] not in stop_ids


SHAPED: list[dict[str, Any]] = [
    {}, {"temperature": 0.8, "seed": 1, "num_logprobs": 3}, {"shaping": shaping(presence=1.0, repetition=1.4)},
    {"temperature": 1.0, "seed": 3, "top_p": 0.9, "shaping": shaping({40: 4.0, 41: 5.0}, frequency=0.6)},
    {"num_logprobs": 20, "shaping": shaping(allowed=np.arange(30, 90, dtype=np.int32), bad=((40, 41), (50,)))},
]  # fmt: skip


def told(runner: GraphRunner, driver: Driver, *rows: tuple[int, int, bool]) -> Any:
    """A step of the driver, whose result's log probabilities are kept."""
    results: list[Any] = []
    launch = runner.launch

    def keep(batch: Any) -> Any:
        launched = launch(batch)
        results.append(launched.result())
        return launched

    runner.launch = keep  # type: ignore[method-assign]
    try:
        driver.step(*rows)
    finally:
        del runner.launch
    return results[0].logprobs


@pytest.mark.parametrize("batch", [1, 5, 33, 40, 48])
def test_shaped_and_ranked_rows_equal_eager_ones(pair: Pair, batch: int) -> None:
    lengths = [5 + slot % 37 for slot in range(batch)]
    outputs, ranks = [], []
    for runner, driver in pair:
        admit_all(driver, lengths, SHAPED)
        ranked = []
        for _ in range(10):
            with no_sync():
                ranked.append(told(runner, driver, *((slot, 1, True) for slot in range(1, batch + 1))))
        outputs.append({slot: driver.outputs[slot] for slot in range(1, batch + 1)})
        ranks.append(ranked)
    assert outputs[0] == outputs[1]
    asking = sum("num_logprobs" in SHAPED[slot % 5] for slot in range(1, batch + 1))
    for mine, theirs in zip(*ranks, strict=True):
        assert asking == 0 or len(mine.logprobs) == asking
        assert asking == 0 or np.array_equal(mine.top_ids, theirs.top_ids)
        assert asking == 0 or np.isfinite(mine.logprobs).all()


def test_counts_are_those_of_the_text_after_a_resume(pair: Pair) -> None:
    runner, driver = pair[0]
    penalties = {"shaping": shaping(frequency=1.0, repetition=1.3, prompt_len=20)}
    driver.admit(1, prompt(1, 20), **penalties)
    driver.step((1, 20, True))
    for _ in range(12):
        driver.step((1, 1, True))
    before = runner._frame.counts[1].clone()
    text = prompt(1, 20) + driver.outputs[1]
    driver.admit(1, text, **penalties)
    driver.step((1, len(text) - 1, False))
    assert torch.equal(runner._frame.counts[1], before)


def test_a_prompt_is_scored_however_it_is_cut(pair: Pair) -> None:
    """In chunks beside decode rows, and in chunks of one token, which the decode kernels compute."""
    runner, driver = pair[0]
    text = prompt(3, 90)
    admit_all(driver, [20, 30], SAMPLING)
    whole = None
    for cuts in ([90], [40, 50], [1, 88, 1], [33, 1, 56]):
        driver.admit(3, text)
        start, parts = 0, []
        for cut in cuts:
            length = min(cut, 89 - start)
            decodes = [(slot, driver.lengths[slot], 1, True) for slot in (1, 2)]
            rows = [*decodes, (3, start, cut, start + cut == 90)]
            batch = make_batch(driver._step, rows, driver._new, driver._deltas)
            batch = msgspec.structs.replace(batch, scored=(Scored(2, start, length, 3),) if length > 0 else ())
            driver._step, driver._new, driver._deltas = driver._step + 1, [], []
            parts += runner.launch(batch).result().scores
            start += cut
        logprobs, ids = (np.concatenate([getattr(part, name) for part in parts]) for name in ("logprobs", "top_ids"))
        assert logprobs.shape == (89,) and ids.shape == (89, 3)
        if whole is None:
            whole = logprobs
        assert np.isfinite(logprobs).all()
        assert np.median(np.abs(logprobs - whole)) < 0.15  # bf16: see test_laws for what chunks may differ by


def test_more_than_an_entry_holds_is_written_all_the_same(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    runner, driver = pair[0]
    admit_all(driver, [40, 50], SAMPLING)
    expected = driver.step((1, 1, True), (2, 1, True))
    pack, calls = runner._packer.pack, []

    def refuse(batch: Any, *rest: Any) -> Any:
        calls.append(len(batch.new_rows))
        if batch.new_rows:
            raise TooLong
        return pack(batch, *rest)

    monkeypatch.setattr(runner._packer, "pack", refuse)
    admit_all(driver, [40, 50], SAMPLING)
    assert calls == [2, 0]
    assert driver.step((1, 1, True), (2, 1, True)) == expected


def test_a_failed_launch_leaves_the_next_one_whole(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fails before or after the device has counted the step."""
    runner, driver = pair[0]
    admit_all(driver, [20], SAMPLING)
    expected = [driver.step((1, 1, True))[0] for _ in range(4)]
    for name in ("_run_forward", "_finish"):
        admit_all(driver, [20], SAMPLING)
        with monkeypatch.context() as patch:
            patch.setattr(runner, name, lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                runner.launch(make_batch(10**6, [(2, 0, 1, True)], [new_row(2, [5])]))
        assert [driver.step((1, 1, True))[0] for _ in range(4)] == expected


def test_a_step_that_wants_no_token_draws_none(pair: Pair) -> None:
    runner, _ = pair[0]
    assert runner.launch(make_batch(0, [(1, 0, 4, False)], [new_row(1, [5] * 9)])).result().token_ids.shape == (0,)


@pytest.mark.parametrize("name", ["tiny-qwen3", "tiny-llama", "tiny-qwen2"])
def test_the_reference_checkpoints_run_in_bf16(name: str) -> None:
    """No equality with float32 greedy ids is asked for here: see test_laws for how near the logits are."""
    _, driver, _ = graph_runner(needs(TINY / name))
    out = driver.generate(1, prompt(1, 40), 24, chunk=17)
    assert len(out) == 24 and NO_TOKEN not in out
