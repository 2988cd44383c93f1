"""However a server ends: 64 clients over SSE and WebSocket hear of it in time, none takes what it has for a full
answer, and a supervised server is back and right. Rows 38, 39, 43 to 45; LIFE-1, SSE-3."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncllm.client import APIError, AsyncClient
from asyncllm.errors import DeviceFailed, EngineDead, EngineStuck
from tests.e2e.process import ROOT, ServerProcess
from tests.tiny import make_checkpoint

NUM_SSE = NUM_LANES = 32
LANES_A_SOCKET = 16
WATCHDOG_S = 1.5
# Within which everybody hears, from the moment of the fault.
HEARD_S = 5.0
ROOMY = ("--max-running", "64", "--kv-cache-bytes", "67108864", "--watchdog-seconds", str(WATCHDOG_S))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny-llama", max_position_embeddings=16384)


@contextmanager
def serving(checkpoint: Path, *arguments: str, fault: str | None = None) -> Iterator[ServerProcess]:
    with ServerProcess(str(checkpoint), *ROOMY, *arguments, fault=fault) as server:
        try:
            yield server
        finally:
            for child in server.children() if server.process.poll() is None else ():
                os.kill(child, signal.SIGKILL)


class Crowd:
    """64 streams, and what became of each: begun, and how and when it ended."""

    def __init__(self) -> None:
        self.num_begun = 0
        self.ends: list[tuple[str, float]] = []
        self.all_begun = asyncio.Event()

    def begin(self) -> None:
        self.num_begun += 1
        if self.num_begun == NUM_SSE + NUM_LANES:
            self.all_begun.set()

    async def run(self, client: AsyncClient) -> None:
        async with asyncio.TaskGroup() as tasks:
            for i in range(NUM_SSE):
                tasks.create_task(self._over_sse(client, i))
            for _ in range(NUM_LANES // LANES_A_SOCKET):
                tasks.create_task(self._over_websocket(client, tasks))

    async def _over_sse(self, client: AsyncClient, number: int) -> None:
        async def open_stream() -> object:
            return await client.completions.create(
                prompt=f"{number} fox", max_tokens=16000, ignore_eos=True, stream=True
            )

        await self._read(open_stream)

    async def _over_websocket(self, client: AsyncClient, tasks: asyncio.TaskGroup) -> None:
        async with client.responses.connect() as session, asyncio.TaskGroup() as lanes:
            for i in range(LANES_A_SOCKET):

                async def open_lane(i: int = i) -> object:
                    return await session.create(input=f"{i} fox", max_output_tokens=16000, ignore_eos=True)

                lanes.create_task(self._read(open_lane))

    async def _read(self, open_it: Callable[[], object]) -> None:
        num_events = 0
        try:
            async for event in await open_it():  # type: ignore[misc,attr-defined]
                num_events += 1
                if num_events == 3:
                    self.begin()
                if getattr(event, "type", "") in ("response.failed", "response.incomplete"):
                    self.ends.append((event.type, time.monotonic()))
                    return
            self.ends.append(("whole", time.monotonic()))
        except APIError as error:
            self.ends.append((type(error).__name__, time.monotonic()))


def crowd(server: ServerProcess, cause: Callable[[], float]) -> Crowd:
    """Open 64 streams, wait until all have begun, bring about the end, and wait until everybody has heard.

    `cause` returns when the end began.
    """
    seen = Crowd()

    async def main() -> None:
        async with AsyncClient(server.url, max_retries=0, timeout=60) as client:
            running = asyncio.create_task(seen.run(client))
            await asyncio.wait_for(seen.all_begun.wait(), 30)
            began_s = await asyncio.to_thread(cause)
            await asyncio.wait_for(running, 30)
            late = [end for end in seen.ends if end[1] - began_s > HEARD_S]
            assert not late, (began_s, late)

    asyncio.run(main())
    assert len(seen.ends) == NUM_SSE + NUM_LANES
    assert not [end for end in seen.ends if end[0] == "whole"]
    return seen


def is_right(server: ServerProcess) -> None:
    """Healthy, ready, and it answers a greedy request with the tokens of ever."""
    assert server.get("/ready")["status"] == "ready"
    first, again = server.complete("The quick", max_tokens=16), server.complete("The quick", max_tokens=16)
    assert first["choices"][0]["text"] == again["choices"][0]["text"] != ""


def at_once() -> float:
    return time.monotonic()


def logged(server: ServerProcess, line: str) -> Callable[[], float]:
    """Waits for the fault to be injected."""

    def wait() -> float:
        deadline_s = time.monotonic() + 30
        while line not in server.stderr():
            assert time.monotonic() < deadline_s, server.stderr()
            time.sleep(0.05)
        return time.monotonic()

    return wait


def test_kill_9(checkpoint: Path) -> None:
    with serving(checkpoint, "--supervise") as server:

        def kill() -> float:
            os.kill(server.children()[0], signal.SIGKILL)
            return time.monotonic()

        crowd(server, kill)
        server.url = server.wait_until_ready()
        is_right(server)
        assert "killed by SIGKILL; starting it again in 1 s" in server.stderr()
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("stuck_step@200", EngineStuck.exit_code, "a step was stuck"),
        ("dead_thread@200", EngineDead.exit_code, "its engine died"),
        ("device_assert@200", DeviceFailed.exit_code, "its GPU failed"),
    ],
)
def test_an_engine_that_ends(checkpoint: Path, fault: str, code: int, told: str) -> None:
    with serving(checkpoint, "--supervise", fault=fault) as server:
        crowd(server, logged(server, "injecting"))
        server.url = server.wait_until_ready()
        is_right(server)
        assert f"exit code {code}, {told}" in server.stderr()
        if fault.startswith("stuck"):
            assert "in _stuck_step" in server.stderr()  # every thread's stack
        assert server.stop() == 0


def test_sigterm_ends_what_outlives_the_grace(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain-seconds", "1") as server:

        def terminate() -> float:
            server.process.send_signal(signal.SIGTERM)
            return time.monotonic()

        crowd(server, terminate)
        assert server.process.wait(timeout=10) == 0


def test_a_second_signal_stops_at_once(checkpoint: Path) -> None:
    with serving(checkpoint, "--drain-seconds", "60") as server:

        def terminate_twice() -> float:
            server.process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            server.process.send_signal(signal.SIGTERM)
            return time.monotonic()

        crowd(server, terminate_twice)
        assert server.process.wait(timeout=10) == 1


@pytest.mark.parametrize("fault", ["step_exception@200", "nan_row@400", "out_of_memory@400"])
def test_a_fault_that_is_not_the_servers_end(checkpoint: Path, fault: str) -> None:
    """Those it struck hear an error, the others go on, and the server is right afterwards."""
    with serving(checkpoint, "--drain-seconds", "0", fault=fault) as server:
        told: list[str] = []

        async def main() -> None:
            seen = Crowd()
            async with AsyncClient(server.url, max_retries=0, timeout=60) as client:
                running = asyncio.create_task(seen.run(client))
                await asyncio.to_thread(logged(server, "injecting"))
                await asyncio.sleep(1)  # the test looks at a moment, not at a state
                told.extend([end for end, _ in seen.ends])
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

        asyncio.run(main())
        assert "whole" not in told
        assert len(told) == (NUM_SSE + NUM_LANES if fault.startswith("step") else 1), told
        is_right(server)
        assert server.process.poll() is None


def test_a_pause_is_not_a_stuck_step(checkpoint: Path) -> None:
    """Stopped for longer than the watchdog's patience, and let go on."""
    with serving(checkpoint) as server:

        async def main() -> None:
            async with AsyncClient(server.url, max_retries=0, timeout=60) as client:
                fields = {"prompt": "fox", "max_tokens": 3000, "ignore_eos": True, "temperature": 0}
                stream = await client.completions.create(stream=True, **fields)
                await anext(stream)
                server.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(2 * WATCHDOG_S)
                server.process.send_signal(signal.SIGCONT)
                assert [chunk async for chunk in stream][-1].choices[0].finish_reason == "length"

        asyncio.run(main())
        assert server.stop() == 0


def test_a_pause_uses_up_nobodys_patience(checkpoint: Path) -> None:
    """Row 40: stopped for longer than the queue's time, and whoever waits there is served."""
    with serving(checkpoint, "--max-running", "1", "--queue-timeout-seconds", "2.5") as server:

        async def main() -> None:
            async with AsyncClient(server.url, max_retries=0, timeout=60) as client:
                runs = await client.completions.create(prompt="fox", max_tokens=16000, ignore_eos=True, stream=True)
                await anext(runs)
                waits = [asyncio.create_task(client.completions.create(prompt="x", max_tokens=2)) for _ in range(8)]
                while server.metrics()["requests_waiting"] < len(waits):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)
                server.process.send_signal(signal.SIGSTOP)
                await asyncio.sleep(4)
                server.process.send_signal(signal.SIGCONT)
                step = server.metrics()["engine_step"]
                while server.metrics()["engine_step"] < step + 2:  # noqa: ASYNC110  (who is sent away is so by now)
                    await asyncio.sleep(0.02)
                await runs.close()
                assert [(await one).choices[0].finish_reason for one in waits] == ["length"] * len(waits)

        asyncio.run(main())
        assert server.stop() == 0


def test_a_loop_that_stands_still_ends_the_process() -> None:
    """A thread of C looks after the loop: it needs no GIL, and tells where everybody is."""
    program = (
        "import asyncio, time\nfrom asyncllm.server import app\napp.BLOCKED_AT_LEAST_S = 0.3\n"
        "async def main():\n    watch = asyncio.create_task(app.turning(0.1))\n    await asyncio.sleep(0.1)\n"
        "    def stands_still(): time.sleep(30)\n    stands_still()\nasyncio.run(main())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=25)
    assert done.returncode == 1 and "in stands_still" in done.stderr


def test_a_fault_is_refused_without_its_flag(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASYNCLLM_FAULT", "stuck_step@1")
    with pytest.raises(AssertionError, match="--allow-fault-injection says that this is meant"):
        ServerProcess(str(checkpoint))
    with pytest.raises(AssertionError, match="a fault is KIND@STEP"):
        ServerProcess(str(checkpoint), fault="earthquake@1")


def test_a_supervisor_passes_signals_on_and_tells_what_cannot_start(checkpoint: Path) -> None:
    with serving(checkpoint, "--supervise") as server:
        [child] = server.children()
        assert server.stop(signal.SIGINT) == 0
        assert not Path(f"/proc/{child}").exists()
    with pytest.raises(AssertionError, match="no-such-folder"):
        ServerProcess("./no-such-folder", "--supervise")


def test_a_supervised_server_drains_when_its_parent_is_killed(checkpoint: Path) -> None:
    with serving(checkpoint, "--supervise") as server:
        [child] = server.children()
        server.process.kill()
        server.process.wait()
        deadline_s = time.monotonic() + 15
        while Path(f"/proc/{child}").exists() and "zombie" not in Path(f"/proc/{child}/status").read_text():
            assert time.monotonic() < deadline_s, "it lives on"
            time.sleep(0.05)
