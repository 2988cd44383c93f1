"""The bodies of Anthropic's messages requests: bytes in, checked values out, and messages as chat templates read them.

Any thread. It never knows tokenizers, the engine or HTTP. The rules are those of requests.py.
"""

from typing import Annotated, Any

import msgspec

from ..errors import InvalidRequest
from ..types import SamplingParams
from .messages import MAX_MESSAGES, MAX_PARTS
from .requests import ChatRequest, Int, chat_params, decode
from .unserved import ANTHROPIC

_ROLES = ("system", "user", "assistant")


class Source(msgspec.Struct):
    """Where a document's text is. Only what is in the request itself is read."""

    type: str
    data: str | None = None
    content: "str | list[Block] | None" = None


class Block(msgspec.Struct):
    """A part of a message; which fields it has depends on its type."""

    type: str
    text: str | None = None
    thinking: str | None = None  # its signature is not looked at: what a client sends back is its own affair
    source: Source | None = None  # of a document
    title: str | None = None
    context: str | None = None
    id: str | None = None  # of tool_use, with name and input
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None  # of tool_result, with content
    content: "str | Annotated[list[Block], msgspec.Meta(max_length=MAX_PARTS)] | None" = None
    is_error: bool | None = None


Blocks = Annotated[list[Block], msgspec.Meta(max_length=MAX_PARTS)]


class MessageParam(msgspec.Struct):
    role: str
    content: str | Blocks


class CountRequest(msgspec.Struct, kw_only=True):
    """POST /v1/messages/count_tokens."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | Blocks | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages, the fields that are served."""

    max_tokens: Int
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None


_request = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountRequest)


def decode_messages(body: bytes) -> MessagesRequest:
    """Raises: InvalidRequest, naming the field."""
    return decode(_request, body, ANTHROPIC)


def decode_count(body: bytes) -> CountRequest:
    """Raises: InvalidRequest, naming the field."""
    return decode(_count, body, ANTHROPIC)


def message_params(request: MessagesRequest) -> SamplingParams:
    """How to sample the answer.

    Raises:
        InvalidRequest: a limit below 1.
    """
    chat = ChatRequest(
        messages=[],
        max_tokens=request.max_tokens,
        stop=request.stop_sequences,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
    )
    return chat_params(chat)


def template_messages(request: CountRequest) -> list[dict[str, Any]]:
    """The conversation as a chat template reads it. Neighbours of one role are one turn, as Anthropic has it.

    Raises:
        InvalidRequest: naming the first message, and the part of it, that cannot be served.
    """
    if not request.messages:
        raise InvalidRequest("'messages' must hold at least one message", "messages")
    if len(request.messages) > MAX_MESSAGES:
        raise InvalidRequest(f"'messages' takes at most {MAX_MESSAGES}, got {len(request.messages)}", "messages")
    turns = [] if request.system is None else [{"role": "system", "content": _text(request.system, "system")}]
    for i, message in enumerate(request.messages):
        for turn in _turns(message, f"messages[{i}]"):
            _add(turns, turn)
    return turns


def _turns(message: MessageParam, path: str) -> list[dict[str, Any]]:
    if message.role not in _ROLES:
        raise InvalidRequest(f"unknown role {message.role[:40]!r}; known are {', '.join(_ROLES)}", f"{path}.role")
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": _text(message.content, f"{path}.content")}]
    if message.role == "assistant":
        return [_assistant(message.content, f"{path}.content")]
    return [_of_user(block, f"{path}.content[{i}]") for i, block in enumerate(message.content)]


def _assistant(blocks: list[Block], path: str) -> dict[str, Any]:
    texts, calls, thoughts = [], [], []
    for i, block in enumerate(blocks):
        if block.type == "tool_use":
            calls.append(_call(block, f"{path}[{i}]"))
        elif block.type == "thinking":
            thoughts.append(block.thinking or "")
        else:
            texts.append(_block_text(block, f"{path}[{i}]"))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    return turn


def _of_user(block: Block, path: str) -> dict[str, Any]:
    if block.type != "tool_result":
        return {"role": "user", "content": _block_text(block, path)}
    if block.tool_use_id is None:
        raise InvalidRequest("a tool_result needs the 'tool_use_id' of its call", f"{path}.tool_use_id")
    text = "" if block.content is None else _text(block.content, f"{path}.content")
    if block.is_error:
        text = f"Error: {text}"  # templates know no other way to say it
    return {"role": "tool", "tool_call_id": block.tool_use_id, "content": text}


def _call(block: Block, path: str) -> dict[str, Any]:
    for name in ("id", "name", "input"):
        if getattr(block, name) is None:
            raise InvalidRequest(f"a tool_use needs its '{name}'", f"{path}.{name}")
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _text(content: str | list[Block], path: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join([_block_text(block, f"{path}[{i}]") for i, block in enumerate(content)])


def _block_text(block: Block, path: str) -> str:
    if block.type == "text":
        if block.text is None:
            raise InvalidRequest("a text block needs its 'text'", f"{path}.text")
        return block.text
    if block.type == "document" and (source := block.source) is not None:
        if source.type == "text" and source.data is not None:
            return _document(block, source.data)
        if source.type == "content" and source.content is not None:
            return _document(block, _text(source.content, f"{path}.source.content"))
    raise InvalidRequest(f"a content block of type {block.type[:40]!r} is not supported: this model reads text", path)


def _document(block: Block, text: str) -> str:
    return "\n".join([part for part in (block.title, block.context, text) if part])


def _add(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    if not turns or turn["role"] == "tool" or turns[-1]["role"] != turn["role"]:
        turns.append(turn)
        return
    last = turns[-1]
    for name in ("content", "reasoning_content"):
        if texts := [one[name] for one in (last, turn) if one.get(name)]:
            last[name] = "\n".join(texts)
    if calls := [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]:
        last["tool_calls"] = calls
