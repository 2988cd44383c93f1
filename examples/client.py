"""Talk to any OpenAI-compatible server: a whole answer, a stream, and an error with its class.

    asyncllm serve &
    python examples/client.py [URL]
"""

import asyncio
import sys

from asyncllm.client import APIError, AsyncClient, BadRequestError

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]


async def main(url: str = "http://127.0.0.1:8000") -> None:
    async with AsyncClient(url, timeout=60) as client:
        model = (await client.models.list()).data[0].id

        reply = await client.chat.completions.create(model=model, messages=MESSAGES, temperature=0, max_tokens=32)
        print(reply.choices[0].message.content)

        fields = {"messages": MESSAGES, "temperature": 0.2, "max_tokens": 32}
        async with client.chat.completions.stream(model=model, **fields) as stream:
            async for text in stream.text_stream:  # leaving the block early stops the server
                print(text, end="", flush=True)
            print(f"\n{(await stream.get_final_completion()).choices[0].finish_reason}")

        try:
            await client.chat.completions.create(model=model, messages=[], max_tokens=32)
        except BadRequestError as error:
            print(f"{type(error).__name__}: {error}, request {error.request_id}")


if __name__ == "__main__":
    try:
        asyncio.run(main(*sys.argv[1:]))
    except APIError as error:
        sys.exit(f"{type(error).__name__}: {error}")
