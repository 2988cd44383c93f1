"""The client's public names. No torch, no engine: importing this costs what aiohttp costs."""

from .accumulate import ChatEvent
from .client import AsyncClient
from .errors import (
    APIConnectionError,
    APIError,
    APIResponseValidationError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    ReplyTooLargeError,
    StreamTruncatedError,
    UnprocessableEntityError,
    WebSocketClosedError,
    WebSocketQueueFullError,
)
from .http import Timeout
from .lane import Lane, Limits
from .message_stream import MessageStream
from .retries import Retries
from .stream import Stream
from .websocket import Session

__all__ = [
    "APIConnectionError", "APIError", "APIResponseValidationError", "APIStatusError", "APITimeoutError",
    "AsyncClient", "AuthenticationError", "BadRequestError", "ChatEvent", "ConflictError", "InternalServerError",
    "Lane", "Limits", "MessageStream", "NotFoundError", "PermissionDeniedError", "RateLimitError",
    "ReplyTooLargeError", "Retries", "Session", "Stream", "StreamTruncatedError", "Timeout",
    "UnprocessableEntityError", "WebSocketClosedError", "WebSocketQueueFullError",
]  # fmt: skip
