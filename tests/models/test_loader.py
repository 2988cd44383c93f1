"""What a folder of weights may and may not hold."""

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncllm.errors import ModelError
from asyncllm.models.layers import PackedLinear, PlainLinear, pack_linear
from asyncllm.runner.runner import build_runner
from tests.runner.driving import Driver, engine_config
from tests.tiny import make_checkpoint, num_tokens

PROMPT = [1, 50, 60, 70, 80, 90]


def generate(folder: Path, **config: Any) -> list[int]:
    config_ = engine_config(**config)
    return Driver(build_runner(folder, config_, num_tokens()), config_).generate(1, PROMPT, 24)


def edit(folder: Path, change: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def shard(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {}
    for i in range(3):
        name = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[i::3]}, folder / name)
        weight_map |= dict.fromkeys(names[i::3], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_equal_the_single_file(tmp_path: Path) -> None:
    whole = generate(make_checkpoint(tmp_path))
    shard(tmp_path)
    assert generate(tmp_path) == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), r"lack model\.layers\.1\.mlp\.up_proj\.weight"),
        (lambda t: t.update(extra=torch.zeros(1)), "does not have: extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"model\.norm\.weight has shape \(3,\)"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: Any, message: str) -> None:
    edit(make_checkpoint(tmp_path), change)
    with pytest.raises(ModelError, match=message):
        build_runner(tmp_path, engine_config())


def test_a_tied_head_saved_all_the_same_is_ignored(tmp_path: Path) -> None:
    expected = generate(make_checkpoint(tmp_path, tie_word_embeddings=True))
    edit(tmp_path, lambda t: t.update({"lm_head.weight": torch.zeros(512, 64)}))
    assert generate(tmp_path) == expected


def test_only_safetensors_are_read(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    os.rename(tmp_path / "model.safetensors", tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"holds no \.safetensors; only those are read"):
        build_runner(tmp_path, engine_config())


def test_a_broken_file_is_a_model_error(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ModelError, match="cannot read the weights"):
        build_runner(tmp_path, engine_config())


def test_padding_ids_are_never_drawn(tmp_path: Path) -> None:
    """Ids past the tokenizer's vocabulary have logits in the file that would win."""
    make_checkpoint(tmp_path)
    edit(tmp_path, lambda t: t["lm_head.weight"][num_tokens() :].mul_(100))
    assert max(generate(tmp_path)) < num_tokens()


def test_bf16_stays_near_float32(tmp_path: Path) -> None:
    """Packed where the CPU lacks bf16, plain elsewhere: the first tokens agree either way."""
    exact = generate(make_checkpoint(tmp_path, dtype="bfloat16"))
    assert generate(tmp_path, dtype="bfloat16")[:4] == exact[:4]


@pytest.mark.parametrize(("out_features", "in_features"), [(96, 64), (2048, 576), (64, 576), (1536, 1024)])
def test_packed_linear_equals_the_bf16_weights_in_float32(out_features: int, in_features: int) -> None:
    """Also where a nearly empty last block of input features stays beside the packed ones."""
    weight = (torch.randn(out_features, in_features, generator=torch.Generator().manual_seed(0)) * 0.05).bfloat16()
    bias = torch.arange(out_features).bfloat16()
    linear = pack_linear(weight, bias)
    if not isinstance(linear, PackedLinear):
        pytest.skip("this torch has no FBGEMM")
    for num_rows in (1, 5):
        x = torch.randn(num_rows, in_features, generator=torch.Generator().manual_seed(1))
        expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
        assert (linear(x) - expected).abs().max() < 1e-4 + 1e-6 * float(expected.abs().max())


def test_weights_beyond_float16_are_not_packed() -> None:
    linear = pack_linear(torch.full((8, 8), 1e6).bfloat16(), None)
    assert isinstance(linear, PlainLinear) and linear.weight.dtype == torch.float32


def test_loading_starts_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    generate(make_checkpoint(tmp_path))
    assert threading.active_count() == before
