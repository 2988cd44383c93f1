"""When the server looks through all that lives for garbage: while no request is being answered.

Loop thread. It never knows what there is. An engine in another program leaves that program's collector as it is.

A full collection holds the GIL for 0.6 us an object: 116 ms beside 2,000 streams, where a refusal takes 1.
"""

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator

from ..llm import AsyncLLM

LOOK_S = 0.1  # a busy server is idle for moments
DUE_AFTER = 100  # younger collections, as many as come before a full one by default
# A server that is never idle has a full one after so many of the middle generation all the same; 20,000 refusals
# make 20 of those. With 50 a refusal in 12,000 waited 60 ms; little waits for it, as requests and connections hold
# themselves in no circles. Collectors without generations (3.14.0, free threads) ignore it.
FULL_AFTER = 200


@contextlib.asynccontextmanager
async def collected_when_idle(llm: AsyncLLM) -> AsyncIterator[None]:
    """As long as the context lasts."""
    before = gc.get_threshold()
    gc.set_threshold(*before[:2], FULL_AFTER)
    collecting = asyncio.create_task(_collect_when_idle(llm))
    try:
        yield
    finally:
        collecting.cancel()
        await asyncio.wait([collecting])
        gc.set_threshold(*before)


async def _collect_when_idle(llm: AsyncLLM) -> None:
    seen = _num_younger()
    while True:
        await asyncio.sleep(LOOK_S)
        if _num_younger() - seen >= DUE_AFTER and not llm.num_live:
            gc.collect()
            seen = _num_younger()


def _num_younger() -> int:
    return sum([generation["collections"] for generation in gc.get_stats()[:2]])
