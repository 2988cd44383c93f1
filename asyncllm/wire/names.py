"""What an API calls the fields that chat has under other names, or one level deeper.

Any thread. It never knows requests. An error that comes up behind the door names fields as chat does (errors.Field).
"""

import re


class Names:
    """Chat's paths as another API has them: whichever pattern fits a path from its beginning, up to the end of a part,
    is replaced by the name beside it."""

    def __init__(self, by_chats: dict[str, str]) -> None:
        self._rules = [(re.compile(rf"(?:{chats})(?![^.\[])"), own) for chats, own in by_chats.items()]

    def of(self, path: str) -> str:
        for chats, own in self._rules:
            if (found := chats.match(path)) is not None:
                return found.expand(own) + path[found.end() :]
        return path


RESPONSE_NAMES = Names({
    r"max_tokens": "max_output_tokens",
    r"reasoning_effort": "reasoning.effort",
    r"messages|prompt": "input",
    r"response_format(\.json_schema)?": "text.format",
    r"(tools\[\d+\])\.function": r"\1",
    r"tool_choice(\.allowed_tools)?(\.tools\[\d+\])?(\.function)?": r"tool_choice\2",
})  # fmt: skip


def message_names(effort: str, num_messages: int) -> Names:
    """Anthropic's: where a request has said how much to think, and how many messages it has, of which the assistant's
    last may be gone on from."""
    return Names({
        r"stop": "stop_sequences",
        r"prompt": "messages",
        r"continue_final_message": f"messages[{num_messages - 1}]",
        r"reasoning_effort": effort,
        r"response_format(\.json_schema)?": "output_config.format",
        r"(tools\[\d+\])\.function\.parameters": r"\1.input_schema",
        r"(tools\[\d+\])\.function": r"\1",
        r"tool_choice\.function": "tool_choice",
    })  # fmt: skip
