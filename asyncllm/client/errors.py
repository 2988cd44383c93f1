"""What a client may catch: OpenAI's names, so that `except` clauses move over as they are.

Any thread. It never knows sessions or retries.

    APIError                          also as itself: an error event inside a stream
    ├── APIConnectionError            no answer, or it broke off
    │   ├── APITimeoutError           nobody answered, or nobody spoke, for too long
    │   ├── StreamTruncatedError      a stream ended without its end
    │   └── WebSocketClosedError      with the close code
    ├── APIStatusError                an answer of 300 and more; below, those that have a class
    ├── APIResponseValidationError    an answer that cannot be read
    ├── ReplyTooLargeError            an answer, or one event of it, above the client's bound
    └── WebSocketQueueFullError       a lane's reader fell too far behind
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from ..errors import AsyncLLMError

_MAX_TEXT_CHARS = 500  # of a body that is no error object, as in an HTML page of a proxy


class APIError(AsyncLLMError):
    """Base of all. `type`, `code` and `param` are the server's, None where it gave none.

    Retries may have come before it: `request_id` was the same in each.
    """

    def __init__(self, message: str, *, body: Any = None, request_id: str | None = None) -> None:
        super().__init__(message)
        fields = error_fields(body)
        self.message = message
        self.body = body
        self.request_id = request_id
        self.type: str | None = fields.get("type")  # type: ignore[assignment]
        self.code: str | None = fields.get("code")
        self.param: str | None = fields.get("param")

    def __reduce__(self) -> Any:
        # Exception's own copies by calling __init__ with the message alone.
        return _again, (type(self), self.args, self.__dict__)


class APIConnectionError(APIError):
    pass


class APITimeoutError(APIConnectionError):
    pass


class StreamTruncatedError(APIConnectionError):
    pass


class APIResponseValidationError(APIError):
    pass


class ReplyTooLargeError(APIError):
    pass


class WebSocketQueueFullError(APIError):
    pass


class WebSocketClosedError(APIConnectionError):
    def __init__(self, close_code: int, reason: str = "") -> None:
        super().__init__(f"the WebSocket is closed with {close_code}{': ' if reason else ''}{reason}")
        self.close_code = close_code
        self.reason = reason


class APIStatusError(APIError):
    """An answer that is no success; `headers` has its lower-case names."""

    def __init__(
        self, message: str, *, status_code: int, headers: Mapping[str, str], body: Any, request_id: str | None
    ) -> None:
        super().__init__(message, body=body, request_id=request_id)
        self.status = self.status_code = status_code
        self.headers = headers


class BadRequestError(APIStatusError):
    pass


class AuthenticationError(APIStatusError):
    pass


class PermissionDeniedError(APIStatusError):
    pass


class NotFoundError(APIStatusError):
    pass


class ConflictError(APIStatusError):
    pass


class UnprocessableEntityError(APIStatusError):
    pass


class RateLimitError(APIStatusError):
    pass


class InternalServerError(APIStatusError):
    pass


_BY_STATUS: dict[int, type[APIStatusError]] = {
    400: BadRequestError, 401: AuthenticationError, 403: PermissionDeniedError, 404: NotFoundError,
    409: ConflictError, 422: UnprocessableEntityError, 429: RateLimitError,
}  # fmt: skip


def status_error(status: int, headers: Mapping[str, str], raw: bytes, request_id: str | None) -> APIStatusError:
    """The error of an answer that is no success, whatever its body is."""
    body = _decoded(raw)
    kind = _BY_STATUS.get(status, InternalServerError if status >= 500 else APIStatusError)
    message = f"Error code: {status} - {error_message(body)}"
    return kind(message, status_code=status, headers=headers, body=body, request_id=request_id)


def event_error(body: Any, request_id: str | None = None) -> APIError:
    """The error that a stream ends with."""
    return APIError(error_message(body), body=body, request_id=request_id)


def error_fields(body: Any) -> dict[str, Any]:
    """The error object of OpenAI's `{"error": {...}}` or of vLLM's flat form; {} if there is none."""
    if not isinstance(body, dict):
        return {}
    inner = body.get("error")
    return inner if isinstance(inner, dict) else body


def error_message(body: Any) -> str:
    """What an error body says, wherever it says it: `message`, FastAPI's `detail`, a bare string."""
    fields = error_fields(body)
    for said in (fields.get("message"), fields.get("error"), fields.get("detail"), body):
        if said:
            return str(said)[:_MAX_TEXT_CHARS]
    return "the server said nothing about it"


def _again(kind: type[APIError], args: tuple[Any, ...], fields: dict[str, Any]) -> APIError:
    error = kind.__new__(kind, *args)
    error.__dict__.update(fields)
    return error


def _decoded(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw.decode("utf-8", "replace").strip()
