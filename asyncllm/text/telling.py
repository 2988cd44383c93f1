"""Tools for a model whose chat template knows none: told in words, in the form that most models have seen.

Any thread. It never knows templates, tokens or requests. What it makes is what tools.py reads as "hermes".
"""

import json
from typing import Any

Message = dict[str, Any]

_INTRODUCTION = """You can call functions. Each line between <tools> and </tools> describes one as JSON:
<tools>
{tools}
</tools>
To call one, write its name and its arguments as JSON between tags:
<tool_call>
{{"name": "the function", "arguments": {{"argument": "value"}}}}
</tool_call>"""


def calls_told(messages: list[Message]) -> list[Message]:
    """The same conversation with calls and their results as text."""
    return [_told(message) for message in messages]


def tools_told(messages: list[Message], tools: list[dict[str, Any]]) -> list[Message]:
    """The same conversation with tools in its system message."""
    text = _INTRODUCTION.format(tools="\n".join([json.dumps(tool, ensure_ascii=False) for tool in tools]))
    if messages and messages[0].get("role") == "system" and isinstance(messages[0].get("content"), str):
        first = messages[0] | {"content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _told(message: Message) -> Message:
    content = message.get("content") or ""
    if message.get("role") == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    if calls := message.get("tool_calls"):
        texts = [content] if content else []
        texts += [f"<tool_call>\n{json.dumps(_called(call), ensure_ascii=False)}\n</tool_call>" for call in calls]
        return {"role": message.get("role"), "content": "\n".join(texts)}
    return message


def _called(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function", call)
    return {"name": function.get("name"), "arguments": function.get("arguments")}
