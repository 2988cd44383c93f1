"""What the server answers, as types: for the OpenAPI document, and for the tests that hold the answers to it.

Any thread. It never makes an answer: those are templates and plain dicts, several times faster than structs.

A field with a default may be absent; `X | None` is there and may be null.
"""

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class ErrorObject(msgspec.Struct, kw_only=True):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(msgspec.Struct, kw_only=True):
    """The answer to every request that failed, whatever the route."""

    error: ErrorObject


class PromptTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class Usage(msgspec.Struct, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


# -- chat --


class CalledFunction(msgspec.Struct, kw_only=True):
    name: str
    arguments: str


class FunctionToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["function"]
    function: CalledFunction


class TokenLogprob(msgspec.Struct, kw_only=True):
    token: str
    bytes: list[int] | None
    logprob: float


class TopTokenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TopTokenLogprob] | None
    refusal: list[TopTokenLogprob] | None | UnsetType = UNSET


class AssistantMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | None | UnsetType = UNSET
    tool_calls: list[FunctionToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: str | None | UnsetType = UNSET
    system_fingerprint: str | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: Any | UnsetType = UNSET


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class MessageDelta(msgspec.Struct, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    refusal: str | None | UnsetType = UNSET
    reasoning_content: str | None | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET


class ChatCompletionChunk(msgspec.Struct, kw_only=True):
    """The data of each event but the last, [DONE]."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET


# -- completions --


class TextLogprobs(msgspec.Struct, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class TextChoice(msgspec.Struct, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None | UnsetType = UNSET
    token_ids: list[int] | None | UnsetType = UNSET
    prompt_token_ids: list[int] | None | UnsetType = UNSET
    prompt_logprobs: Any | UnsetType = UNSET


class TextCompletion(msgspec.Struct, kw_only=True):
    """A whole answer; and the data of each event but the last, [DONE]."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage | None | UnsetType = UNSET
    system_fingerprint: str | None | UnsetType = UNSET


# -- the rest --


class Model(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int
    type: Literal["model"]
    display_name: str
    created_at: str


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[Model]
    has_more: bool
    first_id: str
    last_id: str


class Tokens(msgspec.Struct, kw_only=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(msgspec.Struct, kw_only=True):
    prompt: str


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """tokenizer_config.json's fields besides."""

    tokenizer_class: str
    chat_template: str | None
    vocab_size: int
    eos_token_ids: list[int]


class Status(msgspec.Struct, kw_only=True):
    status: str


class Version(msgspec.Struct, kw_only=True):
    version: str


# -- responses --


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct, kw_only=True):
    """Beside these it repeats what its request said."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: dict[str, Any] | None
    incomplete_details: dict[str, str] | None
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage | None
    parallel_tool_calls: bool
    tool_choice: Any
    tools: list[dict[str, Any]]
    previous_response_id: str | None
    metadata: dict[str, str]


class Event(msgspec.Struct, kw_only=True):
    """One of a response's; what else it has depends on its type."""

    type: str
    sequence_number: int | UnsetType = UNSET


class ItemList(msgspec.Struct, kw_only=True):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class InputTokens(msgspec.Struct, kw_only=True):
    object: Literal["response.input_tokens"]
    input_tokens: int


class Deleted(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["response"]
    deleted: bool


# -- Anthropic's messages --


class AnthropicErrorObject(msgspec.Struct, kw_only=True):
    type: str
    message: str


class AnthropicError(msgspec.Struct, kw_only=True):
    """The answer to every failed request of these routes."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class AnthropicBlock(msgspec.Struct, kw_only=True):
    type: Literal["text", "thinking", "tool_use"]
    text: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET


class ThinkingTokens(msgspec.Struct, kw_only=True):
    thinking_tokens: int


class AnthropicUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: ThinkingTokens


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnthropicBlock]
    stop_reason: (
        Literal["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"] | None
    )
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(msgspec.Struct, kw_only=True):
    input_tokens: int
