"""Why a body is no JSON, as its sender can find the place.

Any thread. It never knows requests.
"""

import json
import re
from typing import Any

from ..errors import InvalidRequest

_ESCAPED = re.compile(rb"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)
_MAX_SEARCHED_BYTES = 1 << 20  # of a body that is refused anyway: 10 ms


def broken_json(body: bytes, error: Exception) -> InvalidRequest:
    """`error` is what reading it ended with. Half of a surrogate pair is named with its field, if it is that."""
    place = _lone_surrogate(body[:_MAX_SEARCHED_BYTES])
    if place is None:
        return InvalidRequest(f"the body is not valid JSON: {error}")
    escape, at = place
    param = _field(body) if len(body) <= _MAX_SEARCHED_BYTES else None
    what = f"half of a surrogate pair, {escape} at byte {at}, which is no character"
    return InvalidRequest(f"'{param}' holds {what}" if param else f"the body holds {what}", param or None)


def _lone_surrogate(body: bytes) -> tuple[str, int] | None:
    """The first escape of one without its other half, and where it stands."""
    high: re.Match[bytes] | None = None
    for escape in _ESCAPED.finditer(body):
        unit = int(escape[1], 16) if escape[1] else 0
        if high is not None:
            if 0xDC00 <= unit < 0xE000 and high.end() == escape.start():
                high = None
                continue
            break
        if 0xDC00 <= unit < 0xE000:
            high = escape
            break
        high = escape if 0xD800 <= unit < 0xDC00 else None
    return None if high is None else (high[0].decode(), high.start())


def _field(body: bytes) -> str | None:
    """The path of a string that holds one; a name that does counts as what it is the name in."""
    try:
        return _find(json.loads(body), "")
    except (ValueError, RecursionError):
        return None


def _find(value: Any, path: str) -> str | None:
    if isinstance(value, str):
        return None if value.isascii() or not re.search("[\ud800-\udfff]", value) else path
    if isinstance(value, dict):
        inner = [(path, key) for key in value] + [(f"{path}.{key}".lstrip("."), one) for key, one in value.items()]
    else:
        inner = [(f"{path}[{i}]", one) for i, one in enumerate(value)] if isinstance(value, list) else []
    return next((found for where, one in inner if (found := _find(one, where)) is not None), None)
