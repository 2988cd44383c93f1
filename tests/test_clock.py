"""A clock that stands still where the process does, and runs where only the engine is busy."""

from types import SimpleNamespace

import pytest

from asyncllm import clock
from asyncllm.clock import MAX_TICK_S, Clock


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Set `now_s`; monotonic() tells it."""
    fake = SimpleNamespace(now_s=1000.0)
    fake.monotonic = lambda: fake.now_s
    monkeypatch.setattr(clock, "time", fake)
    return fake


def test_a_clock_that_is_not_kept_is_the_monotonic_one(time: SimpleNamespace) -> None:
    kept_by_nobody = Clock()
    for time.now_s in (0.0, 5.0, 5000.0):
        assert kept_by_nobody.now_s() == time.now_s


def test_while_the_loop_turns_every_second_counts(time: SimpleNamespace) -> None:
    kept = Clock()
    for tick in range(400):
        time.now_s = 1000.0 + tick * 0.9 * MAX_TICK_S
        kept.tick()
        assert kept.now_s() == time.now_s


def test_a_stop_is_left_out_whoever_looks_first_and_time_never_goes_back(time: SimpleNamespace) -> None:
    kept = Clock()
    kept.tick()
    before_s, told = kept.now_s(), []
    for time.now_s in (1001.0, 1002.0, 1003.0, 1030.0):  # the engine's thread looks before the loop's next tick
        told.append(kept.now_s() - before_s)
    kept.tick()
    told.append(kept.now_s() - before_s)
    time.now_s = 1031.0
    kept.tick()
    assert told == [1.0, 2.0, MAX_TICK_S, MAX_TICK_S, MAX_TICK_S]
    assert kept.now_s() - before_s == MAX_TICK_S + 1.0
