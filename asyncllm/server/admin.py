"""What operators and tools ask: models, health, readiness, version, metrics.

Loop thread. Every answer is read from what the engine last published; none asks it anything.
"""

import copy
import functools
from datetime import UTC, datetime

import orjson
from aiohttp import web

from .. import __version__
from ..errors import QueueFull
from ..llm import AsyncLLM
from ..wire.openapi import ROUTES, document
from .completions import check_model
from .gate import LLM, json_response
from .metrics import Metrics

STALLED_S = 20.0  # a step this long is no place to send more to; it may be alive
METRICS = web.AppKey("metrics", Metrics)


async def models(request: web.Request) -> web.Response:
    """GET /v1/models."""
    llm = request.app[LLM]
    pages = {"has_more": False, "first_id": llm.model_name, "last_id": llm.model_name}  # Anthropic's clients turn them
    return json_response({"object": "list", "data": [_model(llm)], **pages})


async def model(request: web.Request) -> web.Response:
    """GET /v1/models/{id}; the id may hold slashes."""
    check_model(request.app[LLM], request.match_info["id"])
    return json_response(_model(request.app[LLM]))


async def health(request: web.Request) -> web.Response:
    """GET /health: live unless the engine has died. A long prefill or a drain is life; progress is in /metrics."""
    if (dead := request.app[LLM].dead) is not None:
        raise copy.copy(dead)
    return json_response({"status": "ok"})


async def ready(request: web.Request) -> web.Response:
    """GET /ready: whether a request sent now would be taken."""
    llm = request.app[LLM]
    llm.check_open()
    if llm.silent_s > STALLED_S:
        raise QueueFull(f"no step has ended for {llm.silent_s:.0f} s")
    return json_response({"status": "ready"})


async def version(request: web.Request) -> web.Response:
    """GET /version."""
    return json_response({"version": __version__})


async def metrics(request: web.Request) -> web.Response:
    """GET /metrics, in Prometheus' text format."""
    text, content_type = request.app[METRICS].expose()
    return web.Response(body=text, headers={"Content-Type": content_type})


async def openapi(request: web.Request) -> web.Response:
    """GET /openapi.json."""
    served = [(one.method.lower(), one.resource.canonical) for one in request.app.router.routes() if one.resource]
    return web.Response(body=_document(request.app[LLM].model_name, frozenset(served)), content_type="application/json")


@functools.cache
def _document(model: str, served: frozenset[tuple[str, str]]) -> bytes:
    routes = [route for route in ROUTES if (route.method, route.path) in served]  # some have an address of their own
    return orjson.dumps(document(__version__, model, routes))


def _model(llm: AsyncLLM) -> dict[str, object]:
    name = llm.model_name
    return {
        "id": name,
        "object": "model",
        "created": llm.created,
        "owned_by": "asyncllm",
        "root": name,  # vllm's benchmark client reads it
        "max_model_len": llm.limits.max_model_len,  # LiteLLM reads it
        # What Anthropic's clients read.
        "type": "model",
        "display_name": name,
        "created_at": datetime.fromtimestamp(llm.created, UTC).isoformat(),
    }
