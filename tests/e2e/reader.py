"""A client in a process of its own that says every event it has read, a line each: the tests kill and restart it.

    python -m tests.e2e.reader sse|ws URL HANG_AFTER [RESPONSE_ID AFTER]

After HANG_AFTER pieces of text it waits to be killed, so it always dies in the middle of an answer; 0: it reads on.
"""

import asyncio
import json
import sys
import urllib.request

from asyncllm.client import AsyncClient
from asyncllm.wire.sse import Decoder

ASKED = {"input": "tell me a story", "temperature": 0, "max_output_tokens": 900, "ignore_eos": True}


class Teller:
    """Says what was read."""

    def __init__(self, hang_after: int) -> None:
        self._num_left = hang_after

    def say(self, event: dict[str, object], number: int) -> None:
        print(json.dumps({"number": number, **event}), flush=True)
        if event["type"] == "response.output_text.delta":
            self._num_left -= 1
            if not self._num_left:
                sys.stdin.read()


def read_sse(teller: Teller, url: str, response_id: str | None, after: str) -> None:
    """With plain urllib, as an EventSource would: the number to come back with is the last event's id."""
    if response_id is None:
        body = json.dumps({**ASKED, "stream": True, "resumable": True}).encode()
        request = urllib.request.Request(f"{url}/v1/responses", body, {"Content-Type": "application/json"})
    else:
        headers = {"Last-Event-ID": after}
        request = urllib.request.Request(f"{url}/v1/responses/{response_id}/events", headers=headers)
    decoder = Decoder()
    with urllib.request.urlopen(request) as reply:
        while data := reply.read1(4096):
            for event in decoder.feed(data):
                body = json.loads(event.data)
                teller.say(body, int(event.id) if response_id is not None else body["sequence_number"])


async def read_ws(teller: Teller, url: str, response_id: str | None, after: str) -> None:
    """With the package's own client."""
    async with AsyncClient(url) as client, client.responses.connect() as session:
        lane = session.lane("story")
        if response_id is None:
            await lane.send({"type": "response.create", "resumable": True, **ASKED})
        else:
            await lane.send({"type": "response.attach", "response_id": response_id, "starting_after": int(after)})
        while True:
            event = await lane.recv()
            assert event.sequence_number is not None, event
            body: dict[str, object] = {"type": event.type, "delta": event.delta}
            if event.response is not None:
                body["response"] = {"id": event.response.id, "status": event.response.status}
            teller.say(body, event.sequence_number)
            if event.type in ("response.completed", "response.incomplete", "response.failed"):
                return


def main() -> None:
    kind, url, hang_after, *again = sys.argv[1:]
    response_id, after = again or (None, "")
    teller = Teller(int(hang_after))
    if kind == "sse":
        read_sse(teller, url, response_id, after)
    else:
        asyncio.run(read_ws(teller, url, response_id, after))


if __name__ == "__main__":
    main()
