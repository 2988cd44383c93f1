"""The load generator over WebSocket: what it measures, how lanes share sockets, and what may go wrong."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from asyncllm.client import load, plan
from asyncllm.client.plan import Load, Options, Wording
from asyncllm.client.socket_probe import SocketPool
from asyncllm.client.tally import Measured, Tally, decode
from asyncllm.server.app import listening
from asyncllm.text.chat import ChatTemplate
from asyncllm.text.tokenizer import Tokenizer
from tests.fakes import engine_config, scripted, scripted_llm
from tests.text import toys

from .fake import Act, Exchange, json_reply, raw_server
from .test_load import bench_lines

Play = Callable[["Peer", dict[str, Any]], Awaitable[object]]
DELTA = "response.output_text.delta"
HEAD = plan._head(plan.settle(Options(url="http://h/v1", transport="websocket")))
CREATE = b'{"type":"response.create","input":"x"}'


class Peer:
    """The server's end of one socket."""

    def __init__(self, socket: web.WebSocketResponse) -> None:
        self.socket = socket

    async def say(self, kind: str, event: dict[str, Any], **fields: Any) -> None:
        lane = {} if "stream_id" not in event else {"stream_id": event["stream_id"]}
        await self.socket.send_json({"type": kind, **fields, **lane})

    async def end(self, event: dict[str, Any], num_output: int, kind: str = "response.completed") -> None:
        usage = {"input_tokens": 7, "output_tokens": num_output, "total_tokens": 7 + num_output}
        await self.say(kind, event, response={"id": "r", "error": None, "usage": usage})


async def answer(peer: Peer, event: dict[str, Any]) -> None:
    await peer.say("response.created", event, response={"id": "r"})
    for text in ("a", "b", "c"):
        await peer.say(DELTA, event, delta=text)
    await peer.say("response.output_text.done", event, text="abc")
    await peer.end(event, 3)


@asynccontextmanager
async def pool(play: Play = answer, lanes: int = 1) -> AsyncIterator[tuple[SocketPool, list[Peer]]]:
    peers: list[Peer] = []
    playing: set[asyncio.Task[object]] = set()

    async def upgrade(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        peers.append(peer := Peer(socket))
        async for message in socket:
            assert message.type is WSMsgType.TEXT
            playing.add(asyncio.ensure_future(play(peer, json.loads(message.data))))
        return socket

    app = web.Application()
    app.router.add_get("/v1/responses", upgrade)
    runner = web.AppRunner(app, shutdown_timeout=1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    sockets = SocketPool("127.0.0.1", runner.addresses[0][1], None, HEAD, lanes)
    try:
        yield sockets, peers
    finally:
        sockets.close()
        await asyncio.gather(*playing, return_exceptions=True)
        await runner.cleanup()


def tallied(*events: dict[str, Any]) -> tuple[Measured, Tally]:
    tally = Tally(measured := Measured())
    for now_s, event in enumerate(events, 1):
        tally.take(decode(json.dumps(event)), float(now_s))
    return measured, tally


def test_a_response_is_timed_by_its_deltas() -> None:
    usage = {"input_tokens": 5, "output_tokens": 9}
    measured, tally = tallied(
        {"type": "response.created", "response": {}}, {"type": DELTA}, {"type": DELTA},
        {"type": "response.output_text.done"}, {"type": "response.incomplete", "response": {"usage": usage}},
    )  # fmt: skip
    assert (measured.first_s, measured.last_s, measured.gaps_s) == (2, 3, [1])
    assert (measured.num_prompt_tokens, measured.num_output_tokens, measured.error) == (5, 9, None)
    assert tally.done


@pytest.mark.parametrize(
    "event",
    [
        {"type": "error", "error": {"message": "no"}},
        {"type": "error", "message": "no"},
        {"type": "response.failed", "response": {"error": {"code": "server_error", "message": "no"}}},
    ],
)
def test_what_a_response_fails_with(event: dict[str, Any]) -> None:
    measured, tally = tallied({"type": DELTA}, event)
    assert (measured.error, tally.done) == ("no", True)


async def test_a_socket_serves_one_after_another_and_two_at_once_have_one_each() -> None:
    async with pool() as (sockets, peers):
        first = await sockets.ask(CREATE, 0.0)
        both = await asyncio.gather(sockets.ask(CREATE, 0.0), sockets.ask(CREATE, 0.0))
        assert len(peers) == 2
        for one in (first, *both):
            assert (one.num_prompt_tokens, one.num_output_tokens, one.error) == (7, 3, None)
            assert one.sent_s <= one.first_s <= one.last_s and len(one.gaps_s) == 2
            assert not one.tokens_are_events


async def test_lanes_share_a_socket_and_events_find_theirs() -> None:
    begun = asyncio.Event()
    asked: list[dict[str, Any]] = []

    async def together(peer: Peer, event: dict[str, Any]) -> None:
        asked.append(event)
        if len(asked) == 6:
            begun.set()
        await begun.wait()
        for _ in range(place(event)):
            await peer.say(DELTA, event, delta="x")
        await peer.end(event, place(event))

    def place(event: dict[str, Any]) -> int:
        return 1 + int(event["stream_id"][-1])

    async with pool(together, lanes=4) as (sockets, peers):
        measured = await asyncio.gather(*[sockets.ask(CREATE, 0.0) for _ in range(6)])
    assert len(peers) == 2
    assert sorted(map(place, asked)) == [1, 1, 2, 2, 3, 4]
    assert [one.num_output_tokens for one in measured] == [1, 2, 3, 4, 1, 2]
    assert [len(one.gaps_s) + 1 for one in measured] == [1, 2, 3, 4, 1, 2]


async def test_pings_are_answered_and_a_close_has_its_code() -> None:
    async def ping_and_close(peer: Peer, event: dict[str, Any]) -> None:
        await peer.socket.ping(b"are you there")
        await peer.say(DELTA, event, delta="x")
        await peer.socket.close(code=1013)

    async with pool(ping_and_close) as (sockets, peers):
        assert (await sockets.ask(CREATE, 0.0)).error == "the server closed the socket with 1013"
        assert (await sockets.ask(CREATE, 0.0)).error == "the server closed the socket with 1013"
        assert len(peers) == 2  # a closed socket is not used again


async def test_errors_end_their_lane_alone_unless_they_are_of_none() -> None:
    async def refuse(peer: Peer, event: dict[str, Any]) -> None:
        if event["stream_id"] == "lane-0":
            await peer.say("error", event, error={"message": "no"})
        else:
            await peer.say("error", {}, error={"message": "all"})

    async with pool(refuse, lanes=2) as (sockets, _):
        one, other = await asyncio.gather(*[sockets.ask(CREATE, 0.0) for _ in range(2)])
    assert one.error == "no"
    assert other.error is not None and "all" in other.error


async def test_no_server_a_refused_upgrade_and_no_websocket_are_told() -> None:
    async def error_of(port: int) -> str | None:
        sockets = SocketPool("127.0.0.1", port, None, HEAD, 1)
        measured = await sockets.ask(CREATE, 0.0)
        sockets.close()
        return measured.error

    assert "connect" in str(await error_of(1)).lower()
    full = json_reply({"error": {"message": "full"}}, "503 No")
    for act, error in ((full, "503: full"), (json_reply({}), "an empty stream"), (switching(b"\xff\xff"), "masked")):
        async with raw_server(act) as server:
            assert error in str(await error_of(int(server.url.split(":")[2].removesuffix("/v1"))))


def switching(data: bytes) -> Act:
    async def act(exchange: Exchange) -> None:
        await exchange.send(b"HTTP/1.1 101 Switching Protocols\r\n\r\n" + data)
        await exchange.left()

    return act


def test_what_goes_together() -> None:
    settled = plan.settle(Options(url="u", transport="websocket"))
    assert (settled.endpoint, settled.prompt) == ("responses", "text")
    assert plan.settle(Options(url="u")).prompt == "ids"
    for bad in (
        {"transport": "websocket", "endpoint": "chat"}, {"lanes": 2}, {"endpoint": "responses", "prompt": "ids"},
        {"transport": "websocket", "lanes": 0},
    ):  # fmt: skip
        with pytest.raises(ValueError, match="WebSocket|token ids"):
            plan.settle(Options(url="u", **bad))


def test_the_same_lengths_over_either_transport_and_another_prompt_in_each_run() -> None:
    options = Options(url="http://h/v1", prompt_len=(100, 1024), output_len=(100, 1024))
    lengths = plan.lengths(options)
    assert (sum(prompt for prompt, _ in lengths), sum(output for _, output in lengths)) == (142_827, 133_966)
    few = {"num_requests": 5, "prompt_len": (5, 20), "output_len": (1, 9)}
    sse = plan.settle(Options(url="http://h/v1", **few))
    socket = plan.settle(Options(url="http://h/v1", transport="websocket", wording=Wording(around=3), **few))
    asked = [json.loads(body) for body in plan.bodies(sse)]
    created = [json.loads(body) for body in plan.bodies(socket)]
    assert [len(body["prompt"]) for body in asked] == [len(body["input"].split()) + 3 for body in created]
    assert [body["max_tokens"] for body in asked] == [body["max_output_tokens"] for body in created]
    assert {body["type"] for body in created} == {"response.create"}
    assert [body["prompt"] for body in asked] != [json.loads(body)["prompt"] for body in plan.bodies(sse, 1)]


async def test_the_words_are_counted_by_the_server() -> None:
    def counting(num_tokens: int) -> Any:
        return json_reply({"id": "r", "object": "response", "usage": {"input_tokens": num_tokens, "output_tokens": 1}})

    options = Options(url="u", model="m", endpoint="responses")
    num = len(plan.WORDS)
    async with raw_server(counting(9 + num), counting(9 + 2 * num)) as server, load.AsyncClient(server.url) as client:
        wording = await load._wording(client, options)
    assert wording == Wording(around=9, of_word=1.0)
    assert wording.num_words(100) == 91
    async with raw_server(json_reply({"id": "r", "object": "response"})) as server, load.AsyncClient(server.url) as c:
        assert await load._wording(c, options) == Wording()


async def test_bench_over_websocket_against_the_real_server(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_folder(toys.byte_level(tmp_path))
    config = engine_config(max_model_len=600, num_pages=2000)
    async with (
        scripted_llm(tokenizer, ChatTemplate(toys.CHATML), scripted(tokenizer.encode("abc" * 9)), config) as (llm, _),
        listening(llm, port=0) as url,
    ):
        args = ("--num-requests", "12", "--prompt-len", "60:80", "--output-len", "5", "--num-processes", "2")
        for lanes in ("1", "3"):
            (line,), err, code = await bench_lines(url, *args, "--transport", "websocket", "--lanes", lanes)
            assert code == 0, err
            assert (line["num_requests"], line["num_failed"], line["output_tokens"]) == (12, 0, 60)
            assert line["requests"]["transport"] == "websocket" and not line["output_tokens_counted_as_events"]  # type: ignore[index]
        (sse,), err, code = await bench_lines(url, *args, "--endpoint", "responses")
        assert (code, sse["prompt_tokens"]) == (0, line["prompt_tokens"]), err
        assert all(12 <= told["num_events"] <= 60 for told in (line, sse))  # tokens whose reader lags share an event
        assert llm.num_live == 0


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"asyncllm\[bench\]"):
        load.bench(Options(url="http://127.0.0.1:1", plot=Path("p.png"), loads=(Load(kind="rate", value=1.0),)))
