"""docs/reliability.md names tests; they exist, and every row is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "reliability.md").read_text()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(tests/[\w/]+\.py::\w+)`", PAGE))))
def test_a_test_that_is_named_exists(name: str) -> None:
    path, _, function = name.partition("::")
    assert re.search(rf"^(?:async )?(?:def|class) {function}\b", (ROOT / path).read_text(), re.MULTILINE), name


def test_every_row_is_there_once() -> None:
    rows = [int(number) for number in re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) if int(number) < 58]
    assert [row for row in rows if rows.count(row) > 1 and row > 2] == []
    assert set(range(1, 58)) <= set(rows)


def test_every_row_names_what_shows_it() -> None:
    rows = PAGE.partition("## The rows")[2].partition("\n## ")[0].splitlines()[4:]
    assert len([line for line in rows if line.startswith("| ")]) == 57
    for line in filter(None, rows):
        assert re.search(r"`tests/\S+::\w+`|`make \w+`|as \d+", line.rsplit(" | ", 1)[1]), line


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\(`(tests/[\w/]+\.py)`\)", PAGE))))
def test_a_script_that_is_named_exists(path: str) -> None:
    assert (ROOT / path).exists()
