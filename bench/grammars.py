"""What grammars cost a batch: its throughput with 0, 50 and 100% of the rows constrained, with overlap and without.

    python -m bench.grammars [MODEL] [--rows 32] [--tokens 64] [--runs 3] [--option threads=1 ...]

One JSON line each. Runs of the shares alternate, so that a busy machine costs all alike; the figure is the median.
"""

import argparse
import json
import random
import statistics
from itertools import count
from pathlib import Path
from typing import Any

from asyncllm.types import GrammarSpec, SamplingParams

from .burst import ENDLESS, House, Request, compiled, generate, machine, open_house

SHARES = (0.0, 0.5, 1.0)
_FRESH = count()


def requests(rows: int, tokens: int, share: float, vocab_size: int) -> list[Request]:
    """Every second row, every row or none keeps to a schema; none ends before its limit."""
    rng, spec = random.Random(next(_FRESH)), GrammarSpec("json", json.dumps(ENDLESS))
    made = []
    for row in range(rows):
        grammar = spec if int((row + 1) * share) > int(row * share) else None
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=tokens, grammar=grammar)
        made.append(Request([rng.randrange(10, min(10_000, vocab_size)) for _ in range(16)], params))
    return made


async def measure(house: House, rows: int, tokens: int, runs: int) -> dict[float, list[float]]:
    """Output tokens a second of each run, by share. The first run warms up."""
    figures: dict[float, list[float]] = {share: [] for share in SHARES}
    vocab_size = house.llm.limits.vocab_size
    for _ in range(runs + 1):
        for share in SHARES:
            asked = [await compiled(house.llm, request) for request in requests(rows, tokens, share, vocab_size)]
            seconds, num_tokens, _ = await generate(house.llm, asked)
            assert num_tokens == rows * tokens, "an answer ended early"
            figures[share].append(num_tokens / seconds)
    return {share: values[1:] for share, values in figures.items()}


async def run(args: argparse.Namespace) -> None:
    options: dict[str, Any] = {
        name: json.loads(value) for name, _, value in (pair.partition("=") for pair in args.option)
    }
    for overlap in (True, False):
        async with open_house(args.model, overlap=overlap, **options) as house:
            base = {"rows": args.rows, "overlap": overlap, "model": Path(house.llm.model_name).name} | machine()
            figures = await measure(house, args.rows, args.tokens, args.runs)
        plain = statistics.median(figures[0.0])
        for share, values in figures.items():
            tok_s = statistics.median(values)
            line = {"constrained": share, "tok_s": round(tok_s, 1), "of_plain": round(tok_s / plain, 3)}
            print(json.dumps(line | base), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--option", nargs="*", default=[], help="Config fields as name=json")
    import uvloop

    uvloop.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
