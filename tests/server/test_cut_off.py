"""A bug in writing to one client: he is cut off, not left waiting, his sequence ends, and nobody else is hurt."""

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest
from aiohttp import WSMsgType

from asyncllm.errors import AsyncLLMError
from asyncllm.pace import Pace
from asyncllm.server.completions import Answer
from asyncllm.server.live import LiveResponse
from asyncllm.server.websocket import Connection
from asyncllm.types import SamplingParams

from .conftest import BOTH, CHAT, HI, TEXT, Serve, Served, endless, until

LONG = {"max_model_len": 2100, "num_pages": 4000, "page_size": 16, "max_running": 20}
RESPONSES = "/v1/responses"
Break = Callable[..., None]


@pytest.fixture
def break_flush(monkeypatch: pytest.MonkeyPatch) -> Break:
    """`break_flush(kind, 5)`: the flush of one reader of this kind raises, the fifth time and ever after."""

    def break_(kind: type, after: int) -> None:
        flush, counts = kind.flush, dict[Any, int]()  # type: ignore[attr-defined]

        def broken(self: Any) -> bool:
            counts[self] = counts.get(self, 0) + 1
            if next(iter(counts)) is self and counts[self] >= after:
                raise KeyError("bug")
            return bool(flush(self))

        monkeypatch.setattr(kind, "flush", broken)

    return break_


def told_once(caplog: pytest.LogCaptureFixture) -> None:
    told = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in told] == ["unexpected error while writing to a client, who is cut off"]
    assert told[0].exc_info is not None and told[0].exc_info[0] is KeyError


async def cut(served: Served, path: str, **fields: Any) -> bytes:
    """Everything that comes until the server breaks the connection, in the middle of the body."""
    asked = {CHAT: {"messages": HI}, TEXT: {"prompt": "hi"}, RESPONSES: {"input": "hi"}}[path]
    body = {"stream": True, **asked, **fields}
    read = b""
    async with served.session.post(served.url + path, json=body) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            while data := await response.content.readany():
                read += data
    return read


@pytest.mark.parametrize(
    ("path", "kind", "fields"),
    [
        (CHAT, Answer, {"max_tokens": 2000}),
        (TEXT, Answer, {"max_tokens": 2000, "prompt": ["a", "b", "c"]}),
        (RESPONSES, LiveResponse, {"max_output_tokens": 2000}),
        (RESPONSES, LiveResponse, {"max_output_tokens": 2000, "resumable": True}),
    ],
)
async def test_an_event_stream_whose_flush_raises_is_cut_off(
    serve: Serve, break_flush: Break, caplog: pytest.LogCaptureFixture, path: str, kind: type, fields: Any
) -> None:
    async with serve(endless, **LONG) as served:
        break_flush(kind, 5)
        broken, fine = await asyncio.gather(
            cut(served, path, **fields),
            served.complete(max_tokens=200, stream=True) if kind is LiveResponse else asyncio.sleep(0),
        )
        assert broken.count(b"data: ") >= 2 and b"[DONE]" not in broken and b"response.completed" not in broken
        await served.idle()
        assert served.llm.totals.finished["error"] == len(fields.get("prompt", "x"))
        assert fine is None or len(fine.text()) == 200
        assert len((await served.complete(max_tokens=200, stream=True)).text()) == 200
    told_once(caplog)


@BOTH
async def test_a_flush_that_raises_before_anything_is_sent_is_an_error_of_500(
    serve: Serve, break_flush: Break, caplog: pytest.LogCaptureFixture, stream: bool
) -> None:
    async with serve(endless, **LONG) as served:
        break_flush(Answer if stream else LiveResponse, 1)
        answer = await (served.complete(stream=True) if stream else served.post(RESPONSES, {"input": "hi"}))
        assert (answer.status, answer.error["message"]) == (500, "internal error")
        await served.idle()
        await served.alive()
    told_once(caplog)


@pytest.mark.parametrize(("kind", "num_lanes"), [(LiveResponse, 1), (LiveResponse, 3), (Connection, 3)])
async def test_a_socket_with_a_flush_that_raises_is_cut_off_with_all_its_lanes(
    serve: Serve, break_flush: Break, caplog: pytest.LogCaptureFixture, kind: type, num_lanes: int
) -> None:
    async with serve(endless, **LONG) as served, served.session.ws_connect(served.url + RESPONSES) as other:
        break_flush(kind, 5)
        async with served.session.ws_connect(served.url + RESPONSES) as socket:
            for i in range(num_lanes):
                create = {"type": "response.create", "input": "hi", "stream_id": f"{i}", "max_output_tokens": 2000}
                await socket.send_str(json.dumps(create))
            kinds = [message.type async for message in socket]
            assert set(kinds) == {WSMsgType.TEXT}
            assert socket.close_code in (None, aiohttp.WSCloseCode.ABNORMAL_CLOSURE)
        await served.idle()
        assert sum(served.llm.totals.finished.values()) == num_lanes
        await other.send_str(json.dumps({"type": "response.create", "input": "hi", "max_output_tokens": 2}))
        assert [json.loads((await other.receive()).data)["type"] for _ in range(3)][0] == "response.created"
    told_once(caplog)


class Reading:
    """A reader in this process that takes what comes until it breaks."""

    def __init__(self, stream: Any) -> None:
        self.dirty, self.is_cut_off, self.num_flushes = False, False, 0
        self.text, self.stream = "", stream
        stream.listen(self)

    def flush(self) -> bool:
        self.num_flushes += 1
        self.text += self.stream.take_text()
        if len(self.text) > 20:
            raise KeyError("bug")
        return True

    def cut_off(self) -> None:
        self.is_cut_off = True
        raise KeyError("bug")


async def test_a_reader_in_this_process_whose_flush_raises_is_told_and_its_sequence_ends(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(endless, **LONG) as served:
        stream = served.llm.submit([1], SamplingParams(temperature=0))
        reading = Reading(stream)
        await until(lambda: reading.is_cut_off)
        await served.idle()
        assert served.llm.totals.finished == {"error": 1}
        with pytest.raises(AsyncLLMError, match="internal error"):
            async for _ in stream:
                pass
        num_flushes = reading.num_flushes
        await served.alive()
        assert reading.num_flushes == num_flushes
    assert len(caplog.records) == 2  # of flush, and of its own cut_off


class Connection:
    """A Writer; `broken`: its write raises."""

    def __init__(self, *, broken: bool) -> None:
        self.broken, self.written, self.is_cut_off = broken, b"", False

    def write(self, data: bytes) -> None:
        if self.broken:
            raise RuntimeError("bug")
        self.written += data

    def cut_off(self) -> None:
        self.is_cut_off = True


class Writing:
    """A reader that writes to a connection."""

    def __init__(self, pace: Pace, connection: Connection) -> None:
        self.dirty, self.pace, self.connection = False, pace, connection

    def flush(self) -> bool:
        self.pace.write((self.connection, b"x"))
        return True

    def cut_off(self) -> None:
        raise AssertionError("its flush has not raised")


async def test_a_connection_whose_write_raises_is_cut_off_and_the_others_are_written_to() -> None:
    pace = Pace(asyncio.get_running_loop())
    connections = [Connection(broken=i == 1) for i in range(4)]
    for _ in range(2):
        for connection in connections:
            pace.mark(Writing(pace, connection), at_once=False)
        await until(lambda: all(one.written for one in connections if not one.broken))
    await until(lambda: connections[-1].written == b"xx")
    assert [one.is_cut_off for one in connections] == [False, True, False, False]
    assert [one.written for one in connections] == [b"xx", b"", b"xx", b"xx"]
    pace.close()


async def test_counting_that_breaks_with_a_reader_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def on_broken(reader: object) -> None:
        raise KeyError("bug")

    class Bad(Writing):
        is_cut_off = False

        def flush(self) -> bool:
            raise KeyError("bug")

        def cut_off(self) -> None:
            self.is_cut_off = True

    pace = Pace(asyncio.get_running_loop(), on_broken=on_broken)
    bad, good = Bad(pace, Connection(broken=False)), Connection(broken=False)
    for _ in range(2):
        pace.mark(bad, at_once=True)
        pace.mark(Writing(pace, good), at_once=True)
        await until(lambda: bool(good.written))
    pace.write((good, b"y"))
    assert bad.is_cut_off and good.written in (b"xy", b"xxy")
    pace.close()
    assert "cutting a client off" in caplog.text
