"""The bodies of Anthropic's messages requests: bytes in, checked values out, and messages as chat templates read them.

Any thread. It never knows tokenizers, the engine or HTTP. The rules are those of requests.py.
"""

from typing import Annotated, Any

import msgspec

from ..errors import InvalidRequest
from .formats import JsonSchema, ResponseFormat
from .messages import MAX_MESSAGES, MAX_PARTS, add_turn
from .requests import ChatRequest, CommonFields, Int, common_fields, decode
from .tools import Function, NamedFunction, Tool, ToolChoice
from .unserved import OF_ANTHROPIC, all_but

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


class ToolParam(msgspec.Struct):
    """A function of the client's. Anthropic's own tools have another type."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    input_examples: list[dict[str, Any]] | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class Choice(msgspec.Struct):
    """Whether and which tools are called."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: Int | None = None  # a label: max_tokens alone bounds the answer
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class CountRequest(CommonFields, kw_only=True):
    """POST /v1/messages/count_tokens. How to sample changes no count: it may stand there as in the request itself."""

    messages: list[MessageParam]
    model: str | None = None
    system: str | Blocks | None = None
    tools: list[ToolParam] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages, the fields that are served."""

    max_tokens: Int
    stream: bool | None = None
    stop_sequences: list[str] | None = None


ANTHROPIC = all_but(MessagesRequest.__struct_fields__, OF_ANTHROPIC)
_request = msgspec.json.Decoder(MessagesRequest)
_count = msgspec.json.Decoder(CountRequest)


def decode_messages(body: bytes) -> MessagesRequest:
    """Raises: InvalidRequest, naming the field."""
    return decode(_request, body, ANTHROPIC)


def decode_count(body: bytes) -> CountRequest:
    """Raises: InvalidRequest, naming the field."""
    return decode(_count, body, ANTHROPIC)


def as_chat(request: CountRequest) -> ChatRequest:
    """What it asks for beside its messages, as a chat request says it.

    Raises:
        InvalidRequest: naming what cannot be said so.
    """
    choice = request.tool_choice or Choice("auto")
    chat = ChatRequest(
        messages=[],
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])],
        tool_choice=_tool_choice(choice),
        parallel_tool_calls=not choice.disable_parallel_tool_use,
        reasoning_effort=_effort(request),
        response_format=_format(request.output_config),
        include_reasoning=request.thinking is None or request.thinking.display != "omitted",
        **common_fields(request),
    )
    if request.messages and request.messages[-1].role == "assistant":  # "prefill": the answer goes on from there
        chat.continue_final_message = True
    if isinstance(request, MessagesRequest):
        chat.max_tokens, chat.stop = request.max_tokens, request.stop_sequences
    return chat


def _tool(tool: ToolParam, path: str) -> Tool:
    if tool.type not in (None, "custom"):
        raise InvalidRequest(f"a tool of type {tool.type[:40]!r} is not supported: functions are", f"{path}.type")
    asks = {"input_examples": tool.input_examples, "defer_loading": tool.defer_loading}
    asks["allowed_callers"] = tool.allowed_callers not in (None, [], ["direct"])
    for name, value in asks.items():
        if value:
            raise InvalidRequest(f"'{name}' is not supported by this server; leave it out", f"{path}.{name}")
    if tool.input_schema is None:
        raise InvalidRequest("a tool needs its 'input_schema'", f"{path}.input_schema")
    function = Function(tool.name, tool.description, tool.input_schema, tool.strict)
    return Tool("function", function)


def _tool_choice(choice: Choice) -> str | ToolChoice:
    words = {"auto": "auto", "any": "required", "none": "none"}
    if choice.type == "tool" and choice.name is not None:
        return ToolChoice("function", NamedFunction(choice.name))
    if choice.type not in words:
        raise InvalidRequest("'tool_choice' is of type auto, any, none, or tool with a name", "tool_choice.type")
    return words[choice.type]


def _format(config: OutputConfig | None) -> ResponseFormat | None:
    if config is None or config.format is None:
        return None
    if config.format.type != "json_schema":
        raise InvalidRequest("the format is of type json_schema", "output_config.format.type")
    return ResponseFormat("json_schema", JsonSchema("output", config.format.schema))


def _effort(request: CountRequest) -> str | None:
    """Anthropic says how much in one place, and whether at all in another."""
    thinking, config = request.thinking or Thinking("adaptive"), request.output_config or OutputConfig()
    if thinking.type not in ("adaptive", "enabled", "disabled"):
        raise InvalidRequest("'thinking' is of type adaptive, enabled or disabled", "thinking.type")
    if thinking.display not in (None, "summarized", "omitted"):
        raise InvalidRequest("'display' is summarized or omitted", "thinking.display")
    if thinking.type == "disabled":
        return "none"
    if config.effort is None:
        return "medium" if thinking.type == "enabled" else None
    return "xhigh" if config.effort == "max" else config.effort


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
            add_turn(turns, turn)
    if turns[-1].get("tool_calls"):
        path = f"messages[{len(request.messages) - 1}]"
        raise InvalidRequest("a tool_use wants its tool_result in the next message", path)
    return turns


def _turns(message: MessageParam, path: str) -> list[dict[str, Any]]:
    if message.role not in _ROLES:
        raise InvalidRequest(f"unknown role {message.role[:40]!r}; known are {', '.join(_ROLES)}", f"{path}.role")
    if isinstance(message.content, str) or message.role == "system":
        return [{"role": message.role, "content": _text(message.content, f"{path}.content")}]
    if message.role == "assistant":
        return [_assistant(message.content, f"{path}.content")]
    if not message.content:
        raise InvalidRequest("a user's message holds a text or at least one block", f"{path}.content")
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
