"""The command line: what a flag says arrives where it is read."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import asyncllm
from asyncllm import build, cli
from asyncllm.config import Config
from asyncllm.server import app
from asyncllm.server.keys import find_key
from asyncllm.server.settings import Access, Settings
from tests.tiny import make_checkpoint

LOOPBACK = Access(hosts=("localhost",))  # what --host is by default


class Served:
    """In the place of the engine and the server: keeps what they are started with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = Config()
        self.settings = Settings()
        monkeypatch.setattr(build, "serving", self._engine)
        monkeypatch.setattr(app, "serve", self._serve)

    @asynccontextmanager
    async def _engine(self, config: Config) -> AsyncIterator[None]:
        self.config = config
        yield

    async def _serve(self, llm: None, host: str, port: int, *, settings: Settings, on_ready: Any) -> int:
        self.settings = settings
        return 7


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    return Served(monkeypatch)


def serve(*flags: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "model", "--port", "0", *flags])
    return left.value.code


def test_without_flags_everything_has_its_default(served: Served) -> None:
    assert serve() == 7
    assert (served.settings, served.config) == (Settings(access=LOOPBACK), Config(model="model"))


def test_every_setting_has_a_flag_that_reaches_it(served: Served) -> None:
    wanted = {name: value + 1 for name, value in msgspec.structs.asdict(Settings()).items() if name != "access"}
    flags = []
    for name, value in wanted.items():
        flag = name.removesuffix("_s").replace("_", "-") + ("-seconds" if name.endswith("_s") else "")
        flags += [f"--{flag}", str(value)]
    assert serve(*flags) == 7
    assert served.settings == Settings(**wanted, access=LOOPBACK)


def test_who_may_come_in(served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "keys").write_text("alice alice-secret\n")
    monkeypatch.setenv("ASYNCLLM_API_KEY", "other-secret")
    serve("--api-key", "key-secret", "--api-key-file", str(tmp_path / "keys"), "--allowed-host", "LLM.example")
    access = served.settings.access
    assert (access.hosts, len(access.keys)) == (("llm.example",), 3) and "secret" not in repr(access)
    assert find_key(access.keys, b"alice-secret") == access.keys[2] and find_key(access.keys, b"alice") is None
    for flags, hosts in ((("--host", "0.0.0.0"), None), (("--allowed-host", "*"), None), ((), ("localhost",))):
        assert serve(*flags) == 7 and served.settings.access.hosts == hosts


def test_the_pace_is_the_engines(served: Served) -> None:
    assert serve("--pace", "gather") == 7
    assert served.config.pace == "gather"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["serve", "--prot", "9000"], "asyncllm serve: error: unrecognized arguments: --prot; `asyncllm serve --help`"),
        (["serve", "--port", "x"], "asyncllm serve: error: argument --port: 'x' is not a port from 0 to 65535; `asy"),
        (["chat", "one", "two"], "asyncllm chat: error: unrecognized arguments: two; `asyncllm chat --help`"),
        (["chat", "localhost:8000"], "asyncllm: a server's address begins with http:// or https://: http://localhost:8"),
        (["srve"], "asyncllm: error: argument command: invalid choice: 'srve'"),
        ([], "asyncllm: error: the following arguments are required: command; `asyncllm --help`"),
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    err = capsys.readouterr().err
    assert left.value.code == 2 and err.startswith(told) and err.count("\n") == 1, err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--heartbeat-seconds", "0"), "'0' is not a number of seconds above 0"),
        (("--retention-seconds", "-1"), "'-1' is not a number of seconds"),
        (("--send-timeout-seconds", "inf"), "'inf' is not a number of seconds above 0"),
        (("--max-lanes", "1.5"), "'1.5' is not a whole number above 0"),
        (("--max-unread-bytes", "0"), "'0' is not a whole number above 0"),
        (("--pace", "slow"), "invalid choice: 'slow'"),
    ],
)
def test_nonsense_is_refused_with_what_is_wanted(
    served: Served, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], told: str
) -> None:
    assert serve(*flags) == 2
    assert told in capsys.readouterr().err


async def test_the_pace_reaches_the_loop_that_writes(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "tiny")
    async with asyncllm.start(str(folder), device="cpu", threads=1, kv_cache_bytes=1 << 20, pace="gather") as llm:
        assert llm.pace.policy == "gather"
