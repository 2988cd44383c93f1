"""A GPU that fails on purpose, under a real server process: its exit code, and that everybody hears. Rows 44 to 46."""

import pytest

from asyncllm.errors import DeviceFailed, EngineStuck
from tests.attacks.raw import Raw
from tests.e2e.process import ServerProcess

from .houses import TINY, needs

ASKED = {"prompt": [5, 6, 7], "max_tokens": 400, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.mark.parametrize(
    ("fault", "code"), [("device_assert@20", DeviceFailed.exit_code), ("stuck_kernel@20", EngineStuck.exit_code)]
)
def test_a_lost_device_ends_the_process_and_everybody_hears(fault: str, code: int) -> None:
    with ServerProcess(str(needs(TINY / "tiny-qwen3")), "--watchdog-seconds", "3", fault=fault) as server:
        streams = [Raw(server) for _ in range(4)]
        for stream in streams:
            stream.post("/v1/completions", ASKED)
        for stream in streams:
            told = stream.rest()
            assert b"[DONE]" not in told and (b'"error"' in told or not told)
            stream.socket.close()
        assert server.process.wait(timeout=30) == code, server.stderr()
        assert "injecting" in server.stderr()


def test_without_memory_one_ends_and_the_server_goes_on() -> None:
    with ServerProcess(str(needs(TINY / "tiny-qwen3")), fault="out_of_memory@20") as server:
        streams = [Raw(server) for _ in range(4)]
        for stream in streams:
            stream.post("/v1/completions", ASKED, "Connection: close\r\n")
        told = [stream.rest() for stream in streams]
        assert sorted((b'"error"' in one, b"[DONE]" in one) for one in told) == [(False, True)] * 3 + [(True, False)]
        for stream in streams:
            stream.socket.close()
        assert server.complete("again")["choices"] and server.process.poll() is None
