"""Chat messages: checked one by one, and turned into what templates read.

Any thread. It never knows templates or tokens.
"""

from typing import Annotated, Any

import msgspec

from ..errors import InvalidRequest

# Whatever is legal in these numbers, rendering it takes milliseconds. A million empty messages took 10 s.
MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_TOOL_CALLS = 128
MAX_PARSED_ARGUMENTS_CHARS = 1 << 16  # longer ones reach the template as the string they are

ROLES = ("system", "developer", "user", "assistant", "tool")


class Part(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    function: FunctionCall
    id: str | None = None
    type: str | None = None


class Message(msgspec.Struct):
    role: str
    content: str | Annotated[list[Part], msgspec.Meta(max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCall], msgspec.Meta(max_length=MAX_TOOL_CALLS)] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    audio: msgspec.Raw | None = None
    function_call: msgspec.Raw | None = None


def template_messages(messages: list[Message]) -> list[dict[str, Any]]:
    """The messages as a chat template reads them: content a string, arguments of tool calls an object.

    Text parts are joined with a line feed. "developer" is "system".

    Raises:
        InvalidRequest: naming the first message, and the part of it, that cannot be served.
    """
    if not messages:
        raise InvalidRequest("'messages' must hold at least one message", "messages")
    if len(messages) > MAX_MESSAGES:
        raise InvalidRequest(f"'messages' takes at most {MAX_MESSAGES}, got {len(messages)}", "messages")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def add_turn(turns: list[dict[str, Any]], turn: dict[str, Any]) -> None:
    """Behind the others; or joined to the last, where the same role goes on speaking. Results stand alone."""
    if not turns or turn["role"] == "tool" or turns[-1]["role"] != turn["role"]:
        turns.append(turn)
        return
    last = turns[-1]
    for name in ("content", "reasoning_content"):
        if texts := [one[name] for one in (last, turn) if one.get(name)]:
            last[name] = "\n".join(texts)
    if calls := [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]:
        last["tool_calls"] = calls


def _template_message(message: Message, path: str) -> dict[str, Any]:
    _check(message, path)
    result: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    result["content"] = _content(message, path)
    if message.tool_calls:
        result["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    return result


def _check(message: Message, path: str) -> None:
    if message.role not in ROLES:
        raise InvalidRequest(f"unknown role {message.role[:40]!r}; known are {', '.join(ROLES)}", f"{path}.role")
    for name in ("audio", "function_call"):
        if (raw := getattr(message, name)) is not None and bytes(raw) != b"null":
            raise InvalidRequest(f"'{name}' is not supported by this server", f"{path}.{name}")
    if message.tool_calls and message.role != "assistant":
        raise InvalidRequest("only an assistant message has tool calls", f"{path}.tool_calls")


def _content(message: Message, path: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is not None:
        parts = enumerate(message.content)
        return "\n".join([_part_text(part, message.role, f"{path}.content[{i}]") for i, part in parts])
    if message.role == "assistant" and (message.tool_calls or message.refusal is not None):
        return message.refusal or ""  # not None: templates that know no tool calls add it to a string
    raise InvalidRequest("content must be a string or a list of text parts", f"{path}.content")


def _part_text(part: Part, role: str, path: str) -> str:
    text = part.refusal if part.type == "refusal" and role == "assistant" else part.text
    if part.type not in ("text", "refusal") or (part.type == "refusal" and role != "assistant"):
        raise InvalidRequest(f"a content part of type {part.type[:40]!r} is not supported: this model reads text", path)
    if text is None:
        raise InvalidRequest(f"a content part of type {part.type!r} needs its '{part.type}'", path)
    return text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.function.name, "arguments": arguments_of(call.function.arguments)}
    result: dict[str, Any] = {"type": "function", "function": function}
    return result if call.id is None else {"id": call.id, **result}


def arguments_of(arguments: str | dict[str, Any] | None) -> Any:
    """An object for the template. A string that is none stays: a model wrote it, and history is not refused."""
    if not isinstance(arguments, str):
        return arguments or {}
    if len(arguments) > MAX_PARSED_ARGUMENTS_CHARS:
        return arguments
    try:
        return msgspec.json.decode(arguments or "{}")
    except (msgspec.DecodeError, RecursionError):
        return arguments
