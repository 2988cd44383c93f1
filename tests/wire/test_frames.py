"""WebSocket frames of both sides, however cut."""

import pytest

from asyncllm.wire.frames import CLOSE, PING, TEXT, FrameReader, masked_frame, text_frame

SIZES = [0, 1, 5, 125, 126, 127, 65535, 65536, 70000]


def unmask(frame: bytes) -> tuple[int, bytes]:
    """A client's frame, read by the letter of RFC 6455, 5.2."""
    assert frame[0] & 0x80 and frame[1] & 0x80
    size, at = frame[1] & 0x7F, 2
    if size > 125:
        width = 2 if size == 126 else 8
        size, at = int.from_bytes(frame[2 : 2 + width]), 2 + width
    mask, body = frame[at : at + 4], frame[at + 4 :]
    assert len(body) == size
    return frame[0] & 0x0F, bytes(byte ^ mask[i % 4] for i, byte in enumerate(body))


@pytest.mark.parametrize("size", SIZES)
def test_a_masked_frame_is_read_back(size: int) -> None:
    payload = bytes(i % 251 for i in range(size))
    assert unmask(masked_frame(payload)) == (TEXT, payload)
    assert unmask(masked_frame(payload, CLOSE)) == (CLOSE, payload)


def test_masks_differ() -> None:
    assert len({masked_frame(b"x" * 8) for _ in range(4)}) > 1


@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000, 1 << 20])
def test_messages_however_cut(step: int) -> None:
    payloads = [bytes(i % 251 for i in range(size)) for size in SIZES[: 6 if step < 100 else None]]
    data = b"".join(map(text_frame, payloads))
    reader = FrameReader()
    messages = [message for at in range(0, len(data), step) for message in reader.feed(data[at : at + step])]
    assert messages == [(TEXT, payload) for payload in payloads]


def test_fragments_are_one_message_with_a_control_frame_between() -> None:
    data = b"\x01\x01a" + b"\x89\x01p" + b"\x00\x01b" + b"\x00\x00" + b"\x80\x01c" + text_frame(b"next")
    assert FrameReader().feed(data) == [(PING, b"p"), (TEXT, b"abc"), (TEXT, b"next")]


@pytest.mark.parametrize("data", [b"\xc1\x01a", masked_frame(b"a")])
def test_what_a_server_may_not_send(data: bytes) -> None:
    with pytest.raises(ValueError, match="masked"):
        FrameReader().feed(data)
