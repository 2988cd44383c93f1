"""Clients that know nothing of us, unmodified, against the real server: skipped where they are not installed."""

from pathlib import Path

import pytest

from asyncllm.text.tokenizer import Tokenizer

from ..server.conftest import pytest_asyncio_loop_factories, serve
from ..text import toys

__all__ = ["pytest_asyncio_loop_factories", "serve"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toys.byte_level(tmp_path_factory.mktemp("interop"))


@pytest.fixture(scope="session")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)
