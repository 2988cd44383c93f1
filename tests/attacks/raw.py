"""A socket that says what it is told to, byte for byte, and reads until the other side closes."""

import contextlib
import json
import socket
import struct
import time
from typing import Any

from tests.e2e.process import ServerProcess

JSON = "Content-Type: application/json\r\n"
UPGRADE = (
    "GET /v1/responses HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


class Raw:
    """One connection to a server process."""

    def __init__(self, server: ServerProcess, timeout_s: float = 20.0) -> None:
        self.socket = server.connect()
        self.socket.settimeout(timeout_s)

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.socket.close()

    def send(self, data: bytes | str) -> None:
        self.socket.sendall(data.encode("latin-1") if isinstance(data, str) else data)

    def post(self, path: str, body: Any, headers: str = "") -> None:
        """A whole, honest request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}{headers}Content-Length: {len(data)}\r\n\r\n"
        self.send(head.encode() + data)

    def rest(self) -> bytes:
        """All that comes until the other side closes, or resets."""
        pieces = []
        with contextlib.suppress(ConnectionResetError):
            while piece := self.socket.recv(65536):
                pieces.append(piece)
        return b"".join(pieces)

    def until(self, mark: bytes) -> bytes:
        """What comes up to and with this."""
        data = b""
        while mark not in data:
            piece = self.socket.recv(65536)
            assert piece, f"closed before {mark!r}: {data!r}"
            data += piece
        return data

    def reply(self) -> "Reply":
        """One answer with a Content-Length; the connection stays."""
        head, _, body = self.until(b"\r\n\r\n").partition(b"\r\n\r\n")
        length = int(_fields(head).get("content-length", "0"))
        while len(body) < length:
            body += self.socket.recv(65536)
        return Reply(head, body)

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


class Reply:
    def __init__(self, head: bytes, body: bytes) -> None:
        self.status = int(head.split()[1])
        self.headers = _fields(head)
        self.body = body

    @property
    def error(self) -> dict[str, Any]:
        assert self.headers["content-type"].startswith("application/json")
        error: dict[str, Any] = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def replies(data: bytes) -> list[Reply]:
    """All answers on a connection that has been read to its end."""
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        reply = Reply(head, b"")
        length = int(reply.headers.get("content-length", "0"))
        reply.body, data = data[:length], data[length:]
        found.append(reply)
    return found


def _fields(head: bytes) -> dict[str, str]:
    lines = head.decode("latin-1").split("\r\n")[1:]
    return {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def frame(
    opcode: int, payload: bytes = b"", *, fin: bool = True, rsv: int = 0, masked: bool = True, mask: bytes = bytes(4)
) -> bytes:
    """A WebSocket frame, as right or as wrong as asked for."""
    length = len(payload)
    head = bytes([(0x80 if fin else 0) | rsv << 4 | opcode])
    mark = 0x80 if masked else 0
    hidden = bytes([byte ^ mask[i % 4] for i, byte in enumerate(payload)]) if any(mask) else payload
    if length < 126:
        head += bytes([mark | length])
    elif length < 65536:
        head += bytes([mark | 126]) + struct.pack("!H", length)
    else:
        head += bytes([mark | 127]) + struct.pack("!Q", length)
    return head + (mask + hidden if masked else payload)


def until_true(condition: Any, timeout_s: float = 15.0) -> None:
    """Wait for another process."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it never came"
        time.sleep(0.02)
