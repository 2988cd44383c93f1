"""The composition root: Config -> running AsyncLLM. Sees every floor; nothing but cli.py sees it.

Loop thread, except for GpuThread's target. torch is imported on the GPU thread, while the loop lives.
"""

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from . import config as configs
from . import hub, machine
from .bridge import Inbox, Outbox
from .config import Config, EngineConfig
from .engine.batch import Runner
from .engine.budget import StepLimits
from .engine.loop import Engine
from .engine.scheduler import Scheduler
from .errors import AsyncLLMError, EngineDead, InvalidRequest, ModelError
from .llm import AsyncLLM
from .offline import LLM
from .submission import as_params
from .text.chat import ChatTemplate
from .text.tokenizer import Tokenizer, read_json
from .types import DEFAULTED, NO_DEFAULTS, EngineLimits

log = logging.getLogger(__name__)

# The loop waits this long for the GIL while the GPU thread runs Python. The default of 5 ms shows as
# 21 ms in a ping's p95 beside a busy thread, 0.5 ms as 2.1 ms.
SWITCH_INTERVAL_S = 5e-4
# On a GPU the other way round as well: a step is ten calls that let the GIL go, and each may wait this long for
# a busy loop to give it back, in a step of 2 to 4 ms.
CUDA_SWITCH_INTERVAL_S = 1e-4
JOIN_S = 10.0  # longer than any step takes
DEAD_JOIN_S = 0.5  # it has left, or a step is stuck and it never will


def start(model: str | None = None, **options: Any) -> AbstractAsyncContextManager[AsyncLLM]:
    """Load a model and run it beside the current loop:

        async with asyncllm.start() as llm:
            async for delta in await llm.chat([{"role": "user", "content": "Hi"}]): ...

    `model` is a folder, a Hugging Face id, or None for the default model; `options` are Config's fields.

    Raises:
        ValueError: an option that is unknown or cannot be met.
        ModelError: the model cannot be had or loaded, and why.
    """
    return serving(configs.make(model=model, **options))


def load(model: str | None = None, **options: Any) -> LLM:
    """As `start`, for a program without a loop: `asyncllm.load().generate(["Once upon a time"])`."""
    return LLM(start(model, **options))


@asynccontextmanager
async def serving(config: Config, fault: str | None = None) -> AsyncIterator[AsyncLLM]:
    """The engine of a Config, from loading to the last joined thread; with a fault on purpose, for tests."""
    with _told_as_model_errors(config.model or "the default model"):
        folder = await asyncio.to_thread(hub.resolve, config.model)
        tokenizer, template = await asyncio.to_thread(_load_words, folder, config)
    engine_config, limits = _decide(config, folder, tokenizer)
    sampling_defaults = _sampling_defaults(config, folder, limits)
    log.info(
        "%s: %s, %s, torch threads: %d",
        folder.resolve().name,
        engine_config.device,
        engine_config.dtype,
        engine_config.threads,
    )
    log.debug("%s", engine_config)
    if engine_config.why_plain is not None:
        log.warning("no FlashInfer, no CUDA graphs, several times slower: %s", engine_config.why_plain)
    name = config.served_model_name or (config.model if _is_hub_id(config.model) else folder.resolve().name)
    async with running(
        partial(_make_runner, folder, engine_config, limits, fault),
        engine_config,
        limits,
        tokenizer=tokenizer,
        chat_template=template,
        model_name=name,
        pace=config.pace,
        grammars=await asyncio.to_thread(_load_grammars, tokenizer, limits.vocab_size),
        sampling_defaults=sampling_defaults,
    ) as llm:
        yield llm


class SizedRunner(NamedTuple):
    """A runner that found out at start how many pages its device holds, and how fast it is."""

    runner: Runner
    config: EngineConfig


@asynccontextmanager
async def running(
    make_runner: Callable[[], Runner | SizedRunner], config: EngineConfig, limits: EngineLimits, **words: Any
) -> AsyncIterator[AsyncLLM]:
    """Bridge, engine and GPU thread around any Runner. `words` are what AsyncLLM needs beside them."""
    # Twice what may be live: a long step meets submissions whose forerunners' aborts are unread too.
    inbox, outbox = Inbox(2 * (limits.max_running + limits.max_waiting)), Outbox()
    llm = AsyncLLM(inbox=inbox, outbox=outbox, limits=limits, **words)

    def make_engine() -> Engine:
        made = make_runner()
        runner, sized = made if isinstance(made, SizedRunner) else (made, config)
        pool_tokens = sized.usable_pages * config.page_size
        log.info(
            "context: %d tokens; KV cache: %d tokens, in pages of %d",
            limits.max_model_len,
            pool_tokens,
            config.page_size,
        )
        scheduler = Scheduler(
            msgspec.structs.replace(limits, max_prompt_len=min(limits.max_prompt_len, pool_tokens)),
            page_size=config.page_size,
            num_pages=sized.num_pages,
            step_limits=StepLimits(
                sized.max_step_tokens, sized.max_mixed_tokens, sized.mixed_work, sized.break_even_context,
                sized.step_sizes,
            ),  # fmt: skip
            prefix_cache=config.prefix_cache,
            masker=None if llm.words.grammars is None else llm.words.grammars.masker(_mask_threads()),
        )
        return Engine(scheduler, runner, inbox, outbox, overlap=config.overlap)

    interval_s = CUDA_SWITCH_INTERVAL_S if config.device == "cuda" else SWITCH_INTERVAL_S
    sys.setswitchinterval(min(sys.getswitchinterval(), interval_s))
    thread = GpuThread(make_engine, on_death=lambda error: outbox.call(llm.died, error))
    try:
        llm.limits = (await thread.start()).scheduler.limits
    except BaseException:
        llm.close()  # a start that was cancelled: the thread finds this when it has loaded, and leaves
        raise
    try:
        yield llm
    finally:
        llm.close()
        await thread.join(JOIN_S if llm.dead is None else DEAD_JOIN_S)


class GpuThread:
    """The one thread that owns the engine: makes it, runs it, and tells when it ends by itself."""

    def __init__(self, make_engine: Callable[[], Engine], on_death: Callable[[AsyncLLMError], None]) -> None:
        self._make_engine = make_engine
        self._on_death = on_death
        self._ready: Future[Engine] = Future()
        # A daemon: the process ends without it if it must.
        self._thread = threading.Thread(target=self._run, name="asyncllm-gpu", daemon=True)

    async def start(self) -> Engine:
        """Returns when the engine is ready to serve. Raises what making it raised."""
        self._thread.start()
        return await asyncio.wrap_future(self._ready)

    async def join(self, timeout_s: float) -> None:
        """Wait for the thread to leave, but not for a step that is stuck."""
        await asyncio.to_thread(self._thread.join, timeout_s)
        if self._thread.is_alive():
            log.error("the GPU thread has not left within %g s: a step is stuck", timeout_s)

    def _run(self) -> None:
        self._ready.set_running_or_notify_cancel()  # from here on nobody cancels it under our feet
        try:
            engine = self._make_engine()
            # Weights, modules and tables live as long as the process: no collection need look at them.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(engine)
        try:
            engine.run()
        except BaseException as error:
            log.critical("the engine has died: %r", error, exc_info=error)
            kind = type(error) if isinstance(error, EngineDead) else EngineDead
            self._on_death(kind("the engine has died; the server must be restarted"))


@contextmanager
def _told_as_model_errors(model: str) -> Iterator[None]:
    """A model's files may hold anything: null for a number, a list for an object, bytes that are no text.

    Raises:
        ModelError: naming the model and what was met, in place of any error that names neither.
    """
    try:
        yield
    except AsyncLLMError:
        raise
    except MemoryError as error:
        raise ModelError(f"not enough memory for {model}: {error}; lower max_running or num_pages") from error
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        raise ModelError(f"{model} cannot be read as a model: {type(error).__name__}: {error}") from error


def _is_count(number: object) -> bool:
    return isinstance(number, int) and number > 0


def _is_hub_id(model: str | None) -> bool:
    return model is not None and not Path(model).expanduser().exists()


def _load_grammars(tokenizer: Tokenizer, vocab_size: int) -> Any:
    try:
        from .text.grammars import Grammars
    except ImportError as error:  # it has no wheel for every machine, and nothing else needs it
        log.warning("requests that demand a form of their answer will be refused: %s", error)
        return None
    return Grammars.of(tokenizer, vocab_size)


def _mask_threads() -> int:
    """Half of the cores, eight at most: 256 masks take one core 1.4 ms."""
    return max(1, min(8, machine.num_cores() // 2))


def _load_words(folder: Path, config: Config) -> tuple[Tokenizer, ChatTemplate | None]:
    template = ChatTemplate.from_folder(
        folder, tool_parser=config.tool_parser, reasoning_parser=config.reasoning_parser
    )
    return Tokenizer.from_folder(folder), template


def _sampling_defaults(config: Config, folder: Path, limits: EngineLimits) -> Mapping[str, float]:
    """What the model's makers say of sampling.

    Raises:
        ModelError: a value that no request could have.
    """
    if config.sampling_defaults != "model":
        return NO_DEFAULTS
    said = read_json(folder / "generation_config.json")
    defaults = {name: said[name] for name in DEFAULTED if said.get(name) is not None}
    try:
        params = as_params(None, defaults)
        if problem := params.problem(limits):
            raise problem
    except InvalidRequest as error:
        raise ModelError(f"{folder}/generation_config.json: {error}; --sampling-defaults openai passes it by") from None
    defaults = {name: getattr(params, name) for name in defaults}
    if defaults:
        log.info("sampling defaults of the model: %s", ", ".join(f"{name} {x:g}" for name, x in defaults.items()))
    return defaults


def _decide(config: Config, folder: Path, tokenizer: Tokenizer) -> tuple[EngineConfig, EngineLimits]:
    from .models.config import ModelConfig

    with _told_as_model_errors(folder.name):
        model = ModelConfig.from_folder(folder)
        facts = model.facts()
        numbers = {"vocab_size": model.vocab_size, **msgspec.structs.asdict(facts)}
        del numbers["dtype"]
        if wrong := [name for name, number in numbers.items() if not _is_count(number)]:
            raise ValueError(f"{wrong[0]} must be a number above 0, not {numbers[wrong[0]]!r}")
    engine_config = configs.resolve(config, facts, machine.facts(config.device))
    limits = EngineLimits(
        # A padded head has logits without a token, a cut one tokens without a logit; neither may be drawn.
        vocab_size=min(tokenizer.vocab_size, model.vocab_size),
        max_model_len=engine_config.max_model_len,
        max_prompt_len=engine_config.max_model_len - 1,  # less where the pool turns out smaller
        max_running=engine_config.max_running,
        max_waiting=engine_config.max_waiting,
        max_waiting_tokens=config.max_waiting_tokens,
        queue_timeout_s=config.queue_timeout_s,
    )
    return engine_config, limits


def _make_runner(
    folder: Path, config: EngineConfig, limits: EngineLimits, fault: str | None
) -> Runner | SizedRunner:
    made = _make_whole_runner(folder, config, limits)
    if fault is None:
        return made
    from .runner.faults import FaultyRunner, parse

    runner, config = made if isinstance(made, SizedRunner) else (made, config)
    return SizedRunner(FaultyRunner(runner, parse(fault), config.device == "cuda"), config)


def _make_whole_runner(folder: Path, config: EngineConfig, limits: EngineLimits) -> Runner | SizedRunner:
    if config.device == "cpu":
        from .runner.runner import build_runner

        with _told_as_model_errors(folder.name):
            return build_runner(folder, config, limits.vocab_size)
    from .models.config import ModelConfig
    from .runner.cuda import build_cuda_runner

    runner, config = build_cuda_runner(folder, config, ModelConfig.from_folder(folder).facts(), limits.vocab_size)
    return SizedRunner(runner, config)
