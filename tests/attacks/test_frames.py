"""RFC 6455, clause by clause, on the real process: what is right is answered, what is wrong closes with its code.

The categories are those of Autobahn's suite, which itself wants a server that echoes, and Python 2.
"""

import json
import struct
from collections.abc import Iterator

import pytest

from tests.e2e.process import ServerProcess

from .raw import UPGRADE, Raw, frame
from .test_websocket import BINARY, CLOSE, PING, PONG, TEXT, alive, close_code, frames, opened

CONTINUED = 0
MASK = b"\xa5\x01\xff\x7e"
SAID = "é 😀 ďábel ﷽ 日本"
ASKED = {"type": "response.create", "input": SAID, "max_output_tokens": 2, "ignore_eos": True}
CREATE = json.dumps(ASKED, ensure_ascii=False).encode()
OVER = b'"type":"response.incomplete"'


def text(*pieces: bytes, between: bytes = b"", opcode: int = TEXT) -> bytes:
    """One message in frames of these pieces, and something after each but the last."""
    sent = [
        frame(CONTINUED if i else opcode, piece, fin=i == len(pieces) - 1, mask=MASK) for i, piece in enumerate(pieces)
    ]
    return between.join(sent)


def bytewise(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


def padded(num_bytes: int) -> bytes:
    return CREATE + b" " * (num_bytes - len(CREATE))


def ping(payload: bytes) -> bytes:
    return frame(PING, payload, mask=MASK)


RIGHT = {
    "whole": text(CREATE),
    "in two": text(CREATE[:40], CREATE[40:]),
    "a frame for each byte, characters cut": text(*bytewise(CREATE)),
    "an empty first frame": text(b"", CREATE),
    "an empty last frame": text(CREATE, b""),
    "empty frames between": text(CREATE[:9], b"", b"", CREATE[9:], b""),
    "pings between": text(CREATE[:9], CREATE[9:50], CREATE[50:], between=ping(b"p")),
    "pongs nobody asked for between": text(CREATE[:9], CREATE[9:], between=frame(PONG, b"x" * 125, mask=MASK)),
    "a pong before": frame(PONG, b"") + text(CREATE),
    **{f"{n} bytes": text(CREATE[:9], CREATE[9 : n + 9], CREATE[n + 9 :], b" " * n) for n in (0, 1, 125, 126, 127)},
    "65535 bytes": text(padded(65535)),
    "65536 bytes": text(padded(65536)),
    "as many bytes as there may be": text(padded(200_000)),
    "as many in pieces": text(padded(100_000), b" " * 50_000, b" " * 50_000),
    "a mask of nulls": frame(TEXT, CREATE),
}


@pytest.mark.parametrize("data", RIGHT.values(), ids=RIGHT.keys())
def test_what_is_right_is_answered(server: ServerProcess, data: bytes) -> None:
    with opened(server) as raw:
        raw.send(data)
        raw.until(OVER)
        raw.send(frame(CLOSE, struct.pack("!H", 1000), mask=MASK))
        assert close_code(raw.rest()) == 1000


@pytest.mark.parametrize("step", [1, 7, 997])
def test_frames_arrive_in_whatever_pieces_tcp_makes(server: ServerProcess, step: int) -> None:
    data = RIGHT["pings between"] + RIGHT["a frame for each byte, characters cut"][: 2000 if step == 1 else None]
    with opened(server) as raw:
        for at in range(0, len(data), step):
            raw.send(data[at : at + step])
        raw.until(OVER)


def test_each_ping_has_its_pong_in_order_and_whole(server: ServerProcess) -> None:
    payloads = [b"", b"x", bytes(range(125)), b"\xff\xfe\x00", b"y" * 125, *(b"%d" % i for i in range(50))]
    with opened(server) as raw:
        raw.send(b"".join(map(ping, payloads)) + frame(CLOSE, struct.pack("!H", 1000)) + ping(b"too late"))
        assert [(o, p) for o, p in frames(raw.rest()) if o == PONG] == [(PONG, payload) for payload in payloads]


def reserved() -> Iterator[tuple[str, bytes]]:
    for opcode in (3, 4, 5, 6, 7, 11, 12, 13, 14, 15):
        for payload in (b"", b"payload"):
            yield f"opcode {opcode} of {len(payload)}", frame(opcode, payload, mask=MASK)
        yield f"opcode {opcode} inside a message", frame(TEXT, b"{", fin=False) + frame(opcode, b"x")
        yield f"opcode {opcode} behind a ping", ping(b"") + frame(opcode, b"")
    for rsv in range(1, 8):
        for opcode in (TEXT, BINARY, PING, PONG, CLOSE):
            yield f"bits {rsv} on {opcode}", frame(opcode, b"", rsv=rsv, mask=MASK)
        yield f"bits {rsv} on a continuation", frame(TEXT, b"{", fin=False) + frame(CONTINUED, b"}", rsv=rsv)


def misframed() -> Iterator[tuple[str, bytes]]:
    for opcode in (PING, PONG, CLOSE):
        yield f"control {opcode} of 126", frame(opcode, b"\x03\xe8" + b"x" * 124, mask=MASK)
        yield f"control {opcode} in pieces", frame(opcode, b"", fin=False) + frame(CONTINUED, b"")
        yield f"control {opcode} of a length in eight bytes", bytes([0x80 | opcode, 0xFF]) + struct.pack("!Q", 4)
    for fin in (True, False):
        yield f"a continuation of nothing, {fin}", frame(CONTINUED, b"x", fin=fin, mask=MASK)
        yield f"a continuation behind a whole message, {fin}", text(b"{}") + frame(CONTINUED, b"x", fin=fin)
        for opcode in (TEXT, BINARY):
            yield f"{opcode} inside a message, {fin}", frame(TEXT, b"{", fin=False) + frame(opcode, b"}", fin=fin)


def wrong_codes() -> Iterator[tuple[str, bytes]]:
    for code in (0, 1, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65535):
        yield f"close {code}", frame(CLOSE, struct.pack("!H", code), mask=MASK)
        yield f"close {code} with a reason", frame(CLOSE, struct.pack("!H", code) + b"why", mask=MASK)
    yield "close of one byte", frame(CLOSE, b"\x03", mask=MASK)


WRONG = {**dict(reserved()), **dict(misframed()), **dict(wrong_codes())}


@pytest.mark.parametrize("data", WRONG.values(), ids=WRONG.keys())
def test_what_is_wrong_closes_with_1002(server: ServerProcess, data: bytes) -> None:
    with opened(server) as raw:
        raw.send(data)
        assert close_code(raw.rest()) == 1002


NOT_UTF8 = {
    "a continuation byte": b"\x80", "two of them": b"\xbf\x80", "a start without its rest": b"\xc3",
    "three bytes cut": b"\xe2\x82", "four bytes cut": b"\xf0\x9f\x98", "a start and a letter": b"\xc3x",
    "slash in two": b"\xc0\xaf", "slash in three": b"\xe0\x80\xaf", "slash in four": b"\xf0\x80\x80\xaf",
    "null in two": b"\xc0\x80", "the largest in one, in two": b"\xc1\xbf", "in three": b"\xe0\x9f\xbf",
    "a high surrogate": b"\xed\xa0\x80", "a low one": b"\xed\xbf\xbf", "a pair of them": b"\xed\xa0\x80\xed\xb0\x80",
    "above 10ffff": b"\xf4\x90\x80\x80", "five bytes": b"\xf8\x88\x80\x80\x80", "six": b"\xfc\x84\x80\x80\x80\x80",
    "fe": b"\xfe", "ff": b"\xff", "a byte order mark of another": b"\xff\xfe",
}  # fmt: skip
PLACES = {
    "in the input": b'{"type":"response.create","max_output_tokens":1,"input":"x%by"}',
    "in a field nobody knows": b'{"type":"response.create","max_output_tokens":1,"input":"x","unknown":"%b"}',
    "in a name": b'{"type":"response.create","max_output_tokens":1,"input":"x","%b":1}',
    "in what is skipped": b'{"type":"response.cancel","unknown":["%b"]}',
    "in no JSON": b"%b",
}


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
@pytest.mark.parametrize("broken", NOT_UTF8.values(), ids=NOT_UTF8.keys())
def test_what_is_no_utf8_closes_with_1007(server: ServerProcess, broken: bytes, place: bytes) -> None:
    message = place % broken
    for data in (text(message), text(*bytewise(message))):
        with opened(server) as raw:
            raw.send(data + frame(CLOSE, b"", mask=MASK))  # our half of the close, or it waits for that
            assert close_code(raw.rest()) == 1007


@pytest.mark.parametrize("code", [1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 3000, 3999, 4000, 4999])
def test_a_close_is_answered_and_nothing_behind_it_is_read(server: ServerProcess, code: int) -> None:
    for reason in (b"", "ďábel".encode(), b"x" * 123):
        with opened(server) as raw:
            raw.send(frame(CLOSE, struct.pack("!H", code) + reason, mask=MASK) + text(CREATE) + frame(CLOSE, b""))
            heard = frames(raw.rest())
            assert heard == [(CLOSE, struct.pack("!H", 1000))]


def test_other_ways_to_close(server: ServerProcess) -> None:
    for data in (frame(CLOSE), frame(TEXT, CREATE[:9], fin=False) + frame(CLOSE)):
        with opened(server) as raw:
            raw.send(data)
            assert [opcode for opcode, _ in frames(raw.rest())] == [CLOSE]
    with opened(server) as raw:
        raw.send(text(CREATE)[:50])
        raw.reset()
    for reason in NOT_UTF8.values():
        with opened(server) as raw:
            raw.send(frame(CLOSE, struct.pack("!H", 1000) + reason, mask=MASK))
            assert close_code(raw.rest()) == 1007
    alive(server)


def test_over_the_limit_by_one_byte_or_by_eons(server: ServerProcess) -> None:
    lengths = (200_001, 1 << 32, (1 << 63) - 1, 1 << 63)
    for data in (
        text(padded(200_001)), text(padded(100_000), b" " * 100_001), text(*[b" " * 60_000] * 4),
        *(bytes([0x81, 0xFF]) + struct.pack("!Q", length) + MASK for length in lengths),
    ):  # fmt: skip
        with opened(server) as raw:
            raw.send(data)
            assert close_code(raw.rest()) == 1009
    alive(server)


def test_handshakes(server: ServerProcess) -> None:
    for wrong, right in (
        ("Sec-WebSocket-Version: 12", "Sec-WebSocket-Version: 13"),
        ("Sec-WebSocket-Version: 13x", "Sec-WebSocket-Version: 13"),
        ("Sec-WebSocket-Key: AAAA", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
        ("Sec-WebSocket-Key: not base64 at all!!!!!", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
        ("X: y", "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA=="),
        ("X: y", "Upgrade: websocket"),
        ("Upgrade: h2c", "Upgrade: websocket"),
        ("Connection: close", "Connection: Upgrade"),
        ("POST /v1/responses", "GET /v1/responses"),
    ):
        with Raw(server) as raw:
            raw.send(UPGRADE.replace(right, wrong).replace("\r\n\r\n", "\r\nConnection: close\r\n\r\n", 1))
            answer = raw.rest()
            assert answer[9:10] == b"4" and b'"error"' in answer, (wrong, answer)
    for offered in ("Sec-WebSocket-Extensions: permessage-deflate", "Sec-WebSocket-Protocol: chat, superchat"):
        with Raw(server) as raw:
            raw.send(UPGRADE.replace("\r\n\r\n", f"\r\n{offered}\r\n\r\n"))
            head = raw.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 101 ") and offered.partition(":")[0].encode() not in head
    alive(server)
