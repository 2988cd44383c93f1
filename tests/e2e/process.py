"""A real `asyncllm serve` process, from the printed curl line to its exit code."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"NO_COLOR": "1"}


class ServerProcess:
    """Started as a user would, on a port the system chooses; stderr is kept for the test to read."""

    def __init__(self, *arguments: str) -> None:
        self._stderr = tempfile.TemporaryFile("w+")
        command = [sys.executable, "-m", "asyncllm", "serve", *arguments, "--port", "0", "--threads", "1"]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=os.environ | QUIET
        )
        self.printed: list[str] = []
        self.url = self._wait_until_ready()

    def _wait_until_ready(self) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.search(r"http://[^/]+", line):
                return found[0]
        raise AssertionError(f"the server did not start: {self.stderr()}")

    @property
    def curl_line(self) -> str:
        return self.printed[-1].strip()

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=60)

    def connect(self) -> socket.socket:
        host, port = self.url.removeprefix("http://").split(":")
        return socket.create_connection((host, int(port)), timeout=30)

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        self._stderr.close()
