"""The laws of both loops, on tokens that depend on every token before them."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asyncllm.bridge import Abort, Close, Finish
from asyncllm.engine.batch import NO_TOKEN, Batch, StepResult
from asyncllm.errors import EngineDead, InvalidRequest, StepFailed
from asyncllm.types import FinishReason, SamplingParams
from tests.fakes import House, engine_config, hash_chain, scripted, submission

next_token = hash_chain(512)


def solo(prompt: list[int], max_tokens: int) -> list[int]:
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, len(prompt)))
    return context[len(prompt) :]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("max_step_tokens", [8, 256], ids=["chunk8", "whole"])
def test_random_requests_equal_their_solo_output(overlap: bool, page_size: int, max_step_tokens: int) -> None:
    """Random lengths, shared prefixes, aborts, and a pool so small that sequences are preempted."""
    rng = random.Random(page_size * 1000 + max_step_tokens)
    config = engine_config(
        overlap=overlap, page_size=page_size, num_pages=1 + 320 // page_size, max_step_tokens=max_step_tokens,
        max_model_len=256,
    )  # fmt: skip
    house = House(config)
    shared = [rng.randrange(4) for _ in range(90)]
    asked = {}
    for i in range(70):
        prompt = shared[: rng.randrange(1, 90)] + [rng.randrange(4) for _ in range(rng.randrange(9))]
        asked[f"r{i}"] = (prompt, rng.choice([rng.randrange(1, 30), rng.randrange(60, 150)]))
    waiting = list(asked)
    while waiting or not house.scheduler.idle:
        while waiting and rng.random() < 0.5:
            house.submit(name := waiting.pop(), *asked[name])
        if rng.random() < 0.05:
            house.inbox.put(Abort(rng.choice(list(asked))))
        if waiting or not house.scheduler.idle:
            house.turn()
    for name, (prompt, max_tokens) in asked.items():
        terminal, got = house.out.terminal(name), house.out.token_ids(name)
        assert terminal is not None and terminal.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        whole = solo(prompt, max_tokens)
        assert got == (whole if terminal.finish_reason is FinishReason.LENGTH else whole[: len(got)])
    stats = house.scheduler.stats()
    assert stats.pages_used == 0 and stats.num_preemptions > 0
    assert house.scheduler.cache.pool.num_free + house.scheduler.cache.tree.num_pages == config.usable_pages


def test_overlap_launches_the_next_step_before_it_looks_at_the_last() -> None:
    order: list[str] = []
    house = House(engine_config(overlap=True))
    house.runner.on_launch = lambda batch: order.append(f"launch {batch.step}")
    house.runner.on_result = lambda batch: order.append(f"commit {batch.step}")
    house.submit("a", [1, 2, 3], max_tokens=3)
    house.turn()
    assert order == ["launch 1"] and not house.out.by_request  # fill: nothing to commit yet
    house.run()
    assert order == ["launch 1", "launch 2", "commit 1", "launch 3", "commit 2", "commit 3"]
    assert house.out.token_ids("a") == solo([1, 2, 3], 3)  # drain: the last result came without a new step


def test_max_tokens_is_never_scheduled_past() -> None:
    """The host knows this end in advance: the overlap wastes no row on it."""
    house = House(engine_config(overlap=True))
    house.submit("a", [1], max_tokens=5)
    house.run()
    assert sum(int(batch.wants_token.sum()) for batch in house.runner.batches) == 5


def test_a_token_drawn_past_the_end_is_discarded() -> None:
    house = House(engine_config(overlap=True), scripted([5, 6, 2, 9, 9]))
    house.submit("a", [1], max_tokens=20, stop_ids=(2,))
    house.run()
    assert house.out.token_ids("a") == [5, 6, 2]
    terminal = house.out.terminal("a")
    assert terminal is not None and terminal.finish_reason is FinishReason.STOP and terminal.stop_reason is None
    assert sum(int(batch.wants_token.sum()) for batch in house.runner.batches) == 4


def test_an_end_frees_nothing_that_a_step_in_flight_names() -> None:
    """A finish at N while N+1 runs, then an abort: the row goes back once, after N+1."""
    house = House(engine_config(overlap=True), scripted([2]))
    house.submit("a", [1, 1, 1], max_tokens=20, stop_ids=(2,))
    house.turn()
    house.turn()  # step 2 launched, step 1 committed: "a" has ended, and step 2 names it
    assert house.out.terminal("a") is not None
    assert house.scheduler.stats().pages_used > 0
    house.inbox.put(Abort("a"))
    house.turn()
    house.scheduler.check()
    assert house.scheduler.idle and house.scheduler.stats().pages_used == 0


def test_abort_beats_a_finish_that_is_not_committed() -> None:
    house = House(engine_config(overlap=True), scripted([2]))
    house.submit("a", [1], max_tokens=1)
    house.turn()
    house.inbox.put(Abort("a"))
    house.run()
    terminal = house.out.terminal("a")
    assert terminal is not None and terminal.finish_reason is FinishReason.ABORT
    assert house.out.token_ids("a") == []


def test_finish_from_the_text_side_ends_with_stop() -> None:
    house = House(engine_config())
    house.submit("a", [1], max_tokens=50)
    house.turn()
    house.inbox.put(Finish("a"))
    house.run()
    terminal = house.out.terminal("a")
    assert terminal is not None and terminal.finish_reason is FinishReason.STOP


@pytest.mark.parametrize("overlap", [False, True])
def test_decodes_go_on_while_a_long_prompt_is_prefilled(overlap: bool) -> None:
    """A running stream gets a token in every step; the prompt takes what is left of the budget."""
    house = House(engine_config(overlap=overlap, max_step_tokens=9, max_model_len=120))
    house.submit("a", [1], max_tokens=40)
    house.turn()
    house.turn()
    house.submit("b", [2] * 80, max_tokens=2)
    house.run()
    chunked = [batch for batch in house.runner.batches if batch.num_tokens > 2]
    assert len(chunked) == 10 and all(batch.num_rows == 2 and batch.num_tokens == 9 for batch in chunked)
    assert house.out.token_ids("b") == solo([2] * 80, 2)


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    for max_step_tokens in (8, 256):
        house = House(engine_config(page_size=4, max_step_tokens=max_step_tokens))
        for i in range(6):
            house.submit(f"r{i}", [7, 8, 9, 10] * 5 + [1], max_tokens=3)
        house.run()
        prefilled = sum(batch.num_tokens - batch.num_rows for batch in house.runner.batches)
        assert prefilled <= 21 + 6  # the first one's 21 tokens; one each, where the last page is not full
        assert [house.out.token_ids(f"r{i}") for i in range(6)] == [solo([7, 8, 9, 10] * 5 + [1], 3)] * 6


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_PFX_1_a_wholly_cached_prompt_leaves_one_token_to_compute(page_size: int) -> None:
    house = House(engine_config(page_size=page_size, num_pages=257))
    base = [i % 7 for i in range(3 * page_size)]
    prompts = [base, base, base, base + [1], base[:-1] or [3], base + base, base]
    for i, prompt in enumerate(prompts):
        for max_tokens in (1, 20):
            name = f"{i}/{max_tokens}"
            house.submit(name, prompt, max_tokens)
            house.submit(f"{name} twin", prompt, max_tokens)
            house.run()
            for request in (name, f"{name} twin"):
                terminal = house.out.terminal(request)
                assert terminal is not None and terminal.num_cached_tokens <= len(prompt) - 1
                assert house.out.token_ids(request) == solo(prompt, max_tokens)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("page_size", [16, 64])
def test_PFX_3_page_accounting_does_not_drift(overlap: bool, page_size: int) -> None:
    rng = random.Random(3)
    config = engine_config(
        overlap=overlap, page_size=page_size, num_pages=1 + 2048 // page_size, max_model_len=512, max_step_tokens=128
    )
    house = House(config, lambda context, prompt_len: (len(context) * 31 + context[-1]) % 512)
    shared = [rng.randrange(512) for _ in range(300)]
    for i in range(400):
        cut = rng.choice([page_size - 1, page_size, page_size + 1, rng.randrange(1, 300)])
        house.submit(f"r{i}", shared[:cut] + [rng.randrange(512)], rng.randrange(1, 12), stop_ids=(rng.randrange(512),))
        if rng.random() < 0.3:
            house.inbox.put(rng.choice([Abort, Finish])(f"r{rng.randrange(i + 1)}"))
        if rng.random() < 0.3:
            house.run()
            stats = house.scheduler.stats()
            assert stats.pages_used == 0
            assert house.scheduler.cache.pool.num_free + stats.pages_cached == stats.pages_total
    house.run()
    whole_pool = house.limits.max_prompt_len
    house.submit("last", [5] * whole_pool, max_tokens=1)  # as large as the pool or the context
    house.run()
    assert len(house.out.token_ids("last")) == 1


def test_PFX_4_a_cache_hit_changes_nothing_and_is_counted() -> None:
    house = House(engine_config(page_size=4, num_pages=129, max_model_len=128))
    a = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    counts = []
    for i, prompt in enumerate([a, a, a + [11] + a, a, [0] + a[1:], a[:5] + [0] + a[6:]]):
        house.submit(f"r{i}", prompt, max_tokens=6)
        house.run()
        assert house.out.token_ids(f"r{i}") == solo(prompt, 6)
        counts.append(house.out.by_request[f"r{i}"][-1].num_cached_tokens)
    assert counts == [0, 8, 8, 8, 0, 4]


def test_PFX_4_each_turn_of_a_conversation_finds_the_last_answer() -> None:
    house = House(engine_config(page_size=4, num_pages=129, max_model_len=128))
    conversation, cached = [1, 2, 3], []
    for turn in range(5):
        house.submit(f"t{turn}", conversation, max_tokens=8)
        house.run()
        answer = house.out.token_ids(f"t{turn}")
        assert answer == solo(conversation, 8)
        cached.append(house.out.by_request[f"t{turn}"][-1].num_cached_tokens)
        conversation = conversation + answer + [100 + turn]
    assert cached == [0, 8, 16, 28, 36]  # whole pages of 0, 10, 19, 28, 37 tokens: an answer's last one has no KV


@pytest.mark.parametrize("overlap", [False, True])
def test_KV_1_what_can_never_fit_is_refused_and_what_outgrows_the_pool_ends_alone(overlap: bool) -> None:
    house = House(engine_config(overlap=overlap, page_size=4, num_pages=11, max_model_len=128))  # 40 tokens
    house.submit("never", [1] * 41, max_tokens=1)
    house.submit("exact", [2] * 40, max_tokens=1)
    house.submit("grows", [3] * 24, max_tokens=60)
    for i in range(5):
        house.submit(f"small {i}", [4, i], max_tokens=3)
    house.run()
    refused = house.out.terminal("never")
    assert refused is not None and isinstance(refused.error, InvalidRequest) and refused.error.param == "prompt"
    assert house.out.token_ids("exact") == solo([2] * 40, 1)
    grown = house.out.terminal("grows")
    assert grown is not None and grown.finish_reason is FinishReason.LENGTH
    assert house.out.token_ids("grows") == solo([3] * 24, 17)  # 40 positions, and the token drawn from the last
    assert all(house.out.token_ids(f"small {i}") == solo([4, i], 3) for i in range(5))


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_KV_2_preemption_under_a_full_pool(page_size: int) -> None:
    rng = random.Random(page_size)
    config = engine_config(
        page_size=page_size, num_pages=1 + 1024 // page_size, max_running=16, max_step_tokens=64, max_model_len=512
    )
    house = House(config)
    shared = [9] * 100
    asked = {f"r{i}": ((shared if i % 2 else []) + [i] * 10, rng.randrange(150, 300)) for i in range(16)}
    for name, (prompt, max_tokens) in asked.items():
        house.submit(name, prompt, max_tokens)
    house.run()
    assert house.scheduler.roster.num_preemptions > 0
    for name, (prompt, max_tokens) in asked.items():
        assert house.out.token_ids(name) == solo(prompt, max_tokens)


def failing(step: int) -> Any:
    def fault(batch: Batch) -> None:
        if batch.step == step:
            raise RuntimeError("fault hook")

    return fault


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("where", ["on_launch", "on_result"])
def test_a_failed_step_ends_its_requests_and_no_other(overlap: bool, where: str, caplog: Any) -> None:
    house = House(engine_config(overlap=overlap, max_running=2))
    setattr(house.runner, where, failing(4))
    for i in range(4):  # two run, two wait
        house.submit(f"r{i}", [7, 8, 9, 10, i], max_tokens=8)
    house.run()
    for i in (0, 1):
        terminal = house.out.terminal(f"r{i}")
        assert terminal is not None and isinstance(terminal.error, StepFailed)
    for i in (2, 3):
        assert house.out.token_ids(f"r{i}") == solo([7, 8, 9, 10, i], 8)
    assert "step 4 with 2 rows failed" in caplog.text
    assert house.scheduler.cache.pool.num_free + house.scheduler.cache.tree.num_pages == 64


def test_a_survivor_of_a_failed_step_goes_on_from_its_committed_tokens(caplog: Any) -> None:
    """Out of the failed step because the pool had no page for it, the youngest starts over unnoticed."""
    house = House(engine_config(overlap=True, page_size=4, num_pages=8, max_running=3, prefix_cache=False))
    failed_at: list[int] = []

    def fault(batch: Batch) -> None:
        if len(house.scheduler.roster.running) > batch.num_rows and not failed_at:
            failed_at.append(batch.step)
            raise RuntimeError("fault hook")

    house.runner.on_result = fault
    for i in range(3):
        house.submit(f"r{i}", [i + 1] * 5, max_tokens=16)
    house.run()
    survivors = [f"r{i}" for i in range(3) if (end := house.out.terminal(f"r{i}")) and end.error is None]
    assert failed_at and survivors
    for name in survivors:
        assert house.out.token_ids(name) == solo([int(name[1]) + 1] * 5, 16)


def test_two_steps_failing_at_once_fail_together(caplog: Any) -> None:
    house = House(engine_config(overlap=True))
    house.runner.on_launch = failing(3)
    house.runner.on_result = failing(2)
    house.submit("a", [1, 2], max_tokens=9)
    house.run()
    terminal = house.out.terminal("a")
    assert terminal is not None and isinstance(terminal.error, StepFailed)


def test_an_engine_error_is_not_survived() -> None:
    house = House(engine_config())

    def dies(batch: Batch) -> None:
        raise EngineDead("device lost")

    house.runner.on_result = dies
    house.submit("a", [1], max_tokens=9)
    with pytest.raises(EngineDead, match="device lost"):
        house.run()


def test_a_row_without_a_finite_logit_ends_alone() -> None:
    def sometimes_nan(context: list[int], prompt_len: int) -> int:
        return NO_TOKEN if context[0] == 13 and len(context) > 4 else next_token(context, prompt_len)

    house = House(engine_config(), sometimes_nan)
    house.submit("bad", [13, 1], max_tokens=9)
    house.submit("good", [14, 1], max_tokens=9)
    house.run()
    terminal = house.out.terminal("bad")
    assert terminal is not None and terminal.finish_reason is FinishReason.ERROR
    assert len(house.out.token_ids("bad")) == 3
    assert house.out.token_ids("good") == solo([14, 1], 9)


def test_the_engines_door_checks_again() -> None:
    house = House(engine_config())
    house.submit("empty", [])
    house.submit("id", [1, 512])
    house.submit("bias", [1], params=SamplingParams(logit_bias={512: 1.0}))
    house.submit("nan", [1], params=SamplingParams(temperature=float("nan")))
    house.turn()
    errors = {name: house.out.by_request[name][-1].error for name in ("empty", "id", "bias", "nan")}
    assert all(isinstance(error, InvalidRequest) for error in errors.values())
    params = {name: getattr(error, "param", None) for name, error in errors.items()}
    assert params == {"empty": "prompt", "id": "prompt[1]", "bias": "logit_bias", "nan": "temperature"}
    assert house.scheduler.idle


def test_close_ends_everything_and_leaves() -> None:
    house = House(engine_config(overlap=True))
    for i in range(20):
        house.submit(f"r{i}", [i], max_tokens=50)
    house.turn()
    house.inbox.put(Close())
    house.engine.run()
    assert house.runner.closed.is_set() and house.scheduler.idle
    reasons = [end.finish_reason for i in range(20) if (end := house.out.terminal(f"r{i}"))]
    assert reasons == [FinishReason.ABORT] * 20


def test_a_message_wakes_a_waiting_engine() -> None:
    """While a step runs, an abort is applied before the step ends: nothing is scheduled for it again."""
    house = House(engine_config(overlap=True))
    house.submit("a", [1], max_tokens=50)
    house.turn()
    house.engine._step_s[1] = 1e6  # the step's end is expected far in the future
    heard: list[bool] = []

    def ready() -> bool:
        if not heard:
            house.inbox.put(Abort("a"))
        heard.append(house.out.terminal("a") is not None)
        return heard[-1]

    house.runner.may_finish = ready
    house.turn()
    assert heard[0] is False and heard[-1] is True


def test_a_prompt_takes_smaller_steps_where_streams_run() -> None:
    house = House(engine_config(max_step_tokens=32, max_mixed_tokens=12))
    house.scheduler.submit(submission("first", list(range(40)), 9))
    lengths: list[list[int]] = []
    for step in range(6):
        if step == 2:  # "first" decodes from here on
            house.scheduler.submit(submission("second", list(range(40, 75)), 9))
        batch = house.scheduler.schedule()
        assert batch is not None
        lengths.append(batch.lengths.tolist())
        house.scheduler.commit(house.runner.launch(batch).result())
    assert lengths == [[32], [8], [1, 11], [1, 11], [1, 11], [1, 2]]


class TimedStep:
    """A step that is over when the clock says so."""

    def __init__(self, now: list[float], over_s: float) -> None:
        self._now, self._over_s = now, over_s

    def ready(self) -> bool:
        return self._now[0] >= self._over_s

    def result(self) -> StepResult:
        raise NotImplementedError


def test_one_slow_step_does_not_teach_to_oversleep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step of a size may load kernels; those after it are looked at when they are over."""
    house, now = House(engine_config()), [0.0]
    house.scheduler.submit(submission("a", list(range(15)), 3))
    batch = house.scheduler.schedule()
    assert batch is not None
    monkeypatch.setattr("asyncllm.engine.loop.time", SimpleNamespace(monotonic=lambda: now[0]))

    def wait(timeout_s: float) -> bool:
        now[0] += timeout_s
        return False

    monkeypatch.setattr(house.inbox, "wait", wait)
    house.engine._last_end_s = 0.0
    late_s = []
    for duration_s in (0.1, *[0.003] * 12):
        over_s = now[0] + duration_s
        house.engine._wait(batch, TimedStep(now, over_s))
        house.engine._note_end(batch)
        late_s.append(now[0] - over_s)
    assert max(late_s[-3:]) < 1e-4, late_s


def test_batches_are_what_the_runner_was_promised() -> None:
    house = House(engine_config(max_step_tokens=10))
    house.scheduler.submit(submission("a", list(range(15)), 3))
    batch = house.scheduler.schedule()
    assert batch is not None and batch.slots.dtype == np.int32
    assert (batch.starts.tolist(), batch.lengths.tolist(), batch.wants_token.tolist()) == ([0], [10], [False])
    assert batch.new_rows[0].token_ids.tolist() == list(range(15))
    assert batch.page_deltas[:, 1].tolist() == [0, 1, 2, 3]
