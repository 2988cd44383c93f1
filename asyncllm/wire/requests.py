"""The bodies of chat and completions requests: bytes in, checked values out.

Any thread. It never knows tokenizers, the engine or HTTP.

Numbers are strict ("1" and true are none), null is absence, unknown fields are ignored, a field given
twice counts as its last (as every JSON reader of the clients has it), known fields that are not
served are refused by name (unserved.py).
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from ..errors import Field, InvalidRequest
from ..types import MAX_LOGPROBS, NO_DEFAULTS, SamplingParams, with_defaults
from .broken import broken_json
from .formats import ResponseFormat, StructuredOutputs
from .messages import Message
from .tools import Tool, ToolChoice
from .unserved import CHAT, COMPLETIONS, Unserved, refuse_unserved

MAX_PROMPTS = 64
MAX_REQUEST_ID_CHARS = 128
COMPLETION_MAX_TOKENS = 16  # OpenAI's default
GREEDY_BELOW = 1e-5  # a temperature that makes every other token impossible, and would divide to infinity
_MAX_TOP_K = 2**31 - 1  # larger ones are off all the same

Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Prompt = str | list[int]


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    """The fields of every route that answers: how to sample, what form to keep to, when and beside whom."""

    min_tokens: Int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    include_stop_str_in_output: bool | None = None
    priority: Int | None = None  # the lower goes first
    cache_salt: str | None = None
    timeout: float | None = None  # seconds
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None  # Lark, or EBNF
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerationRequest(CommonFields, kw_only=True):
    """The fields that chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Int | None = None
    stop: str | list[str] | None = None
    n: Int | None = None
    prompt_logprobs: Int | bool | None = None  # false is none
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None  # tokens in logprobs as "token_id:5"
    request_id: str | None = None  # the end of the answer's id
    response_format: ResponseFormat | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """POST /v1/chat/completions, the fields that are served."""

    messages: list[Message]
    max_completion_tokens: Int | None = None  # beats max_tokens
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Tool] | None = None
    tool_choice: str | ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    separate_reasoning: bool | None = None  # false: the tags and what is between stay in the content
    include_reasoning: bool | None = None  # false: reasoning is not told
    chat_template_kwargs: dict[str, Any] | None = None


class CompletionRequest(GenerationRequest, kw_only=True):
    """POST /v1/completions, the fields that are served."""

    prompt: str | list[str | Int | list[Int]]
    best_of: Int | None = None
    logprobs: Int | bool | None = None  # false is none
    echo: bool | None = None


Request = TypeVar("Request")
_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def decode_chat(body: bytes) -> ChatRequest:
    """Read a chat request.

    Raises:
        InvalidRequest: naming the field.
    """
    return decode(_chat, body, CHAT)


def decode_completion(body: bytes) -> CompletionRequest:
    """Read a completions request.

    Raises:
        InvalidRequest: naming the field.
    """
    return decode(_completion, body)


def chat_params(request: ChatRequest, defaults: Mapping[str, float] = NO_DEFAULTS) -> SamplingParams:
    """How to sample the answer; without a limit it may run to the end of the context.

    Raises:
        InvalidRequest: a limit below 1, named as the client wrote it.
    """
    for name in ("max_tokens", "max_completion_tokens"):
        if (limit := getattr(request, name)) is not None and limit < 1:
            raise InvalidRequest.of(name, f"must be at least 1, got {limit}")
    limits = (request.max_completion_tokens, request.max_tokens)
    params = sampling_params(request, next((limit for limit in limits if limit is not None), None), defaults)
    if request.logprobs:
        return msgspec.structs.replace(params, logprobs=_num_logprobs(request.top_logprobs or 0, "top_logprobs"))
    if request.top_logprobs:
        raise InvalidRequest.of("top_logprobs", "needs ", Field("logprobs"), " to be true")
    return params


def completion_params(request: CompletionRequest, defaults: Mapping[str, float] = NO_DEFAULTS) -> SamplingParams:
    """How to sample; without a limit 16 tokens, as OpenAI has it (or min_tokens, if that is more).

    With `echo`, max_tokens may be 0, which here is 1: what is drawn then is not told.
    """
    default = max(COMPLETION_MAX_TOKENS, request.min_tokens or 0)
    limit = default if request.max_tokens is None else request.max_tokens
    params = sampling_params(request, 1 if limit == 0 and request.echo else limit, defaults)
    if request.best_of is not None:
        if request.stream and request.best_of > params.n:
            raise InvalidRequest("'best_of' above 'n' cannot be streamed: the best is known at the end", "best_of")
        params = msgspec.structs.replace(params, best_of=request.best_of)
    wide = _asked(request.logprobs, "logprobs")
    if wide is None:
        # The best is the likeliest, so logprobs are needed all the same.
        return msgspec.structs.replace(params, logprobs=0) if params.num_choices > params.n else params
    wide = _num_logprobs(wide, "logprobs")
    return msgspec.structs.replace(params, logprobs=wide, prompt_logprobs=_echoed(request, params, wide))


def _echoed(request: CompletionRequest, params: SamplingParams, wide: int) -> int | None:
    """An echoed prompt has log probabilities like the rest."""
    return max(wide, params.prompt_logprobs or 0) if request.echo else params.prompt_logprobs


def _asked(value: int | bool | None, name: str) -> int | None:
    """A number of alternatives, where false is none and true is no number."""
    if value is True:
        raise InvalidRequest.of(name, "is a number of alternatives here, not true")
    return None if value is False else value


def _num_logprobs(value: int, name: str) -> int:
    if not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest.of(name, f"must be between 0 and {MAX_LOGPROBS}, got {value}")
    return value


def completion_prompts(request: CompletionRequest) -> list[Prompt]:
    """The prompts of a request, each a text or token ids, at most MAX_PROMPTS.

    Raises:
        InvalidRequest: none, too many, or kinds mixed.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    kinds = set(map(type, prompt))
    if kinds == {int}:
        return [prompt]  # type: ignore[list-item]
    if not prompt or len(kinds) > 1:
        raise InvalidRequest("'prompt' must be a text, token ids, or a list of either", "prompt")
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(f"'prompt' takes at most {MAX_PROMPTS} prompts, got {len(prompt)}", "prompt")
    for i, one in enumerate(prompt):
        if one == []:
            raise InvalidRequest("a prompt of no token ids has nothing to continue", f"prompt[{i}]")
    return prompt  # type: ignore[return-value]


def decode(decoder: "msgspec.json.Decoder[Request]", body: bytes, unserved: Unserved | None = COMPLETIONS) -> Request:
    """One pass for what is served, one for what is not.

    Raises:
        InvalidRequest: naming the field.
    """
    try:
        if not body.isascii():
            body.decode()  # the decoder looks at no text that it has no field for
        request = decoder.decode(body)
        if unserved is not None:
            refuse_unserved(body, unserved)
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise broken_json(body, error) from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    return request


def _invalid(message: str) -> InvalidRequest:
    """msgspec's "Expected `str`, got `int` - at `$.messages[0].role`", its path as our param."""
    what, _, where = message.partition(" - at `$")
    param = where.rstrip("`").removeprefix(".").replace("[...]", "")  # a value of an object: its key is not told
    if what.startswith("Object missing required field"):
        param = f"{param}.{what.split('`')[1]}".removeprefix(".")
        return InvalidRequest(f"'{param}' is missing", param)
    return InvalidRequest(f"'{param}': {what}" if param else f"the body: {what}", param or None)


def sampling_params(request: Any, max_tokens: int | None, defaults: Mapping[str, float]) -> SamplingParams:
    """The fields that all routes share; `defaults` are the model's, for what the request leaves open."""
    given = {name: value for name in _SHARED if (value := getattr(request, name, None)) is not None}
    if 0 <= given.get("temperature", 1.0) < GREEDY_BELOW:
        given["temperature"] = 0.0
    given = with_defaults(given, defaults)
    if "top_k" in given:
        given["top_k"] = min(given["top_k"], _MAX_TOP_K)
    for name in _LISTS:
        if (value := getattr(request, name, None)) is not None:
            given[name] = tuple(value)
    if biases := getattr(request, "logit_bias", None):
        given["logit_bias"] = _biases(biases)
    if (wide := _asked(getattr(request, "prompt_logprobs", None), "prompt_logprobs")) is not None:
        given["prompt_logprobs"] = wide
    return SamplingParams(
        max_tokens=max_tokens,
        stop=_stops(request.stop),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        **given,
    )


_SHARED = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos", "skip_special_tokens", "n",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "include_stop_str_in_output",
)  # fmt: skip
_LISTS = ("allowed_token_ids", "bad_words")


def _biases(given: dict[str, float]) -> dict[int, float]:
    """JSON's keys are strings; these are ids."""
    biases = {}
    for key, bias in given.items():
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20):
            raise InvalidRequest.of("logit_bias", f"maps token ids to numbers; {key[:40]!r} is no id")
        biases[int(key)] = bias
    return biases


def common_fields(request: CommonFields) -> dict[str, Any]:
    """Of a request of any route, to be passed on."""
    return {name: getattr(request, name) for name in CommonFields.__struct_fields__}


def terms(request: CommonFields) -> dict[str, Any]:
    """What the engine is told beside the sampling: priority, timeout_s and cache_salt, where they are given."""
    given = {"priority": request.priority, "timeout_s": request.timeout, "cache_salt": request.cache_salt}
    return {name: value for name, value in given.items() if value is not None}


def ending(request: ChatRequest) -> Literal["opening", "closed", "continued"]:
    """How the prompt ends.

    Raises:
        InvalidRequest: the last message is to be continued, and another to be opened.
    """
    if not request.continue_final_message:
        return "closed" if request.add_generation_prompt is False else "opening"
    if request.add_generation_prompt:
        message = "a message that is continued cannot be followed by the opening of another"
        raise InvalidRequest(message, "continue_final_message")
    return "continued"


def answer_id(prefix: str, request: GenerationRequest) -> str:
    """An id of the client's choice behind the route's prefix, or one of ours.

    Raises:
        InvalidRequest: it cannot be repeated in a header or a log.
    """
    theirs = request.request_id
    if not theirs:
        return prefix + secrets.token_hex(12)
    if len(theirs) > MAX_REQUEST_ID_CHARS or not (theirs.isascii() and theirs.isprintable()):
        message = f"'request_id' has at most {MAX_REQUEST_ID_CHARS} printable ASCII characters"
        raise InvalidRequest(message, "request_id")
    return prefix + theirs


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    return (stop,) if isinstance(stop, str) else tuple(stop or ())


def wants_obfuscation(options: StreamOptions | None) -> bool:
    """Whether the stream's events are padded. OpenAI's are unless this is false; here who wants it says so."""
    return options is not None and bool(options.include_obfuscation)


def wants_usage(request: GenerationRequest) -> tuple[bool, bool]:
    """Whether the stream ends with a usage chunk, and whether each chunk carries usage."""
    options: Any = request.stream_options or StreamOptions()
    return bool(options.include_usage), bool(options.continuous_usage_stats)
