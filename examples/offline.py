"""Complete a batch of prompts from a plain script: no loop, no server.

    python examples/offline.py [MODEL]
"""

import sys

import asyncllm


def main(model: str | None = None) -> None:
    prompts = ["The capital of France is", "The largest planet is", "Water boils at"]
    with asyncllm.load(model) as llm:
        for prompt, answer in zip(prompts, llm.generate(prompts, temperature=0, max_tokens=16), strict=True):
            print(f"{prompt}|{answer.text!r} ({answer.finish_reason.value})")


if __name__ == "__main__":
    main(*sys.argv[1:])
