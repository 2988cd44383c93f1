"""Fakes, not mocks: a runner without tensors whose tokens prove which context it read, and a house around it."""

import asyncio
import importlib.util
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from asyncllm import build
from asyncllm.bridge import Deltas as Sent
from asyncllm.bridge import Inbox, Outbox, Submit
from asyncllm.config import EngineConfig
from asyncllm.engine.batch import ALL_BARRED, Batch, Logprobs, StepResult
from asyncllm.engine.budget import StepLimits
from asyncllm.engine.loop import Engine
from asyncllm.engine.scheduler import Scheduler
from asyncllm.llm import AsyncLLM
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import Delta, EngineLimits, Progress, SamplingParams, Submission

NextToken = Callable[[list[int], int], int]  # (the whole context, its prompt's length) -> token id


def hash_chain(vocab_size: int) -> NextToken:
    """Each token depends on every token before it, so an output shows whether its context was right."""

    return lambda context, prompt_len: hash(tuple(context)) % vocab_size  # of ints: the same in every process


def scripted(output: list[int], after: int = 0) -> NextToken:
    """The same answer whatever the prompt; `after` it, for ever."""
    return lambda context, prompt_len: (output + [after] * (len(context) - prompt_len + 1))[len(context) - prompt_len]


class ScriptedRunner:
    """A Runner on numpy that computes as late as it may.

    launch() only queues; a step is computed when a result is asked for, in launch order, from what the
    tables hold then. Token ids travel through the paged KV like keys and values do, so a page that is
    shared, freed or mapped wrongly changes tokens. With `hold()`, steps wait to be let go one by one.
    """

    def __init__(self, config: EngineConfig, limits: EngineLimits, next_token: NextToken | None = None) -> None:
        self.next_token = next_token or hash_chain(limits.vocab_size)
        self.vocab_size = limits.vocab_size
        self.masks: dict[int, Any] = {}  # of steps that were drawn, by their number
        self.on_launch: Callable[[Batch], None] = lambda batch: None  # may raise
        self.on_result: Callable[[Batch], None] = lambda batch: None  # may raise
        self.batches: list[Batch] = []
        self.closed = threading.Event()
        num_slots, max_len = limits.max_running + 1, limits.max_model_len + 1
        max_pages = -(-max_len // config.page_size)
        self._page_size = config.page_size
        self._token_pool = np.full((num_slots, max_len), -7, np.int64)
        self._page_table = np.zeros((num_slots, max_pages), np.int64)
        self._kv = np.full((config.num_pages, config.page_size), -9, np.int64)
        self._prompt_len = np.zeros(num_slots, np.int64)
        self._num_logprobs = np.full(num_slots, -1, np.int64)
        self._queue: deque[Batch] = deque()
        self._results: dict[int, StepResult] = {}
        self._permits: int | None = None  # None: every step may finish

    def launch(self, batch: Batch) -> "ScriptedStep | UndrawnStep":
        self.on_launch(batch)
        self.batches.append(batch)
        return UndrawnStep(self, batch) if len(batch.masked) else self.enqueue(batch)

    def enqueue(self, batch: Batch) -> "ScriptedStep":
        self._queue.append(batch)
        return ScriptedStep(self, batch)

    def close(self) -> None:
        self.closed.set()

    def hold(self, permits: int = 0) -> None:
        """From now on only `permits` more steps finish, until let_go()."""
        self._permits = permits

    def let_go(self) -> None:
        self._permits = None

    def may_finish(self) -> bool:
        return self._permits is None or self._permits > 0

    def finish(self, batch: Batch) -> StepResult:
        if self._permits:
            self._permits -= 1
        self.on_result(batch)
        while batch.step not in self._results:
            queued = self._queue.popleft()
            self._results[queued.step] = self._compute(queued)
        return self._results.pop(batch.step)

    def _compute(self, batch: Batch) -> StepResult:
        for new in batch.new_rows:
            self._token_pool[new.slot] = -7
            self._token_pool[new.slot, : len(new.token_ids)] = new.token_ids
            self._prompt_len[new.slot] = new.min_len
            self._num_logprobs[new.slot] = new.num_logprobs
        for slot, column, page in batch.page_deltas.tolist():
            self._page_table[slot, column] = page
        rows = list(zip(batch.slots.tolist(), batch.starts.tolist(), batch.lengths.tolist(), strict=True))
        for slot, start, length in rows:  # all rows write before any reads, as the models do in each layer
            for position in range(start, start + length):
                self._kv[self._where(slot, position)] = self._token_pool[slot, position]
        tokens, told = [], []
        masks = dict(zip(batch.masked.tolist(), self.masks.pop(batch.step, ()), strict=True))
        for row, ((slot, start, length), wants_token) in enumerate(zip(rows, batch.wants_token, strict=True)):
            if wants_token:
                tokens.append(self._draw(slot, start + length, masks.get(row)))
                if self._num_logprobs[slot] >= 0:
                    told.append((tokens[-1], start + length))
        return StepResult(step=batch.step, token_ids=np.array(tokens, np.int32), logprobs=self._logprobs(told))

    def _draw(self, slot: int, position: int, mask: Any = None) -> int:
        """The model's token, or the next higher one (round the vocabulary) that the mask allows."""
        context = [int(self._kv[self._where(slot, i)]) for i in range(position)]
        token = self.next_token(context, int(self._prompt_len[slot]))
        if mask is not None:
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            token = int(allowed[np.searchsorted(allowed, token) % len(allowed)]) if len(allowed) else ALL_BARRED
        self._token_pool[slot, position] = token
        return token

    def _logprobs(self, drawn: list[tuple[int, int]]) -> Logprobs | None:
        """Minus a thousandth of the token's position, so that each shows whose it is; the token alone is likely."""
        if not drawn:
            return None
        ids, positions = np.array(drawn).T
        ranks, values = np.arange(max(1, self._num_logprobs.max())), -positions.astype(np.float32) / 1000
        return Logprobs(values, (ids[:, None] + ranks).astype(np.int32), values[:, None] - ranks.astype(np.float32))

    def _where(self, slot: int, position: int) -> tuple[int, int]:
        column, offset = divmod(position, self._page_size)
        page = int(self._page_table[slot, column])
        assert page != 0, "a real position on the dummy page"
        return page, offset


class UndrawnStep:
    def __init__(self, runner: ScriptedRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch
        self.masks = np.zeros((len(batch.masked), -(-runner.vocab_size // 32)), np.int32)

    def draw(self) -> "ScriptedStep":
        self._runner.masks[self._batch.step] = self.masks
        return self._runner.enqueue(self._batch)


class ScriptedStep:
    def __init__(self, runner: ScriptedRunner, batch: Batch) -> None:
        self._runner, self._batch = runner, batch

    def ready(self) -> bool:
        return self._runner.may_finish()

    def result(self) -> StepResult:
        return self._runner.finish(self._batch)


def engine_config(**changes: object) -> EngineConfig:
    values: dict[str, object] = {
        "device": "cpu", "dtype": "float32", "threads": 1, "page_size": 4, "num_pages": 65,
        "max_running": 8, "max_waiting": 64, "max_step_tokens": 32, "max_model_len": 128,
        "overlap": True, "prefix_cache": True,
    }  # fmt: skip
    return EngineConfig(**(values | changes))  # type: ignore[arg-type]


def limits_for(config: EngineConfig, vocab_size: int = 512) -> EngineLimits:
    return EngineLimits(
        vocab_size=vocab_size,
        max_model_len=config.max_model_len,
        max_prompt_len=min(config.max_model_len - 1, config.usable_pages * config.page_size),
        max_running=config.max_running,
        max_waiting=config.max_waiting,
    )


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until the engine, in its own thread, has come so far."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


class Deltas(Outbox):
    """An Outbox without a loop: keeps what it is given, by request."""

    def __init__(self) -> None:
        super().__init__()
        self.by_request: dict[str, list[Delta]] = {}
        self.progress: list[Progress] = []

    def put(self, deltas: Sent) -> None:
        for delta in deltas:
            if isinstance(delta, Progress):
                self.progress.append(delta)
                continue
            self.by_request.setdefault(delta.request_id, []).append(delta)

    def token_ids(self, request_id: str) -> list[int]:
        return [token for delta in self.by_request.get(request_id, []) for token in delta.token_ids]

    def terminal(self, request_id: str) -> Delta | None:
        """The terminal delta; asserts that there is at most one and that nothing follows it."""
        deltas = self.by_request.get(request_id, [])
        ends = [i for i, delta in enumerate(deltas) if delta.finish_reason is not None]
        assert ends in ([], [len(deltas) - 1]), f"terminal deltas at {ends} of {len(deltas)}"
        return deltas[-1] if ends else None


class ImpatientInbox(Inbox):
    """Looks where the real one would sleep: a test waits for nothing but what it asked for."""

    def wait(self, timeout_s: float | None) -> bool:
        return super().wait(0)


def submission(request_id: str, prompt_ids: list[int], max_tokens: int = 8, **changes: object) -> Submission:
    values = {"params": SamplingParams(temperature=0), "seed": 0, "stop_ids": (), "arrival_s": 0.0} | changes
    return Submission(
        request_id=request_id, prompt_ids=tuple(prompt_ids), max_tokens=max_tokens, **values  # type: ignore[arg-type]
    )  # fmt: skip


def _masker() -> Any:
    """None on a machine without llguidance, where tests have grammars of their own."""
    if importlib.util.find_spec("llguidance") is None:
        return None
    from asyncllm.text.grammars import Masker

    return Masker(1)


class House:
    """Scheduler, ScriptedRunner and loop in the test's own thread: one turn at a time, checked after each."""

    def __init__(
        self, config: EngineConfig, next_token: NextToken | None = None, runner: Any = None, vocab_size: int = 512
    ) -> None:
        self.limits = limits_for(config, vocab_size)
        self.runner = runner or ScriptedRunner(config, self.limits, next_token)
        self.inbox, self.out = ImpatientInbox(1000), Deltas()
        self.scheduler = Scheduler(
            self.limits,
            page_size=config.page_size,
            num_pages=config.num_pages,
            step_limits=StepLimits(
                config.max_step_tokens, config.max_mixed_tokens, config.mixed_work, config.break_even_context,
                config.step_sizes,
            ),  # fmt: skip
            prefix_cache=config.prefix_cache,
            masker=_masker(),
        )
        self.engine = Engine(self.scheduler, self.runner, self.inbox, self.out, overlap=config.overlap)

    def submit(self, *args: Any, **kwargs: Any) -> None:
        self.inbox.put(Submit(submission(*args, **kwargs)))

    def turn(self) -> None:
        self.engine.turn()
        self.scheduler.check()

    def run(self, max_turns: int = 10_000) -> None:
        """Until nothing is left to do; asserts that everything was given back."""
        for _ in range(max_turns):
            self.turn()
            if self.scheduler.idle:
                break
        assert self.scheduler.idle, self.scheduler
        assert self.scheduler.stats().pages_used == 0


@asynccontextmanager
async def scripted_llm(
    tokenizer: Tokenizer,
    template: ChatTemplate | None = None,
    next_token: NextToken | None = None,
    config: EngineConfig | None = None,
) -> AsyncIterator[tuple[AsyncLLM, ScriptedRunner]]:
    """The real AsyncLLM, engine and GPU thread on a ScriptedRunner: everything but torch."""
    config = config or engine_config()
    limits = limits_for(config, tokenizer.vocab_size)
    runner = ScriptedRunner(config, limits, next_token)
    async with build.running(
        lambda: runner,
        config,
        limits,
        tokenizer=tokenizer,
        chat_template=template,
        model_name="scripted",
        grammars=build._load_grammars(tokenizer, limits.vocab_size),
    ) as llm:
        try:
            yield llm, runner
        finally:
            runner.let_go()  # a test that fails while it holds steps must not wait for them
