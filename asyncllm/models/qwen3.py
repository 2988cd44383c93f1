"""Qwen3, dense: the Llama shape with a norm over each head's query and key before they are rotated.

GPU thread, once at start. It never knows files: weights come by name.
"""

import torch

from . import llama
from .config import ModelConfig
from .layers import Decoder, Placement, RMSNorm, Weights


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    norms = {
        f"model.layers.{layer}.self_attn.{name}.weight": (config.head_dim,)
        for layer in range(config.num_layers)
        for name in ("q_norm", "k_norm")
    }
    return llama.tensor_shapes(config) | norms


def build(config: ModelConfig, weights: Weights, placement: Placement) -> Decoder:
    qk_norms: list[RMSNorm | None] = [_qk_norm(config, weights, placement, layer) for layer in range(config.num_layers)]
    return llama.decoder(config, weights, placement, qk_norms)


def _qk_norm(config: ModelConfig, weights: Weights, placement: Placement, layer: int) -> RMSNorm:
    """One norm over queries and keys together: its weight is one row a head."""
    name = f"model.layers.{layer}.self_attn"
    q_weight = weights(f"{name}.q_norm.weight").expand(config.num_heads, -1)
    k_weight = weights(f"{name}.k_norm.weight").expand(config.num_kv_heads, -1)
    weight = torch.cat((q_weight, k_weight)).to(placement.compute_dtype)  # [num_heads + num_kv_heads, head_dim]
    return RMSNorm(weight, config.rms_norm_eps)
