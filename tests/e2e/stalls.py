"""What the machine itself holds up, beside a load: a process that does nothing but sleep a millisecond and look how
late it wakes. No collector, no loop, no lock: what it loses, every process on the machine may lose.
"""

import gc
import select
import subprocess
import sys
import time
from types import TracebackType

SLEEP_S = 1e-3


class Stalls:
    """As long as the context lasts; `longest_s` is known behind it."""

    def __enter__(self) -> "Stalls":
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self._process.stdout.readline()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        told, _ = self._process.communicate()
        assert self._process.returncode == 0, "the process that measures stalls has failed"
        self.longest_s = float(told)


def main() -> None:
    """Until stdin is closed."""
    gc.disable()
    print("looking", flush=True)
    longest_s, slept_s = 0.0, time.monotonic()
    while not select.select([sys.stdin], [], [], SLEEP_S)[0]:
        slept_s, before_s = time.monotonic(), slept_s
        longest_s = max(longest_s, slept_s - before_s - SLEEP_S)
    print(longest_s)


if __name__ == "__main__":
    main()
