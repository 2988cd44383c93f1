"""An error as OpenAI's clients read it.

Any thread. It never knows which route failed; what is not ours to explain stays in the log.
"""

import math

import orjson

from ..errors import AsyncLLMError
from . import sse

_MAX_RETRY_AFTER_S = 120  # the SDKs give up on more


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> bytes:
    """{"error": {...}}, the body of every answer that is not a success."""
    return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_reply(error: BaseException) -> tuple[int, bytes, dict[str, str]]:
    """Status, body and headers that tell a client about this error.

    Whatever is not an AsyncLLMError is a bug of ours: 500, and its words are for the log alone.
    """
    if not isinstance(error, AsyncLLMError):
        return 500, error_body("internal error; the server's log has the details", "server_error"), {}
    if (after_s := error.retry_after_s) is None:
        return error.status, _body(error), {}
    retry_after = min(max(1, math.ceil(after_s)), _MAX_RETRY_AFTER_S)
    return error.status, _body(error), {"Retry-After": str(retry_after)}


def error_event(error: BaseException) -> bytes:
    """The event that ends a stream which had begun; the connection closes behind it, without [DONE]."""
    return sse.encode(error_reply(error)[1])


def _body(error: AsyncLLMError) -> bytes:
    return error_body(str(error), error.type, getattr(error, "param", None), error.code)
