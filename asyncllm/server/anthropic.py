"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients.

Loop thread. It never knows token ids' meaning, steps or pages: an answer is a LiveResponse that nobody asks for again.
"""

import secrets

from aiohttp import web

from ..wire.anthropic import CountRequest, as_chat, decode_count, decode_messages, template_messages
from ..wire.anthropic_events import MessageHead, error_body
from ..wire.names import Names, message_names
from ..wire.requests import terms
from ..wire.tools import tool_use
from . import gate
from .asking import ask, call_id_chars, naming, prompt_of
from .completions import check_model
from .gate import LLM, SETTINGS, Handler, json_response, read_body, read_request, request_id
from .live import LiveResponse
from .responses import answer

PATH = "/v1/messages"


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of these routes as Anthropic's clients read them."""
    if not _is_ours(request):
        return await handler(request)
    return in_its_words(request, await gate.answer_errors(request, handler))


def in_its_words(request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    """An error of these routes, told anew; anything else as it is."""
    if not isinstance(response, web.Response) or not isinstance(response.body, bytes):  # a client that left has none
        return response
    if _is_ours(request) and response.status >= 400:
        response.body = error_body(response.status, response.body, request_id(request))
    return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: under the name that Anthropic's clients look for."""
    if _is_ours(request):
        response.headers["request-id"] = request_id(request)


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    llm = request.app[LLM]
    body = decode_messages(await read_request(request))
    check_model(llm, body.model)
    names = _names(body)
    with naming(names):
        asked = await ask(llm, as_chat(body), template_messages(body))
        stream = llm.submit(asked.prompt_ids, asked.params, shown=asked.shown, **terms(body))
    head = MessageHead(
        id=f"msg_{secrets.token_hex(12)}",
        model=llm.model_name,
        num_prompt_tokens=len(asked.prompt_ids),
        fills_context=body.max_tokens > llm.limits.max_model_len - len(asked.prompt_ids),
        call_id_chars=call_id_chars(llm),
        names=names,
    )
    live = LiveResponse(head, stream, [], request.app[SETTINGS], parting=asked.parting)
    return await answer(request, live, stream=body.stream is True)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens."""
    llm = request.app[LLM]
    body = decode_count(await read_body(request))
    check_model(llm, body.model)
    chat = as_chat(body)
    with naming(_names(body)):
        use = tool_use(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
        prompt_ids = await prompt_of(llm, chat, template_messages(body), use)
    return json_response({"input_tokens": len(prompt_ids)})


def _names(body: CountRequest) -> Names:
    effort = "thinking" if body.output_config is None else "output_config.effort"
    return message_names(effort, len(body.messages))


def _is_ours(request: web.Request) -> bool:
    return request.path == PATH or request.path.startswith(f"{PATH}/")
