"""What the time of an answer tells: `python -m tests.attacks.timings [--pairs 10000]`, or make timings.

In pairs, each in a random order, by the test of Kolmogorov and Smirnov: a key that is nearly right against one that is
all wrong, compared in this process and asked of a real server; and a prompt that another key has sent against one that
nobody has. Beside each stands what must be found, or the test would be blind. Prints one line of JSON for each, and
fails where something is told. Not in the suite, as no timing is.
"""

import argparse
import bisect
import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from asyncllm.server.keys import find_key, read_keys
from tests.e2e.process import ServerProcess
from tests.tiny import make_checkpoint

from .raw import Raw

TOLD_BELOW_P = 0.01
ROUNDS = 3  # the middle one counts: in one of a hundred rounds nothing looks like something
KEY, OTHER = "sk-" + "k" * 61, "sk-" + "o" * 61
NEARLY, WRONG = KEY[:-1] + "x", "x" * len(KEY)
PROMPT_TOKENS = 480  # thirty pages
Timed = Callable[[], object]


def ks(ones: Sequence[float], others: Sequence[float]) -> float:
    """The probability that samples of one distribution lie as far apart as these, by Kolmogorov and Smirnov."""
    ones, others = sorted(ones), sorted(others)
    apart = max(
        abs(bisect.bisect_right(ones, at) / len(ones) - bisect.bisect_right(others, at) / len(others))
        for at in {*ones, *others}
    )
    num = math.sqrt(len(ones) * len(others) / (len(ones) + len(others)))
    x = (num + 0.12 + 0.11 / num) * apart
    if x < 0.3:
        return 1.0
    return min(1.0, max(0.0, 2 * sum([(-1) ** (k - 1) * math.exp(-2 * (k * x) ** 2) for k in range(1, 101)])))


def in_pairs(pairs: Iterable[tuple[Timed, Timed]]) -> tuple[list[float], list[float]]:
    """How long each of two took, whichever came first."""
    chance = random.Random(0)
    taken: tuple[list[float], list[float]] = ([], [])
    for pair in pairs:
        for which in chance.sample((0, 1), 2):
            began = time.perf_counter_ns()
            pair[which]()
            taken[which].append(time.perf_counter_ns() - began)
    return taken


def told(what: str, pairs: Callable[[], Iterable[tuple[Timed, Timed]]], *, is_found: bool = False) -> bool:
    """Print what was found; whether it is as it must be."""
    rounds = [in_pairs(pairs()) for _ in range(ROUNDS)]
    p = statistics.median([ks(*taken) for taken in rounds])
    medians = [round(statistics.median(taken) / 1000, 2) for taken in rounds[-1]]
    is_right = (p < TOLD_BELOW_P) == is_found
    print(json.dumps({"what": what, "p": round(p, 4), "medians_us": medians, "as_it_must_be": is_right}), flush=True)
    return is_right


def compared(num_pairs: int) -> bool:
    """In this process, where nothing hides a nanosecond."""
    keys = read_keys([f"k{i} {chr(97 + i) * 64}" for i in range(10)] + [f"own {KEY}"])

    def leaky(offered: str) -> bool:
        return all(a == b for a, b in zip(KEY, offered, strict=True))

    def ours() -> Iterable[tuple[Timed, Timed]]:
        return ((lambda: find_key(keys, NEARLY.encode()), lambda: find_key(keys, WRONG.encode())),) * num_pairs

    def theirs() -> Iterable[tuple[Timed, Timed]]:
        return ((lambda: leaky(NEARLY), lambda: leaky(WRONG)),) * num_pairs

    in_pairs(ours())  # warm
    is_right = told("keys, compared", ours)
    return told("keys, compared character by character", theirs, is_found=True) and is_right


def asked(server: ServerProcess, num_pairs: int) -> bool:
    with Raw(server) as raw:

        def ask(key: str) -> None:
            raw.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n")
            assert raw.reply().status == 401

        return told("keys, asked", lambda: ((lambda: ask(NEARLY), lambda: ask(WRONG)),) * num_pairs)


def cached(server: ServerProcess, num_pairs: int) -> bool:
    """The first token of a prompt that somebody has sent before, against one that is new."""
    chance = random.Random(1)
    with Raw(server) as raw:

        def send(key: str, prompt: list[int]) -> None:
            raw.post("/v1/completions", {"prompt": prompt, "max_tokens": 1}, f"Authorization: Bearer {key}\r\n")
            assert raw.reply().status == 200

        def pairs(sender: str) -> Iterable[tuple[Timed, Timed]]:
            for _ in range(num_pairs):
                known, new = ([chance.randrange(3, 250) for _ in range(PROMPT_TOKENS)] for _ in range(2))
                send(sender, known)
                yield (lambda known=known: send(KEY, known)), (lambda new=new: send(KEY, new))

        is_right = told("a prompt that another key has sent", lambda: pairs(OTHER))
        return told("a prompt that the same key has sent", lambda: pairs(KEY), is_found=True) and is_right


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=10_000)
    num_pairs = parser.parse_args().pairs
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "tiny-llama")
        with ServerProcess(str(checkpoint), "--api-key", KEY, "--api-key", OTHER) as server:
            found = [compared(num_pairs), asked(server, num_pairs), cached(server, max(100, num_pairs // 20))]
    sys.exit(0 if all(found) else 1)


if __name__ == "__main__":
    main()
