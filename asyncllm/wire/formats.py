"""What a request demands of an answer's form: OpenAI's response_format, and what vLLM and SGLang call the same.

Any thread. It never knows how a grammar is compiled; whether it can be is found out there.
"""

from typing import Any

import msgspec
import orjson

from ..errors import Field, InvalidRequest
from ..types import GrammarSpec

MAX_CHOICES = 1 << 16
_ANY_OBJECT = GrammarSpec("json", '{"type":"object"}')


class JsonSchema(msgspec.Struct):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None  # a label: the schema is kept to in any case


class ResponseFormat(msgspec.Struct):
    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """vLLM's: one of these."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def grammar_spec(request: Any) -> GrammarSpec | None:
    """What the request demands, under whichever name; None: nothing.

    Raises:
        InvalidRequest: two demands, or one that is none.
    """
    specs = [
        *_response_format(request.response_format),
        *_structured_outputs(request.structured_outputs),
        *_json(request.guided_json, "guided_json"),
        *_regex(request.guided_regex, "guided_regex"),
        *_choice(request.guided_choice, "guided_choice"),
        *_grammar(request.guided_grammar, "guided_grammar"),
        *_json(request.json_schema, "json_schema"),
        *_regex(request.regex, "regex"),
        *_grammar(request.ebnf, "ebnf"),
    ]
    if len(specs) > 1:
        one, other = specs[0].param, specs[1].param
        raise InvalidRequest((Field(one), " and ", Field(other), " demand two forms of one answer"), other)
    return specs[0] if specs else None


def _response_format(given: ResponseFormat | None) -> list[GrammarSpec]:
    if given is None or given.type == "text":
        return []
    if given.type == "json_object":
        return [msgspec.structs.replace(_ANY_OBJECT, param="response_format")]
    if given.type != "json_schema":
        message = f"the type is text, json_object or json_schema, not {given.type[:40]!r}"
        raise InvalidRequest(message, "response_format.type")
    if given.json_schema is None:
        raise InvalidRequest("json_schema needs its name and schema", "response_format.json_schema")
    if given.json_schema.schema is None:
        raise InvalidRequest("json_schema needs a schema", "response_format.json_schema.schema")
    return _json(given.json_schema.schema, "response_format.json_schema.schema")


def _structured_outputs(given: StructuredOutputs | None) -> list[GrammarSpec]:
    if given is None:
        return []
    path = "structured_outputs"
    any_object = [msgspec.structs.replace(_ANY_OBJECT, param=f"{path}.json_object")] if given.json_object else []
    specs = [
        *_json(given.json, f"{path}.json"),
        *_regex(given.regex, f"{path}.regex"),
        *_choice(given.choice, f"{path}.choice"),
        *_grammar(given.grammar, f"{path}.grammar"),
        *any_object,
    ]
    if not specs:
        raise InvalidRequest("one of json, regex, choice, grammar or json_object says what to keep to", path)
    return specs


def _json(schema: dict[str, Any] | str | None, param: str) -> list[GrammarSpec]:
    if schema is None:
        return []
    if isinstance(schema, str):
        try:
            schema = msgspec.json.decode(schema, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            raise InvalidRequest("the schema is not a JSON object", param) from None
    refuse_options(schema, param)
    try:
        return [GrammarSpec("json", orjson.dumps(schema).decode(), param)]
    except orjson.JSONEncodeError:  # deeper than it goes, or numbers beyond 64 bits
        raise InvalidRequest("the schema is nested too deeply, or holds too large a number", param) from None


def refuse_options(schema: dict[str, Any], param: str) -> None:
    """Raises: InvalidRequest, for a schema that tells the grammar engine how to read it: that is told already."""
    if "x-guidance" in schema:
        raise InvalidRequest("'x-guidance' is not for a request to set", f"{param}.x-guidance")


def _regex(pattern: str | None, param: str) -> list[GrammarSpec]:
    return [] if pattern is None else [GrammarSpec("regex", pattern, param)]


def _choice(texts: list[str] | None, param: str) -> list[GrammarSpec]:
    if texts is None:
        return []
    if not 1 <= len(texts) <= MAX_CHOICES or "" in texts:
        raise InvalidRequest.of(param, f"takes 1 to {MAX_CHOICES} texts that are not empty")
    return [GrammarSpec("choice", orjson.dumps(texts).decode(), param)]


def _grammar(source: str | None, param: str) -> list[GrammarSpec]:
    return [] if source is None else [GrammarSpec("grammar", source, param)]
