"""One real server process for all attacks, with the limits that tests can wait for."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.process import ServerProcess
from tests.tiny import make_checkpoint

log = logging.getLogger(__name__)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[ServerProcess]:
    """Whatever is done to it: it lives, it has logged no traceback, and it answers."""
    limits = "--header-timeout-seconds 1 --body-timeout-seconds 1 --max-body-bytes 200000 --log-level info".split()
    with ServerProcess(str(checkpoint), *limits) as running:
        yield running
        assert running.process.poll() is None, running.stderr()
        assert "Traceback" not in running.stderr()
        assert running.complete("after all that")["choices"][0]["finish_reason"] == "length"
