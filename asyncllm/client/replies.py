"""What servers answer, as structs: OpenAI's fields and the extensions that are about.

Any thread. It never knows sockets or events.

Every field has a default and null counts as absent: of the servers that call themselves compatible no
two send the same. What no field here takes is in `to_dict()`.
"""

from typing import Any, Generic, TypeVar

import msgspec

from .errors import APIResponseValidationError


class Reply(msgspec.Struct, dict=True, kw_only=True):
    """What every whole answer, chunk and event has beside its fields."""

    def to_dict(self) -> dict[str, Any]:
        """Everything the server sent."""
        raw = self.__dict__.get("_raw")
        return msgspec.to_builtins(self) if raw is None else msgspec.json.decode(raw)  # type: ignore[no-any-return]

    @property
    def _request_id(self) -> str | None:
        return self.__dict__.get("request_id")


# -- chat and completions --


class Function(msgspec.Struct, kw_only=True):
    name: str | None = None
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True, omit_defaults=True):
    index: int = 0  # in deltas: which call of the message this continues
    id: str | None = None
    type: str | None = None
    function: Function = msgspec.field(default_factory=Function)


class Message(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A whole message, or one delta of it. As it is, a request takes it as history."""

    role: str | None = None
    content: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(msgspec.Struct, kw_only=True):
    """One answer. `message` in whole replies, `delta` in chunks, `text` of completions."""

    index: int = 0
    message: Message = msgspec.field(default_factory=Message)
    delta: Message = msgspec.field(default_factory=Message)
    text: str = ""
    logprobs: Any = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int = 0


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    completion_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class ChatCompletion(Reply, kw_only=True):
    id: str = ""
    object: str = "chat.completion"
    created: int | float = 0
    model: str = ""
    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    system_fingerprint: str | None = None


class ChatCompletionChunk(Reply, kw_only=True):
    id: str = ""
    object: str = "chat.completion.chunk"
    created: int | float = 0
    model: str = ""
    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None


class Completion(Reply, kw_only=True):
    """A text completion, and equally a chunk of one."""

    id: str = ""
    object: str = "text_completion"
    created: int | float = 0
    model: str = ""
    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None


# -- models and tokens --


class Model(Reply, kw_only=True):
    id: str = ""
    object: str = "model"
    created: int | float = 0
    owned_by: str = ""
    root: str | None = None
    max_model_len: int | None = None


class ModelList(Reply, kw_only=True):
    object: str = "list"
    data: list[Model] = msgspec.field(default_factory=list)


class Tokens(Reply, kw_only=True):
    """What /tokenize answers."""

    tokens: list[int] = msgspec.field(default_factory=list)
    count: int | None = None
    max_model_len: int | None = None


class Detokenized(Reply, kw_only=True):
    prompt: str = ""


# -- responses --


class ContentPart(msgspec.Struct, kw_only=True):
    type: str = ""
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] | None = None


class OutputItem(msgspec.Struct, kw_only=True):
    id: str = ""
    type: str = "message"
    status: str | None = None
    role: str | None = None
    content: list[ContentPart] = msgspec.field(default_factory=list)
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str | None = None


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: PromptTokensDetails = msgspec.field(default_factory=PromptTokensDetails)
    output_tokens_details: CompletionTokensDetails = msgspec.field(default_factory=CompletionTokensDetails)


class Response(Reply, kw_only=True):
    id: str = ""
    object: str = "response"
    created_at: float = 0.0
    model: str = ""
    status: str | None = None
    output: list[OutputItem] = msgspec.field(default_factory=list)
    usage: ResponseUsage | None = None
    error: Any = None
    incomplete_details: IncompleteDetails | None = None
    previous_response_id: str | None = None

    @property
    def output_text(self) -> str:
        """All text of all messages."""
        parts = [part for item in self.output if item.type == "message" for part in item.content]
        return "".join([part.text for part in parts if part.type == "output_text"])


class ResponseEvent(Reply, kw_only=True):
    """Any `response.*` event; a field that its type does not have keeps its default."""

    type: str = ""
    sequence_number: int | None = None
    stream_id: str | None = None  # over WebSocket: its lane
    response: Response | None = None
    response_id: str | None = None
    output_index: int = 0
    content_index: int = 0
    item_id: str | None = None
    item: OutputItem | None = None
    part: ContentPart | None = None
    delta: str = ""
    text: str = ""
    arguments: str | None = None
    error: Any = None  # of "error" events over WebSocket; over SSE the three below
    status: int | None = None
    code: Any = None
    message: str | None = None
    param: str | None = None


ReplyT = TypeVar("ReplyT", bound=Reply)


class Reader(Generic[ReplyT]):
    """JSON to one kind of reply."""

    def __init__(self, kind: type[ReplyT]) -> None:
        self._kind = kind
        self._decoder = msgspec.json.Decoder(kind, strict=False)

    def read(self, raw: bytes | str, request_id: str | None = None) -> ReplyT:
        """
        Raises:
            APIResponseValidationError: it is no such thing.
        """
        try:
            reply = self._decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            message = f"the server's answer is no {self._kind.__name__}: {error}"
            raise APIResponseValidationError(message, body=raw, request_id=request_id) from None
        reply.__dict__.update(_raw=raw, request_id=request_id)
        return reply

    def _decode(self, raw: bytes | str) -> ReplyT:
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError:
            # A null where a default would do. Annotating every field with None instead would put a check
            # into each line of the callers'; this costs a second pass, and only with servers that do it.
            return msgspec.convert(_without_nulls(msgspec.json.decode(raw)), self._kind, strict=False)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
