"""The bodies of responses requests, and what a client says on a socket: bytes in, checked values out.

Any thread. It never knows tokenizers, the engine or HTTP. The rules are those of requests.py.
"""

import re
from typing import Any

import msgspec
import orjson

from ..errors import InvalidRequest
from ..types import SamplingParams
from .formats import JsonSchema, ResponseFormat
from .requests import ChatRequest, CommonFields, Int, StreamOptions, decode
from .response_input import InputItem
from .tools import AllowedTools, Function, NamedFunction, NamedTool, Tool, ToolChoice
from .unserved import OF_RESPONSES, all_but

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")
_MAX_METADATA_CHARS = 32_768
LOGPROBS = "message.output_text.logprobs"
# Of what OpenAI can include, all but the first two belongs to tools and images: there is none of it to be left out.
_INCLUDABLE = frozenset((
    LOGPROBS, "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
    "web_search_call.action.sources", "message.input_image.image_url", "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
))  # fmt: skip


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


class ResponseRequest(CommonFields, kw_only=True):
    """POST /v1/responses, and response.create: the fields that are served."""

    input: str | list[InputItem] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: Int | None = None
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
    # -- chat's --
    stop: str | list[str] | None = None
    return_tokens_as_token_ids: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # -- ours --
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

    def change(self, other: "ResponseRequest | Update") -> None:
        """The same of a request that has not begun, or of what an update before this one said."""
        for name in ("max_output_tokens", "stop", "temperature"):
            if (value := getattr(self, name)) is not None:
                setattr(other, name, value)


class Attach(msgspec.Struct, kw_only=True):
    """response.attach: go on with a response behind an event's number."""

    response_id: str
    starting_after: Int | None = None
    stream_options: StreamOptions | None = None


class Cancel(msgspec.Struct, kw_only=True):
    response_id: str | None = None


class Envelope(msgspec.Struct, kw_only=True):
    """What every client event has."""

    type: str
    stream_id: Any = None


RESPONSES = all_but(ResponseRequest.__struct_fields__, OF_RESPONSES)
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
    _check_repeatable(request)
    if request.truncation not in (None, "disabled", "auto"):
        raise InvalidRequest("'truncation' is disabled or auto", "truncation")
    if sum(len(key) + len(value) for key, value in (request.metadata or {}).items()) > _MAX_METADATA_CHARS:
        raise InvalidRequest(f"'metadata' may hold {_MAX_METADATA_CHARS} characters", "metadata")
    return request


def _check_repeatable(request: ResponseRequest) -> None:
    """A response repeats its tools and its format, a few levels deep: JSON is written to 254, and numbers of 64 bits.

    Raises:
        InvalidRequest: naming what goes beyond.
    """
    for name in ("tools", "tool_choice", "text"):
        try:
            orjson.dumps([[[[[[msgspec.to_builtins(getattr(request, name))]]]]]])
        except (orjson.JSONEncodeError, RecursionError):
            raise InvalidRequest("it is nested too deeply, or holds too large a number", name) from None


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
    attach = decode(_attach, body, None)
    if attach.starting_after is not None and attach.starting_after < 0:
        raise InvalidRequest("'starting_after' is the number of an event, from 0 on", "starting_after")
    return attach


def decode_cancel(body: bytes) -> Cancel:
    """Raises: InvalidRequest, naming the field."""
    return decode(_cancel, body, None)


def as_chat(request: ResponseRequest) -> ChatRequest:
    """What it asks for beside its input, as a chat request says it.

    Raises:
        InvalidRequest: naming what cannot be said so.
    """
    given = {name: getattr(request, name) for name in _SHARED}
    return ChatRequest(
        messages=[],
        max_tokens=request.max_output_tokens,
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(request.tools or [])],
        tool_choice=_tool_choice(request.tool_choice),
        reasoning_effort=_effort(request.reasoning or Reasoning()),
        response_format=_format(request.text or TextConfig()),
        logprobs=tells_logprobs(request),
        **given,
    )


def tells_logprobs(request: ResponseRequest) -> bool:
    """Whether the answer's tokens come with theirs."""
    return LOGPROBS in (request.include or ()) or bool(request.top_logprobs)


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


def echo(request: ResponseRequest, params: SamplingParams) -> dict[str, Any]:
    """What a response repeats of its request, and how it is sampled."""
    said = msgspec.to_builtins(request)
    return {
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "temperature": params.temperature,
        "top_p": params.top_p,
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
