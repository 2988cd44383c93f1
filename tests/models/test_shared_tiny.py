"""Greedy ids of the reference checkpoints beside the repository, made with EOS banned throughout."""

import json
from pathlib import Path

import pytest

from asyncllm.runner.runner import build_runner
from tests.runner.driving import Driver, engine_config

SHARED = Path(__file__).parents[3] / "shared" / "tiny"
NAMES = ("tiny-llama", "tiny-llama-sharded", "tiny-mistral", "tiny-qwen2", "tiny-qwen3")
EOS_ID = 2


@pytest.mark.skipif(not SHARED.is_dir(), reason="no reference checkpoints beside the repository")
@pytest.mark.parametrize("name", NAMES)
def test_greedy_ids_equal_expected(name: str) -> None:
    runner = build_runner(SHARED / name, config := engine_config())
    for case in json.loads((SHARED / name / "expected.json").read_text())["cases"]:
        prompt_ids, expected = case["prompt_ids"], case["greedy_ids_eos_banned"]
        min_len = len(prompt_ids) + len(expected)
        out = Driver(runner, config).generate(1, prompt_ids, len(expected), stop_ids=(EOS_ID,), min_len=min_len)
        assert out == expected, case["prompt"]
