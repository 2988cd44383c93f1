"""POST /tokenize and /detokenize, GET /tokenizer_info; and /v1/embeddings, which a generating model refuses.

Loop thread; long texts in a worker thread. It never knows the engine: nothing here queues.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from ..errors import ContextTooLong, InvalidRequest
from ..llm import AsyncLLM
from ..text.tokenizer import token_text
from ..text.words import INLINE_CHARS
from ..wire.messages import template_messages
from ..wire.tokens import TokenizeRequest, as_chat, decode_detokenize, decode_embedding, decode_tokenize
from ..wire.tools import tool_use
from .asking import prompt_of
from .completions import check_model
from .gate import LLM, json_response, read_body

# A text may be longer than the context: people count to find out. A million ids hold the GIL for 0.1 s.
MAX_TOKENS = 1 << 18
# One long text at a time: two cores' worth of tokenising belongs to prompts.
LONG_TEXTS = web.AppKey("long_texts", asyncio.Semaphore)
# Of tokenizer_config.json: where things lay on somebody's disk.
_PRIVATE = ("auto_map", "cache_dir", "merges_file", "name_or_path", "tokenizer_file", "vocab_file")


class NoEmbedder(InvalidRequest):
    code = "model_not_supported"


async def tokenize(request: web.Request) -> web.Response:
    """POST /tokenize: the ids of a prompt, as completions count them, or of messages, as chat does."""
    llm = request.app[LLM]
    body = decode_tokenize(await read_body(request))
    check_model(llm, body.model)
    if body.messages is not None:
        chat = as_chat(body)
        use = tool_use(chat.tools, chat.tool_choice, None)
        token_ids = await prompt_of(llm, chat, template_messages(body.messages), use)
    else:
        token_ids = await _off_loop(request, len(body.prompt or ""), partial(_prompt_ids, llm, body))
    names = llm.tokenizer.spellings(token_ids) if body.return_token_strs else None
    limit = llm.limits.max_model_len
    return json_response({"count": len(token_ids), "max_model_len": limit, "tokens": token_ids, "token_strs": names})


async def detokenize(request: web.Request) -> web.Response:
    """POST /detokenize: the text of ids, control tokens included unless they are to be skipped."""
    llm = request.app[LLM]
    body = decode_detokenize(await read_body(request), llm.limits.vocab_size)
    check_model(llm, body.model)
    decode = partial(llm.tokenizer.decode, body.tokens, skip_special_tokens=body.skip_special_tokens is True)
    return json_response({"prompt": await _off_loop(request, len(body.tokens), decode)})


async def tokenizer_info(request: web.Request) -> web.Response:
    """GET /tokenizer_info: the tokenizer's own configuration, special tokens as plain text."""
    llm = request.app[LLM]
    info = {name: value for name, value in llm.tokenizer.config.items() if name not in _PRIVATE}
    for name in [name for name in info if name.endswith("_token")]:
        info[name] = info[name] if isinstance(info[name], bool) else token_text(info[name])
    info.setdefault("tokenizer_class", "PreTrainedTokenizerFast")
    source = None if llm.chat_template is None else llm.chat_template.source
    own = {"chat_template": source, "vocab_size": llm.tokenizer.vocab_size, "eos_token_ids": llm.tokenizer.eos_ids}
    return json_response(info | own)


async def embeddings(request: web.Request) -> web.Response:
    """POST /v1/embeddings: every model that is served here generates text."""
    llm = request.app[LLM]
    check_model(llm, decode_embedding(await read_body(request)).model)
    raise NoEmbedder(f"the model {llm.model_name!r} generates text; it makes no embeddings", "model")


def _prompt_ids(llm: AsyncLLM, body: TokenizeRequest) -> list[int]:
    tokenizer = llm.tokenizer
    encode = tokenizer.encode if body.parse_special is False else tokenizer.encode_written
    limit = max(MAX_TOKENS, llm.limits.max_model_len)
    try:
        return encode(body.prompt or "", add_special_tokens=body.add_special_tokens is not False, max_len=limit)
    except ContextTooLong:
        raise InvalidRequest(f"the prompt has more than {limit} tokens; send it in pieces", "prompt") from None


async def _off_loop(request: web.Request, size: int, call: Callable[[], Any]) -> Any:
    if size <= INLINE_CHARS:
        return call()
    async with request.app[LONG_TEXTS]:
        return await asyncio.to_thread(call)
