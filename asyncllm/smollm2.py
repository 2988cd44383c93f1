"""The default model: SmolLM2-135M-Instruct from its GGUF to an ordinary bf16 model folder.

Runs as a script in a process of its own, so that its memory ends with it; hub.py starts it.
Never knows of torch, nor of the rest of asyncllm, nor where the GGUF comes from.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
CONTROL_TOKEN = 3  # GGUF's token type of what only a template may write

Metadata = dict[str, Any]
Bits = npt.NDArray[np.uint16]  # bf16, which numpy does not have


def convert(gguf: Path, folder: Path) -> None:
    """Write the GGUF as a model folder that transformers, or any loader of safetensors, can open."""
    reader = open_gguf(gguf)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    folder.mkdir()
    write_weights(folder / "model.safetensors", reader.tensors, metadata)
    for name, content in (
        ("config.json", config(metadata)),
        ("generation_config.json", generation_config(metadata)),
        ("tokenizer_config.json", tokenizer_config(metadata)),
        ("tokenizer.json", tokenizer(metadata)),
    ):
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8", newline="\n")


def open_gguf(path: Path) -> Any:
    from gguf import GGUFReader

    class Reader(GGUFReader):
        """Its file as a plain array: slices of a memmap are slow, and 98,052 strings took 6.4 s, now 2.3."""

        @property  # type: ignore[override]
        def data(self) -> npt.NDArray[np.uint8]:
            return self._data

        @data.setter
        def data(self, mapped: npt.NDArray[np.uint8]) -> None:
            self._data = mapped.view(np.ndarray)

    return Reader(path)


def write_weights(path: Path, tensors: list[Any], metadata: Metadata) -> None:
    """One safetensors file, tensor by tensor: safetensors' own writer wants all of them, and a bf16 dtype."""
    from tqdm import tqdm

    named = sorted((hf_name(tensor.name), tensor) for tensor in tensors)
    with path.open("wb") as file:
        file.write(header({name: shape(tensor) for name, tensor in named}))
        for _, tensor in tqdm(named, "converting", unit=" tensors", file=sys.stderr, disable=None):
            file.write(weight(tensor, metadata).tobytes())
        file.flush()
        os.fsync(file.fileno())  # the rename that publishes it must not reach the disk first


def hf_name(name: str) -> str:
    """transformers' name of a GGUF tensor; there is no lm_head: the embeddings serve as the head."""
    if name in OUTER:
        return OUTER[name]
    _, layer, part, kind = name.split(".")
    return f"model.layers.{layer}.{PARTS[part]}.{kind}"


def shape(tensor: Any) -> list[int]:
    return [int(size) for size in reversed(tensor.shape)]  # GGUF names the fastest dimension first


def header(shapes: dict[str, list[int]]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, sizes in shapes.items():
        start, end = end, end + 2 * int(np.prod(sizes))
        entries[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def weight(tensor: Any, metadata: Metadata) -> Bits:
    from gguf.quants import dequantize

    bits = to_bf16(dequantize(tensor.data, tensor.tensor_type))
    if tensor.name.endswith("attn_q.weight"):
        return unpermute(bits, metadata["llama.attention.head_count"])
    if tensor.name.endswith("attn_k.weight"):
        return unpermute(bits, metadata["llama.attention.head_count_kv"])
    return bits


def to_bf16(values: npt.NDArray[np.float32]) -> Bits:
    """Rounded to nearest, ties to even. Finite values only: a NaN's carry would make it a number."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def unpermute(rows: Bits, num_heads: int) -> Bits:
    """llama.cpp pairs a head's rotary halves row by row; transformers keeps the halves apart.

    Left as they were, the model answers every question with a bare <|im_end|>.
    """
    paired = rows.reshape(num_heads, -1, 2, rows.shape[1])  # [num_heads, head_dim / 2, 2, hidden]
    return paired.swapaxes(1, 2).reshape(rows.shape)


def config(metadata: Metadata) -> Metadata:
    llama = {name.removeprefix("llama."): value for name, value in metadata.items() if name.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": metadata["tokenizer.ggml.eos_token_id"],
        "head_dim": llama["rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": llama["embedding_length"],
        "initializer_range": 0.041666666666666664,  # the hub's; the GGUF does not say
        "intermediate_size": llama["feed_forward_length"],
        "max_position_embeddings": llama["context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": llama["attention.head_count"],
        "num_hidden_layers": llama["block_count"],
        "num_key_value_heads": llama["attention.head_count_kv"],
        "pad_token_id": metadata["tokenizer.ggml.padding_token_id"],
        "pretraining_tp": 1,
        # The shortest decimal of the float32: 1e-05, where its double reads 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(llama["attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": llama["rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": llama["vocab_size"],
    }


def generation_config(metadata: Metadata) -> Metadata:
    ids = ("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")
    return {theirs: metadata[f"tokenizer.ggml.{ours}_token_id"] for ours, theirs in ids}


def tokenizer_config(metadata: Metadata) -> Metadata:
    tokens = metadata["tokenizer.ggml.tokens"]
    roles = ("bos", "bos_token"), ("eos", "eos_token"), ("padding", "pad_token"), ("unknown", "unk_token")
    return {
        "add_prefix_space": False,
        "chat_template": metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        # Not GPT2Tokenizer, which the hub has: transformers 5 rebuilds its pre-tokenizer, without Digits.
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{theirs: tokens[metadata[f"tokenizer.ggml.{ours}_token_id"]] for ours, theirs in roles},
    }


def tokenizer(metadata: Metadata) -> Metadata:
    """The hub's tokenizer.json, byte for byte (its sha256 is a test).

    Digits is what `tokenizer.ggml.pre = smollm` stands for; transformers' own GGUF reader drops it, and
    then 3,140 of 20,000 random strings came out with other ids.
    """
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [control_token(i, tokens[i]) for i, kind in enumerate(types) if kind == CONTROL_TOKEN],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [digits, byte_level | {"add_prefix_space": False}]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": metadata["tokenizer.ggml.merges"],
        },
    }


def control_token(token_id: int, content: str) -> Metadata:
    never = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **never, "special": True}


def main(gguf: str, folder: str) -> None:
    convert(Path(gguf), Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
