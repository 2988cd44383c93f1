"""What a submission says of itself beside its sampling: priority, deadline, cache salt."""

from typing import Any

import pytest

from asyncllm.engine import scheduler
from asyncllm.errors import TimedOut
from asyncllm.types import FinishReason
from tests.fakes import House, engine_config, hash_chain


def firsts(house: House, names: list[str]) -> list[str]:
    """The names in the order of their first tokens."""
    order: list[str] = []
    while len(order) < len(names):
        house.turn()
        order += [name for name in names if name not in order and house.out.token_ids(name)]
    return order


def test_the_lower_priority_is_admitted_first_and_equals_in_their_order() -> None:
    house = House(engine_config(max_running=1, overlap=False))
    for name, priority in (("c", 5), ("a", -1), ("d", 5), ("b", 0)):
        house.submit(name, [1, 2], max_tokens=2, priority=priority)
    assert firsts(house, ["a", "b", "c", "d"]) == ["a", "b", "c", "d"]
    house.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_the_least_urgent_is_preempted_and_resumes(overlap: bool) -> None:
    """The pool holds one and a half of them; the urgent one came last."""
    next_token, config = hash_chain(512), engine_config(num_pages=13, max_running=2, overlap=overlap)
    house = House(config, next_token)
    house.submit("background", list(range(8)), max_tokens=24, priority=10)
    house.turn()
    house.submit("urgent", list(range(50, 58)), max_tokens=24)
    house.run()
    assert house.scheduler.stats().num_preemptions == 1
    ends = [name for name, deltas in house.out.by_request.items() for delta in deltas if delta.finish_reason]
    assert sorted(ends) == ["background", "urgent"]
    alone = House(engine_config(overlap=False), next_token)
    for name, prompt in (("background", list(range(8))), ("urgent", list(range(50, 58)))):
        alone.submit(name, prompt, max_tokens=24)
        alone.run()
        assert house.out.token_ids(name) == alone.out.token_ids(name)
    times = {name: house.out.by_request[name][-1].timings for name in ("urgent", "background")}
    assert times["urgent"].finished_s < times["background"].finished_s  # type: ignore[union-attr]


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)
    return clock


@pytest.mark.parametrize("overlap", [False, True])
def test_a_deadline_ends_what_has_begun_by_length_and_what_has_not_by_an_error(clock: Clock, overlap: bool) -> None:
    house = House(engine_config(max_running=1, overlap=overlap))
    house.submit("running", [1], max_tokens=100, deadline_s=110.0)
    house.submit("waiting", [2], max_tokens=100, deadline_s=105.0)
    house.submit("patient", [3], max_tokens=3)
    for _ in range(5):
        house.turn()
    clock.now_s = 109.0
    house.turn()
    late: Any = house.out.terminal("waiting")
    assert isinstance(late.error, TimedOut) and late.error.status == 408
    clock.now_s = 110.0
    house.run()
    ended: Any = house.out.terminal("running")
    assert ended.finish_reason is FinishReason.LENGTH and ended.error is None
    assert 3 <= len(house.out.token_ids("running")) == ended.num_output_tokens < 12
    assert len(house.out.token_ids("patient")) == 3


def test_prefixes_are_shared_under_the_same_salt_alone() -> None:
    house = House(engine_config(overlap=False))
    prompt = list(range(1, 20))
    cached = []
    for i, salt in enumerate(("", "", "a", "b", "a", "")):
        house.submit(f"r{i}", prompt, max_tokens=2, cache_salt=salt)
        house.run()
        cached.append(house.out.by_request[f"r{i}"][-1].num_cached_tokens)
    assert cached == [0, 16, 0, 0, 16, 16]


def test_salts_that_are_used_up_leave_nothing() -> None:
    """More salts than the pool has pages: their pages are evicted, their roots let go."""
    house = House(engine_config(overlap=False, num_pages=20))
    for i in range(400):
        house.submit(f"r{i}", [i] * 9, max_tokens=2, cache_salt=str(i))
        house.run()
    assert len(house.scheduler.cache.tree._salted) < 150
