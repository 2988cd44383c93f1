"""The WebSocket session against a fake server that speaks OpenAI's Responses mode: lanes, errors, limits, closes."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from asyncllm.client import (
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncClient,
    AuthenticationError,
    Limits,
    Session,
    Timeout,
    WebSocketClosedError,
    WebSocketQueueFullError,
)

from .test_stream import response_events

Answer = Callable[["Peer", dict[str, Any]], Awaitable[None]]


class Peer:
    """The server's end of one socket."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.socket = socket
        self.received: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

    async def send(self, event: dict[str, Any], stream_id: str | None = None) -> None:
        lane = {} if stream_id is None else {"stream_id": stream_id}
        await self.socket.send_str(json.dumps(event | lane))

    async def answer(self, stream_id: str | None, *texts: str) -> None:
        for event in response_events(*texts):
            await self.send(event, stream_id)

    async def error(self, code: str, stream_id: str | None = None) -> None:
        error = {"type": "invalid_request_error", "code": code, "message": f"it is {code}", "param": None}
        await self.send({"type": "error", "status": 400, "error": error}, stream_id)


@contextlib.asynccontextmanager
async def session(answer: Answer | None = None, **options: Any) -> AsyncIterator[tuple[Session, Peer]]:
    """A session, and its peer, who answers each client event with `answer`, or leaves that to the test."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def upgrade(request: web.Request) -> web.WebSocketResponse:
        assert request.headers["Authorization"] == "Bearer k"
        socket = web.WebSocketResponse(compress=False)
        await socket.prepare(request)
        peer = Peer(socket)
        peers.put_nowait(peer)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                event = json.loads(message.data)
                peer.received.put_nowait(event)
                if answer is not None:
                    await answer(peer, event)
        return socket

    app = web.Application()
    app.router.add_get("/v1/responses", upgrade)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    limits = options.pop("limits", None)
    try:
        async with AsyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}", "k", **options) as client:
            async with client.responses.connect(limits) as opened:
                yield opened, await peers.get()
    finally:
        await runner.cleanup()


async def test_one_response_as_the_same_stream_as_over_sse() -> None:
    async def answer(peer: Peer, event: dict[str, Any]) -> None:
        await peer.answer(event.get("stream_id"), "Hel", "lo")

    async with session(answer) as (opened, peer):
        async with opened.stream(model="m", input="Hi") as running:
            assert [text async for text in running.text_stream] == ["Hel", "lo"]
            response = await running.get_final_response()
        assert (response.output_text, response.status, running.request_id) == ("Hello", "completed", "resp_1")
        sent = peer.received.get_nowait()
        assert sent == {"type": "response.create", "model": "m", "input": "Hi", "stream_id": sent["stream_id"]}
        events = [event async for event in await opened.create(input="again")]
        assert [event.sequence_number for event in events] == list(range(6))


async def test_lanes_run_beside_each_other_and_events_find_theirs() -> None:
    async with session() as (opened, peer):
        streams = [await opened.create(input=str(i)) for i in range(3)]
        ids = [(await peer.received.get())["stream_id"] for _ in streams]
        assert len(set(ids)) == 3
        for events in zip(*[response_events(f"{i}a", f"{i}b") for i in range(3)], strict=True):
            for stream_id, event in zip(ids, events, strict=True):
                await peer.send(event, stream_id)
        for i, stream in reversed(list(enumerate(streams))):
            assert "".join([event.delta async for event in stream]) == f"{i}a{i}b"


async def test_lanes_of_its_own_are_used_again() -> None:
    async def answer(peer: Peer, event: dict[str, Any]) -> None:
        await peer.answer(event["stream_id"], "x")

    async with session(answer, limits=Limits(max_lanes=1)) as (opened, peer):
        for _ in range(5):
            async with opened.stream(input="Hi") as running:
                assert await running.get_final_text() == "x"
        assert {event["stream_id"] for event in iter_queue(peer.received)} == {"own-0"}


def iter_queue(queue: asyncio.Queue[dict[str, Any]]) -> list[dict[str, Any]]:
    return [queue.get_nowait() for _ in range(queue.qsize())]


async def test_named_lanes_and_the_default_one() -> None:
    async with session() as (opened, peer):
        lane = opened.lane("talk")
        assert opened.lane("talk") is lane
        await lane.send({"type": "response.create", "input": "a"})
        await opened.default.send({"type": "response.create", "input": "b"})
        assert await peer.received.get() == {"type": "response.create", "input": "a", "stream_id": "talk"}
        assert await peer.received.get() == {"type": "response.create", "input": "b"}
        await peer.answer(None, "default")
        await peer.answer("talk", "named")
        await peer.answer("nobody", "dropped")
        assert (await opened.default.get_final_response()).output_text == "default"
        assert (await lane.recv()).type == "response.created"
        assert (await lane.get_final_response()).output_text == "named"
        for bad in ("", "a b", "x" * 257, "ä"):
            with pytest.raises(ValueError, match="stream_id"):
                opened.lane(bad)


async def test_a_lane_runs_one_response_at_a_time() -> None:
    async with session() as (opened, peer):
        lane = opened.lane("a")
        running = await lane.create(input="x")
        with pytest.raises(RuntimeError, match="running"):
            await lane.create(input="y")
        await peer.answer("a", "x")
        assert len([event async for event in running]) == 5
        await lane.create(input="y")


async def test_a_waiting_read_that_is_cancelled_loses_nothing() -> None:
    async with session() as (opened, peer):
        lane = opened.lane("a")
        await lane.send({"type": "response.create"})
        waiting = asyncio.ensure_future(lane.recv())
        await asyncio.wait([waiting], timeout=0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await peer.answer("a", "x")
        assert (await lane.get_final_response()).output_text == "x"


async def test_our_extensions() -> None:
    async with session() as (opened, peer):
        lane = opened.lane("a")
        running = await lane.attach("resp_1", starting_after=7)
        await lane.update(max_output_tokens=5, stop=["x"])
        await lane.cancel()
        assert [await peer.received.get() for _ in range(3)] == [
            {"type": "response.attach", "response_id": "resp_1", "starting_after": 7, "stream_id": "a"},
            {"type": "response.update", "max_output_tokens": 5, "stop": ["x"], "stream_id": "a"},
            {"type": "response.cancel", "stream_id": "a"},
        ]
        # An error behind the response's beginning is about the update: handed on, the response goes on.
        events = response_events("x")
        await peer.send(events[0], "a")
        await peer.error("too_late", "a")
        for event in events[1:]:
            await peer.send(event, "a")
        types = [event.type async for event in running]
        assert types[1] == "error"
        assert types[-1] == "response.completed"


async def test_leaving_a_stream_cancels_its_response_and_frees_the_lane() -> None:
    async with session() as (opened, peer):
        async with await opened.create(input="x") as running:
            stream_id = (await peer.received.get())["stream_id"]
            events = response_events("a", "b")
            for event in events[:4]:
                await peer.send(event, stream_id)
            assert (await anext(running)).type == "response.created"
        cancel = {"type": "response.cancel", "response_id": "resp_1", "stream_id": stream_id}
        assert await peer.received.get() == cancel
        # What still comes of it is nobody's; a new response gets a lane without remains.
        for event in events[4:]:
            await peer.send(event, stream_id)
        other = await opened.create(input="y")
        other_id = (await peer.received.get())["stream_id"]
        await peer.answer(other_id, "new")
        assert "".join([event.delta async for event in other]) == "new"


async def test_letting_a_stream_go_cancels_too() -> None:
    async with session() as (opened, peer):
        running = await opened.create(input="x")
        stream_id = (await peer.received.get())["stream_id"]
        del running
        assert await peer.received.get() == {"type": "response.cancel", "stream_id": stream_id}


async def test_an_error_frame_ends_its_request_and_keeps_the_socket() -> None:
    async def answer(peer: Peer, event: dict[str, Any]) -> None:
        if event["input"] == "bad":
            await peer.error("no_such_model", event["stream_id"])
        else:
            await peer.answer(event["stream_id"], "good")

    async with session(answer) as (opened, _):
        with pytest.raises(APIError, match="it is no_such_model") as caught:
            async with opened.stream(input="bad") as running:
                await running.until_done()
        assert (caught.value.code, caught.value.type) == ("no_such_model", "invalid_request_error")
        async with opened.stream(input="good") as running:
            assert await running.get_final_text() == "good"


async def test_an_error_about_the_connection_fails_every_lane() -> None:
    async with session() as (opened, peer):
        streams = [await opened.create(input="x") for _ in range(2)]
        await peer.error("websocket_connection_limit_reached")
        for stream in streams:
            with pytest.raises(APIError, match="limit_reached"):
                await anext(stream)
        assert (await opened.default.recv()).type == "error"


@pytest.mark.parametrize("code", [1001, 1011, 1013])
async def test_a_close_gives_its_code_after_what_had_come(code: int) -> None:
    async with session() as (opened, peer):
        running = await opened.create(input="x")
        stream_id = (await peer.received.get())["stream_id"]
        await peer.send(response_events("a")[0], stream_id)
        closing = asyncio.ensure_future(peer.socket.close(code=code, message=b"bye"))
        assert (await anext(running)).type == "response.created"
        with pytest.raises(WebSocketClosedError, match="bye") as caught:
            await anext(running)
        assert caught.value.close_code == code
        with pytest.raises(WebSocketClosedError):
            await opened.create(input="y")
        await closing


async def test_a_binary_frame_and_rubbish_end_the_session() -> None:
    for send in (lambda peer: peer.socket.send_bytes(b"x"), lambda peer: peer.socket.send_str("{not json")):
        async with session() as (opened, peer):
            running = await opened.create(input="x")
            await send(peer)
            with pytest.raises(WebSocketClosedError):
                await anext(running)


async def test_a_lane_that_is_not_read_fails_alone_and_is_cancelled() -> None:
    async with session(limits=Limits(max_bytes_per_lane=2000)) as (opened, peer):
        slow, live = await opened.create(input="slow"), await opened.create(input="live")
        slow_id, live_id = [(await peer.received.get())["stream_id"] for _ in range(2)]
        for event in response_events(*["x" * 100] * 20)[:-1]:
            await peer.send(event, slow_id)
        assert await peer.received.get() == {"type": "response.cancel", "stream_id": slow_id}
        await peer.answer(live_id, "live")
        assert "".join([event.delta async for event in live]) == "live"
        with pytest.raises(WebSocketQueueFullError):
            await anext(slow)


async def test_lanes_are_bounded() -> None:
    async with session(limits=Limits(max_lanes=2)) as (opened, _):
        opened.lane("a")
        await opened.create(input="x")
        with pytest.raises(WebSocketQueueFullError, match="2 lanes"):
            await opened.create(input="y")


async def test_silence_is_bounded() -> None:
    async with session(timeout=Timeout(read=0.1)) as (opened, _):
        with pytest.raises(APITimeoutError):
            await anext(await opened.create(input="x"))


async def test_a_refused_upgrade_has_its_status() -> None:
    async def refuse(request: web.Request) -> web.Response:
        return web.Response(status=401, headers={"X-Request-Id": "r"})

    app = web.Application()
    app.router.add_get("/v1/responses", refuse)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with AsyncClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        with pytest.raises(AuthenticationError) as caught:
            async with client.responses.connect():
                pass
    assert isinstance(caught.value, APIStatusError)
    assert caught.value.headers["x-request-id"] == "r"
    await runner.cleanup()
