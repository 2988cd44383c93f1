"""Every architecture equals transformers, on tiny random checkpoints in float32: logits, and greedy ids
through ModelRunner with the prompt whole, in chunks, and in a mixed batch."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.runner.runner import ModelRunner, build_runner
from tests.runner.driving import Driver, engine_config
from tests.tiny import VOCAB_SIZE, make_checkpoint

os.environ["HF_HUB_OFFLINE"] = "1"
NUM_OUTPUT = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64, "rope_theta": 500000.0,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-old-spelling": ("llama", {"rope_parameters": None, "rope_theta": 20000.0, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear": ("llama", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 11}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True, "sliding_window": 8, "use_sliding_window": False}),
    "qwen2-window": ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 1}),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "qwen3-yarn-mscale": ("qwen3", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.0, "beta_fast": 16}}),
    "qwen3-yarn-factor": ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.3, "truncate": False}}),
}


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, VOCAB_SIZE, n).tolist() for n in (40, 3, 17)]


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


class Reference:
    """transformers' own greedy decoding: ids, and the logits of the first token."""

    def __init__(self, transformers: Any, folder: Path) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def logits(self, ids: list[int]) -> torch.Tensor:
        return self.model(torch.tensor([ids])).logits[0]  # [num_tokens, vocab_size]

    def greedy(self, ids: list[int]) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), do_sample=False, eos_token_id=None,
            max_new_tokens=NUM_OUTPUT, pad_token_id=0,
        )  # fmt: skip
        return out[0, len(ids) :].tolist()


class LogitsSpy:
    """Stands in for the runner's model and keeps what its head returned."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.seen: list[torch.Tensor] = []

    def __call__(self, *args: Any) -> torch.Tensor:
        return self._model(*args)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self.seen.append(self._model.logits(hidden))
        return self.seen[-1]


def all_logits(runner: ModelRunner, ids: list[int]) -> torch.Tensor:
    """Every position's logits: the prompt one token a step."""
    spy = LogitsSpy(runner._model)
    runner._model = spy  # type: ignore[assignment]
    driver = Driver(runner, engine_config())
    driver.admit(1, ids)
    for _ in ids:
        driver.step((1, 1, True))
        driver.rewrite(1, ids)  # the drawn token went where the next prompt token was
    runner._model = spy._model
    return torch.cat(spy.seen)


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name: str, transformers: Any, tmp_path: Path) -> None:
    architecture, overrides = CASES[name]
    folder = make_checkpoint(tmp_path, architecture, seed=3, **overrides)
    reference = Reference(transformers, folder)
    runner = build_runner(folder, config := engine_config())
    texts = prompts()
    expected = [reference.greedy(ids) for ids in texts]

    difference = (all_logits(runner, texts[2]) - reference.logits(texts[2])).abs().max()
    assert difference < 1e-4, difference
    assert Driver(runner, config).generate(1, texts[0], NUM_OUTPUT) == expected[0], "whole"
    assert Driver(runner, config).generate(2, texts[0], NUM_OUTPUT, chunk=7) == expected[0], "chunked"
    assert mixed(runner, texts) == expected, "mixed"


def mixed(runner: ModelRunner, texts: list[list[int]]) -> list[list[int]]:
    """The first prompt comes in chunks while the second decodes; the third joins both, then all decode together."""
    driver = Driver(runner, engine_config())
    driver.admit(2, texts[1])
    driver.step((2, 3, True))
    driver.admit(1, texts[0])
    driver.step((1, 15, False), (2, 1, True))
    driver.step((2, 1, True), (1, 15, False))
    driver.admit(3, texts[2])
    driver.step((3, 17, True), (2, 1, True), (1, 10, True))
    while unfinished := [slot for slot in (3, 1, 2) if len(driver.outputs[slot]) < NUM_OUTPUT]:
        driver.step(*((slot, 1, True) for slot in unfinished))
    return [driver.outputs[slot] for slot in (1, 2, 3)]
