"""transformers' continuous batching over the workloads of bench/burst.py, the same requests: a rival on any machine.

    python -m bench.rival MODEL [--work burst one] [--runs 3]

One JSON line a workload, as bench/burst.py prints them; the first run warms up, or with --runs 0 is the figure, for on
a GPU with slow host cores one takes minutes.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from .burst import _FRESH, WORKS, Request, machine


def load(folder: str) -> Any:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device).eval()


def settings(temperature: float) -> GenerationConfig:
    """No end of text, as in burst.py; answers end by their own max_new_tokens."""
    sampling: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(eos_token_id=-1, pad_token_id=0, max_new_tokens=1024, **sampling)


def generate(manager: Any, requests: list[Request]) -> tuple[float, int]:
    """Seconds, and output tokens."""
    began_s = time.perf_counter()
    waiting = {
        manager.add_request(list(request.prompt_ids), max_new_tokens=request.params.max_tokens) for request in requests
    }
    num_tokens = 0
    while waiting:
        result = manager.get_result(timeout=1.0)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(result.error)
            waiting.discard(result.request_id)
            num_tokens += len(result.generated_tokens)
        elif result is None and not manager.is_running():
            raise RuntimeError("its thread has ended")
    return time.perf_counter() - began_s, num_tokens


def measure(model: Any, work: str, runs: int) -> dict[str, Any]:
    temperature = WORKS[work](0)[0].params.temperature
    with model.continuous_batching_context_manager(generation_config=settings(temperature)) as manager:
        figures = []
        for number in range(runs + 1):
            figures.append(generate(manager, WORKS[work](next(_FRESH))))
            seconds, tokens = figures[-1]
            print(f"{work}, run {number} of {runs}: {tokens / seconds:.0f} tok/s in {seconds:.0f} s", file=sys.stderr)
    rates = [tokens / seconds for seconds, tokens in figures]
    steady = rates[1:] or rates
    return {
        "tok_s": round(statistics.median(steady), 1),
        "first_tok_s": round(rates[0], 1),
        "all_tok_s": [round(rate) for rate in steady],
        "num_tokens": figures[-1][1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--work", nargs="+", default=["burst"], choices=tuple(WORKS))
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    import transformers

    model = load(args.model)
    for work in args.work:
        figures = measure(model, work, args.runs)
        rival = {"rival": f"transformers {transformers.__version__}, continuous batching", "work": work}
        print(json.dumps(rival | figures | machine() | {"model": Path(args.model).name}), flush=True)


if __name__ == "__main__":
    main()
