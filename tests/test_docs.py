"""What README.md and docs/ name is there: flags, targets of make, files, headings, modules, Python that compiles."""

import argparse
import ast
import re
from itertools import chain
from pathlib import Path

import pytest

from asyncllm.cli import _parser

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EVERY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def _flags(parser: argparse.ArgumentParser) -> set[str]:
    """Its own and its commands'."""
    flags = set(chain.from_iterable(action.option_strings for action in parser._actions))
    commands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return flags.union(*[_flags(command) for action in commands for command in action.choices.values()])


def _anchors(page: Path) -> set[str]:
    """As GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@EVERY_PAGE
def test_flags(page: Path) -> None:
    known = _flags(_parser()) | {"--work", "--runs"}  # and those of bench.burst
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z]", page.read_text()))
    assert named - known == set()


@EVERY_PAGE
def test_targets_of_make(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"[`\n]make ([\w-]+)", page.read_text())) - targets == set()


@EVERY_PAGE
def test_links(page: Path) -> None:
    for path, _, anchor in [link.partition("#") for link in re.findall(r"\]\((?!http)([^)]+)\)", page.read_text())]:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in _anchors(target), f"{path}#{anchor}"


@EVERY_PAGE
def test_python(page: Path) -> None:
    for code in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        compile(code, page.name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_the_house_is_drawn_as_it_stands() -> None:
    drawn = set(re.findall(r"[├└ ] ?(?:── )?([a-z][a-z0-9]*(?:\.py|/))(?= )", (ROOT / "README.md").read_text()))
    there = {path.name + "/" * path.is_dir() for path in (ROOT / "asyncllm").iterdir() if path.name[0] not in "_."}
    assert drawn - {"asyncllm/"} == there - {"py.typed"}
