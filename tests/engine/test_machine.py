"""The scheduler under anything a client or a device can do, in any order, checked after every action."""

import os

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from asyncllm.bridge import Abort, Finish, Update
from asyncllm.engine.batch import NO_TOKEN, Batch
from asyncllm.types import FinishReason
from tests.fakes import House, engine_config, hash_chain

VOCAB = 3  # so small that prefixes collide all the time
next_token = hash_chain(VOCAB)


def naive(prompt: list[int], max_tokens: int) -> list[int]:
    """What a model without cache, pages or batches says."""
    context = list(prompt)
    for _ in range(max_tokens):
        context.append(next_token(context, len(prompt)))
    return context[len(prompt) :]


class SchedulerMachine(RuleBasedStateMachine):
    """schedule() and commit() are separate rules, so up to two steps are in flight when things happen."""

    @initialize(
        page_size=st.sampled_from([1, 4, 16]),
        num_pages=st.integers(8, 40),
        max_step_tokens=st.sampled_from([4, 9, 64]),
        max_mixed_tokens=st.sampled_from([5, 64]),
        break_even_context=st.sampled_from([0, 3, 100]),
        step_sizes=st.sampled_from([(), (2, 4, 8, 16, 32, 64)]),
        prefix_cache=st.booleans(),
    )
    def begin(
        self, page_size: int, num_pages: int, max_step_tokens: int, max_mixed_tokens: int, break_even_context: int,
        step_sizes: tuple[int, ...], prefix_cache: bool,
    ) -> None:  # fmt: skip
        config = engine_config(
            page_size=page_size, num_pages=num_pages, max_running=4, max_step_tokens=max_step_tokens, max_model_len=64,
            prefix_cache=prefix_cache, max_mixed_tokens=min(max_mixed_tokens, max_step_tokens),
            break_even_context=break_even_context, step_sizes=step_sizes,
        )  # fmt: skip
        self.house = House(config, next_token)
        self.scheduler = self.house.scheduler
        self.pool_tokens = config.usable_pages * page_size
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.updated: dict[str, int] = {}  # how many tokens an updated request may have
        self.flying: list[tuple[Batch, object]] = []

    @rule(
        prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40),
        max_tokens=st.integers(1, 20),
        caller=st.sampled_from(["", "a", "b"]),
        priority=st.sampled_from([0, 0, 0, -1, 2]),
    )
    def submit(self, prompt: list[int], max_tokens: int, caller: str, priority: int) -> None:
        name = f"r{len(self.asked)}"
        self.asked[name] = (prompt, max_tokens)
        self.house.submit(name, prompt, max_tokens, caller=caller, cache_salt=caller, priority=priority)
        self.house.engine._receive()

    @precondition(lambda self: len(self.flying) < 2)
    @rule()
    def schedule(self) -> None:
        batch = self.scheduler.schedule() if self.scheduler.roster.live else None
        if batch is not None:
            limits, num_rows = self.scheduler.step_limits, batch.num_rows
            is_mixed = 0 < self.scheduler._before.num_decodes < num_rows
            assert batch.num_tokens <= max(limits.max_mixed_tokens if is_mixed else limits.max_step_tokens, num_rows)
            assert len(set(batch.slots.tolist())) == batch.num_rows and 0 not in batch.slots
            assert len({row.slot for row in batch.new_rows}) == len(batch.new_rows), "two new rows for a slot"
            self.flying.append((batch, self.house.runner.launch(batch)))

    @precondition(lambda self: self.flying)
    @rule()
    def commit(self) -> None:
        _, launched = self.flying.pop(0)
        self.scheduler.commit(launched.result())

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), message=st.sampled_from([Abort, Finish]))
    def end_one(self, data: st.DataObject, message: type[Abort] | type[Finish]) -> None:
        """Also of requests that have ended: they are no news."""
        name = data.draw(st.sampled_from(sorted(self.asked)))
        self.house.inbox.put(message(name))
        self.house.engine._receive()

    @precondition(lambda self: self.asked)
    @rule(data=st.data(), limit=st.integers(1, 20) | st.none(), temperature=st.sampled_from([None, 0.5]))
    def update_one(self, data: st.DataObject, limit: int | None, temperature: float | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.asked)))
        got, (_, max_tokens) = self.house.out.token_ids(name), self.asked[name]
        bound = self.updated.get(name, max_tokens)
        if self.house.out.terminal(name) is None:
            self.updated[name] = bound if limit is None else max(limit, len(got))
        self.house.inbox.put(Update(request_id=name, max_tokens=limit, temperature=temperature))
        self.house.engine._receive()

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def commit_nan(self, data: st.DataObject) -> None:
        """One row's logits hold no number: it ends alone, and nobody reads its pages any more."""
        batch, launched = self.flying.pop(0)
        result = launched.result()
        if len(result.token_ids):
            broken = data.draw(st.integers(0, len(result.token_ids) - 1))
            result.token_ids[broken] = NO_TOKEN
        self.scheduler.commit(result)

    @precondition(lambda self: self.flying)
    @rule(largest_only=st.booleans())
    def fail(self, largest_only: bool) -> None:
        """A step that failed, or found no memory."""
        for _, launched in self.flying:
            launched.result()
        self.flying.clear()
        self.scheduler.fail(RuntimeError("fault"), largest_only=largest_only)

    @rule()
    def lose_patience(self) -> None:
        """Whoever waits has waited too long; who has had a slot is spared, though preempted."""
        spared = [one for one in self.scheduler.roster.waiting if one.admitted_s]
        self.scheduler.roster.waiting._next_look_s = 0.0
        self.scheduler.roster.end_impatient(1e-9)
        assert list(self.scheduler.roster.waiting) == spared

    @invariant()
    def holds(self) -> None:
        self.scheduler.check()
        never_admitted = [one.prompt_len for one in self.scheduler.roster.waiting if not one.admitted_s]
        assert self.scheduler.stats().num_waiting_tokens == sum(never_admitted)
        self.house.engine._hand_off()
        for name, (prompt, max_tokens) in self.asked.items():
            self._check_request(name, prompt, max_tokens)

    def _check_request(self, name: str, prompt: list[int], max_tokens: int) -> None:
        got, terminal = self.house.out.token_ids(name), self.house.out.terminal(name)
        expected = naive(prompt, 20 if name in self.updated else max_tokens)
        assert got == expected[: len(got)]
        assert len(got) <= self.updated.get(name, max_tokens)
        if terminal is not None and terminal.finish_reason is FinishReason.LENGTH:
            pool_full = len(prompt) + len(got) > self.pool_tokens - self.scheduler.cache.page_size
            assert got == expected or pool_full or name in self.updated

    def teardown(self) -> None:
        if not hasattr(self, "house"):
            return
        for _ in range(5000):
            while self.flying:
                self.commit()
            if self.scheduler.idle:
                break
            self.schedule()
        self.holds()
        assert self.scheduler.idle
        assert all(self.house.out.terminal(name) for name in self.asked), "a request never ended"
        assert self.scheduler.stats().pages_used == 0


TestScheduler = SchedulerMachine.TestCase
# 10,200 steps; make prove runs more.
num_machines = int(os.environ.get("ASYNCLLM_MACHINES", "170"))
TestScheduler.settings = settings(max_examples=num_machines, stateful_step_count=60, deadline=None)
