"""WS-1 from the client's side: a socket that ends the wrong way ends every lane with an error, and nothing hangs."""

import asyncio
import base64
import hashlib

import msgspec
import pytest

from asyncllm.client import AsyncClient, Limits, Retries, WebSocketClosedError
from asyncllm.wire.frames import text_frame

from .fake import Act, Exchange, raw_server, refusal
from .test_stream import response_events

GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # RFC 6455, 1.3
SOON = Retries(max_retries=2, first_delay_s=0.001, max_delay_s=0.001)


async def agree(exchange: Exchange) -> None:
    key = exchange.request.headers["sec-websocket-key"]
    accept = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
    head = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    await exchange.send(f"{head}Sec-WebSocket-Accept: {accept}\r\n\r\n".encode())


def cut_by(last: bytes, how: str) -> Act:
    async def act(exchange: Exchange) -> None:
        await agree(exchange)
        heard = b""
        while len(heard) < 2 * 60:  # both creates
            heard += await exchange.hear()
        event = response_events("a")[0] | {"stream_id": "own-0"}
        await exchange.send(text_frame(msgspec.json.encode(event)) + last)
        if how == "reset":
            exchange.reset()
            return
        if how == "stay":
            await exchange.hear()  # the client's close frame
        exchange.close()

    return act


@pytest.mark.parametrize(
    ("last", "how", "code"),
    [
        (b"", "end", 1006),
        (b"", "reset", 1006),
        (b"\x81", "end", 1006),  # half a head
        (b"\x81\x7e\x00\xff{", "end", 1006),  # half a message
        (b"\x01\x02{}", "reset", 1006),  # half of a fragmented one
        (b"\x83\x00", "stay", 1002),  # an opcode that is none
        (b"\xc1\x00", "stay", 1002),  # a bit of an extension that was not agreed on
        (b"\x81\x02\xff\xfe", "stay", 1007),  # text that is none
        (b"\x81\x7e\xff\xff" + b"x" * 65535, "stay", 1009),  # larger than the client takes
        (b"\x82\x01x", "stay", 1003),
        (text_frame(b"[]"), "stay", 1002),  # WS-2: no event
        (text_frame(b"null"), "stay", 1002),
        (text_frame(b'{"type": 3}'), "stay", 1002),
        (b"\x88\x02\x03\xf5", "stay", 1013),
        (b"\x88\x00", "stay", 1005),  # a close that says nothing
    ],
)
async def test_ws_1_however_a_socket_ends_every_lane_is_told(last: bytes, how: str, code: int) -> None:
    async with raw_server(cut_by(last, how)) as server, AsyncClient(server.url) as client:
        async with asyncio.timeout(20), client.responses.connect(Limits(max_event_bytes=10_000)) as opened:
            begun, silent = await opened.create(input="x" * 60), await opened.create(input="y" * 60)
            assert (await anext(begun)).type == "response.created"  # what had come is not lost
            for stream in (begun, silent):
                with pytest.raises(WebSocketClosedError) as caught:
                    await anext(stream)
                assert caught.value.close_code == code
            with pytest.raises(WebSocketClosedError):
                await opened.create(input="z")
        assert len(server.requests) == 1  # nothing is sent again behind the caller's back


async def test_cli_5_a_refused_upgrade_is_tried_again_under_one_request_id() -> None:
    async def act(exchange: Exchange) -> None:
        await agree(exchange)
        await exchange.hear()
        exchange.close()

    async with raw_server(refusal("503 No"), refusal("503 No"), act) as server:
        async with AsyncClient(server.url, max_retries=SOON) as client, client.responses.connect():
            pass
    assert len(server.requests) == 3
    assert len({request.headers["x-request-id"] for request in server.requests}) == 1
