"""Clients that know nothing of us, unmodified, against the real server: skipped where they are not installed."""

from pathlib import Path

import pytest

from asyncllm.text.tokenizer import Tokenizer

from ..server.conftest import pytest_asyncio_loop_factories, serve
from ..text import toys

__all__ = ["pytest_asyncio_loop_factories", "serve"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="a client that is not installed fails the run")


def pytest_sessionfinish(session: pytest.Session) -> None:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--no-skips", default=False) and reporter.stats.get("skipped"):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.byte_level(tmp_path_factory.mktemp("interop"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)
