"""GraphRunners and their reference, ModelRunner on torch's operators, on the same GPU."""

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncllm.config import EngineConfig
from asyncllm.device.cuda import CudaDevice
from asyncllm.models.config import ModelConfig
from asyncllm.runner import runner as plain
from asyncllm.runner.cuda import build_cuda_runner
from asyncllm.runner.graphs import GraphRunner
from tests.runner.driving import Driver, engine_config

TINY = Path(os.environ.get("ASYNCLLM_TINY", ".gpu/tiny"))
REAL = Path(os.environ.get("ASYNCLLM_REAL", ".gpu/qwen3-0.6b"))  # made by .gpu/random_checkpoint.py
VOCAB = 512


def needs(folder: Path) -> Path:
    if not (folder / "config.json").exists():
        pytest.skip(f"no {folder}")
    return folder


def gpu_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "cuda", "dtype": "bfloat16", "page_size": 64, "num_pages": 257, "max_running": 16,
        "max_step_tokens": 512, "max_model_len": 1024, "attention": "fa3", "cuda_graph_max_batch": 16,
    }  # fmt: skip
    return engine_config(**(values | changes))


@functools.cache
def device() -> CudaDevice:
    """One for all runners of the process: its engine stream is the thread's current one."""
    return CudaDevice()


def graph_runner(folder: Path, num_tokens: int = VOCAB, **changes: Any) -> tuple[GraphRunner, Driver, EngineConfig]:
    config = gpu_config(**changes)
    runner, config = build_cuda_runner(folder, config, ModelConfig.from_folder(folder).facts(), num_tokens, device())
    assert isinstance(runner, GraphRunner)
    return runner, Driver(runner, config), config  # type: ignore[arg-type]


def plain_runner(folder: Path, num_tokens: int = VOCAB, **changes: Any) -> Driver:
    config = gpu_config(attention="sdpa", cuda_graph_max_batch=0, **changes)
    with torch.inference_mode():
        return Driver(plain.build_runner(folder, config, num_tokens, device()), config)


@contextmanager
def no_sync() -> Iterator[None]:
    """Any call that waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def plain_logits(driver: Driver, text: list[int], start: int, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Logits behind each position from `start` on, the text forced: [len(text) - start, vocab] float32."""
    seen: list[torch.Tensor] = []

    def pick(logits: torch.Tensor, banned: Any, draw: Any) -> torch.Tensor:
        seen.append(logits.float().clone())
        return original(logits, banned, draw)

    original = plain.pick
    monkeypatch.setattr(plain, "pick", pick)
    force(driver, text, start)
    monkeypatch.setattr(plain, "pick", original)
    return torch.cat(seen)


def graph_logits(runner: GraphRunner, driver: Driver, text: list[int], start: int) -> torch.Tensor:
    seen: list[torch.Tensor] = []

    def keep() -> None:
        seen.append(runner._tail.logits[:1, :VOCAB].float().clone())

    force(driver, text, start, keep)
    return torch.cat(seen)


def force(driver: Driver, text: list[int], start: int, after: Any = lambda: None) -> None:
    driver.admit(1, text)
    driver.step((1, start, False))
    for _ in range(start, len(text)):
        driver.rewrite(1, text)  # the last draw stands where the text goes on
        driver.step((1, 1, True))
        after()
