"""The OpenAPI document, made from the types that requests are read by and answers are held to.

Any thread. It never knows handlers: a test holds ROUTES to what the server serves.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from . import schemas as s
from .anthropic import CountRequest, MessagesRequest
from .messages import ROLES
from .requests import ChatRequest, CompletionRequest
from .responses import ResponseRequest
from .tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from .variables import EFFORTS

OPENAPI = "3.1.0"  # the first whose schemas are JSON Schema, as msgspec writes it
_REF = "#/components/schemas/{name}"
_TEXT = {"type": "string"}
_ID = {"name": "id", "in": "path", "required": True, "schema": _TEXT}
_AFTER = {"type": "integer", "minimum": 0, "description": "Only the events behind this number."}
_FOLLOW = (
    {"name": "stream", "in": "query", "schema": {"type": "boolean"}},
    {"name": "starting_after", "in": "query", "schema": _AFTER},
    {"name": "include_obfuscation", "in": "query", "schema": {"type": "boolean"}},
)
_PAGE = (
    {"name": "after", "in": "query", "schema": _TEXT},
    {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 100}},
    {"name": "order", "in": "query", "schema": {"type": "string", "enum": ["asc", "desc"]}},
)
_RESUME = ({"name": "Last-Event-ID", "in": "header", "schema": _AFTER},)
# Where the server was started with keys.
_SECURITY = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
_FAILURES = {
    "4XX": "The request cannot be served as sent; `param` names the field.",
    "5XX": "The server cannot serve it, or not now: with Retry-After, try again.",
}


_AT_LEAST_1 = {"minimum": 1}
# What a request's field may be beyond its type, which is checked elsewhere: by name, or by struct and name.
_NARROWER: dict[str, dict[str, Any]] = {
    "temperature": {"minimum": 0, "maximum": 2}, "top_p": {"minimum": 0, "maximum": 1},
    "min_p": {"minimum": 0, "maximum": 1}, "top_k": {"minimum": -1}, "max_output_tokens": _AT_LEAST_1,
    "presence_penalty": {"minimum": -2, "maximum": 2}, "frequency_penalty": {"minimum": -2, "maximum": 2},
    "repetition_penalty": {"minimum": 0.01, "maximum": 10}, "top_logprobs": {"minimum": 0, "maximum": 20},
    "n": {"minimum": 1, "maximum": 128}, "best_of": {"minimum": 1, "maximum": 128}, "min_tokens": {"minimum": 0},
    "truncation": {"enum": ["auto", "disabled"]}, "reasoning_effort": {"enum": list(EFFORTS)},
    "ChatRequest.max_tokens": _AT_LEAST_1, "ChatRequest.max_completion_tokens": _AT_LEAST_1,
    "MessagesRequest.max_tokens": _AT_LEAST_1, "CompletionRequest.max_tokens": {"minimum": 0},
    "ChatRequest.messages": {"minItems": 1}, "MessagesRequest.messages": {"minItems": 1},
    "Message.role": {"enum": list(ROLES)}, "Part.type": {"enum": ["text", "refusal"]},
    "MessageParam.role": {"enum": ["system", "user", "assistant"]}, "Tool.type": {"enum": ["function"]},
    "InputItem.role": {"enum": ["system", "developer", "user", "assistant"]},
    "FunctionTool.type": {"enum": ["function"]},
    "InputItem.type": {"enum": ["message", "function_call", "function_call_output", "reasoning"]},
    "InputPart.type": {"enum": ["input_text", "output_text", "refusal"]},
    "Block.type": {"enum": ["text", "document", "thinking", "tool_use", "tool_result"]},
}  # fmt: skip


class Route(msgspec.Struct, frozen=True):
    """One method of one path."""

    method: str
    path: str
    summary: str
    request: Any = None
    reply: Any = None  # application/json
    event: Any = None  # the data of each of text/event-stream's
    parameters: tuple[dict[str, Any], ...] = ()
    media_type: str = "application/json"
    status: str = "200"
    error: Any = s.Error


ROUTES = (
    Route(
        "post", "/v1/chat/completions", "Answer a conversation.",
        ChatRequest, s.ChatCompletion, s.ChatCompletionChunk,
    ),
    Route(
        "post", "/v1/completions", "Continue a text, or several.",
        CompletionRequest, s.TextCompletion, s.TextCompletion,
    ),
    Route("post", "/v1/responses", "Answer in items, kept for a while.", ResponseRequest, s.Response, s.Event),
    Route("get", "/v1/responses", "Upgrade to a WebSocket: many responses in lanes.", status="101"),
    Route("post", "/v1/responses/input_tokens", "The length of its prompt.", ResponseRequest, s.InputTokens),
    Route("get", "/v1/responses/{id}", "A response, or its events.", None, s.Response, s.Event, (_ID, *_FOLLOW)),
    Route("delete", "/v1/responses/{id}", "Forget a response.", None, s.Deleted, None, (_ID,)),
    Route("get", "/v1/responses/{id}/events", "Its events, for an EventSource.", None, None, s.Event, (_ID, *_RESUME)),
    Route("get", "/v1/responses/{id}/input_items", "What it answers.", None, s.ItemList, None, (_ID, *_PAGE)),
    Route("post", "/v1/responses/{id}/cancel", "End a response.", None, s.Response, None, (_ID,)),
    Route(
        "post", "/v1/messages", "Answer a conversation, for Anthropic's clients.",
        MessagesRequest, s.AnthropicMessage, s.Event, error=s.AnthropicError,
    ),
    Route(
        "post", "/v1/messages/count_tokens", "The length of such a conversation.",
        CountRequest, s.TokenCount, error=s.AnthropicError,
    ),
    Route("post", "/v1/embeddings", "Refused: the model generates text.", EmbeddingRequest, status=""),
    Route("get", "/v1/models", "The model that is served.", None, s.ModelList),
    Route("get", "/v1/models/{id}", "The model, by its id.", None, s.Model, None, (_ID,)),
    Route("post", "/tokenize", "The ids of a text or a conversation.", TokenizeRequest, s.Tokens),
    Route("post", "/detokenize", "The text of ids.", DetokenizeRequest, s.Detokenized),
    Route("get", "/tokenizer_info", "The tokenizer's configuration.", None, s.TokenizerInfo),
    Route("get", "/health", "Whether the process lives.", None, s.Status),
    Route("get", "/ready", "Whether a request sent now would be taken.", None, s.Status),
    Route("get", "/version", "The server's version.", None, s.Version),
    Route("get", "/metrics", "Prometheus' text format.", media_type="text/plain"),
    Route("get", "/openapi.json", "This document.", None, dict[str, Any]),
)  # fmt: skip


def document(version: str, model: str, routes: Sequence[Route] = ROUTES) -> dict[str, Any]:
    """The whole of it, as JSON will have it, for a server of this model."""
    kinds = [kind for route in routes for kind in (route.request, route.reply, route.event, route.error)]
    kinds = [kind for kind in dict.fromkeys(kinds) if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]
    _, components = msgspec.json.schema_components(kinds, ref_template=_REF)
    requests = {"model": {"enum": [model]}} | _NARROWER
    for struct, component in components.items():
        for name, schema in component.get("properties", {}).items():
            if not hasattr(s, struct):
                _narrow(schema, requests.get(f"{struct}.{name}") or requests.get(name) or {})
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method] = _operation(route)
    info = {"title": "asyncllm", "version": version, "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"}}
    return {
        "openapi": OPENAPI,
        "info": info,
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": _SECURITY},
        "security": [{}, *[{name: []} for name in _SECURITY]],
    }


def _narrow(schema: dict[str, Any], limits: dict[str, Any]) -> None:
    """A field's schema, or the one of its alternatives that is not null."""
    alternatives = [one for one in schema.get("anyOf", [schema]) if one.get("type") != "null"]
    if limits and len(alternatives) == 1:
        alternatives[0].update(limits)


def _operation(route: Route) -> dict[str, Any]:
    parts = route.path.strip("/").replace("{", "").replace("}", "").replace(".", "/").split("/")
    operation: dict[str, Any] = {
        "summary": route.summary,
        "operationId": "_".join([route.method, *parts]),
        "responses": _responses(route),
    }
    if route.parameters:
        operation["parameters"] = list(route.parameters)
    if route.request is not None:
        content = {"application/json": {"schema": _schema(route.request)}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _responses(route: Route) -> dict[str, Any]:
    failed = {"application/json": {"schema": _schema(route.error)}}
    responses: dict[str, Any] = {
        status: {"description": description, "content": failed} for status, description in _FAILURES.items()
    }
    if route.status:
        responses[route.status] = {"description": route.summary, "content": _content(route)}
    return responses


def _content(route: Route) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.reply is not None:
        content["application/json"] = {"schema": _schema(route.reply)}
    elif route.media_type != "application/json":
        content[route.media_type] = {"schema": _TEXT}
    if route.event is not None:
        content["text/event-stream"] = {"schema": _event(route.event)}
    return content


def _event(kind: Any) -> dict[str, Any]:
    """One event of a stream, as readers of event streams see it. The streams of chunks may break off with an error;
    those that do not end in a line that is no JSON."""
    told = _schema(kind) if kind is s.Event else {"anyOf": [_schema(kind), _schema(s.Error)]}
    data: dict[str, Any] = _TEXT | {"contentMediaType": "application/json", "contentSchema": told}
    if kind is not s.Event:
        data = {"anyOf": [{"const": "[DONE]"}, data]}
    return {"type": "object", "properties": {"data": data, "event": _TEXT, "id": _TEXT}, "required": ["data"]}


def _schema(kind: Any) -> dict[str, Any]:
    if kind == dict[str, Any]:
        return {"type": "object"}
    return {"$ref": _REF.format(name=kind.__name__)}
