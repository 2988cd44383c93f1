"""Stream an answer inside your own asyncio program; the engine runs beside your loop, in one process.

    python examples/stream.py [MODEL]
"""

import asyncio
import sys

import asyncllm


async def main(model: str | None = None) -> None:
    async with asyncllm.start(model) as llm:
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        async for delta in await llm.chat(messages, temperature=0, max_tokens=64):
            print(delta.text, end="", flush=True)
        print()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
