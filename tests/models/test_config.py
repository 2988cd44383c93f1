"""config.json in its old and new spellings, and what is refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncllm.errors import ModelError
from asyncllm.models.config import ModelConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 512, "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "sliding_window": 32}


def parse(folder: Path, **changes: Any) -> ModelConfig:
    return parse_raw(folder, LLAMA | changes)


def parse_raw(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(raw))
    return ModelConfig.from_folder(folder)


def test_defaults(tmp_path: Path) -> None:
    config = parse(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.tied, config.dtype) == (4, 16, False, "float32")
    assert (config.rope.kind, config.rope.theta, config.windows) == ("default", 10000.0, (None,) * 3)


@pytest.mark.parametrize(
    "spelling", [{"torch_dtype": "bfloat16"}, {"dtype": "bfloat16"}, {"torch_dtype": "torch.bfloat16"}]
)
def test_dtype_spellings(tmp_path: Path, spelling: dict[str, Any]) -> None:
    assert parse(tmp_path, **spelling).facts().dtype == "bfloat16"


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_rope_spellings(tmp_path: Path, spelling: dict[str, Any]) -> None:
    rope = parse(tmp_path, **spelling).rope
    assert (rope.kind, rope.theta, rope.factor) == ("linear", 5e5, 2.0)


def test_yarn_added_to_a_config_widens_the_context(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    assert parse(tmp_path, rope_scaling=scaling).facts().max_position == 1024


def test_windows(tmp_path: Path) -> None:
    assert parse(tmp_path, sliding_window=32).windows == (None,) * 3, "Llama has none"
    assert parse_raw(tmp_path, QWEN2).windows == (None,) * 3
    used = QWEN2 | {"use_sliding_window": True, "max_window_layers": 2}
    assert parse_raw(tmp_path, used).windows == (None, None, 32)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert parse_raw(tmp_path, used | {"layer_types": kinds}).windows == (32, None, 32)
    assert parse_raw(tmp_path, QWEN2 | {"architectures": ["MistralForCausalLM"]}).windows == (32,) * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "known are LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM"),
        ({"architectures": None}, "known are"),
        ({"auto_map": {"AutoModel": "x.Y"}}, "auto_map"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "'longrope' is unknown; known are default, linear"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"dtype": "int8"}, "'int8' is unknown; known are bfloat16"),
    ],
)
def test_refused_by_name(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(tmp_path, **change)


def test_unreadable_and_incomplete_files_name_themselves(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        ModelConfig.from_folder(tmp_path)
    with pytest.raises(ModelError, match="lacks 'vocab_size'"):
        parse_raw(tmp_path, {k: v for k, v in LLAMA.items() if k != "vocab_size"})


def test_needs_no_torch() -> None:
    code = "import sys, asyncllm.models.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
