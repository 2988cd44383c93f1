"""What a request tells the chat template beside messages and tools.

Any thread. It never knows templates.
"""

from typing import Any

from ..errors import InvalidRequest

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
EFFORT_VARIABLES = ("reasoning_effort", "enable_thinking", "thinking")
# Each value is looked at several times, in 2 us or more: a hundred thousand held the loop for 0.4 s.
MAX_VALUES = 4096
_OURS = frozenset(("messages", "tools", "documents", "add_generation_prompt"))


def template_variables(effort: str | None, kwargs: dict[str, Any] | None) -> dict[str, Any]:
    """`reasoning_effort` and `chat_template_kwargs`, as the template has them.

    An effort is told under the names that templates know it by: some count it, others switch thinking on or off.

    Raises:
        InvalidRequest: a variable that is not the request's to set, too many values, or an effort that there is
            none of.
    """
    variables: dict[str, Any] = {}
    if effort is not None:
        if effort not in EFFORTS:
            raise InvalidRequest.of("reasoning_effort", f"is one of {', '.join(EFFORTS)}")
        thinks = effort != "none"
        variables = dict(zip(EFFORT_VARIABLES, (effort, thinks, thinks), strict=True))
    if not kwargs:
        return variables
    if _holds_more(kwargs, MAX_VALUES):
        raise InvalidRequest.of(
            "chat_template_kwargs", f"may hold {MAX_VALUES} values, those inside of others counted"
        )
    for name in kwargs:
        if name in _OURS or name.endswith("_token"):
            path = f"chat_template_kwargs.{name[:80]}"
            raise InvalidRequest(f"{name[:80]!r} is not for a request to set", path)
    return variables | kwargs


def _holds_more(value: Any, most: int) -> bool:
    """However deep: without recursion, and no further than it must."""
    left, num = [value], 0
    while left:
        one = left.pop()
        inner = one.values() if isinstance(one, dict) else one if isinstance(one, list) else ()
        num += len(inner)
        if num > most:
            return True
        left += inner
    return False
