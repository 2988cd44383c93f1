"""The bodies of responses requests, and what a client says on a socket: bytes in, checked values out.

Any thread. It never knows tokenizers, the engine or HTTP. The rules are those of requests.py.
"""

import re
from typing import Annotated, Any

import msgspec

from ..errors import InvalidRequest
from .formats import JsonSchema, ResponseFormat
from .messages import MAX_MESSAGES, MAX_PARTS, add_turn, arguments_of
from .requests import ChatRequest, Int, StreamOptions, decode
from .response_events import decrypted_reasoning
from .tools import AllowedTools, Function, NamedFunction, NamedTool, Tool, ToolChoice
from .unserved import RESPONSES

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_ROLES = ("system", "developer", "user", "assistant")
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text")
_MAX_METADATA_CHARS = 32_768
LOGPROBS = "message.output_text.logprobs"
# Of what OpenAI can include, all but the first two belongs to tools and images: there is none of it to be left out.
_INCLUDABLE = frozenset((
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
))  # fmt: skip


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


class FunctionTool(msgspec.Struct):
    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None
    allowed_callers: list[str] | None = None


class ResponseToolChoice(msgspec.Struct):
    """A choice that is no word."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[FunctionTool] | None = None


class TextFormat(msgspec.Struct):
    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: str | None = None
    mode: str | None = None


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
    top_logprobs: Int | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Int | None = None  # of tools that the server runs: there are none
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    include: list[str] | None = None
    truncation: str | None = None
    generate: bool | None = None  # false: a warm-up: compute the input, for previous_response_id, and say nothing
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
    for i, name in enumerate(request.include or []):
        if name not in _INCLUDABLE:
            raise InvalidRequest(f"{name[:80]!r} cannot be included by this server", f"include[{i}]")
    if request.truncation not in (None, "disabled", "auto"):
        raise InvalidRequest("'truncation' is disabled or auto", "truncation")
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


def as_chat(request: ResponseRequest) -> ChatRequest:
    """What it asks for beside its input, as a chat request says it.

    Raises:
        InvalidRequest: naming what cannot be said so.
    """
    shared = {name: getattr(request, name) for name in _SHARED}
    return ChatRequest(
        messages=[],
        max_tokens=request.max_output_tokens,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])],
        tool_choice=_tool_choice(request.tool_choice),
        reasoning_effort=_effort(request.reasoning or Reasoning()),
        response_format=_format(request.text or TextConfig()),
        logprobs=tells_logprobs(request),
        **shared,
    )


def tells_logprobs(request: ResponseRequest) -> bool:
    """Whether the answer's tokens come with theirs."""
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


# Chat's names of what responses call otherwise.
NAMES = {
    "max_tokens": "max_output_tokens", "reasoning_effort": "reasoning.effort", "messages": "input", "prompt": "input",
    "response_format": "text.format",
}  # fmt: skip
_CONVERTED = frozenset(("logprobs", "messages", "max_tokens", "tools", "tool_choice", "reasoning_effort"))
_SHARED = (set(ChatRequest.__struct_fields__) & set(ResponseRequest.__struct_fields__)) - _CONVERTED


def _tool(tool: FunctionTool, path: str) -> Tool:
    if tool.type != "function":
        raise InvalidRequest(f"a tool of type {tool.type[:40]!r} is not supported: functions are", f"{path}.type")
    if tool.name is None:
        raise InvalidRequest("a function needs its 'name'", f"{path}.name")
    if tool.defer_loading or tool.allowed_callers not in (None, [], ["direct"]):
        name = "defer_loading" if tool.defer_loading else "allowed_callers"
        raise InvalidRequest(f"'{name}' is not supported by this server; leave it out", f"{path}.{name}")
    return Tool("function", Function(tool.name, tool.description, tool.parameters, tool.strict))


def _tool_choice(choice: str | ResponseToolChoice | None) -> str | ToolChoice | None:
    if choice is None or isinstance(choice, str):
        return choice
    if choice.type == "function" and choice.name is not None:
        return ToolChoice("function", NamedFunction(choice.name))
    if choice.type != "allowed_tools":
        raise InvalidRequest("'tool_choice' names a function, or allowed_tools", "tool_choice")
    tools = [NamedTool(one.type, None if one.name is None else NamedFunction(one.name)) for one in choice.tools or []]
    return ToolChoice("allowed_tools", allowed_tools=AllowedTools(choice.mode or "", tools))


def _format(text: TextConfig) -> ResponseFormat | None:
    if text.verbosity not in (None, "medium"):
        raise InvalidRequest("'verbosity' is not supported by this server; leave it out", "text.verbosity")
    if (given := text.format) is None or given.type != "json_schema":
        return None if given is None else ResponseFormat(given.type)
    if given.name is None:
        raise InvalidRequest("a json_schema needs its 'name'", "text.format.name")
    return ResponseFormat("json_schema", JsonSchema(given.name, given.schema, given.description, given.strict))


def _effort(reasoning: Reasoning) -> str | None:
    """
    Raises:
        InvalidRequest: a summary. Reasoning is told as it is; "auto" leaves that to the server.
    """
    neutral = {"summary": "auto", "generate_summary": "auto", "context": "auto", "mode": "standard"}
    for name, value in neutral.items():
        if getattr(reasoning, name) not in (None, value):
            raise InvalidRequest(f"'{name}' is not supported by this server; leave it out", f"reasoning.{name}")
    return reasoning.effort


def input_messages(request: ResponseRequest) -> list[dict[str, Any]]:
    """The input as chat messages. What one answer said in several items is one message again.

    Raises:
        InvalidRequest: naming the first item, and the part of it, that cannot be served.
    """
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    if not request.input:
        raise InvalidRequest("'input' must be a text or hold at least one item", "input")
    if len(request.input) > MAX_MESSAGES:
        raise InvalidRequest(f"'input' takes at most {MAX_MESSAGES} items, got {len(request.input)}", "input")
    turns: list[dict[str, Any]] = []
    for i, item in enumerate(request.input):
        turn = _turn(item, f"input[{i}]")
        if turn["role"] == "assistant" and turn.get("reasoning_content") != "":  # as that of others, told to nobody
            add_turn(turns, turn)
        elif turn["role"] != "assistant":
            turns.append(turn)
    return turns


def echo(request: ResponseRequest) -> dict[str, Any]:
    """What a response repeats of its request."""
    said = msgspec.to_builtins(request)
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "top_p": 1.0 if request.top_p is None else request.top_p,
        "top_logprobs": request.top_logprobs or 0,
        "previous_response_id": request.previous_response_id,
        "store": request.store is not False,
        "metadata": request.metadata or {},
        "background": False,
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "tool_choice": said["tool_choice"] or "auto",
        "tools": said["tools"] or [],
        "reasoning": {"effort": said["reasoning"] and said["reasoning"]["effort"], "summary": None},
        "text": _echoed(request.text),
        "truncation": request.truncation or "disabled",
    }


def _echoed(text: TextConfig | None) -> dict[str, Any]:
    given = {} if text is None or text.format is None else msgspec.to_builtins(text.format)
    return {"format": {name: value for name, value in given.items() if value is not None} or {"type": "text"}}


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
