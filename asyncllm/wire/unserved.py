"""Fields that a client may know and this server does not serve: refused by name, never ignored.

Any thread. It never knows the structs of the requests.

A value that asks for nothing passes: null, "", [], {} everywhere, and what is listed beside the name.
Fields that no list here names are ignored, as OpenAI's clients send each other's extras.
"""

from collections.abc import Iterable
from typing import Any

import msgspec

from ..errors import InvalidRequest

# Labels: accepted, without effect on the answer. Listed so that a test can tell them from forgotten ones.
LABELS = frozenset((
    "user", "metadata", "service_tier", "store", "safety_identifier",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
))  # fmt: skip

_BOOLS = (True, False)
# name: the values, besides empty ones, that ask for nothing
UNSERVED: dict[str, tuple[Any, ...]] = {
    # tools and structure
    "functions": (), "function_call": ("none", "auto"),
    "guided_decoding_backend": (), "guided_whitespace_pattern": (), "structural_tag": (),
    # choices and probabilities
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,), "logits_processors": (),
    # the text around the answer
    "suffix": (), "no_stop_trim": (False,), "truncate_prompt_tokens": (), "prompt_embeds": (),
    "spaces_between_special_tokens": (True,), "detokenize": (True,),
    # templates and reasoning
    "chat_template": (), "documents": (), "stream_reasoning": (True,),
    # other services
    "audio": (), "modalities": (["text"],), "prediction": (), "web_search_options": (), "moderation": (),
    "verbosity": ("medium",), "lora": (), "lora_path": (),
    "kv_transfer_params": (), "mm_processor_kwargs": (),
}  # fmt: skip
_EMPTY: tuple[Any, ...] = (None, "", [], {})

# Served by chat and completions.
BOTH: dict[str, tuple[Any, ...]] = {
    "n": (1,), "logprobs": (False,), "prompt_logprobs": (False,), "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,), "response_format": ({"type": "text"},), "request_id": (), "stop": (),
    "stream_options": ({"include_usage": True}, {"include_usage": False}),
}  # fmt: skip

# Served by completions alone.
COMPLETIONS_ALONE: dict[str, tuple[Any, ...]] = {"best_of": (1,), "echo": (False,)}

# Served by chat alone.
CHAT_ALONE: dict[str, tuple[Any, ...]] = {
    "top_logprobs": (0,), "add_generation_prompt": (True,), "continue_final_message": (False,),
    "tools": (), "tool_choice": ("none", "auto"), "parallel_tool_calls": _BOOLS, "chat_template_kwargs": (),
    "reasoning_effort": (), "separate_reasoning": _BOOLS, "include_reasoning": _BOOLS,
}  # fmt: skip

# Of responses alone.
OF_RESPONSES: dict[str, tuple[Any, ...]] = {
    "background": (False,), "background_options": (), "conversation": (), "context_management": (), "prompt": (),
    "access_programs": (), "image": (),
    "max_tokens": (), "max_completion_tokens": (), "messages": (),  # another route's: not to be lost silently
}  # fmt: skip

# Of Anthropic's messages alone. Labels there: metadata, service_tier, inference_geo, user_profile_id, workspace_id,
# cache_control (also in parts: every prefix is cached), and of tools defer_loading, eager_input_streaming and the like.
OF_ANTHROPIC: dict[str, tuple[Any, ...]] = {
    "output_format": (), "container": (), "diagnostics": (), "speed": ("standard",),
    "context_management": (), "mcp_servers": (), "compaction": (), "fallbacks": (), "fallback_credit_token": (),
    "billing_policy": (), "thread": (),
    "max_completion_tokens": (), "prompt": (),  # another route's: not to be lost silently
}  # fmt: skip
ANTHROPIC_LABELS = frozenset((
    "metadata", "service_tier", "inference_geo", "user_profile_id", "workspace_id", "cache_control", "betas",
))  # fmt: skip

# Of tokenize alone.
_OF_TOKENS = {
    name: UNSERVED[name] for name in ("chat_template", "documents", "mm_processor_kwargs", "truncate_prompt_tokens")
}

_ABSENT = msgspec.Raw(b"null")


class Unserved:
    """One route's table, and the decoder that finds its fields."""

    def __init__(self, table: dict[str, tuple[Any, ...]]) -> None:
        given = msgspec.defstruct("Given", [(name, msgspec.Raw, _ABSENT) for name in table])
        self.table = table
        self.decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(given)


CHAT = Unserved(UNSERVED | COMPLETIONS_ALONE)
COMPLETIONS = Unserved(UNSERVED | CHAT_ALONE)
TOKENS = Unserved(_OF_TOKENS)


def all_but(served: Iterable[str], own: dict[str, tuple[Any, ...]]) -> Unserved:
    """What chat and completions know and this route does not serve, and what it alone might be asked for."""
    table = UNSERVED | BOTH | COMPLETIONS_ALONE | CHAT_ALONE | own
    return Unserved({name: table[name] for name in table.keys() - set(served)})


def refuse_unserved(body: bytes, unserved: Unserved = COMPLETIONS) -> None:
    """Look for these fields in a body that is known to be a JSON object.

    A second pass over the body, which skips whatever it does not look for at 1 GB/s; sixty more
    fields in each request struct would be checked in the first and read by nobody.

    Raises:
        InvalidRequest: one of them asks for something.
    """
    given = unserved.decoder.decode(body)
    for name, neutral in unserved.table.items():
        if (raw := getattr(given, name)) is not _ABSENT and _asks(raw, neutral):
            raise InvalidRequest(f"'{name}' is not supported by this server yet; leave it out", name)


def _asks(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    if len(bytes(raw)) > 64:  # longer than any way to ask for nothing
        return True
    value = msgspec.json.decode(raw)
    # The kinds are compared too, as True == 1 and False == 0.
    return not any(value == none and isinstance(value, bool) == isinstance(none, bool) for none in (*_EMPTY, *neutral))
