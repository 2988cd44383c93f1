"""The composition root: Config -> running AsyncLLM. Sees every floor; nothing but cli.py sees it.

Loop thread, except for GpuThread's target. torch is imported on the GPU thread, while the loop lives.
"""

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

from . import config as configs
from . import hub
from .bridge import Inbox, Outbox
from .config import Config, EngineConfig, MachineFacts
from .engine.batch import Runner
from .engine.loop import Engine
from .engine.scheduler import Scheduler
from .errors import AsyncLLMError, EngineDead, ModelError
from .llm import LLM, AsyncLLM
from .text.chat import ChatTemplate
from .text.tokenizer import Tokenizer
from .types import EngineLimits

log = logging.getLogger(__name__)

# The loop waits this long for the GIL while the GPU thread runs Python. The default of 5 ms shows as
# 21 ms in a ping's p95 beside a busy thread, 0.5 ms as 2.1 ms.
SWITCH_INTERVAL_S = 5e-4


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
async def serving(config: Config) -> AsyncIterator[AsyncLLM]:
    """The engine of a Config, from loading to the last joined thread."""
    folder = await asyncio.to_thread(hub.resolve, config.model)
    tokenizer, template = await asyncio.to_thread(_load_words, folder)
    engine_config, limits = _decide(config, folder, tokenizer)
    log.info("%s", engine_config)
    name = config.served_model_name or (config.model if _is_hub_id(config.model) else folder.name)
    async with running(
        lambda: _make_runner(folder, engine_config, limits),
        engine_config,
        limits,
        tokenizer=tokenizer,
        chat_template=template,
        model_name=name,
    ) as llm:
        yield llm


@asynccontextmanager
async def running(
    make_runner: Callable[[], Runner], config: EngineConfig, limits: EngineLimits, **words: Any
) -> AsyncIterator[AsyncLLM]:
    """Bridge, engine and GPU thread around any Runner. `words` are what AsyncLLM needs beside them."""
    inbox, outbox = Inbox(limits.max_running + limits.max_waiting), Outbox()
    llm = AsyncLLM(inbox=inbox, outbox=outbox, limits=limits, **words)

    def make_engine() -> Engine:
        scheduler = Scheduler(
            limits,
            page_size=config.page_size,
            num_pages=config.num_pages,
            max_step_tokens=config.max_step_tokens,
            prefix_cache=config.prefix_cache,
        )
        return Engine(scheduler, make_runner(), inbox, outbox, overlap=config.overlap)

    thread = GpuThread(make_engine, on_death=lambda error: outbox.call(llm.died, error))
    try:
        await thread.start()
        yield llm
    finally:
        llm.close()
        await thread.join()


class GpuThread:
    """The one thread that owns the engine: makes it, runs it, and tells when it ends by itself."""

    def __init__(self, make_engine: Callable[[], Engine], on_death: Callable[[AsyncLLMError], None]) -> None:
        self._make_engine = make_engine
        self._on_death = on_death
        self._ready: Future[None] = Future()
        # A daemon: a process that is told to stop does not wait for a step that is stuck.
        self._thread = threading.Thread(target=self._run, name="asyncllm-gpu", daemon=True)

    async def start(self) -> None:
        """Returns when the engine is ready to serve. Raises what making it raised."""
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()
        await asyncio.wrap_future(self._ready)

    async def join(self) -> None:
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            engine = self._make_engine()
            # Weights, modules and tables live as long as the process: no collection need look at them.
            gc.collect()
            gc.freeze()
        except BaseException as error:
            self._ready.set_exception(error)
            return
        self._ready.set_result(None)
        try:
            engine.run()
        except BaseException as error:
            log.critical("the engine has died: %r", error, exc_info=error)
            self._on_death(EngineDead("the engine has died; the server must be restarted"))


def _is_hub_id(model: str | None) -> bool:
    return model is not None and not Path(model).exists()


def _load_words(folder: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    return Tokenizer.from_folder(folder), ChatTemplate.from_folder(folder)


def _decide(config: Config, folder: Path, tokenizer: Tokenizer) -> tuple[EngineConfig, EngineLimits]:
    from .models.config import ModelConfig

    model = ModelConfig.from_folder(folder)
    engine_config = configs.resolve(config, model.facts(), _machine(config.device))
    pool_tokens = engine_config.usable_pages * engine_config.page_size
    limits = EngineLimits(
        # A padded head has logits without a token, a cut one tokens without a logit; neither may be drawn.
        vocab_size=min(tokenizer.vocab_size, model.vocab_size),
        max_model_len=engine_config.max_model_len,
        max_prompt_len=min(engine_config.max_model_len - 1, pool_tokens),
        max_running=engine_config.max_running,
        max_waiting=engine_config.max_waiting,
    )
    return engine_config, limits


def _machine(device: str) -> MachineFacts:
    if device == "cuda":
        raise ModelError("this version computes on the CPU only; use --device cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return MachineFacts(device="cpu", num_cores=cores, free_bytes=_free_memory_bytes())


def _free_memory_bytes() -> int:
    """What new processes could have, swap aside; 4 GiB where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return 4 << 30


def _make_runner(folder: Path, config: EngineConfig, limits: EngineLimits) -> Runner:
    from .runner.runner import build_runner

    return build_runner(folder, config, limits.vocab_size)
