"""The tools of a request and what it says about their use: checked, and as templates and parsers want them.

Any thread. It never knows templates, parsers or grammars.
"""

import re
from typing import Any

import msgspec

from ..errors import Field, InvalidRequest
from .formats import refuse_options

MAX_TOOLS = 128  # OpenAI's own limit
_NO_OBJECTS = ("array", "string", "number", "integer", "boolean", "null")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct):
    type: str
    function: Function | None = None


class NamedFunction(msgspec.Struct):
    name: str


class NamedTool(msgspec.Struct):
    type: str
    function: NamedFunction | None = None


class AllowedTools(msgspec.Struct):
    mode: str
    tools: list[NamedTool]


class ToolChoice(msgspec.Struct):
    """A choice that is no word: one function, or some of them."""

    type: str
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None


class ToolUse(msgspec.Struct, frozen=True):
    """Tools that the answer may call, or must."""

    functions: tuple[Function, ...]
    must_call: bool = False
    one_call: bool = False

    @property
    def names(self) -> frozenset[str]:
        return frozenset([function.name for function in self.functions])

    def for_template(self) -> list[dict[str, Any]]:
        """As chat templates read them, the keys in the order that models are trained on."""
        return [{"type": "function", "function": _described(function)} for function in self.functions]


def tool_use(
    tools: list[Tool] | None, choice: str | ToolChoice | None, parallel_tool_calls: bool | None
) -> ToolUse | None:
    """What the answer may call; None where it may call nothing.

    Raises:
        InvalidRequest: naming the field.
    """
    functions = _functions(tools or [])
    if not functions and choice not in (None, "none", "auto"):
        raise InvalidRequest.of("tool_choice", "needs ", Field("tools"))
    if choice == "none" or not functions:
        return None
    use = ToolUse(functions, one_call=parallel_tool_calls is False)
    if choice in (None, "auto", "required"):
        return msgspec.structs.replace(use, must_call=choice == "required")
    if isinstance(choice, str):
        known = "none, auto, required or an object with a function's name"
        raise InvalidRequest.of("tool_choice", f"is {known}, not {choice[:40]!r}")
    return _chosen(use, choice)


def _functions(tools: list[Tool]) -> tuple[Function, ...]:
    if len(tools) > MAX_TOOLS:
        raise InvalidRequest.of("tools", f"takes at most {MAX_TOOLS}, got {len(tools)}")
    seen: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise InvalidRequest(
                f"a tool of type {tool.type[:40]!r} is not supported: functions are", f"tools[{i}].type"
            )
        if tool.function is None:
            raise InvalidRequest("a function tool needs its 'function'", f"tools[{i}].function")
        path, parameters = f"tools[{i}].function.parameters", tool.function.parameters or {}
        refuse_options(parameters, path)
        kinds = parameters.get("type", "object")
        if kinds in _NO_OBJECTS or (isinstance(kinds, list) and "object" not in kinds):  # other words the grammar tells
            raise InvalidRequest("a function's parameters are a schema of type 'object'", f"{path}.type")
        name = tool.function.name
        if not _NAME.fullmatch(name) or name in seen:
            message = f"a function's name is given once, in 1 to 64 of A-Z a-z 0-9 _ . -, not {name[:80]!r}"
            raise InvalidRequest(message, f"tools[{i}].function.name")
        seen.add(name)
    return tuple([tool.function for tool in tools if tool.function is not None])


def _chosen(use: ToolUse, choice: ToolChoice) -> ToolUse:
    if choice.type == "function" and choice.function is not None:
        functions = _named(use, choice.function.name, "tool_choice.function.name")
        return msgspec.structs.replace(use, functions=functions, must_call=True, one_call=True)
    if choice.type == "allowed_tools" and (allowed := choice.allowed_tools) is not None:
        return _allowed(use, allowed)
    raise InvalidRequest.of("tool_choice", "names a function, or allowed_tools")


def _allowed(use: ToolUse, allowed: AllowedTools) -> ToolUse:
    path = "tool_choice.allowed_tools"
    if allowed.mode not in ("auto", "required"):
        raise InvalidRequest(f"the mode is auto or required, not {allowed.mode[:40]!r}", f"{path}.mode")
    functions: list[Function] = []
    for i, tool in enumerate(allowed.tools):
        if tool.type != "function" or tool.function is None:
            raise InvalidRequest("an allowed tool is a function with its name", f"{path}.tools[{i}]")
        functions += _named(use, tool.function.name, f"{path}.tools[{i}].function.name")
    if not functions:
        raise InvalidRequest("no tool is allowed; tool_choice none says so", f"{path}.tools")
    return msgspec.structs.replace(use, functions=tuple(functions), must_call=allowed.mode == "required")


def _named(use: ToolUse, name: str, path: str) -> tuple[Function, ...]:
    functions = tuple([function for function in use.functions if function.name == name])
    if not functions:
        raise InvalidRequest(f"no tool has the name {name[:80]!r}", path)
    return functions


def _described(function: Function) -> dict[str, Any]:
    described: dict[str, Any] = {"name": function.name}
    if function.description is not None:
        described["description"] = function.description
    return described | {"parameters": function.parameters or {"type": "object", "properties": {}}}
