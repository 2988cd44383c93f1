"""Everything here needs CUDA, Triton and FlashInfer; elsewhere it is skipped, with the reason.

Some need no GPU, for Triton's interpreter will do: TRITON_INTERPRET=1 pytest tests/gpu.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
_MISSING = [name for name in ("triton", "flashinfer") if importlib.util.find_spec(name) is None]
WHY_NOT = "no CUDA" if not torch.cuda.is_available() else f"no {', '.join(_MISSING)}" if _MISSING else None
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and "triton" not in _MISSING
INTERPRETED = {"test_fused.py", "test_tails.py"}
_IGNORED = {path.name for path in HERE.glob("test_*.py")} - (INTERPRETED if IS_INTERPRETED else set())
collect_ignore = sorted(_IGNORED) if WHY_NOT else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            # torch and FlashInfer warn of prototypes and deprecations of their own.
            item.add_marker(pytest.mark.filterwarnings("default"))
            item.add_marker(pytest.mark.timeout(600))


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """Device tables are made in inference mode, so only there may a test spoil them."""
    with torch.inference_mode():
        yield
