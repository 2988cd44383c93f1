"""A running generation whose limits change, and what its client may be told before the first token."""

from typing import Any

import pytest

from asyncllm.bridge import Update
from asyncllm.types import FinishReason, Progress
from tests.fakes import House, engine_config

from .test_loop import solo

OVERLAP = pytest.mark.parametrize("overlap", [False, True])
PROMPT = [1, 2, 3]


def running(num_tokens: int, **config: Any) -> House:
    """A house whose request "r", of at most 20 tokens, has got that many."""
    house = House(engine_config(**config))
    house.submit("r", PROMPT, 20)
    while len(house.out.token_ids("r")) < num_tokens:
        house.turn()
    return house


@OVERLAP
@pytest.mark.parametrize("limit", [1, 4, 5, 6, 7, 12, 19, 20, 21, 40])
def test_a_changed_limit_holds_for_what_is_not_scheduled(overlap: bool, limit: int) -> None:
    house = running(5, overlap=overlap)
    house.inbox.put(Update(request_id="r", max_tokens=limit))
    house.run()
    got, terminal = house.out.token_ids("r"), house.out.terminal("r")
    assert got == solo(PROMPT, 40)[: max(5, limit)]
    assert terminal is not None and terminal.finish_reason is FinishReason.LENGTH
    assert terminal.num_output_tokens == len(got)


@OVERLAP
def test_a_limit_raised_while_the_last_token_is_in_flight_is_in_time(overlap: bool) -> None:
    house = running(19, overlap=overlap)
    house.inbox.put(Update(request_id="r", max_tokens=30))
    house.run()
    assert house.out.token_ids("r") == solo(PROMPT, 30)


@OVERLAP
def test_a_changed_temperature_reaches_the_device_and_nobody_misses_a_token(overlap: bool) -> None:
    house = running(5, overlap=overlap)
    house.submit("neighbour", [7, 8], 20)
    house.turn()
    num_batches = len(house.runner.batches)
    house.inbox.put(Update(request_id="r", temperature=0.5))
    house.run()
    rows = [row for batch in house.runner.batches[num_batches:] for row in batch.new_rows]
    assert [row.temperature for row in rows] == [0.5]
    assert house.out.token_ids("r") == solo(PROMPT, 20)
    assert house.out.token_ids("neighbour") == solo([7, 8], 20)


def test_a_waiting_request_and_an_unknown_one_can_be_updated_too() -> None:
    house = running(2, max_running=1)
    house.submit("waits", [4, 5], 20)
    house.turn()
    house.inbox.put(Update(request_id="waits", max_tokens=3, temperature=0.5))
    house.inbox.put(Update(request_id="nobody", max_tokens=3, temperature=0.5))
    house.run()
    assert house.out.token_ids("waits") == solo([4, 5], 3)
    assert [row.temperature for batch in house.runner.batches for row in batch.new_rows] == [0, 0.5]


def test_progress_tells_the_queue_and_the_prefill_to_those_who_asked() -> None:
    house = running(2, max_running=1, max_step_tokens=4)
    for name in ("first", "second", "silent"):
        house.submit(name, [len(name)] * 10, 2, wants_progress=name != "silent")
    house.run()
    told = {name: [one for one in house.out.progress if one.request_id == name] for name in ("first", "second")}
    assert len(house.out.progress) == sum(map(len, told.values()))
    assert [one.queue_position for one in told["first"]][:2] == [0, None]
    assert [one.queue_position for one in told["second"]][:3] == [1, 0, None]
    for name in told:
        computed = [one.num_computed_tokens for one in told[name]]
        assert computed == sorted(computed) and 0 < computed[-1] <= 10
    assert told["first"][0] == Progress(request_id="first", queue_position=0, num_prompt_tokens=10)
