"""Who gets in, in what order, and who is sent away: turns, patience, and what a lost prefix leaves behind."""

import msgspec
import numpy as np
import pytest

from asyncllm.engine.batch import NO_TOKEN
from asyncllm.engine.radix import RadixTree
from asyncllm.engine.turns import Turns
from asyncllm.errors import EngineDead, OutOfMemory, QueueFull
from asyncllm.types import FinishReason
from tests.fakes import House, engine_config, hash_chain


def admitted(house: House) -> list[str]:
    return list(house.scheduler.roster.running)


def test_a_light_caller_waits_for_no_more_than_a_request_of_a_heavy_one() -> None:
    house = House(engine_config(max_running=1, max_step_tokens=64))
    for i in range(50):
        house.submit(f"heavy{i}", [1] * 10, max_tokens=4, caller="heavy")
    house.turn()
    house.submit("light", [2] * 10, max_tokens=4, caller="light")
    order: list[str] = []
    while not house.scheduler.idle:
        house.turn()
        order += [name for name in admitted(house) if name not in order]
    assert order.index("light") == 1 and order[2:4] == ["heavy1", "heavy2"]


def test_one_caller_is_served_in_the_order_of_arrival() -> None:
    turns = Turns()
    starts = [turns.start("", 100, 10**9) for _ in range(5)]
    assert starts == sorted(starts) and len(set(starts)) == 5


def test_who_was_idle_has_saved_nothing_up() -> None:
    turns = Turns()
    for _ in range(100):
        turns.admitted(turns.start("busy", 100, 100))
    assert turns.start("late", 10, 10) >= turns.start("busy", 10, 10) - 200


def test_two_callers_share_evenly_by_tokens() -> None:
    turns = Turns()
    long = [("long", turns.start("long", 300, 100)) for _ in range(10)]
    short = [("short", turns.start("short", 20, 20)) for _ in range(100)]
    first = [name for name, _ in sorted(long + short, key=lambda one: one[1])[:55]]
    assert 4 <= first.count("long") <= 6


def test_patience_ends_in_the_queue_without_gpu_work() -> None:
    house = House(engine_config(max_running=1))
    house.submit("runs", [1, 2], max_tokens=40)
    house.turn()
    house.submit("waits", [3, 4], max_tokens=40, arrival_s=0.0)  # long ago, by the monotonic clock
    house.scheduler.limits = msgspec.structs.replace(house.scheduler.limits, queue_timeout_s=30.0)
    house.run()
    terminal = house.out.terminal("waits")
    assert terminal is not None and isinstance(terminal.error, QueueFull)
    assert {row.slot for batch in house.runner.batches for row in batch.new_rows} == {1}
    ended = house.out.terminal("runs")
    assert ended is not None and ended.finish_reason is FinishReason.LENGTH


def test_a_broken_rows_prompt_is_matched_no_more() -> None:
    """The pages that a NaN came from stay out of everybody's way; who had shared them keeps them to his end."""
    next_token, prompt = hash_chain(512), [7] * 13

    def breaks(context: list[int], prompt_len: int) -> int:
        return NO_TOKEN if context[13:14] == [9] and len(context) > 16 else next_token(context, prompt_len)

    house = House(engine_config(max_running=2), breaks)
    house.submit("good", prompt + [8], max_tokens=20)
    house.submit("bad", prompt + [9], max_tokens=20)
    house.run()
    end = house.out.terminal("bad")
    assert end is not None and end.finish_reason is FinishReason.ERROR
    house.submit("again", prompt + [8], max_tokens=20)
    house.run()
    assert house.out.by_request["again"][-1].num_cached_tokens == 0
    assert house.out.token_ids("again") == house.out.token_ids("good")
    house.submit("third", prompt + [8], max_tokens=20)
    house.run()
    assert house.out.by_request["third"][-1].num_cached_tokens == 12


def test_a_lost_path_is_evicted_once_nobody_holds_it() -> None:
    tree = RadixTree(2)
    ids = np.arange(8, dtype=np.int32)
    node, _ = tree.insert(ids, [1, 2, 3, 4])
    tree.lock(node)
    tree.lose(node)
    tree.check()
    assert tree.match(ids, 4)[1] == [] and tree.is_lost(node) and tree.evict(4) == []
    other, adopted = tree.insert(ids, [5, 6, 7, 8])
    assert adopted == [5, 6, 7, 8] and not tree.is_lost(other)
    tree.unlock(node)
    assert sorted(tree.evict(8)) == [1, 2, 3, 4, 5, 6, 7, 8]
    tree.lose(tree.root)
    tree.check()


def test_without_memory_the_largest_ends_and_the_others_go_on() -> None:
    house = House(engine_config(overlap=True))
    failed: list[int] = []

    def no_memory(batch: object) -> None:
        if len(house.runner.batches) == 3 and not failed:
            failed.append(3)
            raise OutOfMemory("no memory")

    house.runner.on_launch = no_memory
    house.submit("small", [1, 2], max_tokens=9)
    house.submit("large", [3] * 20, max_tokens=9)
    house.run()
    large, small = house.out.terminal("large"), house.out.terminal("small")
    assert large is not None and isinstance(large.error, OutOfMemory)
    assert small is not None and small.finish_reason is FinishReason.LENGTH
    alone = House(engine_config())
    alone.submit("small", [1, 2], max_tokens=9)
    alone.run()
    assert house.out.token_ids("small") == alone.out.token_ids("small")


def test_the_third_time_without_memory_is_the_end() -> None:
    house = House(engine_config())

    def no_memory(batch: object) -> None:
        raise MemoryError

    house.runner.on_launch = no_memory
    for i in range(5):
        house.submit(f"r{i}", [1], max_tokens=2)
    with pytest.raises(EngineDead):
        house.run()
