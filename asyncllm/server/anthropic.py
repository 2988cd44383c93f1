"""POST /v1/messages and /v1/messages/count_tokens, for Anthropic's clients.

Loop thread. It never knows token ids' meaning, steps or pages: an answer is a LiveResponse that nobody asks for again.
"""

import secrets

from aiohttp import web

from ..wire.anthropic import decode_count, decode_messages, message_params, template_messages
from ..wire.anthropic_events import MessageHead, error_body
from . import gate
from .completions import check_model
from .gate import LLM, SETTINGS, Handler, json_response, read_body, request_id
from .live import LiveResponse
from .responses import answer

PATH = "/v1/messages"


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors of these routes as Anthropic's clients read them."""
    if not _is_ours(request):
        return await handler(request)
    response = await gate.answer_errors(request, handler)
    if isinstance(response, web.Response) and response.status >= 400 and isinstance(response.body, bytes):
        response.body = error_body(response.status, response.body, request_id(request))
    return response


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """on_response_prepare: under the name that Anthropic's clients look for."""
    if _is_ours(request):
        response.headers["request-id"] = request_id(request)


async def messages(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages."""
    llm = request.app[LLM]
    body = decode_messages(await read_body(request))
    check_model(llm, body.model)
    params = message_params(body)
    prompt_ids = await llm.encode_chat(template_messages(body))
    stream = llm.submit(prompt_ids, params)
    head = MessageHead(
        id=f"msg_{secrets.token_hex(12)}",
        model=llm.model_name,
        num_prompt_tokens=len(prompt_ids),
        fills_context=body.max_tokens > llm.limits.max_model_len - len(prompt_ids),
    )
    return await answer(request, LiveResponse(head, stream, [], request.app[SETTINGS]), stream=body.stream is True)


async def count_tokens(request: web.Request) -> web.StreamResponse:
    """POST /v1/messages/count_tokens."""
    llm = request.app[LLM]
    body = decode_count(await read_body(request))
    check_model(llm, body.model)
    return json_response({"input_tokens": len(await llm.encode_chat(template_messages(body)))})


def _is_ours(request: web.Request) -> bool:
    return request.path == PATH or request.path.startswith(f"{PATH}/")
