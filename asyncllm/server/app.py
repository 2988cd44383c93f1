"""The HTTP server: its routes, its start, and its end by signal or by the engine's death.

Loop thread. It never knows how an answer is made.
"""

import asyncio
import contextlib
import logging
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from aiohttp import web

from ..llm import AsyncLLM
from . import admin, anthropic, completions, gate, live, responses, tokens, websocket
from .metrics import Metrics
from .settings import Settings

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_STOPPED_AT_ONCE = 1  # a second signal came before the first one's drain was over
EXIT_ENGINE_DEAD = 70
_CLOSING_S = 2.0  # for the last events to reach their sockets; aiohttp may take it twice


def build_app(llm: AsyncLLM, settings: Settings | None = None) -> web.Application:
    """The routes around one engine."""
    settings = settings or Settings()
    middlewares = [gate.answer_errors, anthropic.answer_errors]
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    app[gate.LLM] = llm
    app[gate.SETTINGS] = settings
    app[live.RESPONSES] = live.Responses(llm, settings)
    app[tokens.LONG_TEXTS] = asyncio.Semaphore(1)
    app[websocket.SOCKETS] = sockets = websocket.Sockets(llm, settings)
    app[admin.METRICS] = Metrics(llm, sockets)
    app.cleanup_ctx.append(websocket.draining)
    app.on_shutdown.append(_close_sockets)
    app.on_response_prepare.append(gate.add_request_id)
    app.on_response_prepare.append(anthropic.add_request_id)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.completions),
            web.post("/v1/responses", responses.create),
            web.get("/v1/responses", websocket.upgrade, allow_head=False),
            web.get("/v1/responses/{id}", responses.retrieve),
            web.delete("/v1/responses/{id}", responses.delete),
            web.get("/v1/responses/{id}/events", responses.events),
            web.post("/v1/responses/{id}/cancel", responses.cancel),
            web.post(anthropic.PATH, anthropic.messages),
            web.post(f"{anthropic.PATH}/count_tokens", anthropic.count_tokens),
            web.post("/v1/embeddings", tokens.embeddings),
            web.get("/v1/models", admin.models),
            web.get("/v1/models/{id:.+}", admin.model),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/tokenizer_info", tokens.tokenizer_info),
            web.get("/health", admin.health),
            web.get("/ready", admin.ready),
            web.get("/version", admin.version),
            web.get("/metrics", admin.metrics),
            web.get("/openapi.json", admin.openapi),
        ]
    )
    return app


async def _close_sockets(app: web.Application) -> None:
    await app[websocket.SOCKETS].close()


@contextlib.asynccontextmanager
async def listening(
    llm: AsyncLLM, host: str = "127.0.0.1", port: int = 8000, settings: Settings | None = None
) -> AsyncIterator[str]:
    """Serve while the context lasts; yields the base URL, with the port the system chose for port 0.

    Raises:
        OSError: the address cannot be listened on, saying which and why.
    """
    settings = settings or Settings()
    runner = web.AppRunner(
        build_app(llm, settings),
        # aiohttp leaves handlers of clients that left running; only tests' servers cancel them by default.
        handler_cancellation=True,
        access_log=None,
        keepalive_timeout=settings.keepalive_s,
        lingering_time=_CLOSING_S,
        shutdown_timeout=_CLOSING_S,
        auto_decompress=False,  # nothing compressed is read, so nothing can be a bomb
    )
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, host, port, backlog=2048).start()
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
        yield _url(host, runner.addresses[0][1])
    finally:
        await runner.cleanup()


async def serve(
    llm: AsyncLLM,
    host: str = "127.0.0.1",
    port: int = 8000,
    *,
    settings: Settings | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> int:
    """Serve until SIGTERM, SIGINT or the engine's death, by itself or by a step of watchdog_s; returns the exit code.

    The first signal drains: /ready and new requests get 503, running streams finish within drain_s or
    end with an error event. A second one ends them at once.

    Raises:
        OSError: as `listening`.
    """
    settings = settings or Settings()
    signals = Signals()
    # Signals last out: a second SIGTERM while sockets are being closed is none that kills.
    async with signals, listening(llm, host, port, settings) as url, _watched(llm, settings.watchdog_s):
        on_ready(url)
        if not await _first(signals.wait(), llm.wait_died()):
            return EXIT_ENGINE_DEAD
        log.info("draining for at most %g s", settings.drain_s)
        if await _first(llm.drain(settings.drain_s), signals.wait()):
            return EXIT_OK if llm.dead is None else EXIT_ENGINE_DEAD
        await llm.drain(0)
        return EXIT_STOPPED_AT_ONCE


@contextlib.asynccontextmanager
async def _watched(llm: AsyncLLM, limit_s: float) -> AsyncIterator[None]:
    watch = asyncio.create_task(llm.watch(limit_s)) if limit_s > 0 else None
    try:
        yield
    finally:
        if watch is not None:
            watch.cancel()
            await asyncio.gather(watch, return_exceptions=True)


class Signals:
    """SIGTERM and SIGINT, to be awaited one by one."""

    def __init__(self) -> None:
        self._arrived: asyncio.Queue[int] = asyncio.Queue()

    async def wait(self) -> None:
        await self._arrived.get()

    async def __aenter__(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):  # Windows: there Ctrl-C raises KeyboardInterrupt
                loop.add_signal_handler(number, self._arrived.put_nowait, number)

    async def __aexit__(self, *exc_info: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            with contextlib.suppress(NotImplementedError):
                asyncio.get_running_loop().remove_signal_handler(number)


async def _first(one: Coroutine[Any, Any, object], other: Coroutine[Any, Any, object]) -> bool:
    """Wait for either; True if `one` is done, and the other is cancelled."""
    tasks = [asyncio.ensure_future(one), asyncio.ensure_future(other)]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return tasks[0].done()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
