"""The Llama shape: Llama 2 and 3, SmolLM2, Mistral, Qwen2; they differ by biases, rope and windows alone.

GPU thread, once at start. It never knows files: weights come by name.
"""

from .config import ModelConfig
from .layers import (
    Block,
    Decoder,
    FeedForward,
    Linear,
    Placement,
    RMSNorm,
    RotaryTable,
    SelfAttention,
    Weights,
)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor the family's files hold, as config.json has them."""
    hidden = config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in _block_shapes(config).items()}
    return shapes


def _block_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.output_bias),
        "mlp.gate_proj": (ffn, hidden, config.mlp_bias),
        "mlp.up_proj": (ffn, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, ffn, config.mlp_bias),
    }
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, cols) for name, (rows, cols, _) in linears.items()}
    shapes |= {f"{name}.bias": (rows,) for name, (rows, _, bias) in linears.items() if bias}
    return shapes | {"input_layernorm.weight": (hidden,), "post_attention_layernorm.weight": (hidden,)}


def build(config: ModelConfig, weights: Weights, placement: Placement) -> Decoder:
    return decoder(config, weights, placement, [None] * config.num_layers)


def decoder(config: ModelConfig, weights: Weights, placement: Placement, qk_norms: list[RMSNorm | None]) -> Decoder:
    """The shared skeleton; a family brings what stands between projection and rotation."""
    max_len = placement.max_len or config.max_position
    embedding = weights("model.embed_tokens.weight")  # [vocab_size, hidden_size], device
    limit = min(placement.num_tokens or config.vocab_size, config.vocab_size)
    head_weight = embedding[:limit] if config.tied else weights("lm_head.weight", limit)
    return Decoder(
        embedding=embedding,
        rotary=RotaryTable(config, placement.compute_dtype, placement.device, max_len),
        blocks=tuple(
            _block(config, weights, placement, f"model.layers.{layer}", qk_norm)
            for layer, qk_norm in enumerate(qk_norms)
        ),
        norm=_norm(config, weights, placement, "model.norm"),
        head=placement.make_linear(head_weight, None),
        compute_dtype=placement.compute_dtype,
    )


def _block(config: ModelConfig, weights: Weights, placement: Placement, name: str, qk_norm: RMSNorm | None) -> Block:
    def linear(*parts: str, bias: bool) -> Linear:
        weight = weights.fused(*(f"{name}.{part}.weight" for part in parts))
        return placement.make_linear(weight, weights.fused(*(f"{name}.{p}.bias" for p in parts)) if bias else None)

    qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", bias=config.qkv_bias)
    output = linear("self_attn.o_proj", bias=config.output_bias)
    return Block(
        attention_norm=_norm(config, weights, placement, f"{name}.input_layernorm"),
        attention=SelfAttention(qkv, output, qk_norm, config.num_heads, config.num_kv_heads),
        feed_forward_norm=_norm(config, weights, placement, f"{name}.post_attention_layernorm"),
        feed_forward=FeedForward(
            linear("mlp.gate_proj", "mlp.up_proj", bias=config.mlp_bias), linear("mlp.down_proj", bias=config.mlp_bias)
        ),
    )


def _norm(config: ModelConfig, weights: Weights, placement: Placement, name: str) -> RMSNorm:
    return RMSNorm(weights(f"{name}.weight").to(placement.compute_dtype), config.rms_norm_eps)
