"""Why a body is no JSON, as its sender can find the place.

Any thread. It never knows requests.
"""

import json
import re
from typing import Any

from ..errors import InvalidRequest

# All that is no half of a pair, in one pass that looks back at nothing: a search would be quadratic in backslashes.
_SOUND = re.compile(
    rb"(?:[^\\]++|\\[^u]|\\u(?![dD][89a-fA-F])|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})*+", re.DOTALL
)
_HALF = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")
_MAX_SEARCHED_BYTES = 1 << 20  # of a body that is refused anyway: 5 ms
_MAX_READ_BYTES = 1 << 16  # to find the field: 10 ms where it is all brackets


def broken_json(body: bytes, error: Exception) -> InvalidRequest:
    """`error` is what reading it ended with. Half of a surrogate pair is named with its field, if it is that."""
    at = _SOUND.match(body, 0, _MAX_SEARCHED_BYTES).end()  # type: ignore[union-attr]  # it fits nothing, too
    if (half := _HALF.match(body, at)) is None:
        return InvalidRequest(f"the body is not valid JSON: {error}")
    param = _field(body) if len(body) <= _MAX_READ_BYTES else None
    what = f"half of a surrogate pair, {half[0].decode()} at byte {at}, which is no character"
    return InvalidRequest(f"'{param}' holds {what}" if param else f"the body holds {what}", param or None)


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
