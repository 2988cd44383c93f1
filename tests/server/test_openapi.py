"""/openapi.json: valid, complete, and true of what the server answers."""

import json
from typing import Any

import msgspec
import pytest

from asyncllm.server.app import build_app
from asyncllm.server.settings import Access, Settings
from asyncllm.wire import schemas
from asyncllm.wire.openapi import _NARROWER, ROUTES, document

from .conftest import CHAT, HI, MODEL, TEXT, Serve


def routes() -> set[tuple[str, str]]:
    return {(route.method, route.path) for route in ROUTES}


async def test_every_route_is_in_the_document_and_nothing_else(serve: Serve) -> None:
    async with serve() as served:
        app = build_app(served.llm)
        served_routes = {
            (route.method.lower(), route.resource.canonical)
            for route in app.router.routes()
            if route.resource is not None and route.method != "HEAD"  # aiohttp's own, beside each GET
        }
    assert served_routes == routes(), "a new route goes into wire/openapi.py's ROUTES too"


async def test_it_is_served_and_valid(serve: Serve) -> None:
    validator = pytest.importorskip("openapi_spec_validator")
    async with serve() as served:
        status, body = await served.get("/openapi.json")
    assert (status, body) == (200, json.loads(json.dumps(document(body["info"]["version"], MODEL))))
    validator.validate(body)
    ids = [operation["operationId"] for path in body["paths"].values() for operation in path.values()]
    assert len(set(ids)) == len(ids) == len(ROUTES)


async def test_what_has_an_address_of_its_own_is_not_said(serve: Serve) -> None:
    async with serve(settings=Settings(access=Access(admin_port=0))) as served:
        paths = (await served.get("/openapi.json"))[1]["paths"]
        assert (await served.get("/metrics"))[0] == 404
    assert "/metrics" not in paths and "/health" in paths


def test_limits_stand_where_they_are_checked() -> None:
    schemas_of = document("1", MODEL)["components"]["schemas"]
    limits = {"type": "number", "minimum": 0, "maximum": 2}
    for name in ("ChatRequest", "CompletionRequest", "ResponseRequest", "MessagesRequest"):
        assert schemas_of[name]["properties"]["temperature"]["anyOf"][0] == limits
        assert schemas_of[name]["properties"]["model"]["anyOf"][0]["enum"] == [MODEL]
        limits_of_penalty = {"type": "number", "minimum": -2, "maximum": 2}
        assert schemas_of[name]["properties"]["presence_penalty"]["anyOf"][0] == limits_of_penalty
    told = json.dumps(schemas_of)
    for field in _NARROWER:
        struct, _, name = field.rpartition(".")
        assert f'"{name}"' in told and (not struct or name in schemas_of[struct]["properties"]), field


def as_said(body: Any, kind: Any) -> None:
    """Whether this answer is one of that type: every field known, every required one there."""
    decoded = msgspec.convert(body, kind)
    assert msgspec.to_builtins(decoded) == body


async def test_whole_answers_are_as_the_document_says(serve: Serve) -> None:
    async with serve() as served:
        as_said((await served.chat()).body, schemas.ChatCompletion)
        as_said((await served.complete()).body, schemas.TextCompletion)
        as_said((await served.post(CHAT, {})).body, schemas.Error)
        as_said((await served.post("/tokenize", {"prompt": "hi", "return_token_strs": True})).body, schemas.Tokens)
        as_said((await served.post("/detokenize", {"tokens": [3]})).body, schemas.Detokenized)
        for path, kind in (
            ("/v1/models", schemas.ModelList), (f"/v1/models/{MODEL}", schemas.Model), ("/health", schemas.Status),
            ("/ready", schemas.Status), ("/version", schemas.Version),
        ):  # fmt: skip
            as_said((await served.get(path))[1], kind)
        msgspec.convert((await served.get("/tokenizer_info"))[1], schemas.TokenizerInfo)
        response = (await served.post("/v1/responses", {"input": "hi"})).body
        msgspec.convert(response, schemas.Response)
        async with served.session.delete(f"{served.url}/v1/responses/{response['id']}") as deleted:
            as_said(await deleted.json(), schemas.Deleted)


def test_the_end_of_a_stream_of_chunks_is_in_the_document() -> None:
    paths = document("1", MODEL)["paths"]
    for path, kind in ((CHAT, "ChatCompletionChunk"), (TEXT, "TextCompletion")):
        content = paths[path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        done, chunk = content["schema"]["properties"]["data"]["anyOf"]
        assert done == {"const": "[DONE]"}
        told = [one["$ref"].rpartition("/")[2] for one in chunk["contentSchema"]["anyOf"]]
        assert told == [kind, "Error"]
    content = paths["/v1/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert content["schema"]["properties"]["data"]["contentSchema"]["$ref"].endswith("/Event")


async def test_streamed_answers_are_as_the_document_says(serve: Serve) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with serve() as served:
        for event in (await served.post(CHAT, {"messages": HI} | options)).events:
            as_said(event, schemas.ChatCompletionChunk)
        for event in (await served.post(TEXT, {"prompt": "hi"} | options)).events:
            as_said(event, schemas.TextCompletion)
