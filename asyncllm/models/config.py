"""A model folder's config.json as one frozen ModelConfig, in the old spellings and the new.

Any thread, once at start; json alone, no torch. It never knows weights or devices.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..config import DTYPE_BYTES, ModelFacts
from ..errors import ModelError

Raw = Mapping[str, Any]

# Architecture name -> family; the loader knows which module builds a family.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


class RopeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding: the base and, beyond "default", how its frequencies are stretched."""

    kind: str
    theta: float
    factor: float = 1.0
    original_max_position: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    attention_factor: float | None = None  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the model floor needs to know before it opens a weight file."""

    architecture: str
    family: str
    dtype: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_norm_eps: float
    tied: bool  # the head is the embedding table
    qkv_bias: bool
    output_bias: bool  # of the attention's output projection
    mlp_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]  # [num_layers]: sliding window in tokens, None is full attention
    rope: RopeConfig

    @classmethod
    def from_folder(cls, folder: str | Path) -> "ModelConfig":
        """Read config.json.

        Raises:
            ModelError: no such file, or something in it that this project does not compute.
        """
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read {path}: {error}") from error
        if not isinstance(raw, dict):
            raise ModelError(f"{path} does not hold a JSON object")
        try:
            return _parse(raw)
        except KeyError as error:
            raise ModelError(f"{path} lacks {error}") from error

    def facts(self) -> ModelFacts:
        return ModelFacts(
            num_layers=self.num_layers,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position=self.max_position,
            dtype=self.dtype,
            num_heads=self.num_heads,
        )


def _parse(raw: Raw) -> ModelConfig:
    architecture = _architecture(raw)
    family = ARCHITECTURES[architecture]
    _refuse_what_we_do_not_compute(raw)
    num_layers, num_heads = raw["num_hidden_layers"], raw["num_attention_heads"]
    attention_bias = bool(raw.get("attention_bias", False)) and family in ("llama", "qwen3")
    rope = _rope(raw)
    return ModelConfig(
        architecture=architecture,
        family=family,
        dtype=_dtype(raw),
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=raw.get("head_dim") or raw["hidden_size"] // num_heads,
        max_position=_max_position(raw, rope),
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=attention_bias or family == "qwen2",
        output_bias=attention_bias,
        mlp_bias=bool(raw.get("mlp_bias", False)) and family == "llama",
        qk_norm=family == "qwen3",
        windows=_windows(raw, family, num_layers),
        rope=rope,
    )


def _architecture(raw: Raw) -> str:
    names = raw.get("architectures") or []
    if raw.get("auto_map"):
        raise ModelError("this model needs code of its own (auto_map); remote code is never run")
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    raise ModelError(f"architecture {', '.join(names) or '(none)'} is unknown; known are {', '.join(ARCHITECTURES)}")


def _refuse_what_we_do_not_compute(raw: Raw) -> None:
    if (activation := raw.get("hidden_act", "silu")) != "silu":
        raise ModelError(f"hidden_act {activation!r} is not supported; only silu is")
    if raw.get("quantization_config"):
        raise ModelError("quantized weights (quantization_config) are not supported")


def _dtype(raw: Raw) -> str:
    # A config that does not say was written before the field existed, by a float32 world.
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelError(f"dtype {dtype!r} is unknown; known are {', '.join(DTYPE_BYTES)}")
    return dtype


def _rope(raw: Raw) -> RopeConfig:
    """New configs keep it in rope_parameters, old ones in rope_theta and rope_scaling ("type" or "rope_type")."""
    scaling: Raw = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ROPE_TYPES:
        raise ModelError(f"rope type {kind!r} is unknown; known are {', '.join(ROPE_TYPES)}")
    if (scaling.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor other than 1 is not supported")
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind == "default":
        return RopeConfig(kind=kind, theta=theta)
    original = scaling.get("original_max_position_embeddings") or raw["max_position_embeddings"]
    optional = ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor", "mscale",
                "mscale_all_dim", "truncate")  # fmt: skip
    given = {name: scaling[name] for name in optional if scaling.get(name) is not None}
    factor = scaling.get("factor") or raw["max_position_embeddings"] / original
    return RopeConfig(kind=kind, theta=theta, factor=float(factor), original_max_position=original, **given)


def _max_position(raw: Raw, rope: RopeConfig) -> int:
    """Qwen's instructions for yarn add rope_scaling and leave max_position_embeddings at the trained length."""
    stated = int(raw.get("max_position_embeddings", 2048))
    return max(stated, int(rope.factor * rope.original_max_position)) if rope.kind == "yarn" else stated


def _windows(raw: Raw, family: str, num_layers: int) -> tuple[int | None, ...]:
    window = raw.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (window,) * num_layers
    if not raw.get("use_sliding_window", False):
        return (None,) * num_layers
    if (kinds := raw.get("layer_types")) is None:
        first = raw.get("max_window_layers", 28)  # the layers below it see everything
        return tuple(window if layer >= first else None for layer in range(num_layers))
    if unknown := sorted(set(kinds) - {"full_attention", "sliding_attention"}):
        raise ModelError(f"layer_types {', '.join(unknown)} are not supported")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
