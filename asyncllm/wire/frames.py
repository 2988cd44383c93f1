"""Whole WebSocket frames: a server's are unmasked, a client's masked.

Any thread; sans-I/O. It never knows sockets or what a message says.
"""

import os

TEXT, CLOSE, PING, PONG = 1, 8, 9, 10
# Payloads from here on have their length in two bytes, and in eight. TEXT_HEAD: what stands before those two.
SHORT_FRAME, LONG_FRAME, TEXT_HEAD = 126, 1 << 16, b"\x81\x7e"


def text_frame(payload: bytes) -> bytes:
    """One TEXT frame (RFC 6455, 5.2). Many can be joined into one write, which aiohttp's writer cannot."""
    num = len(payload)
    if num < SHORT_FRAME:
        return b"\x81%c%b" % (num, payload)
    if num < LONG_FRAME:
        return b"".join((TEXT_HEAD, num.to_bytes(2), payload))
    return b"\x81\x7f%b%b" % (num.to_bytes(8), payload)


def masked_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """A client's frame, which a mask hides from proxies that would take it for HTTP (RFC 6455, 10.3)."""
    num = len(payload)
    mask = os.urandom(4)
    key = int.from_bytes((mask * (num // 4 + 1))[:num])
    hidden = (int.from_bytes(payload) ^ key).to_bytes(num)  # one big number: 5 kB take 3 us
    if num < 126:
        return b"%c%c%b%b" % (0x80 | opcode, 0x80 | num, mask, hidden)
    if num < 1 << 16:
        return b"%c\xfe%b%b%b" % (0x80 | opcode, num.to_bytes(2), mask, hidden)
    return b"%c\xff%b%b%b" % (0x80 | opcode, num.to_bytes(8), mask, hidden)


class FrameReader:
    """A server's frames, however cut, to whole messages. Not one that would be safe from a hostile server: a
    message may be as large as it likes."""

    def __init__(self) -> None:
        self._rest = b""
        self._opcode = 0  # of the message whose parts are being collected
        self._parts: list[bytes] = []

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The messages that these bytes complete, each with its opcode; a control frame is one by itself.

        Raises:
            ValueError: no frames of a server's.
        """
        data = self._rest + data if self._rest else data
        messages: list[tuple[int, bytes]] = []
        at = 0
        while (place := _payload_at(data, at)) is not None:
            start, end = place
            self._frame(data[at], data[start:end], messages)
            at = end
        self._rest = data[at:]
        return messages

    def _frame(self, first: int, payload: bytes, messages: list[tuple[int, bytes]]) -> None:
        final, opcode = first & 0x80, first & 0x0F
        if opcode & 0x08 or (final and opcode and not self._parts):  # nearly always
            messages.append((opcode, payload))
            return
        self._opcode = opcode or self._opcode
        self._parts.append(payload)
        if final:
            messages.append((self._opcode, b"".join(self._parts)))
            self._parts = []


def _payload_at(data: bytes, at: int) -> tuple[int, int] | None:
    """Where the payload of the frame at `at` begins and ends; None while it is not all there."""
    left = len(data) - at
    if left < 2:
        return None
    if data[at] & 0x70 or data[at + 1] & 0x80:
        raise ValueError("a frame that is masked, or has bits of an extension")
    num, start = data[at + 1], at + 2
    if num >= 126:
        size = 2 if num == 126 else 8
        if left < 2 + size:
            return None
        num, start = int.from_bytes(data[start : start + size]), start + size
    return (start, start + num) if start + num <= len(data) else None
