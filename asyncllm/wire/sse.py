"""Server-sent events as bytes: an encoder, and a decoder to the WHATWG specification.

Any thread; sans-I/O. It never knows sockets, JSON or what an event means.
"""

import re

import msgspec

MAX_EVENT_BYTES = 64 << 20
DONE = b"data: [DONE]\n\n"
_LINE_END = re.compile(rb"\r\n|\n|\r")


def encode(data: bytes) -> bytes:
    """One event of one-line data, and nothing else: an `event:` line breaks line-based readers."""
    return b"data: " + data + b"\n\n"


class Event(msgspec.Struct, frozen=True):
    """What a blank line dispatched."""

    data: str
    type: str = "message"
    id: str = ""  # the last one seen, as the specification keeps it


class EventTooLarge(ValueError):
    """An event, or a line, longer than the decoder takes; `events` were complete before it."""

    def __init__(self, message: str, events: list[Event]) -> None:
        super().__init__(message)
        self.events = events


class Decoder:
    """Bytes as they arrive, however cut, to events. An event without its blank line at the end is dropped.

    `retry_ms` is the reconnection time the peer asked for, None until it does.
    """

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self.retry_ms: int | None = None
        self._max_event_bytes = max_event_bytes
        self._parts: list[bytes] = []  # of the open line, joined once: a giant line in small reads stays linear
        self._parts_bytes = 0
        self._after_cr = False  # a line ended with the last byte, a CR: an LF that follows belongs to it
        self._at_start = True  # a byte-order mark may still come
        self._data: list[str] = []
        self._data_bytes = 0
        self._type = ""
        self._id = ""

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that these bytes complete.

        Raises:
            EventTooLarge: more than max_event_bytes without an end. It holds the events of these bytes that
                came before; the decoder is of no more use.
        """
        if self._after_cr and chunk:
            self._after_cr = False
            chunk = chunk.removeprefix(b"\n")
        events: list[Event] = []
        start = 0
        for match in _LINE_END.finditer(chunk):
            self._keep(chunk[start : match.start()], events)
            start = match.end()
            self._line(self._take_line(), events)
        self._after_cr = start == len(chunk) and chunk.endswith(b"\r")
        self._keep(chunk[start:], events)
        return events

    def _keep(self, part: bytes, events: list[Event]) -> None:
        if part:
            self._parts.append(part)
            self._parts_bytes += len(part)
        if self._parts_bytes + self._data_bytes > self._max_event_bytes:
            raise EventTooLarge(f"an event is larger than {self._max_event_bytes} bytes", events)

    def _take_line(self) -> str:
        line = b"".join(self._parts)
        self._parts.clear()
        self._parts_bytes = 0
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        return line.decode("utf-8", "replace")

    def _line(self, line: str, events: list[Event]) -> None:
        if line:
            self._field(*_split(line))
        elif (event := self._dispatch()) is not None:
            events.append(event)

    def _field(self, name: str, value: str) -> None:
        if name == "data":
            self._data.append(value)
            self._data_bytes += len(value) + 1
        elif name == "event":
            self._type = value
        elif name == "id" and "\0" not in value:
            self._id = value
        elif name == "retry" and value.isascii() and value.isdigit():
            self.retry_ms = int(value[:18])

    def _dispatch(self) -> Event | None:
        data, kind = self._data, self._type
        self._data, self._data_bytes, self._type = [], 0, ""
        text = "\n".join(data)
        # The one step away from the specification, which dispatches "" for a lone `data:`: servers send it
        # as a sign of life, no JSON is empty, and readers that parse what they get choke on it.
        return Event(text, kind or "message", self._id) if text or len(data) > 1 else None


def _split(line: str) -> tuple[str, str]:
    """Field name and value; a comment has the name ""."""
    name, _, value = line.partition(":")
    return name, value.removeprefix(" ")
