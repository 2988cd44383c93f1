"""The bodies of responses requests, and what a client says on a socket: bytes in, checked values out.

Any thread. It never knows tokenizers, the engine or HTTP. The rules are those of requests.py.
"""

import re
from typing import Any

import msgspec

from ..errors import InvalidRequest
from ..types import SamplingParams
from .messages import MAX_MESSAGES
from .requests import Int, StreamOptions, decode, sampling_params
from .unserved import RESPONSES

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text")
_MAX_METADATA_CHARS = 32_768


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message. Items of other types are refused by their type."""

    type: str | None = None
    role: str | None = None
    content: str | list[InputPart] | None = None


class ResponseRequest(msgspec.Struct, kw_only=True):
    """POST /v1/responses, and response.create: the fields that are served."""

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    generate: bool | None = None  # false: keep the input for previous_response_id, and say nothing
    # -- ours --
    min_tokens: Int | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    resumable: bool | None = None  # outlives its connection, for a while
    progress: bool | None = None  # tell the place in the queue and the prefill


class Update(msgspec.Struct, kw_only=True):
    """response.update: what may change while a response runs."""

    response_id: str | None = None
    max_output_tokens: Int | None = None
    stop: str | list[str] | None = None
    temperature: float | None = None

    def changes(self) -> dict[str, Any]:
        """As AsyncLLM.update takes them."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        return {"max_tokens": self.max_output_tokens, "stop": stop, "temperature": self.temperature}


class Attach(msgspec.Struct, kw_only=True):
    """response.attach: go on with a response behind an event's number."""

    response_id: str
    starting_after: Int | None = None


class Cancel(msgspec.Struct, kw_only=True):
    response_id: str | None = None


class Envelope(msgspec.Struct, kw_only=True):
    """What every client event has."""

    type: str
    stream_id: Any = None


_request = msgspec.json.Decoder(ResponseRequest)
_envelope = msgspec.json.Decoder(Envelope)
_update = msgspec.json.Decoder(Update)
_attach = msgspec.json.Decoder(Attach)
_cancel = msgspec.json.Decoder(Cancel)


def decode_response(body: bytes) -> ResponseRequest:
    """Read a responses request.

    Raises:
        InvalidRequest: naming the field.
    """
    request = decode(_request, body, RESPONSES)
    if sum(len(key) + len(value) for key, value in (request.metadata or {}).items()) > _MAX_METADATA_CHARS:
        raise InvalidRequest(f"'metadata' may hold {_MAX_METADATA_CHARS} characters", "metadata")
    return request


def decode_envelope(body: bytes) -> Envelope:
    """What kind of event this is, and of which lane.

    Raises:
        InvalidRequest: it is no event.
    """
    return decode(_envelope, body, None)


def check_stream_id(value: Any) -> str | None:
    """The lane's name.

    Raises:
        InvalidRequest: it is none.
    """
    if value is not None and not (isinstance(value, str) and _STREAM_ID.fullmatch(value)):
        error = InvalidRequest("'stream_id' has 1 to 256 of A-Z a-z 0-9 _ . -", "stream_id")
        error.code = "invalid_stream_id"
        raise error
    return value


def decode_update(body: bytes) -> Update:
    """Raises: InvalidRequest, naming the field."""
    update = decode(_update, body, None)
    if update.max_output_tokens is not None and update.max_output_tokens < 1:
        raise InvalidRequest("'max_output_tokens' must be at least 1", "max_output_tokens")
    return update


def decode_attach(body: bytes) -> Attach:
    """Raises: InvalidRequest, naming the field."""
    return decode(_attach, body, None)


def decode_cancel(body: bytes) -> Cancel:
    """Raises: InvalidRequest, naming the field."""
    return decode(_cancel, body, None)


def response_params(request: ResponseRequest) -> SamplingParams:
    """How to sample the answer; without a limit it may run to the end of the context.

    Raises:
        InvalidRequest: a limit below 1.
    """
    limit = request.max_output_tokens
    if limit is not None and limit < 1:
        raise InvalidRequest(f"'max_output_tokens' must be at least 1, got {limit}", "max_output_tokens")
    return sampling_params(request, limit)


def input_messages(request: ResponseRequest) -> list[dict[str, Any]]:
    """The input as chat messages.

    Raises:
        InvalidRequest: naming the first item, and the part of it, that cannot be served.
    """
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequest("'input' must be a text or hold at least one message", "input")
    if len(request.input) > MAX_MESSAGES:
        raise InvalidRequest(f"'input' takes at most {MAX_MESSAGES} items, got {len(request.input)}", "input")
    return [_message(item, f"input[{i}]") for i, item in enumerate(request.input)]


def echo(request: ResponseRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "previous_response_id": request.previous_response_id,
        "store": request.store is not False,
        "metadata": request.metadata or {},
        "background": False,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "text": {"format": {"type": "text"}},
        "truncation": "disabled",
    }


def _message(item: InputItem, path: str) -> dict[str, Any]:
    if item.type not in (None, "message"):
        message = f"an input item of type {item.type[:40]!r} is not supported by this server yet; messages are"
        raise InvalidRequest(message, path)
    if item.role not in _ROLES:
        raise InvalidRequest(f"unknown role {str(item.role)[:40]!r}; known are {', '.join(_ROLES)}", f"{path}.role")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _content(item, path)}


def _content(item: InputItem, path: str) -> str:
    if isinstance(item.content, str):
        return item.content
    if item.content is None:
        raise InvalidRequest("content must be a string or a list of text parts", f"{path}.content")
    return "\n".join([_part_text(part, f"{path}.content[{i}]") for i, part in enumerate(item.content)])


def _part_text(part: InputPart, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXT_PARTS, "refusal"):
        raise InvalidRequest(f"a content part of type {part.type[:40]!r} is not supported: this model reads text", path)
    if text is None:
        raise InvalidRequest(f"a content part of type {part.type!r} needs its text", path)
    return text
