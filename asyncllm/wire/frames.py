"""Whole WebSocket frames, as a server sends them: text, unmasked, in one piece.

Any thread; sans-I/O. It never knows sockets or what a message says.
"""


def text_frame(payload: bytes) -> bytes:
    """One TEXT frame (RFC 6455, 5.2). Many can be joined into one write, which aiohttp's writer cannot."""
    num = len(payload)
    if num < 126:
        return b"\x81%c%b" % (num, payload)
    if num < 1 << 16:
        return b"\x81\x7e%b%b" % (num.to_bytes(2), payload)
    return b"\x81\x7f%b%b" % (num.to_bytes(8), payload)
