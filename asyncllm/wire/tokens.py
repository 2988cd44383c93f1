"""What tokenize, detokenize and embeddings requests say: bytes in, checked values out. The names are vLLM's.

Any thread. It never knows tokenizers or HTTP.
"""

from typing import Any

import msgspec

from ..errors import InvalidRequest
from .messages import Message
from .requests import ChatRequest, Int, decode
from .tools import Tool, ToolChoice
from .unserved import TOKENS


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /tokenize: a prompt, or messages through the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = None
    model: str | None = None
    add_special_tokens: bool | None = None  # the start token, where the model has one; for a prompt
    parse_special: bool | None = None  # false: control tokens written in the prompt are text, as in completions
    return_token_strs: bool | None = None
    # as chat has them, with messages
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """POST /detokenize."""

    tokens: list[Int]
    model: str | None = None
    skip_special_tokens: bool | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """POST /v1/embeddings, as far as it is read before it is refused."""

    model: str | None = None


_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)
_embedding = msgspec.json.Decoder(EmbeddingRequest)


def decode_tokenize(body: bytes) -> TokenizeRequest:
    """Raises: InvalidRequest, naming the field."""
    request = decode(_tokenize, body, TOKENS)
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequest("give either 'prompt' or 'messages'", "prompt")
    for name in _OF_PROMPTS if request.prompt is None else _OF_MESSAGES:
        if getattr(request, name) is not None:
            raise InvalidRequest(f"'{name}' is not for {'messages' if request.prompt is None else 'a prompt'}", name)
    return request


def as_chat(request: TokenizeRequest) -> ChatRequest:
    """What it asks for beside its messages, as a chat request says it."""
    return ChatRequest(messages=[], **{name: getattr(request, name) for name in _OF_MESSAGES})


_OF_PROMPTS = ("add_special_tokens", "parse_special")
_OF_MESSAGES = (
    "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "add_generation_prompt",
    "continue_final_message",
)  # fmt: skip


def decode_detokenize(body: bytes, vocab_size: int) -> DetokenizeRequest:
    """Raises: InvalidRequest, naming the field, or the first id outside the vocabulary."""
    request = decode(_detokenize, body, TOKENS)
    if request.tokens and not (0 <= min(request.tokens) and max(request.tokens) < vocab_size):
        i = next(i for i, token_id in enumerate(request.tokens) if not 0 <= token_id < vocab_size)
        message = f"token id {request.tokens[i]} is outside the vocabulary of {vocab_size}"
        raise InvalidRequest(message, f"tokens[{i}]")
    return request


def decode_embedding(body: bytes) -> EmbeddingRequest:
    """Raises: InvalidRequest, naming the field."""
    return decode(_embedding, body, None)
