"""The one tree of errors that asyncllm raises on purpose, and the HTTP status of each.

    AsyncLLMError
    ├── InvalidRequest        the caller's fault: 400
    │   ├── ContextTooLong    400, code context_length_exceeded
    │   ├── ModelNotFound     404
    │   └── BodyTooLarge      413
    ├── QueueFull             503: try again later
    ├── Draining              503: the server is stopping
    ├── TimedOut              504: its own deadline came before its first token
    ├── Aborted               499: somebody ended the request before it was done
    ├── StepFailed            500: the step that computed this request failed
    ├── OutOfMemory           503: the step found no memory for this request
    ├── EngineDead            503: the engine thread has ended; the process exits with its exit_code
    │   ├── DeviceFailed      a CUDA error other than out of memory
    │   └── EngineStuck       no step has ended for too long
    └── ModelError            (start only) this model cannot be loaded, and why

Imported by every floor; imports nothing of ours.
"""

import copy


class AsyncLLMError(Exception):
    """Base of all; `status`, `type` and `code` follow OpenAI's error object."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: float | None = None  # when another attempt has a chance


class InvalidRequest(AsyncLLMError):
    """The request cannot be served as sent. `param` names the field, as `messages[0].role`."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextTooLong(InvalidRequest):
    code = "context_length_exceeded"


class ModelNotFound(InvalidRequest):
    status = 404
    code = "model_not_found"


class BodyTooLarge(InvalidRequest):
    status = 413
    code = "body_too_large"


class QueueFull(AsyncLLMError):
    status = 503
    code = "queue_full"
    retry_after_s = 1.0


class Draining(AsyncLLMError):
    status = 503
    code = "draining"
    retry_after_s = 5.0


class TimedOut(AsyncLLMError):
    status = 504
    code = "timeout"


class Aborted(AsyncLLMError):
    status = 499
    code = "aborted"


class StepFailed(AsyncLLMError):
    code = "step_failed"


class OutOfMemory(AsyncLLMError):
    status = 503
    code = "out_of_memory"
    retry_after_s = 5.0


class EngineDead(AsyncLLMError):
    status = 503
    code = "engine_dead"
    exit_code = 70
    retry_after_s = 10.0  # a supervisor may have it back by then


class DeviceFailed(EngineDead):
    exit_code = 71


class EngineStuck(EngineDead):
    exit_code = 72


class ModelError(AsyncLLMError):
    """Raised at start, never for a request."""


def as_ours(error: Exception | None) -> AsyncLLMError:
    """What ended a request, to be raised or told: a copy, as one error may end many requests, and each raise would
    grow its traceback. The words of a bug are for the log alone."""
    return copy.copy(error) if isinstance(error, AsyncLLMError) else AsyncLLMError("internal error")
