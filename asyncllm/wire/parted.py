"""Chat answers that are more than content: reasoning and calls of tools, whole and streamed, as bytes.

Any thread. It never knows parsers, sockets or the engine. Plain content has its faster way in replies.py.
"""

from typing import Any

import orjson

from .replies import Head, Usage, chunk_end, chunk_start


class PartedChunks:
    """The events of one choice of a stream. The role comes with the first."""

    def __init__(self, head: Head, index: int) -> None:
        self._start = chunk_start(head, "chat.completion.chunk", index)
        self._role: dict[str, Any] = {"role": "assistant"}
        self._num_calls = 0

    def open(self) -> bytes:
        """The event that opens the choice before it says anything."""
        return self._event({"content": ""}, None)

    def content(self, text: str, usage: Usage | None) -> bytes:
        return self._event({"content": text}, usage)

    def reasoning(self, text: str, usage: Usage | None) -> bytes:
        return self._event({"reasoning_content": text}, usage)

    def call(self, call_id: str, name: str, usage: Usage | None) -> bytes:
        """A call begins: its id and name are said here and never again."""
        self._num_calls += 1
        opened = {"id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        return self._tool(opened, usage)

    def arguments(self, text: str, usage: Usage | None) -> bytes:
        """More of the last call's arguments."""
        return self._tool({"function": {"arguments": text}}, usage)

    def finish(self, reason: str, usage: Usage | None) -> bytes:
        """The event that closes the choice."""
        opening = self.open() if self._role else b""
        return opening + self._make({}, reason, usage)

    def _tool(self, call: dict[str, Any], usage: Usage | None) -> bytes:
        return self._event({"tool_calls": [{"index": self._num_calls - 1, **call}]}, usage)

    def _event(self, delta: dict[str, Any], usage: Usage | None) -> bytes:
        delta, self._role = self._role | delta, {}
        return self._make(delta, None, usage)

    def _make(self, delta: dict[str, Any], reason: str | None, usage: Usage | None) -> bytes:
        body = orjson.dumps({"delta": delta, "logprobs": None, "finish_reason": reason})
        return b"%b%b]%b" % (self._start, body[1:], chunk_end(usage))


def message(content: str, reasoning: str, calls: list[tuple[str, str, str]]) -> dict[str, Any]:
    """An assistant's whole message; calls are (id, name, arguments)."""
    made: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if reasoning:
        made["reasoning_content"] = reasoning
    if calls:
        made["tool_calls"] = [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
            for call_id, name, arguments in calls
        ]
    return made
