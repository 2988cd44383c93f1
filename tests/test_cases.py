"""cases.md names, for every case, tests that there are."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
NUM_CASES = 50


def test_every_case_has_tests_that_exist() -> None:
    rows = [line for line in (HERE / "cases.md").read_text().splitlines() if re.match(r"\| [A-Z]+-\d+ \|", line)]
    assert len({row.split("|")[1] for row in rows}) == len(rows) == NUM_CASES
    missing = []
    for row in rows:
        named = re.findall(r"`([^`]+\.py)::([^`]+)`", row.split("|")[3])
        assert named, f"a case without a test: {row}"
        missing += [f"{file}::{name}" for file, name in named if name not in functions(HERE / file)]
    assert not missing


def functions(path: Path) -> set[str]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}
