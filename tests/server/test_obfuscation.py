"""Row 57: with include_obfuscation an event's length does not tell what is in it; without, nothing is padded."""

import json
import re
from typing import Any

import pytest

from asyncllm.wire import replies
from asyncllm.wire.obfuscation import BLOCK_BYTES, DETAILED_BLOCK_BYTES, Obfuscated, obfuscated
from asyncllm.wire.response_events import EventStream, Framing, SocketFrames

from ..text import toys
from .conftest import CHAT, HI, TEXT, Serve, Served

SAID = "The fox jumps over 12345 lazy dogs. ďábelské 😀!"
ASKS = {"include_obfuscation": True}
PATH = "/v1/responses"


async def events_of(served: Served, path: str, **fields: Any) -> list[bytes]:
    async with served.session.post(served.url + path, json={"stream": True, "temperature": 0} | fields) as response:
        assert response.status == 200, await response.text()
        return (await response.read()).split(b"\n\n")[:-1]


def bodies(events: list[bytes]) -> list[dict[str, Any]]:
    """What is JSON among them."""
    found = [event.partition(b"data: ")[2] for event in events]
    return [json.loads(data) for data in found if data.startswith(b"{")]


def lengths(events: list[bytes]) -> set[int]:
    """Of those that are padded, without the number that an EventSource comes back with: it is no secret."""
    return {len(re.sub(rb"^id: \d+\n", b"", event)) for event in events if b'"obfuscation":' in event}


@pytest.mark.parametrize(("path", "asked"), [(CHAT, {"messages": HI}), (TEXT, {"prompt": "hi", "max_tokens": 100})])
async def test_chunks_are_all_as_long_whatever_they_say(serve: Serve, path: str, asked: dict[str, Any]) -> None:
    async with serve(SAID) as served:
        plain = await events_of(served, path, **asked)
        padded = await events_of(served, path, stream_options=ASKS | {"include_usage": True}, **asked)
        assert lengths(plain) == set() and len(lengths(padded)) == 1
        *chunks, usage = bodies(padded)
        assert usage["usage"]["completion_tokens"] and "obfuscation" not in usage and padded[-1] == b"data: [DONE]"
        assert [len(chunk["obfuscation"]) > 0 for chunk in chunks] == [True] * len(chunks)
        said = [choice.get("text") or choice.get("delta", {}).get("content", "") for chunk in chunks
                for choice in chunk["choices"]]  # fmt: skip
        assert "".join(said) == SAID


async def test_calls_reasoning_and_several_choices_are_padded_too(serve: Serve) -> None:
    call = '<think>hm</think>So:<tool_call>\n{"name": "f", "arguments": {"city": "Brno"}}\n</tool_call>'
    roomy = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}
    async with serve(call, template=toys.TOOLS, **roomy) as served:
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
        events = await events_of(served, CHAT, messages=HI, tools=tools, n=2, stream_options=ASKS)
        assert len(lengths(events)) == 1 and all(b"obfuscation" in event for event in events[:-1])


def test_what_a_token_makes_of_an_event_is_rounded_up() -> None:
    head = replies.Head("chatcmpl-1", 1, 'a "choices":[{ model')
    said = [[chunks.open(), chunks.text("x" * n)] for n in range(120) for chunks in [replies.chat_chunks(head)]]
    assert len({len(obfuscated(b"".join(events))) for events in said}) == 1
    assert len(obfuscated(b"".join(said[0]))) > 2 * BLOCK_BYTES
    detailed = [
        obfuscated(b'data: {"choices":[{"index":0,"text":"x","logprobs":{"tokens":["%b"]}}]}\n\n' % (b"x" * n))
        for n in range(1, 4000, 37)
    ]
    assert len({len(event) for event in detailed}) == 1 and len(detailed[0]) > DETAILED_BLOCK_BYTES
    assert len(set(detailed)) == len(detailed)  # random: a proxy that compresses undoes nothing
    for untouched in (b"data: [DONE]\n\n", b": keep-alive\n\n", b"", b'data: {"error":{"message":"m"}}\n\n'):
        assert obfuscated(untouched) == untouched


async def test_responses_deltas_are_all_as_long(serve: Serve) -> None:
    async with serve(SAID) as served:
        assert lengths(await events_of(served, PATH, input="hi")) == set()
        events = await events_of(served, PATH, input="hi", stream_options=ASKS)
        deltas = [body for body in bodies(events) if body["type"].endswith(".delta")]
        assert "".join(delta["delta"] for delta in deltas) == SAID
        assert len(lengths(events)) == 1 and all("obfuscation" in delta for delta in deltas)
        assert [body["sequence_number"] for body in bodies(events)] == list(range(len(events)))
        response_id = bodies(events)[0]["response"]["id"]
        for follow in (f"{PATH}/{response_id}?stream=true&", f"{PATH}/{response_id}/events?"):
            async with served.session.get(f"{served.url}{follow}include_obfuscation=true") as again:
                assert len(lengths((await again.read()).split(b"\n\n"))) == 1
        for wrong, param in (
            ("?stream=yes", "stream"), ("?stream=true&include_obfuscation=yes", "include_obfuscation"),
            ("/events?include_obfuscation=2", "include_obfuscation"),
        ):  # fmt: skip
            status, body = await served.get(f"{PATH}/{response_id}{wrong}")
            assert (status, body["error"]["param"]) == (400, param)


async def test_a_lanes_frames_are_padded_for_the_response_that_asks(serve: Serve) -> None:
    async with serve(SAID) as served, served.session.ws_connect(served.url + PATH) as socket:
        for asks in (True, False, True):
            options = {"stream_options": ASKS} if asks else {}
            await socket.send_json({"type": "response.create", "input": "hi", "stream_id": "a", **options})
            frames: list[bytes] = []
            while b'"response.completed"' not in (frames or [b""])[-1]:
                frames.append((await socket.receive_str()).encode())
            deltas = [frame for frame in frames if b'text.delta"' in frame]
            assert len(lengths(deltas)) == asks and all(json.loads(frame)["stream_id"] == "a" for frame in deltas)


@pytest.mark.parametrize("framing", [EventStream(), EventStream(with_ids=True), SocketFrames("lane")])
def test_only_deltas_are_padded(framing: Framing) -> None:
    body = b'{"type":"response.completed","response":{}'
    assert Obfuscated(framing).event(b"response.completed", 3, body) == framing.event(b"response.completed", 3, body)
