"""Responses over WebSocket: lanes, our extensions, and the public bug reports WS-1 and WS-2."""

import asyncio
import json
import logging
import os
import random
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest
from aiohttp import WSMsgType

from asyncllm.client import AsyncClient, Session
from asyncllm.server.settings import Settings

from .conftest import Serve, Served, endless, until

PATH = "/v1/responses"
ROOMY = {"max_model_len": 2100, "num_pages": 4000, "page_size": 16, "max_running": 20}


class Socket:
    """A client that says what it likes and keeps what it hears."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.seen: list[dict[str, Any]] = []

    async def say(self, kind: str, **fields: Any) -> None:
        await self.socket.send_str(json.dumps({"type": kind, **fields}))

    async def create(self, stream_id: str | None = None, **fields: Any) -> None:
        lane = {} if stream_id is None else {"stream_id": stream_id}
        await self.say("response.create", **({"input": "hi", "temperature": 0} | lane | fields))

    async def hear(self) -> dict[str, Any]:
        message = await self.socket.receive(timeout=20)
        assert message.type is WSMsgType.TEXT, message
        event: dict[str, Any] = json.loads(message.data)
        self.seen.append(event)
        return event

    async def until(self, kind: str, stream_id: str | None = None) -> dict[str, Any]:
        while (event := await self.hear())["type"] != kind or event.get("stream_id") != stream_id:
            pass
        return event

    async def error(self) -> dict[str, Any]:
        """The next event, which is one."""
        event = await self.hear()
        assert event["type"] == "error", event
        assert set(event["error"]) == {"message", "type", "param", "code"}
        return event

    def text(self, stream_id: str | None = None) -> str:
        mine = [event for event in self.seen if event.get("stream_id") == stream_id]
        return "".join(event["delta"] for event in mine if event["type"] == "response.output_text.delta")

    async def good(self) -> None:
        """A good request on the same socket works."""
        await self.create("good", max_output_tokens=2)
        await self.until("response.created", "good")
        assert (await self.until("response.incomplete", "good"))["response"]["usage"]["output_tokens"] == 2


@asynccontextmanager
async def opened(served: Served) -> AsyncIterator[Socket]:
    async with served.session.ws_connect(served.url + PATH) as socket:
        yield Socket(socket)


async def answer(client: Socket, stream_id: str | None = None, **fields: Any) -> Any:
    """A response to the end."""
    await client.create(stream_id, **fields)
    return (await client.until("response.completed", stream_id))["response"]


@asynccontextmanager
async def session(served: Served) -> AsyncIterator[Session]:
    async with AsyncClient(served.url, "k") as client, client.responses.connect() as open_session:
        yield open_session


async def test_one_response_has_the_events_of_sse(serve: Serve) -> None:
    async with serve("Hello ďábelské 😀.") as served, opened(served) as client:
        await client.create()
        last = await client.until("response.completed")
        assert client.text() == last["response"]["output"][0]["content"][0]["text"] == "Hello ďábelské 😀."
        assert [event["sequence_number"] for event in client.seen] == list(range(len(client.seen)))
        assert all("stream_id" not in event for event in client.seen)
        async with served.session.post(served.url + PATH, json={"input": "hi", "stream": True}) as response:
            kinds = [line[7:].decode().strip() async for line in response.content if line.startswith(b"event: ")]
        assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(event["type"] for event in client.seen))


async def test_lanes_run_side_by_side_and_each_in_order(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, opened(served) as client:
        served.runner.hold()
        for lane, limit in (("a", 40), ("b", 30), ("a", 20), (None, 10)):
            await client.create(lane, max_output_tokens=limit)
        await until(lambda: served.llm.num_live == 3)  # the second of lane a waits for the first
        served.runner.let_go()
        while sum(event["type"] == "response.incomplete" for event in client.seen) < 4:
            await client.hear()
        in_a = [event for event in client.seen if event.get("stream_id") == "a"]
        kinds = [event["type"] for event in in_a]
        assert kinds.index("response.incomplete") < kinds.index("response.created", 1)
        assert len(client.text("a")) == 60 and len(client.text("b")) == 30 and len(client.text()) == 10


async def test_no_more_than_so_many_run_at_once_and_lanes_are_limited(serve: Serve) -> None:
    settings = Settings(max_active_per_socket=2, max_lanes=4, max_queued_per_socket=3)
    async with serve(endless, settings=settings, **ROOMY) as served, opened(served) as client:
        served.runner.hold()
        for i in range(4):
            await client.create(f"lane-{i}", max_output_tokens=3)
            await until(lambda i=i: served.llm.num_live == min(2, i + 1))
        await client.create("lane-4")
        while (refused := await client.hear())["type"] != "error":
            pass
        assert (refused["error"]["code"], refused["stream_id"]) == ("websocket_stream_limit_reached", "lane-4")
        assert served.llm.num_live == 2
        await client.create("lane-0", max_output_tokens=3)
        await client.create("lane-0")
        assert (await client.error())["error"]["code"] == "websocket_queue_full"
        served.runner.let_go()
        while sum(event["type"] == "response.incomplete" for event in client.seen) < 5:
            await client.hear()


async def test_an_old_socket_takes_nothing_new(serve: Serve) -> None:
    async with serve(settings=Settings(socket_lifetime_s=0)) as served, opened(served) as client:
        await client.create()
        assert (await client.error())["error"]["code"] == "websocket_connection_limit_reached"


async def test_too_many_sockets_are_refused_before_the_upgrade(serve: Serve) -> None:
    async with serve(settings=Settings(max_sockets=1)) as served, opened(served) as client:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await served.session.ws_connect(served.url + PATH)
        assert caught.value.status == 503
        await client.good()


async def test_foreign_pages_and_plain_gets_are_refused(serve: Serve) -> None:
    async with serve() as served:
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await served.session.ws_connect(served.url + PATH, headers={"Origin": "https://evil.example"})
        assert caught.value.status == 403
        async with served.session.ws_connect(served.url + PATH, headers={"Origin": served.url}) as socket:
            await Socket(socket).good()
        status, body = await served.get(PATH)
        assert (status, body["error"]["code"]) == (426, "upgrade_required")
        opening = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        key = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        lacking = {"Sec-WebSocket-Key": "x"}, key | {"Sec-WebSocket-Version": "12"}, key | {"Connection": "close"}
        for broken in lacking:
            async with served.session.get(served.url + PATH, headers=opening | broken) as response:
                assert (response.status, response.headers["Sec-WebSocket-Version"]) == (400, "13")
                assert "Connection: Upgrade" in (await response.json())["error"]["message"]


async def test_cancel(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, opened(served) as client:
        await client.create("a")
        await client.until("response.output_text.delta", "a")
        await client.say("response.cancel", stream_id="a")
        last = await client.until("response.incomplete", "a")
        assert last["response"]["status"] == "cancelled"
        assert last["response"]["output"][0]["content"][0]["text"] == client.text("a")
        await client.say("response.cancel", stream_id="a", response_id=last["response"]["id"])  # over: no news
        await client.say("response.cancel", stream_id="a")
        await client.say("response.cancel", response_id="resp_unknown")
        assert (await client.error())["error"]["code"] == "response_not_found"
        await client.create("b")
        await client.say("response.cancel", stream_id="b")  # perhaps before it has its response
        assert (await client.until("response.incomplete", "b"))["response"]["status"] == "cancelled"
        await served.idle()
        await client.good()


async def test_update_changes_what_runs(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, opened(served) as client:
        served.runner.hold(permits=6)
        await client.create("a", max_output_tokens=2000)
        await client.until("response.output_text.delta", "a")
        await client.say("response.update", stream_id="a", max_output_tokens=60, temperature=0.5)
        await client.say("response.update", stream_id="a", max_output_tokens=0)
        assert (await client.until("error", "a"))["error"]["param"] == "max_output_tokens"
        await client.say("response.update", stream_id="b", max_output_tokens=5)
        assert (await client.until("error", "b"))["error"]["code"] == "response_not_found"
        served.runner.let_go()
        last = await client.until("response.incomplete", "a")
        assert last["response"]["usage"]["output_tokens"] == len(client.text("a")) == 60
        assert [row.temperature for batch in served.runner.batches for row in batch.new_rows] == [0, 0.5]
        served.runner.hold(permits=6)
        await client.create("c")
        await client.until("response.output_text.delta", "c")
        await client.say("response.update", stream_id="c", stop=["xyz"])
        await client.say("response.update", stream_id="c", stop=[""])
        assert (await client.until("error", "c"))["error"]["param"] == "stop[0]"
        served.runner.let_go()
        assert (await client.until("response.completed", "c"))["response"]["status"] == "completed"
        assert "abcdefghijklmnopqrstuvw".endswith(client.text("c")[-5:])


async def test_a_killed_client_resumes_on_a_new_socket(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served:
        served.runner.hold(permits=10)
        async with session(served) as first:
            lane = first.lane("a")
            await lane.send({"type": "response.create", "input": "hi", "max_output_tokens": 200, "resumable": True})
            text, number, response_id = "", -1, ""
            while not text:
                event = await lane.recv()
                text, number = text + event.delta, event.sequence_number or number
                response_id = event.response.id if event.response is not None else response_id
            first._socket._response.connection.transport.abort()  # type: ignore[union-attr]
        async with session(served) as second:
            stream = await second.lane("z").attach(response_id, starting_after=number)
            served.runner.let_go()
            events = [event async for event in stream]
        assert [event.sequence_number for event in events] == list(range(number + 1, number + 1 + len(events)))
        assert events[-1].response is not None
        assert text + "".join(event.delta for event in events) == events[-1].response.output_text
        assert len(events[-1].response.output_text) == 200
        await served.idle()


async def test_a_client_that_says_goodbye_does_not_resume(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served:
        async with opened(served) as client:
            await client.create(resumable=True)
            await client.until("response.output_text.delta")
        await served.idle()


async def test_a_response_is_taken_over(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, opened(served) as first, opened(served) as second:
        served.runner.hold()
        await first.create("a", max_output_tokens=50)
        response_id = (await first.until("response.created", "a"))["response"]["id"]
        await second.say("response.attach", response_id=response_id)
        assert (await first.until("error", "a"))["error"]["code"] == "response_taken"
        served.runner.let_go()
        await second.until("response.incomplete")
        assert len(second.text()) == 50
        await first.good()


async def test_an_update_right_behind_its_create_comes_in_order(serve: Serve) -> None:
    async with serve(endless, settings=Settings(max_active_per_socket=1), **ROOMY) as served, opened(served) as client:
        served.runner.hold()
        for lane, limit in (("a", 20), ("b", 7)):  # b has to wait for a
            await client.create(lane, max_output_tokens=2000)
            await client.say("response.update", stream_id=lane, temperature=3)
            await client.say("response.update", stream_id=lane, max_output_tokens=500)
            await client.say("response.update", stream_id=lane, max_output_tokens=limit)
        await client.say("response.update", stream_id="c")  # nothing is there, so all before it has been heard
        assert (await client.until("error", "c"))["error"]["code"] == "response_not_found"
        served.runner.let_go()
        for lane, limit in (("a", 20), ("b", 7)):
            last = await client.until("response.incomplete", lane)
            assert last["response"]["usage"]["output_tokens"] == len(client.text(lane)) == limit
        errors = [event for event in client.seen if event["type"] == "error"]
        told = [event["error"]["param"] for event in errors if event["stream_id"] != "c"]
        assert told == ["temperature"] * 2
        await client.say("response.update", stream_id="a", max_output_tokens=9)  # it is over
        assert (await client.error())["error"]["code"] == "response_not_found"
        await served.idle()


async def test_what_is_not_stored_can_be_gone_on_from_on_its_socket_alone(serve: Serve) -> None:
    async with serve("Hello.", **ROOMY) as served, opened(served) as other:
        async with opened(served) as client:
            first = await answer(client, store=False)
            second = await answer(client, "fork", store=False, previous_response_id=first["id"])
            third = await answer(client, store=False, previous_response_id=second["id"])
            sizes = [one["usage"]["input_tokens"] for one in (first, second, third)]
            assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 0
            assert (await served.get(f"{PATH}/{first['id']}"))[0] == 404
            for send in ("response.attach", "response.cancel"):
                await client.say(send, response_id=first["id"])
                assert (await client.error())["error"]["code"] == "response_not_found"
            await other.create(previous_response_id=first["id"])
            assert (await other.error())["error"]["code"] == "previous_response_not_found"
            whole = await served.post(PATH, {"input": "x", "previous_response_id": first["id"]})
            assert whole.error["code"] == "previous_response_not_found"


async def test_what_is_kept_for_a_socket_goes_with_it(serve: Serve) -> None:
    async with serve("Hello.", settings=Settings(resume_grace_s=0), **ROOMY) as served:
        async with opened(served) as client:
            where = f"{PATH}/{(await answer(client, store=False, resumable=True))['id']}"
            assert (await served.get(where))[0] == 200
        async with asyncio.timeout(20):
            while (await served.get(where))[0] != 404:  # noqa: ASYNC110
                await asyncio.sleep(0.001)


async def test_what_is_kept_for_a_socket_counts_among_the_retained_bytes(serve: Serve) -> None:
    async with serve(settings=Settings(max_retained_bytes=5000)) as served, opened(served) as client:
        first, *_, last = [await answer(client, store=False) for _ in range(4)]
        await client.create(previous_response_id=first["id"])
        assert (await client.error())["error"]["code"] == "previous_response_not_found"
        await answer(client, store=False, previous_response_id=last["id"])


async def test_a_warm_up_computes_its_input_and_says_nothing(serve: Serve) -> None:
    async with serve("Hello.", **ROOMY) as served, opened(served) as client:
        text = "a long story " * 20
        await client.create(generate=False, input=text, progress=True, min_tokens=5, max_output_tokens=9)
        warm = (await client.until("response.completed"))["response"]
        kinds = [event["type"] for event in client.seen if event["type"] != "response.progress"]
        assert kinds == ["response.created", "response.in_progress", "response.completed"]
        assert (warm["output"], warm["usage"]["output_tokens"]) == ([], 0)
        assert [event["sequence_number"] for event in client.seen if event["type"] == kinds[-1]] == [2]
        assert served.llm.totals.num_prompt_tokens == warm["usage"]["input_tokens"] > len(text) // 2
        went_on = await answer(client, previous_response_id=warm["id"])
        cached = went_on["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= (warm["usage"]["input_tokens"] - 16) // 16 * 16 - 16 > 0
        await client.say("response.attach", response_id=warm["id"])
        assert [(await client.hear())["type"] for _ in range(3)] == kinds
        await client.create(generate=False, temperature=3)
        assert (await client.error())["error"]["param"] == "temperature"
        assert await served.get(f"{PATH}/{warm['id']}") == (200, warm)


async def test_attaching_to_what_has_ended_says_it_again(serve: Serve) -> None:
    async with serve("Hello.", **ROOMY) as served, opened(served) as client:
        ended = await answer(client)
        await client.say("response.attach", response_id=ended["id"], stream_id="again")
        assert (await client.until("response.completed", "again"))["response"] == ended
        assert client.text("again") == "Hello."


async def test_the_past_and_progress(serve: Serve) -> None:
    async with serve("Hello.", **ROOMY) as served, opened(served) as client:
        await client.create(generate=False)
        warm = (await client.until("response.completed"))["response"]
        await client.create(previous_response_id=warm["id"], progress=True)
        last = await client.until("response.completed")
        assert last["response"]["previous_response_id"] == warm["id"]
        assert any(event["type"] == "response.progress" for event in client.seen)
        await client.create(previous_response_id="resp_none")
        assert (await client.error())["error"]["code"] == "previous_response_not_found"


async def test_sigterms_drain_closes_with_1001_when_the_last_response_is_done(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, opened(served) as busy, opened(served) as idle:
        served.runner.hold(permits=4)
        await busy.create(max_output_tokens=30)
        await busy.until("response.output_text.delta")
        draining = asyncio.create_task(served.llm.drain(20))
        message = await idle.socket.receive()
        assert (message.type, message.data) == (WSMsgType.CLOSE, 1001)
        await busy.create("late")
        assert (await busy.error())["error"]["code"] == "draining"
        served.runner.let_go()
        await busy.until("response.incomplete")
        assert (await busy.socket.receive()).data == 1001
        await draining
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await served.session.ws_connect(served.url + PATH)
        assert caught.value.status == 503


async def test_a_failing_step_fails_its_responses_and_not_the_socket(serve: Serve) -> None:
    async with serve(endless) as served, opened(served) as client:

        def fail(batch: object) -> None:
            served.runner.on_result = lambda batch: None
            raise RuntimeError("no")

        served.runner.on_result = fail
        await client.create("a")
        assert (await client.until("response.failed", "a"))["response"]["error"]["code"] == "server_error"
        await client.good()


async def test_a_socket_that_is_not_read_is_bounded_and_cut_off(serve: Serve) -> None:
    settings = Settings(send_timeout_s=0.05)
    large = {"metadata": {"filler": "x" * 30_000}}  # which the first two events and the last repeat
    async with serve(endless, settings=settings, **ROOMY) as served:
        served.runner.hold()
        raw = await handshake(served)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        for i in range(16):
            create = {"type": "response.create", "input": "x", "stream_id": f"{i}"} | large
            raw.sendall(frame(json.dumps(create).encode()))
        await until(lambda: served.llm.totals.finished["abort"] == 16)
        served.runner.let_go()
        async with opened(served) as client:
            await client.good()
        await served.idle()
        raw.close()


# -- the openai package --


async def test_the_openai_packages_socket(serve: Serve) -> None:
    pytest.importorskip("websockets")  # openai[realtime]
    async with (
        serve("Hello there.") as served,
        openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="k") as client,
        client.responses.connect() as connection,
    ):
        for _ in range(2):
            await connection.response.create(model="scripted", input="hi")
            texts = []
            async for event in connection:
                if event.type == "response.output_text.delta":
                    texts.append(event.delta)
                if event.type == "response.completed":
                    break
            assert "".join(texts) == event.response.output_text == "Hello there."


# -- WS-1, WS-2 --


def frame(payload: bytes, opcode: int = 1, *, fin: bool = True) -> bytes:
    """A client's frame, masked."""
    mask, first = os.urandom(4), (0x80 if fin else 0) | opcode
    num = len(payload)
    head = bytes([first, 0x80 | num]) if num < 126 else struct.pack("!BBH", first, 0x80 | 126, num)
    return head + mask + bytes(byte ^ mask[i % 4] for i, byte in enumerate(payload))


REQUEST = f"GET {PATH} HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
REQUEST += "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"


async def handshake(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    raw = await asyncio.to_thread(socket.create_connection, (host, int(port)))
    raw.sendall(REQUEST.encode())
    assert b"101" in await asyncio.to_thread(raw.recv, 12)
    return raw


CREATE = frame(json.dumps({"type": "response.create", "input": "hi", "max_output_tokens": 2000}).encode())
CLOSES = [struct.pack("!H", code) for code in (1000, 1001, 4999, 999)] + [
    b"", b"\x03\xe8" + b"x" * 123, b"\x03\xe8\xff\xfe", b"\x03",
]  # fmt: skip


async def cut(served: Served, way: str, rng: random.Random) -> None:
    raw = await handshake(served)
    raw.sendall(CREATE[: rng.randrange(1, len(CREATE))] if way == "half" else CREATE)
    if rng.random() < 0.5:
        await asyncio.sleep(0)
    if way == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    elif way == "close":
        raw.sendall(frame(rng.choice(CLOSES), 8))
    elif way == "twice":
        raw.sendall(frame(rng.choice(CLOSES), 8) * 2)
    raw.close()


@pytest.mark.parametrize("way", ["reset", "close", "half", "twice"])
async def test_ws_1_a_socket_cut_the_wrong_way(serve: Serve, caplog: pytest.LogCaptureFixture, way: str) -> None:
    rng = random.Random(way)
    async with serve(endless, **ROOMY) as served:
        for _ in range(50):
            async with asyncio.TaskGroup() as tasks:
                for _ in range(4):
                    tasks.create_task(cut(served, way, rng))
        await served.idle()
        await served.alive()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_ws_1_leaving_during_the_upgrade(serve: Serve, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(endless) as served:
        host, port = served.url.removeprefix("http://").split(":")
        for i in range(50):
            with socket.create_connection((host, int(port))) as raw:
                raw.sendall(REQUEST.encode()[: 20 + 7 * i])
        await served.alive()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize(
    ("sent", "code"),
    [(frame(b'{"type": "\xff"}'), 1007), (frame(b"\xff\xfe"), 1007), (frame(b"x", 3), 1002), (b"\xc1\x81abcdx", 1002)],
)
async def test_ws_1_protocol_faults_close_with_their_code(serve: Serve, sent: bytes, code: int) -> None:
    async with serve() as served:
        raw = await handshake(served)
        raw.sendall(sent)
        heard = b""
        while data := await asyncio.to_thread(raw.recv, 4096):
            heard += data
            if struct.pack("!BBH", 0x88, 2, code)[2:] in heard and b"\x88" in heard:
                break
        assert b"\x88" in heard and struct.pack("!H", code) in heard, heard[-40:]
        raw.close()
        await served.alive()


@pytest.mark.parametrize(
    "text",
    ["hello", "{bad", "[]", "null", "", "3", '"x"', "{}", '{"type": 3}', '{"type": "no.such"}', '{"type": null}',
     '{"type": "response.create"}', '{"type": "response.create", "input": 3}', '{"type": "response.attach"}',
     '{"type": "response.create", "input": "x", "stream_id": ""}', '{"type": "response.cancel", "stream_id": "a b"}',
     '{"type": "response.create", "input": "x", "stream_id": 3}', '{"type": "response.create", "input": "x", "n": 3}',
     '{"type": "response.create", "input": "x", "model": "other"}', "[" * 100_000],
)  # fmt: skip
async def test_ws_2_bad_text_is_answered_and_the_socket_stays(serve: Serve, text: str) -> None:
    async with serve(endless) as served, opened(served) as client:
        await client.socket.send_str(text)
        error = await client.error()
        assert 400 <= error["status"] < 500
        await client.good()


async def test_ws_2_binary_is_answered_and_the_socket_stays(serve: Serve) -> None:
    async with serve(endless) as served, opened(served) as client:
        for data in (b'{"type": "response.create", "input": "x"}', bytes(range(256))):
            await client.socket.send_bytes(data)
            assert (await client.error())["error"]["code"] == "binary_not_supported"
        await client.good()


async def test_ws_2_fragments_with_a_ping_between_are_one_message(serve: Serve) -> None:
    async with serve(endless) as served:
        raw = await handshake(served)
        text = b'{"type": "response.create", "input": "x", "max_output_tokens": 1}'
        first, second = frame(text[:20], 1, fin=False), frame(text[20:40], 0, fin=False)
        raw.sendall(first + frame(b"p", 9) + second + frame(text[40:], 0))
        heard = b""
        while b"response.incomplete" not in heard:
            heard += await asyncio.to_thread(raw.recv, 4096)
        assert b"\x8a\x01p" in heard
        raw.close()


async def test_ws_2_a_request_while_one_runs_with_the_same_lane_and_another(serve: Serve) -> None:
    async with serve(endless, **ROOMY) as served, opened(served) as client:
        await client.create("same", max_output_tokens=20)
        await client.create("same", max_output_tokens=20)
        await client.create("other", max_output_tokens=20)
        while sum(event["type"] == "response.incomplete" for event in client.seen) < 3:
            await client.hear()
        assert (len(client.text("same")), len(client.text("other"))) == (40, 20)


async def test_what_waits_on_a_socket_is_bounded(serve: Serve) -> None:
    settings = Settings(max_active_per_socket=1, max_body_bytes=500)
    async with serve(endless, settings=settings, **ROOMY) as served, opened(served) as client:
        served.runner.hold()
        await client.create("a", max_output_tokens=3)
        await until(lambda: served.llm.num_live == 1)
        await client.create("b", input="x" * 200, max_output_tokens=3)
        await client.create("c", input="x" * 200, max_output_tokens=3)  # small enough alone
        assert (await client.until("error", "c"))["error"]["code"] == "websocket_queue_full"
        for _ in range(100):  # no more is kept of them than of one
            await client.say("response.update", stream_id="b", stop=[""])
        told = [await client.until("error", "b") for _ in range(100)]
        assert {event["error"]["param"] for event in told} == {"stop[0]"}
        await client.say("response.update", stream_id="b", max_output_tokens=9)
        await client.say("response.update", stream_id="b", stop=["never"])
        served.runner.let_go()
        last = await client.until("response.incomplete", "b")
        assert last["response"]["usage"]["output_tokens"] == 9
        await served.idle()


async def test_nothing_is_behind_an_event_that_has_not_come(serve: Serve) -> None:
    async with serve("Hello.", **ROOMY) as served, opened(served) as client:
        response = await answer(client)
        last = client.seen[-1]["sequence_number"]
        for after in (last, last + 1, 10**9):
            await client.say("response.attach", response_id=response["id"], starting_after=after)
            assert (await client.error())["error"]["param"] == "starting_after"
            status, body = await served.get(f"{PATH}/{response['id']}?stream=true&starting_after={after}")
            assert (status, body["error"]["param"]) == (400, "starting_after")
        await client.say("response.attach", response_id=response["id"], starting_after=-1)
        assert (await client.error())["error"]["param"] == "starting_after"
        await client.say("response.attach", response_id=response["id"], starting_after=last - 1)
        assert (await client.hear())["type"] == "response.completed"
