"""The items that a response goes on from: messages, calls and what came of them, reasoning; as chat messages.

Any thread. It never knows templates, tokens or what else a request says.
"""

from typing import Annotated, Any

import msgspec

from ..errors import InvalidRequest
from .items import hex_of
from .messages import MAX_MESSAGES, MAX_PARTS, add_turn, arguments_of
from .response_events import decrypted_reasoning

_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
Parts = Annotated["list[InputPart]", msgspec.Meta(max_length=MAX_PARTS)]


class InputPart(msgspec.Struct):
    type: str
    text: str | None = None
    refusal: str | None = None


class InputItem(msgspec.Struct):
    """A message, a call, what came of a call, or reasoning: which fields it has depends on its type."""

    type: str | None = None
    role: str | None = None
    content: str | Parts | None = None
    call_id: str | None = None  # of function_call, with name and arguments, and of function_call_output, with output
    name: str | None = None
    arguments: str | None = None
    output: str | Parts | None = None
    encrypted_content: str | None = None  # of reasoning


def input_messages(given: str | list[InputItem] | None) -> list[dict[str, Any]]:
    """The input as chat messages. What one answer said in several items is one message again.

    Raises:
        InvalidRequest: naming the first item, and the part of it, that cannot be served.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("'input' must be a text or hold at least one item", "input")
    if len(given) > MAX_MESSAGES:
        raise InvalidRequest(f"'input' takes at most {MAX_MESSAGES} items, got {len(given)}", "input")
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(given):
        turn = _turn(item, f"input[{i}]")
        if turn["role"] == "assistant" and turn.get("reasoning_content") != "":  # as that of others, told to nobody
            add_turn(turns, turn)
        elif turn["role"] != "assistant":
            turns.append(turn)
    return turns


def _turn(item: InputItem, path: str) -> dict[str, Any]:
    match item.type:
        case None | "message":
            return _message(item, path)
        case "function_call":
            return _call(item, path)
        case "function_call_output":
            return _result(item, path)
        case "reasoning":
            return _thought(item, path)
    known = "message, function_call, function_call_output, reasoning"
    raise InvalidRequest(f"an input item of type {item.type[:40]!r} is not supported; known are {known}", path)


def _message(item: InputItem, path: str) -> dict[str, Any]:
    if item.role not in _ROLES:
        raise InvalidRequest(f"unknown role {str(item.role)[:40]!r}; known are {', '.join(_ROLES)}", f"{path}.role")
    role = "system" if item.role == "developer" else item.role
    return {"role": role, "content": _text(item.content, f"{path}.content")}


def _call(item: InputItem, path: str) -> dict[str, Any]:
    for name in ("call_id", "name", "arguments"):
        if getattr(item, name) is None:
            raise InvalidRequest(f"a function_call needs its '{name}'", f"{path}.{name}")
    function = {"name": item.name, "arguments": arguments_of(item.arguments)}
    call = {"id": item.call_id, "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _result(item: InputItem, path: str) -> dict[str, Any]:
    if item.call_id is None:
        raise InvalidRequest("a function_call_output needs the 'call_id' of its call", f"{path}.call_id")
    return {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output, f"{path}.output")}


def _thought(item: InputItem, path: str) -> dict[str, Any]:
    """Reasoning as it was told, or in the form in which it is sent back."""
    text = "" if item.content is None else _text(item.content, f"{path}.content")
    if not text and item.encrypted_content:
        try:
            text = decrypted_reasoning(item.encrypted_content)
        except ValueError:
            raise InvalidRequest("this server has not made this", f"{path}.encrypted_content") from None
    return {"role": "assistant", "content": "", "reasoning_content": text}


def _text(content: str | list[InputPart] | None, path: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest("it must be a string or a list of text parts", path)
    return "\n".join([_part_text(part, f"{path}[{i}]") for i, part in enumerate(content)])


def _part_text(part: InputPart, path: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if part.type not in (*_TEXT_PARTS, "refusal"):
        raise InvalidRequest(f"a content part of type {part.type[:40]!r} is not supported: this model reads text", path)
    if text is None:
        raise InvalidRequest(f"a content part of type {part.type!r} needs its text", path)
    return text


def as_items(messages: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """A conversation as items again, with ids that are the same each time."""
    items: list[dict[str, Any]] = []
    for message in messages:
        items += _TOLD.get(message["role"], _told_input)(message)
    prefixes = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
    return [{"id": f"{prefixes[item['type']]}_{hex_of(name, -1 - i)}", **item} for i, item in enumerate(items)]


def _told_input(message: dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "input_text", "text": message["content"]}]
    return [{"type": "message", "status": "completed", "role": message["role"], "content": content}]


def _told_result(message: dict[str, Any]) -> list[dict[str, Any]]:
    result = {"call_id": message["tool_call_id"], "output": message["content"]}
    return [{"type": "function_call_output", "status": "completed", **result}]


def _told_answer(message: dict[str, Any]) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        items.append({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": thought}]})
    if text := message["content"]:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append({"type": "message", "status": "completed", "role": "assistant", "content": [part]})
    for call in message.get("tool_calls", ()):
        function = call["function"]
        arguments = function["arguments"]
        written = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
        own = {"call_id": call["id"], "name": function["name"], "arguments": written}
        items.append({"type": "function_call", "status": "completed", **own})
    return items


_TOLD = {"assistant": _told_answer, "tool": _told_result}
