"""Every example runs as it stands, as a program, on a tiny model."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import make_checkpoint

ROOT = Path(__file__).resolve().parents[1]
STARTS_AN_ENGINE = ("asyncllm.start(", "asyncllm.load(")
EXAMPLES = [
    path for path in sorted((ROOT / "examples").glob("*.py")) if any(s in path.read_text() for s in STARTS_AN_ENGINE)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_runs(example: Path, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny")
    command = [sys.executable, "-W", "error", str(example), str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() and done.stderr == ""
