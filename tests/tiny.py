"""Tiny random checkpoints in Hugging Face's form, made in milliseconds without a network and without transformers.

`make_checkpoint(folder, ...)` writes config.json, model.safetensors, tokenizer.json, tokenizer_config.json and
generation_config.json. With dtype "float64" it is the TinyModel on which the laws hold exactly.
"""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2
EOS_ID = 2
VOCAB_SIZE = 512  # of the model; the tokenizer knows fewer, so the head has padding rows
CHAT_TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_TEXT = """The quick brown fox jumps over the lazy dog, and the dog does not mind. It was the best of times, it was
the worst of times; there was nothing to be done and everything to be said. Hello there, how are you? You are a
helpful assistant. What is the capital of France? The answer is Paris, which is in the north of the country. One two
three four five six seven eight nine ten. If the streams are many then the server must be quick, and when they end
all of the pages should return to where they came from. This is a story about a small model that could not think."""


def make_checkpoint(
    folder: Path, architecture: str = "llama", dtype: str = "float32", seed: int = 0, **overrides: Any
) -> Path:
    """`overrides` go into config.json; a value of None takes the key out. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in (_config(architecture, dtype) | overrides).items() if v is not None}
    _write(folder / "config.json", config)
    save_file(
        _weights(config, architecture, getattr(torch, dtype), seed), folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "tokenizer.json").write_text(_tokenizer_json(), encoding="utf-8")
    _write(folder / "tokenizer_config.json", _tokenizer_config(config))
    _write(folder / "generation_config.json", {"bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": 0})
    return folder


def num_tokens() -> int:
    """Ids the tiny tokenizer knows."""
    return Tokenizer.from_str(_tokenizer_json()).get_vocab_size()


def _config(architecture: str, dtype: str) -> dict[str, Any]:
    return {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "dtype": dtype,
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": False,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }


def _weights(config: dict[str, Any], architecture: str, dtype: torch.dtype, seed: int) -> dict[str, torch.Tensor]:
    """Drawn in float64 and then rounded, so that dtypes of one seed are the same model."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in _shapes(config, architecture):
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith("norm.weight"):
            values = 1 + 0.1 * values
        elif name.endswith("bias"):
            values = 0.1 * values
        elif "proj" in name:
            # Loud blocks: else a tied head answers every token with itself.
            loudness = 4.0 if "o_proj" in name or "down_proj" in name else 1.5
            values = values * loudness / shape[1] ** 0.5
        weights[name] = values.to(dtype)  # embedding and head keep std 1: logits of std 8, wide margins
    return weights


def _shapes(config: dict[str, Any], architecture: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, ffn, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    attention_bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for part, rows in (("q", q_size), ("k", kv_size), ("v", kv_size), ("o", hidden)):
            yield prefix + f"self_attn.{part}_proj.weight", (rows, q_size if part == "o" else hidden)
            if attention_bias or (architecture == "qwen2" and part != "o"):
                yield prefix + f"self_attn.{part}_proj.bias", (rows,)
        for part, rows, cols in (("gate", ffn, hidden), ("up", ffn, hidden), ("down", hidden, ffn)):
            yield prefix + f"mlp.{part}_proj.weight", (rows, cols)
            if mlp_bias:
                yield prefix + f"mlp.{part}_proj.bias", (rows,)
        if architecture == "qwen3":
            yield prefix + "self_attn.q_norm.weight", (head_dim,)
            yield prefix + "self_attn.k_norm.weight", (head_dim,)


@functools.cache
def _tokenizer_json() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - 16, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return tokenizer.to_str()


def _tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": config["max_position_embeddings"],
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2), encoding="utf-8")
