"""From a folder of safetensors to a Decoder: checks every name and shape first, then streams tensor by tensor.

GPU thread, once at start. It never knows pages, batches or where the folder came from.
"""

import ctypes
import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from tqdm import tqdm

from ..errors import ModelError
from . import llama, qwen3
from .config import ModelConfig
from .layers import Decoder, Placement

BAR_BYTES = 1 << 30  # smaller models load before a bar is read
_FAMILIES = {"llama": llama, "mistral": llama, "qwen2": llama, "qwen3": qwen3}


def load_model(folder: str | Path, config: ModelConfig, placement: Placement) -> Decoder:
    """Read the folder's weights.

    Raises:
        ModelError: no safetensors, or tensors missing, unexpected or of the wrong shape; they are named.
    """
    family = _FAMILIES[config.family]
    with ExitStack() as stack:
        weights = FolderWeights.open(Path(folder), stack, placement)
        weights.check(family.tensor_shapes(config))
        model: Decoder = family.build(config, weights, placement)
    _return_freed_memory()
    return model


def _return_freed_memory() -> None:
    """glibc keeps what conversions have freed, 75 MB for SmolLM2, unless asked. Other libraries have no such call."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


class _Bar(tqdm):  # type: ignore[misc]
    monitor_interval = 0  # its monitor thread would outlive the bar, into the server


class FolderWeights:
    """The tensors of a folder by name, read one at a time."""

    def __init__(self, where: Mapping[str, Any], placement: Placement, bar: Any) -> None:
        self._where = where  # name -> open safetensors file
        self._placement = placement
        self._bar = bar

    @classmethod
    def open(cls, folder: Path, stack: ExitStack, placement: Placement) -> "FolderWeights":
        paths = _weight_files(folder)
        try:
            files = [stack.enter_context(safe_open(path, framework="pt")) for path in paths]
        except (OSError, SafetensorError) as error:
            raise ModelError(f"cannot read the weights in {folder}: {error}") from error
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (not a mapping)
        total = sum(path.stat().st_size for path in paths)
        hidden = True if total < BAR_BYTES else None  # None: shown on a terminal only
        bar = stack.enter_context(_Bar(total=len(where), desc="loading weights", unit="tensor", disable=hidden))
        return cls(where, placement, bar)

    def check(self, expected: Mapping[str, tuple[int, ...]]) -> None:
        present = {name for name in self._where if not name.endswith("rotary_emb.inv_freq")}  # old Llama files
        if "lm_head.weight" not in expected:
            present.discard("lm_head.weight")  # a tied head saved all the same
        if missing := sorted(set(expected) - present):
            raise ModelError(f"the weights lack {_some(missing)}")
        if unexpected := sorted(present - set(expected)):
            raise ModelError(f"the weights hold tensors this model does not have: {_some(unexpected)}")
        for name, shape in expected.items():
            if (found := tuple(self._where[name].get_slice(name).get_shape())) != shape:
                raise ModelError(f"{name} has shape {found}; config.json asks for {shape}")

    def __call__(self, name: str, num_rows: int | None = None) -> Tensor:
        """One tensor, or its first rows, in the placement's dtype on its device."""
        # A copy, always: a view of the mapped file would keep the whole file in memory.
        return self._read(name, num_rows).to(self._placement.device, self._placement.dtype, copy=True)

    def fused(self, *names: str) -> Tensor:
        """Several tensors stacked along their rows."""
        return torch.cat([self._read(name) for name in names]).to(self._placement.device, self._placement.dtype)

    def _read(self, name: str, num_rows: int | None = None) -> Tensor:
        self._bar.update()
        tensor: Tensor = self._where[name].get_slice(name)[:num_rows]
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").exists():
        return [single]
    # Mistral's folders hold the same weights once more, under other names, as consolidated*.safetensors.
    if others := sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated")):
        return others
    raise ModelError(f"{folder} holds no .safetensors; only those are read")


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown} and {len(names) - 8} more"
