"""One answer's events counted: what a Measured holds, and what in an event changes it.

A load process's loop. It never knows how events arrive: probe.py has them from HTTP, socket_probe.py from a
WebSocket; as chunks of chat and completions, or as the events of a response.
"""

from typing import Any

import msgspec

from .errors import error_message
from .stream import TERMINAL_EVENTS


class Measured(msgspec.Struct, kw_only=True):
    """What one request cost; times by time.monotonic(), the same clock in every process."""

    planned_s: float = 0.0
    sent_s: float = 0.0  # before connecting, as the caller would see it
    first_s: float = 0.0  # the first event with text: a chunk with choices, a delta of a response
    last_s: float = 0.0
    gaps_s: list[float] = msgspec.field(default_factory=list)  # between such events
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    tokens_are_events: bool = False  # the server sent no usage
    error: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    input_tokens: int = 0  # of a response
    output_tokens: int = 0


class _Response(msgspec.Struct):
    usage: _Usage | None = None
    error: Any = None


class Said(msgspec.Struct):
    """A chunk, or an event of a response."""

    type: str | None = None
    stream_id: str | None = None
    choices: list[msgspec.Raw] | None = None
    usage: _Usage | None = None
    response: _Response | None = None
    error: Any = None
    message: Any = None  # of a flat error event


decode = msgspec.json.Decoder(Said).decode


class Tally:
    """Events of one answer, into a Measured. `done`: its end has been said."""

    def __init__(self, measured: Measured) -> None:
        self.done = False
        self._measured = measured
        self._num_events = 0

    def read(self, data: str, now_s: float) -> None:
        """The data of one server-sent event."""
        if data == "[DONE]":
            self.done = True
            return
        try:
            self.take(decode(data), now_s)
        except msgspec.DecodeError as error:
            self._measured.error = f"an event that is no chunk: {error}"

    def take(self, said: Said, now_s: float) -> None:
        """One event that arrived at now_s."""
        if said.type is not None:
            self._take_event(said, said.type, now_s)
            return
        if said.error:
            self._measured.error = error_message({"error": said.error})
        if said.choices:
            self.count(1, now_s)
        self._use(said.usage)

    def count(self, num: int, now_s: float) -> None:
        """So many events with text, in one read: like vLLM's client, all gaps within it are zero."""
        measured = self._measured
        if self._num_events:
            measured.gaps_s.append(now_s - measured.last_s)
        else:
            measured.first_s = now_s
        measured.gaps_s.extend([0.0] * (num - 1))
        measured.last_s = now_s
        self._num_events += num

    def fail(self, message: str) -> None:
        """No more will come; what went wrong first stands."""
        self.done = True
        self._measured.error = self._measured.error or message

    def finish(self) -> None:
        """The answer is over. Without a usage each event counts as a token."""
        if not self._num_events and self._measured.error is None:
            self._measured.error = "an empty stream"
        if not self._measured.num_output_tokens:
            self._measured.num_output_tokens = self._num_events
            self._measured.tokens_are_events = True

    def _take_event(self, said: Said, kind: str, now_s: float) -> None:
        if kind.endswith(".delta"):
            self.count(1, now_s)
        elif kind == "error":
            self.fail(error_message({"error": said.error or said.message}))
        elif kind in TERMINAL_EVENTS:
            self.done = True
            if said.response is not None:
                self._use(said.response.usage)
                if said.response.error:
                    self.fail(error_message({"error": said.response.error}))

    def _use(self, usage: _Usage | None) -> None:
        if usage is not None:
            self._measured.num_prompt_tokens = usage.prompt_tokens or usage.input_tokens
            self._measured.num_output_tokens = usage.completion_tokens or usage.output_tokens
