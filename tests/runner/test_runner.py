"""ModelRunner's laws, exactly, on the float64 TinyModel: batched, chunked and permuted equal alone."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.engine.batch import NO_TOKEN
from asyncllm.runner.runner import ModelRunner, build_runner
from tests.manual_device import ManualDevice
from tests.runner.driving import Driver, engine_config, make_batch, new_row
from tests.tiny import EOS_ID, make_checkpoint, num_tokens

PROMPTS = [[1, 50, 60], list(range(100, 140)), [9] * 17, [300, 7, 7, 20, 4]]
SAMPLING: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 1},
    {"temperature": 1.3, "seed": 2, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.0, "seed": 3, "min_p": 0.02},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"), "qwen3", "float64")


def runner_of(folder: Path, device: Any = None, **changes: Any) -> tuple[ModelRunner, Driver]:
    config = engine_config(dtype="float64", **changes)
    runner = build_runner(folder, config, num_tokens(), device)
    return runner, Driver(runner, config)


def alone(folder: Path, which: int, num_output: int = 24) -> list[int]:
    return runner_of(folder)[1].generate(1, PROMPTS[which], num_output, **SAMPLING[which])


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("order", [(1, 2, 3, 4), (4, 2, 1, 3)])
def test_batched_equals_alone(folder: Path, page_size: int, order: tuple[int, ...]) -> None:
    _, driver = runner_of(folder, page_size=page_size, num_pages=1 + 8 * 128 // page_size)
    for slot in order:
        driver.admit(slot, PROMPTS[slot - 1], **SAMPLING[slot - 1])
    driver.step(*((slot, len(PROMPTS[slot - 1]), True) for slot in order))
    for _ in range(23):
        driver.step(*((slot, 1, True) for slot in order))
    for slot in order:
        assert driver.outputs[slot] == alone(folder, slot - 1)


def test_chunked_and_mixed_equals_alone(folder: Path) -> None:
    _, driver = runner_of(folder)
    driver.admit(1, PROMPTS[0], **SAMPLING[0])
    driver.step((1, 3, True))
    driver.admit(2, PROMPTS[1], **SAMPLING[1])
    for _ in range(5):
        driver.step((1, 1, True), (2, 8, driver.lengths[2] == 32))
    while len(driver.outputs[2]) < 24:
        driver.step((2, 1, True), (1, 1, True))
    assert driver.outputs[1][:24] == alone(folder, 0)
    assert driver.outputs[2] == alone(folder, 1)


def test_a_used_slot_and_its_pages_start_afresh(folder: Path) -> None:
    """NaN everywhere but in page 0, in pages and beyond the text in the pool, stands for all that could be stale."""
    runner, driver = runner_of(folder)
    with torch.inference_mode():
        runner._tables.kv[:, 1:] = math.nan
        runner._tables.token_pool.fill_(10**8)
    assert driver.generate(1, PROMPTS[1], 24, chunk=9, **SAMPLING[1]) == alone(folder, 1)
    assert driver.generate(1, PROMPTS[2], 24, **SAMPLING[2]) == alone(folder, 2)


def test_resumed_equals_never_preempted(folder: Path) -> None:
    expected = alone(folder, 2)
    _, driver = runner_of(folder)
    text = PROMPTS[2] + expected[:10]
    assert driver.generate(3, text, 14, chunk=11, **SAMPLING[2]) == expected[10:]


def test_stop_ids_are_banned_below_min_len(folder: Path) -> None:
    greedy = alone(folder, 0)
    stop_ids = (greedy[2], greedy[3], EOS_ID, 10**9)
    min_len = len(PROMPTS[0]) + 3
    out = runner_of(folder)[1].generate(1, PROMPTS[0], 3, stop_ids=stop_ids, min_len=min_len)
    assert out[:2] == greedy[:2] and out[2] not in stop_ids
    out = runner_of(folder)[1].generate(1, PROMPTS[0], 3, stop_ids=stop_ids, min_len=min_len - 1)
    assert out == greedy[:3], "at min_len it may stop"


def test_a_row_of_nan_ends_alone(folder: Path) -> None:
    runner, driver = runner_of(folder)
    driver.admit(1, PROMPTS[0])
    driver.admit(2, PROMPTS[3], **SAMPLING[3])
    driver.step((1, 3, True), (2, 5, True))
    with torch.inference_mode():
        runner._tables.kv[:, driver.pages_of(1)] = math.nan
    for _ in range(23):
        assert driver.step((1, 1, True), (2, 1, True))[0] == NO_TOKEN
    assert driver.outputs[2] == alone(folder, 3)


def test_a_step_that_wants_no_token_draws_none(folder: Path) -> None:
    runner, _ = runner_of(folder)
    batch = make_batch(0, [(1, 0, 4, False)], [new_row(1, PROMPTS[1])], [(1, 0, 1)])
    assert runner.launch(batch).result().token_ids.shape == (0,)


def test_results_keep_the_order_of_the_rows_that_want_one(folder: Path) -> None:
    _, driver = runner_of(folder)
    for slot in (1, 2, 3):
        driver.admit(slot, PROMPTS[slot - 1], **SAMPLING[slot - 1])
    drawn = driver.step((3, 17, True), (2, 20, False), (1, 3, True))
    assert drawn == [alone(folder, 2, 1)[0], alone(folder, 0, 1)[0]]


# -- a device that is late --


def test_results_survive_the_launches_after_them(folder: Path) -> None:
    """Overlap: step N is read when N+1 and N+2 have been launched, its tokens having fed N+1 on the device."""
    runner, driver = runner_of(folder, ManualDevice())
    length = len(PROMPTS[2])
    deltas = [(1, i, i + 1) for i in range(8)]
    launched = [runner.launch(make_batch(0, [(1, 0, length, True)], [new_row(1, PROMPTS[2], **SAMPLING[2])], deltas))]
    tokens = []
    for step in range(1, 24):
        launched.append(runner.launch(make_batch(step, [(1, length + step - 1, 1, True)])))
        if len(launched) == 3:
            tokens += launched.pop(0).result().token_ids.tolist()
    tokens += [token for late in launched for token in late.result().token_ids.tolist()]
    assert tokens == alone(folder, 2)


def test_launch_reads_nothing_back(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch path must suit a device that is far away: no item, tolist, nonzero, or mask that needs one."""

    def forbidden(name: str) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            raise AssertionError(f"{name} on the launch path")

        return call

    runner, driver = runner_of(folder)
    for slot in (1, 2, 3, 4):
        driver.admit(slot, PROMPTS[slot - 1], stop_ids=(2,), min_len=99, **SAMPLING[slot - 1])
    for name in ("item", "tolist", "cpu", "nonzero", "__bool__", "__int__", "__float__", "__index__"):
        monkeypatch.setattr(torch.Tensor, name, forbidden(name))
    for name in ("tensor", "nonzero", "masked_select", "unique"):
        monkeypatch.setattr(torch, name, forbidden(name))
    driver.step(*((slot, len(PROMPTS[slot - 1]), True) for slot in (1, 2, 3, 4)))
    driver.step((1, 1, True), (2, 1, True), (3, 1, True), (4, 1, True))
