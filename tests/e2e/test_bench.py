"""The front end's benchmarks run: they bring an engine of their own, which has to keep up with what the server asks."""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.e2e.process import ROOT


def run(script: str, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, f"bench/{script}.py", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    line: dict[str, Any] = json.loads(done.stdout)
    return line


@pytest.mark.parametrize(("transport", "sides"), [("sse", ["ours", "floor"]), ("ws", ["ours"])])
def test_frontend(transport: str, sides: list[str]) -> None:
    line = run("frontend", "--streams", "4", "--seconds", "0.5", "--transport", transport, "--sides", ",".join(sides))
    assert [side["side"] for side in line["sides"]] == sides
    assert all(side["fewest_events"] > 0 and side["num_lost"] == 0 for side in line["sides"])
    assert line["floor_us"] == (line["sides"][1]["server_us_per_event"] if "floor" in sides else None)


def test_stuck() -> None:
    line = run("stuck", "--streams", "4", "--seconds", "0.5", "--step-ms", "4")
    assert (line["missing_tokens"], line["lost_streams"]) == (0, 0)
    assert line["live_at_the_end"] == 5 and line["stuck"]["cut_off_after_s"] is None  # too short a rest for that
