"""A real `asyncllm serve` process, from the printed curl line to its exit code."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
QUIET = {"NO_COLOR": "1"}
PYTHON_FLAGS = shlex.split(os.environ.get("ASYNCLLM_PYTHON_FLAGS", ""))  # make interpreters: -O, -X dev


class ServerProcess:
    """Started as a user would, on a port the system chooses; stderr is kept for the test to read.

    `fault` is what breaks in it on purpose, `python` the interpreter's own flags; with --supervise the server proper
    is a child of `process`.
    """

    def __init__(self, *arguments: str, fault: str | None = None, python: Sequence[str] = PYTHON_FLAGS) -> None:
        self._stderr = tempfile.TemporaryFile("w+")
        command = [sys.executable, *python, "-m", "asyncllm", "serve", *arguments, "--port", "0", "--threads", "1"]
        environment = os.environ | QUIET
        if fault is not None:
            command.append("--allow-fault-injection")
            environment["ASYNCLLM_FAULT"] = fault
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=self._stderr, text=True, env=environment
        )
        self.printed: list[str] = []
        self.url = self.wait_until_ready()

    def wait_until_ready(self) -> str:
        """The address that it prints; a supervised server prints one in each life."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.printed.append(line)
            if found := re.search(r"https?://[^/ ]+:\d+", line):
                return found[0]
        told = self.stderr()
        self.__exit__(None, None, None)
        raise AssertionError(f"the server did not start: {told}")

    @property
    def curl_line(self) -> str:
        return self.printed[-1].strip()

    def children(self) -> list[int]:
        """Process ids of the servers under a supervisor."""
        listed = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in listed.split()]

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:"))

    def stderr(self) -> str:
        self._stderr.seek(0)
        return self._stderr.read()

    def stop(self, signal_number: int = signal.SIGTERM) -> int:
        self.process.send_signal(signal_number)
        return self.process.wait(timeout=60)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=30) as reply:
            return json.load(reply)

    def complete(self, prompt: str, **fields: Any) -> Any:
        """A short greedy answer, whole."""
        body = json.dumps({"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True} | fields).encode()
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(f"{self.url}/v1/completions", body, headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as reply:
            text = reply.read().decode()
        found = re.findall(r"^asyncllm_(\w+(?:\{[^}]*\})?) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def connect(self) -> socket.socket:
        host, port = self.url.rpartition("//")[2].split(":")
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
