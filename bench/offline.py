"""asyncllm beside transformers' generate: same process, model, dtype and threads, in alternating repetitions.

    python bench/offline.py [--model FOLDER] [--dtype bfloat16] [--threads 2] [--reps 5]

Prints one JSON line: medians of both sides and their ratios (asyncllm / transformers).

- decode: ms a step at batch 1 and 8 after a prompt of 64 tokens, from the first token to the last.
- prefill: tokens a second of a prompt of 512 tokens, up to its first token.
- requests: 32 prompts of 16-64 tokens asking for 16-128 tokens each. transformers takes them in batches of 8, each
  as long as its longest request; both sides count the tokens that were asked for.
- gemm: all linears of one decode step and nothing else, with asyncllm's kernels: what no scheduler can go below.

asyncllm goes through its public face, engine loop and text included; transformers' clock is read at each token.
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch

import asyncllm
from asyncllm import hub
from asyncllm.models.config import ModelConfig
from asyncllm.models.layers import pack_linear

Prompts = Sequence[Sequence[int]]
DECODE_PROMPT, DECODE_TOKENS, PREFILL_TOKENS = 64, 24, 512
NUM_REQUESTS, HF_BATCH = 32, 8


class Ours:
    """asyncllm, on the loop that main() runs."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    async def run(self, prompts: Prompts, num_tokens: Sequence[int]) -> tuple[float, float, float]:
        """(seconds to the last first token, from there to the end, all)"""
        begin = time.monotonic()

        async def one(prompt: Sequence[int], count: int) -> Any:
            stream = await self._llm.generate(list(prompt), temperature=0, max_tokens=count, ignore_eos=True)
            return (await stream.result()).timings

        timings = await asyncio.gather(*map(one, prompts, num_tokens))
        first, last = max(t.first_token_s for t in timings), max(t.finished_s for t in timings)
        return first - begin, last - first, last - begin


class Theirs:
    """transformers' generate, greedy, EOS off."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        import transformers

        self.version = transformers.__version__
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    async def run(self, prompts: Prompts, num_tokens: Sequence[int]) -> tuple[float, float, float]:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        times: list[float] = []

        def clock(input_ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
            times.append(time.monotonic())
            return torch.zeros(len(prompts), dtype=torch.bool)

        begin = time.monotonic()
        self._model.generate(
            ids, attention_mask=mask, do_sample=False, max_new_tokens=max(num_tokens), eos_token_id=None,
            pad_token_id=0, stopping_criteria=[clock],
        )  # fmt: skip
        return times[0] - begin, times[-1] - times[0], times[-1] - begin


class Workload:
    """Random prompts; every repetition draws new ones, the same for both sides."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def prompts(self, seed: int, lengths: Sequence[int]) -> list[list[int]]:
        rng = np.random.default_rng(seed)
        return [rng.integers(100, self._vocab_size, length).tolist() for length in lengths]

    async def decode(self, side: Ours | Theirs, seed: int, batch: int) -> float:
        prompts = self.prompts(seed, [DECODE_PROMPT] * batch)
        _, decoding_s, _ = await side.run(prompts, [DECODE_TOKENS] * batch)
        return decoding_s / (DECODE_TOKENS - 1) * 1e3

    async def prefill(self, side: Ours | Theirs, seed: int) -> float:
        first_s, _, _ = await side.run(self.prompts(seed, [PREFILL_TOKENS]), [1])
        return PREFILL_TOKENS / first_s

    async def requests(self, side: Ours | Theirs, seed: int) -> float:
        rng = np.random.default_rng(seed)
        prompts = self.prompts(seed, rng.integers(16, 65, NUM_REQUESTS).tolist())
        counts = rng.integers(16, 129, NUM_REQUESTS).tolist()
        size = NUM_REQUESTS if isinstance(side, Ours) else HF_BATCH
        batches = [slice(i, i + size) for i in range(0, NUM_REQUESTS, size)]
        return sum(counts) / sum([(await side.run(prompts[b], counts[b]))[2] for b in batches])


async def alternate(measure: Callable[[Any, int], Awaitable[float]], sides: list[Any], reps: int) -> dict[str, Any]:
    """Medians over repetitions that take turns, after one of each that does not count."""
    samples: list[list[float]] = [[] for _ in sides]
    for rep in range(reps + 1):
        for side, kept in zip(sides, samples, strict=True):
            kept.append(await measure(side, rep))
    ours, theirs = (statistics.median(kept[1:]) for kept in samples)
    return {"asyncllm": round(ours, 2), "transformers": round(theirs, 2), "ratio": round(ours / theirs, 3)}


@torch.inference_mode()
def gemm_ms(config: ModelConfig, batch: int, reps: int) -> float:
    """All linears of one decode step, with random weights of the model's shapes."""
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    hidden, ffn = config.hidden_size, config.intermediate_size
    block = [(heads, hidden), (hidden, config.num_heads * config.head_dim), (2 * ffn, hidden), (hidden, ffn)]
    shapes = block * config.num_layers + [(config.vocab_size, hidden)]
    linears = [(pack_linear(torch.randn(shape), None), torch.randn(batch, shape[1])) for shape in shapes]
    times = []
    for _ in range(reps + 1):
        begin = time.perf_counter()
        for linear, x in linears:
            linear(x)
        times.append(time.perf_counter() - begin)
    return round(statistics.median(times[1:]) * 1e3, 2)


async def main() -> None:
    parser = argparse.ArgumentParser(description="asyncllm beside transformers' generate, offline")
    parser.add_argument("--model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--parts", default="decode,prefill,requests,gemm")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    folder = hub.resolve(args.model)
    config = ModelConfig.from_folder(folder)
    theirs = Theirs(folder, getattr(torch, args.dtype))
    options = {"dtype": args.dtype, "threads": args.threads, "prefix_cache": False, "max_model_len": 1024}
    results: dict[str, Any] = {}
    async with asyncllm.start(str(folder), **options) as llm:
        sides, work = [Ours(llm), theirs], Workload(config.vocab_size)
        if "decode" in args.parts:
            for batch in (1, 8):
                measured = await alternate(lambda side, rep, b=batch: work.decode(side, rep, b), sides, args.reps)
                results[f"decode_ms_per_step_batch_{batch}"] = measured
        if "prefill" in args.parts:
            results["prefill_tokens_per_s"] = await alternate(work.prefill, sides, args.reps)
        if "requests" in args.parts:
            results["requests_tokens_per_s"] = await alternate(work.requests, sides, max(1, args.reps // 2))
    if "gemm" in args.parts:
        results["gemm_ms_per_step"] = {batch: gemm_ms(config, batch, 2 * args.reps) for batch in (1, 8)}
    print(json.dumps(results | environment(args, theirs, folder)))


def environment(args: argparse.Namespace, theirs: Theirs, folder: Path) -> dict[str, Any]:
    return {
        "command": " ".join(["python", *sys.argv]),
        "model": folder.name,
        "dtype": args.dtype,
        "threads": args.threads,
        "reps": args.reps,
        "versions": {
            "asyncllm": asyncllm.__version__, "torch": torch.__version__, "transformers": theirs.version,
            "python": platform.python_version(),
        },
        "hardware": f"{os.cpu_count()} cores, {cpu_name()}, {torch.backends.cpu.get_cpu_capability()}",
    }  # fmt: skip


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    asyncio.run(main())
