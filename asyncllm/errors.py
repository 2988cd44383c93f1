"""The one tree of errors that asyncllm raises on purpose, and the HTTP status of each.

    AsyncLLMError
    ├── InvalidRequest        the caller's fault: 400
    │   ├── ContextTooLong    400, code context_length_exceeded
    │   ├── ModelNotFound     404
    │   └── BodyTooLarge      413
    ├── QueueFull             503: try again later
    ├── Draining              503: the server is stopping
    ├── GrammarUnchecked      503: whoever tries grammars out did not get to it
    ├── TimedOut              408: its own deadline came before its first token
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
from collections.abc import Callable


class Field(str):
    """A field of the request within a sentence: told in quotes, and by the name that the client's API has for it."""


Sentence = str | tuple[str, ...]  # of parts, where it tells of Fields


class AsyncLLMError(Exception):
    """Base of all; `status`, `type` and `code` follow OpenAI's error object."""

    status = 500
    type = "server_error"
    code: str | None = None
    retry_after_s: float | None = None  # when another attempt has a chance

    def renamed(self, name_of: Callable[[str], str]) -> "AsyncLLMError":
        """The same in another API's names of fields; only what tells of fields has any."""
        return self


class InvalidRequest(AsyncLLMError):
    """The request cannot be served as sent. `param` names the field, as `messages[0].role`."""

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: Sentence, param: str | None = None) -> None:
        self._parts = (message,) if isinstance(message, str) else message
        super().__init__(_told(self._parts))
        self.param = param

    @classmethod
    def of(cls, field: str, *what: str) -> "InvalidRequest":
        """With a sentence that begins with the field at fault."""
        return cls((Field(field), " ", *what), field)

    def renamed(self, name_of: Callable[[str], str]) -> "InvalidRequest":
        """A copy: one error may be told to clients of several APIs."""
        error = copy.copy(self)
        error._parts = tuple([Field(name_of(part)) if isinstance(part, Field) else part for part in self._parts])
        error.args = (_told(error._parts),)
        error.param = None if self.param is None else name_of(self.param)
        return error


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


class GrammarUnchecked(AsyncLLMError):
    status = 503
    code = "grammar_unchecked"
    retry_after_s = 1.0


class TimedOut(AsyncLLMError):
    status = 408  # the client set it: no fault of the server's, which a 5xx would say
    type = "invalid_request_error"
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


def _told(parts: tuple[str, ...]) -> str:
    return "".join([f"'{part}'" if isinstance(part, Field) else part for part in parts])


def as_ours(error: Exception | None) -> AsyncLLMError:
    """What ended a request, to be raised or told: a copy, as one error may end many requests, and each raise would
    grow its traceback. The words of a bug are for the log alone."""
    return copy.copy(error) if isinstance(error, AsyncLLMError) else AsyncLLMError("internal error")
