"""Frames that break RFC 6455, or only memory: rows 26 to 29 on the real process."""

import json
import os
import resource
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.process import ServerProcess

from .raw import UPGRADE, Raw, frame, until_true

TEXT, BINARY, CLOSE, PING, PONG = 1, 2, 8, 9, 10
CREATE = json.dumps({"type": "response.create", "input": "x", "max_output_tokens": 2}).encode()


def opened(server: ServerProcess, fields: str = "") -> Raw:
    raw = Raw(server)
    raw.send(UPGRADE.replace("\r\n\r\n", f"\r\n{fields}\r\n\r\n" if fields else "\r\n\r\n"))
    assert raw.until(b"\r\n\r\n").startswith(b"HTTP/1.1 101 ")
    return raw


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """What a server sent, to the end: (opcode, payload)."""
    found = []
    while len(data) >= 2:
        opcode, length, at = data[0] & 15, data[1] & 127, 2
        if length == 126:
            length, at = struct.unpack("!H", data[2:4])[0], 4
        elif length == 127:
            length, at = struct.unpack("!Q", data[2:10])[0], 10
        found.append((opcode, data[at : at + length]))
        data = data[at + length :]
    return found


def close_code(data: bytes) -> int:
    closes = [payload for opcode, payload in frames(data) if opcode == CLOSE]
    assert len(closes) == 1, frames(data)
    return int.from_bytes(closes[0][:2], "big")


def alive(server: ServerProcess) -> None:
    assert server.get("/health")["status"] == "ok"
    until_true(lambda: server.metrics()["websockets_open"] == 0)
    until_true(lambda: server.metrics()["requests_live"] == 0)


BROKEN = {
    "reserved bit": (frame(TEXT, b"{}", rsv=4), 1002),
    "compressed though not agreed": (frame(TEXT, zlib.compress(b"0" * 100_000), rsv=4), 1002),
    "reserved opcode 3": (frame(3, b"x"), 1002),
    "reserved opcode 11": (frame(11, b"x"), 1002),
    "ping of 126 bytes": (frame(PING, b"x" * 126), 1002),
    "ping in pieces": (frame(PING, b"x", fin=False), 1002),
    "a continuation of nothing": (frame(0, b"x"), 1002),
    "a message inside a message": (frame(TEXT, b"{", fin=False) + frame(TEXT, b"}"), 1002),
    "close of one byte": (frame(CLOSE, b"x"), 1002),
    "close code 999": (frame(CLOSE, struct.pack("!H", 999)), 1002),
    "close code 1005": (frame(CLOSE, struct.pack("!H", 1005)), 1002),
    "close reason that is no text": (frame(CLOSE, struct.pack("!H", 1000) + b"\xff\xfe"), 1007),
    "text that is none": (frame(TEXT, b'{"type": "\xff"}'), 1007),
    "a message over the limit": (frame(TEXT, b" " * 300_000), 1009),
    "a length of 2**62": (b"\x81\xff" + struct.pack("!Q", 1 << 62) + b"\0\0\0\0" + b"x" * 1000, 1009),
    "pieces over the limit": (
        frame(TEXT, b" " * 90_000, fin=False) + b"".join(frame(0, b" " * 90_000, fin=False) for _ in range(3)),
        1009,
    ),
}


@pytest.mark.parametrize(("data", "code"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_frame_closes_with_its_code(server: ServerProcess, data: bytes, code: int) -> None:
    with opened(server) as raw:
        raw.send(frame(TEXT, CREATE))
        raw.send(data)
        assert close_code(raw.rest()) == code
    alive(server)


@pytest.mark.parametrize(
    "payload",
    [b"hello", b"{bad", b"[]", b"null", b"", b"[" * 50_000, b'{"a":' * 20_000, b'{"type":"nonsense"}',
     b'{"type":"response.create"}', b'{"type":"response.cancel","response_id":"resp_1"}',
     b'{"type":"response.cancel","response_id":""}', b'{"type":"response.create","input":"x","stream_id":7}',
     b'{"type":"response.create","input":"x","max_output_tokens":1e999}'],
)  # fmt: skip
def test_nonsense_is_told_and_the_socket_goes_on(server: ServerProcess, payload: bytes) -> None:
    with opened(server) as raw:
        for part in (frame(TEXT, payload), frame(BINARY, payload)):
            raw.send(part)
            assert b'"error"' in raw.until(b"}")
        raw.send(frame(TEXT, CREATE))
        raw.until(b'"type":"response.incomplete"')
    alive(server)


def test_unmasked_frames_are_closed(server: ServerProcess) -> None:
    with opened(server) as raw:
        raw.send(frame(TEXT, CREATE, masked=False))
        assert close_code(raw.rest()) == 1002
    with opened(server) as raw:
        raw.send(frame(TEXT, CREATE) + frame(PING, b"x", masked=False))
        assert close_code(raw.rest()) == 1002
    alive(server)


def test_ways_of_leaving(server: ServerProcess) -> None:
    """WS-1: in the middle of an answer, of a frame, of the handshake, twice; hard and soft."""
    create = frame(TEXT, json.dumps({"type": "response.create", "input": "x", "max_output_tokens": 900}).encode())
    for i in range(48):
        raw = Raw(server)
        raw.send(UPGRADE[: -2 if i % 8 == 0 else None])
        if i % 8:
            raw.until(b"\r\n\r\n")
            raw.send(create)
            if i % 3 == 0:
                raw.until(b"delta")
            raw.send(
                (
                    b"", create[:9], frame(CLOSE, struct.pack("!H", 1000)), frame(CLOSE), frame(CLOSE) * 2,
                    frame(CLOSE, struct.pack("!H", 4999) + b"x" * 100), frame(CLOSE, b"\x03\xe9"), b"\x81",
                )[i % 8]
            )  # fmt: skip
        if i % 2:
            raw.reset()
        raw.socket.close()
    alive(server)


def test_floods_are_bounded(server: ServerProcess) -> None:
    """Pings, pongs, empty messages, one-byte pieces: answered or refused, in bounded memory."""
    with opened(server) as raw:  # warm
        raw.send(frame(TEXT, CREATE))
        raw.until(b'"type":"response.incomplete"')
    before = server.rss_bytes()
    for flood in (frame(PING, b"x" * 100), frame(PONG), frame(TEXT), frame(TEXT, b" ", fin=False) + frame(0, b" ")):
        with opened(server, "X: y") as raw:
            raw.socket.settimeout(2)
            try:
                for _ in range(10):
                    raw.send(flood * 2000)
            except (TimeoutError, ConnectionError):
                pass  # it reads no more of one who does not read himself
            assert server.get("/health")["status"] == "ok"
            raw.reset()
    alive(server)
    assert server.rss_bytes() - before < 48 << 20


def test_a_frame_that_dribbles_costs_what_it_has_sent(server: ServerProcess) -> None:
    before = server.rss_bytes()
    raws = [opened(server) for _ in range(50)]
    for raw in raws:
        raw.send(b"\x81\xfe" + struct.pack("!H", 60_000) + b"\0\0\0\0")
        for _ in range(20):
            raw.send(b" ")
    assert server.get("/health")["status"] == "ok"
    assert server.rss_bytes() - before < 8 << 20
    for raw in raws:
        raw.reset()
    alive(server)


def test_idle_sockets_are_cheap(server: ServerProcess) -> None:
    count = 400
    first = opened(server)
    before = server.rss_bytes()
    raws = [opened(server) for _ in range(count)]
    assert server.metrics()["websockets_open"] == count + 1
    assert (server.rss_bytes() - before) / count < 40_000
    for raw in [first, *raws]:
        raw.socket.close()
    alive(server)


def answers(server: ServerProcess) -> bool:
    try:
        return bool(server.get("/health"))
    except OSError:
        return False


def test_descriptors_that_run_out(checkpoint: Path) -> None:
    """Rows 36, CONC-3: with few of them left, streams go on, what is too many is told so, and the log stays short."""
    with ServerProcess(str(checkpoint), "--max-connections", "40", "--log-level", "info") as server:
        stream = Raw(server)
        asked: dict[str, Any] = {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True}
        stream.post("/v1/completions", asked)
        stream.until(b"data: ")
        crowd = [Raw(server) for _ in range(200)]
        refused = [raw for raw in crowd[60:] if b"503" in raw.rest()]
        assert len(refused) == 140
        assert b"[DONE]" in stream.until(b"[DONE]")
        for raw in [stream, *crowd]:
            raw.socket.close()
        until_true(lambda: answers(server))
        assert len(server.stderr()) < 10_000 and "Traceback" not in server.stderr()


def test_descriptors_that_run_out_below_the_cap(checkpoint: Path) -> None:
    """Somebody else eats them: accepting fails, quietly, and recovers."""
    with ServerProcess(str(checkpoint), "--max-connections", "100000") as server:
        num_open = len(os.listdir(f"/proc/{server.process.pid}/fd"))
        resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (num_open + 8, num_open + 8))
        stream = Raw(server)
        stream.post("/v1/completions", {"prompt": "x", "max_tokens": 900, "ignore_eos": True, "stream": True})
        stream.until(b"data: ")
        crowd = [Raw(server) for _ in range(60)]
        assert b"[DONE]" in stream.until(b"[DONE]")
        time.sleep(0.3)
        for raw in [stream, *crowd]:
            raw.socket.close()
        until_true(lambda: answers(server))
        assert len(server.stderr()) < 10_000, server.stderr()[:3000]
