"""Row 25: a bug in any layer tells its client nothing: no path, no address, no repr, no prompt. And it is that
request's alone, unless it is the engine's own."""

import asyncio
import contextlib
import gc
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp
import pytest

from ..text import toys
from .conftest import CHAT, MODEL, TEXT, Serve, Served, until

PROMPT = "purple elephant"
MARKS = (PROMPT, "/srv/", "0x7f", "Traceback", "<class", ".py", "_secret", "asyncllm.")
MESSAGES = [{"role": "user", "content": PROMPT}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ROOMY = {"max_model_len": 2048, "num_pages": 600, "max_step_tokens": 2048}
SAID = 'So it is.<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
ASKS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "tools": TOOLS, "stop": "###"}),
    (CHAT, {"messages": MESSAGES, "n": 2, "stream_options": {"include_usage": True}}),
    (TEXT, {"prompt": PROMPT, "max_tokens": 30}),
    (TEXT, {"prompt": ["once", "again"], "max_tokens": 30, "return_token_ids": True, "echo": True}),
    (TEXT, {"prompt": PROMPT, "max_tokens": 30, "structured_outputs": {"choice": ["yes", "no"]}}),
    ("/v1/responses", {"input": PROMPT, "tools": [{"type": "function", "name": "f"}]}),
    ("/v1/messages", {"messages": MESSAGES, "model": MODEL, "max_tokens": 30}),
    ("/v1/messages/count_tokens", {"messages": MESSAGES, "model": MODEL}),
    ("/v1/responses/input_tokens", {"input": PROMPT}),
    ("/tokenize", {"prompt": PROMPT}),
    ("/detokenize", {"tokens": [70, 71]}),
]
LAYERS = (
    "server.access._caller", "server.access.check_host", "server.gate.check_density", "server.gate.request_id",
    "server.gate.check_origin", "server.rates.Rates.spend", "server.events.EventResponse.begin",
    "server.events.EventResponse.write", "server.events.EventResponse.end", "server.kept.Responses.start",
    "server.completions.Answer.take", "server.completions.Answer.flush", "server.live.LiveResponse.flush",
    "server.live.LiveResponse.attach", "server.live.LiveResponse.whole", "server.live.LiveResponse._outcome",
    "server.detailed.Teller.note", "server.metrics.Metrics.collect", "server.websocket.Connection._dispatch",
    "server.websocket.Connection.push", "server.websocket.Connection.flush", "server.lane.Lane._create",
    "server.websocket.Connection.take", "server.admin.json_response",
    "wire.requests.decode", "wire.requests.chat_params", "wire.replies._reply", "wire.replies.Chunks.text",
    "wire.replies.Chunks.finish", "wire.parted.PartedChunks._make", "wire.response_events.Events.say",
    "wire.response_events.Events.opening", "wire.response_events.Events.closing",
    "wire.response_events.SocketFrames.event", "wire.details.put_in", "server.completions.template_messages",
    "text.chat.ChatTemplate.render", "text.tokenizer.Tokenizer.encode", "text.tokenizer.Tokenizer.encode_rendered",
    "text.detokenizer.TableDetokenizer.push", "text.detokenizer.TableDetokenizer.finish",
    "text.stop.StopMatcher.push", "text.answer.AnswerParser.push", "text.answer.AnswerParser.finish",
    "text.answer.AnswerParser.whole", "text.grammars.Grammars.compile", "text.grammars.Masker.fill",
    "text.grammars.Masker.accept",
    "llm.AsyncLLM.submit", "llm.AsyncLLM.encode_chat", "admission.Admission.enter", "admission.Admission.leave",
    "registry.Registry.submit", "registry.Registry._deliver", "mailbox.Mailbox.deliver", "mailbox.Mailbox.add_token",
    "mailbox.Mailbox.take_more", "server.events.Outflow.write", "server.events.Outflow.has_room",
    "text.detokenizer.TableDetokenizer.push_one", "pace.Pace.settle", "pace.Pace.step", "totals.Totals.add",
    "engine.scheduler.Scheduler.submit", "engine.scheduler.Scheduler.schedule", "engine.scheduler.Scheduler.commit",
    "engine.roster.Roster.enter", "engine.cache.Cache.place", "engine.loop.Engine._launch",
    "jinja2.Template.generate",
)  # fmt: skip
# Bookkeeping, and the engine's own: everybody hears, and the process ends.
ENDS_THE_ENGINE = (
    "text.grammars.Masker.accept", "engine.", "registry.Registry._deliver", "mailbox.Mailbox.deliver",
    "mailbox.Mailbox.add_token", "pace.Pace.", "totals.", "admission.",
)  # fmt: skip


class Broken(Exception):
    """Says all that nobody may hear."""


class Break:
    """Raises wherever it is put, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *args: object, **kwargs: object) -> Any:
        self.count += 1
        raise Broken(f"/srv/model/_secret.py {PROMPT} {self!r} {object()!r} {Broken!r}")


async def told(served: Served) -> list[bytes]:
    """All that every kind of client hears, whether answered, refused or cut off."""
    asks = [(path, fields | {"stream": stream}) for path, fields in ASKS for stream in (False, True)]
    gets = ["/v1/models", "/metrics", "/health", "/ready", "/version", "/v1/responses/resp_1", "/nowhere"]
    heard = await asyncio.gather(
        *[_posted(served, path, {"temperature": 0} | fields) for path, fields in asks],
        *[_got(served, path) for path in gets],
        _on_a_socket(served),
    )
    return [*heard]


async def _posted(served: Served, path: str, body: dict[str, Any]) -> bytes:
    return await _read(served.session.post(served.url + path, json=body))


async def _got(served: Served, path: str) -> bytes:
    return await _read(served.session.get(served.url + path))


async def _read(asking: Any) -> bytes:
    data = b""
    with contextlib.suppress(aiohttp.ClientError):
        async with asking as response:
            data = f"{response.status} {dict(response.headers)}".encode()
            async for piece in response.content.iter_any():
                data += piece
    return data


async def _on_a_socket(served: Served) -> bytes:
    data = b""
    with contextlib.suppress(aiohttp.ClientError):
        async with served.session.ws_connect(served.url + "/v1/responses") as socket:
            for lane in ("a", "b"):
                await socket.send_json({"type": "response.create", "input": PROMPT, "stream_id": lane})
            num_over = 0
            while num_over < 2:
                message = await socket.receive()
                if message.type is not aiohttp.WSMsgType.TEXT:
                    return data + str(message.extra).encode()
                data += message.data.encode()
                num_over += json.loads(message.data)["type"] in ("error", "response.completed", "response.failed")
    return data


async def test_what_is_over_does_not_wait_for_the_collector(serve: Serve) -> None:
    """Nothing of a request or a connection is held in a circle: full collections are rare beside load."""
    kinds = {"Door", "Request", "Connection", "Lane", "Order", "WebSocketResponse", "EventResponse", "Outflow"}

    def held() -> list[str]:
        return [name for one in gc.get_objects() if (name := type(one).__name__) in kinds]

    async with serve(SAID, template=toys.TOOLS, **ROOMY) as served:
        gc.collect()
        gc.disable()
        try:
            async with aiohttp.ClientSession() as session:  # whose connections go with it
                await told(Served(served.url, served.llm, served.runner, session))
                headers = {"Content-Type": "application/json"}
                async with session.post(served.url + TEXT, data=b"{", headers=headers) as refused:
                    assert refused.status == 400
                assert held()
            raw, leaver = await served.connect(), await served.connect()
            raw.writer.write(b"nonsense\r\n\r\n")
            await raw.rest()
            raw.leave()
            await leaver.send(TEXT, b'{"prompt": "x", "max_tokens": 500, "ignore_eos": true, "stream": true}')
            await leaver.events(2)
            leaver.leave(reset=True)
            await until(lambda: not held())
        finally:
            gc.enable()


@pytest.mark.parametrize("layer", LAYERS)
async def test_a_bug_in_any_layer_tells_nothing(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, layer: str
) -> None:
    caplog.set_level(logging.CRITICAL, "asyncio")
    async with serve(SAID, template=toys.TOOLS, **ROOMY) as served:
        broken = Break()
        with monkeypatch.context() as patch:
            patch.setattr(layer if layer.startswith("jinja2") else f"asyncllm.{layer}", broken)
            async with asyncio.timeout(30):
                heard = await told(served)
            assert broken.count, "nobody came by"
        for data in heard:
            assert not [mark for mark in MARKS if mark.encode() in data], data
        if not layer.startswith(ENDS_THE_ENGINE):
            await served.idle()
            await served.alive()


@pytest.mark.parametrize("hook", ["on_launch", "on_result"])
async def test_a_step_that_breaks_tells_nothing(serve: Serve, hook: str) -> None:
    async with serve(SAID, template=toys.TOOLS, **ROOMY) as served:
        broken = Break()
        works: Callable[[Any], None] = getattr(served.runner, hook)
        setattr(served.runner, hook, broken)
        heard = await told(served)
        setattr(served.runner, hook, works)
        assert broken.count and any(b"step_failed" in data for data in heard)
        for data in heard:
            assert not [mark for mark in MARKS if mark.encode() in data], data
        await served.idle()
        await served.alive()
