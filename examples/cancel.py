"""Many streams at once, and what happens to one that is left: it is aborted, and the others go on.

    python examples/cancel.py [MODEL]
"""

import asyncio
import sys

import asyncllm


async def read(llm: asyncllm.AsyncLLM, name: str, max_chars: int) -> None:
    text = ""
    async with await llm.generate(f"My name is {name} and I", seed=1, max_tokens=48) as stream:
        async for delta in stream:
            text += delta.text
            if len(text) > max_chars:
                break  # leaving the block aborts the request: its slot and pages are free a step later
    print(f"{name}: {text!r}")


async def main(model: str | None = None) -> None:
    async with asyncllm.start(model) as llm, asyncio.TaskGroup() as group:
        group.create_task(read(llm, "Ada", max_chars=20))
        group.create_task(read(llm, "Alan", max_chars=10_000))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
