"""`asyncllm serve --supervise`: a small parent that starts the server again when it dies.

A process of its own, one thread. It never knows sockets, models or torch; it knows exit codes.
"""

import ctypes
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from .errors import DeviceFailed, EngineDead, EngineStuck

log = logging.getLogger(__name__)

EXIT_CANNOT_START = 2
FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 30.0
GOOD_LIFE_S = 60.0  # who lived as long starts over with the first wait
_REASONS = {
    EngineDead.exit_code: "its engine died",
    DeviceFailed.exit_code: "its GPU failed",
    EngineStuck.exit_code: "a step was stuck",
    1: "it was stuck outside of Python, or stopped at once",
    EXIT_CANNOT_START: "it cannot start",
}


class Supervisor:
    """One server at a time. SIGTERM and SIGINT go on to it, and end the watch with it."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        later_environment: Mapping[str, str],
        first_wait_s: float = FIRST_WAIT_S,
    ) -> None:
        self._command = command
        self._environment = environment
        self._later_environment = later_environment
        self._first_wait_s = first_wait_s
        self._child: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()

    def run(self) -> int:
        """Returns the server's exit code once it was asked to end, or could not begin."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)
        wait_s, num_lives = self._first_wait_s, 0
        while True:
            began_s = time.monotonic()
            code = self._live()
            lived_s, num_lives = time.monotonic() - began_s, num_lives + 1
            if code == 0 or self._stopping.is_set() or (num_lives == 1 and code == EXIT_CANNOT_START):
                return code if code >= 0 else 128 - code
            if lived_s > GOOD_LIFE_S:
                wait_s = self._first_wait_s
            log.error("the server ended after %.1f s: %s; starting it again in %g s", lived_s, told(code), wait_s)
            if self._stopping.wait(wait_s):
                return 0
            wait_s = min(2 * wait_s, LONGEST_WAIT_S)

    def _live(self) -> int:
        # A group of its own: Ctrl-C reaches the parent alone, or it would count as two.
        self._child = subprocess.Popen(
            self._command, env=self._environment, start_new_session=True, preexec_fn=_dying_with_parent()
        )
        self._environment = self._later_environment
        log.info("server process %d", self._child.pid)
        if self._stopping.is_set():  # a signal while it was being started
            self._child.terminate()
        return self._child.wait()

    def _pass_on(self, number: int, frame: object) -> None:
        self._stopping.set()
        if self._child is not None:
            self._child.send_signal(number)


def told(code: int) -> str:
    """An exit code in words."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit code {code}, {_REASONS.get(code, 'which says nothing')}"


def command_of(arguments: Sequence[str]) -> list[str]:
    """The same server, without a supervisor of its own."""
    return [sys.executable, "-m", "asyncllm", *(one for one in arguments if one != "--supervise")]


def _dying_with_parent() -> Callable[[], None] | None:
    """The server drains when its parent is killed: two on one port and one GPU help nobody."""
    if sys.platform != "linux":
        return None
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def before_exec() -> None:
        prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it had died already
            os._exit(0)

    return before_exec
