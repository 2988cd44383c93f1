"""The HTTP server: its routes, its start, and its end by signal or by the engine's death.

Loop thread. It never knows how an answer is made.
"""

import asyncio
import contextlib
import faulthandler
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import msgspec
from aiohttp import web

from ..clock import CLOCK
from ..errors import EngineDead
from ..llm import AsyncLLM
from . import access, admin, anthropic, completions, events, gate, kept, responses, tokens, websocket
from .door import Door, Doors, check_parser
from .garbage import collected_when_idle
from .metrics import Metrics
from .rates import RATES, Rates
from .settings import Access, Settings

log = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_STOPPED_AT_ONCE = 1  # a second signal came before the first one's drain was over
BLOCKED_LIMITS, BLOCKED_AT_LEAST_S = 2.0, 30.0  # watchdogs, after which a loop that does not turn counts as stuck
_CLOSING_S = 2.0  # for the last events to reach their sockets; aiohttp may take it twice


def build_app(llm: AsyncLLM, settings: Settings | None = None) -> web.Application:
    """The routes around one engine."""
    settings = settings or Settings()
    app = _bare_app(llm, settings)
    app[kept.RESPONSES] = kept.Responses(llm, settings)
    app[tokens.LONG_TEXTS] = asyncio.Semaphore(1)
    app[websocket.SOCKETS] = sockets = websocket.Sockets(llm, settings)
    app[events.OUTFLOWS] = outflows = events.Outflows(settings)
    app[admin.METRICS] = Metrics(llm, sockets, outflows)
    app[RATES] = Rates(settings.requests_per_minute)
    app.cleanup_ctx.append(_beside(sockets.drain_with_engine))
    app.cleanup_ctx.append(_beside(CLOCK.keep))
    app.on_shutdown.append(_close_sockets)
    app.add_routes(
        [
            web.post("/v1/chat/completions", completions.chat),
            web.post("/v1/completions", completions.completions),
            web.post("/v1/responses", responses.create),
            web.post("/v1/responses/input_tokens", responses.input_tokens),
            web.get("/v1/responses", websocket.upgrade, allow_head=False),
            # No HEAD: it would take the events from who follows them.
            web.get("/v1/responses/{id}", responses.retrieve, allow_head=False),
            web.delete("/v1/responses/{id}", responses.delete),
            web.get("/v1/responses/{id}/events", responses.events, allow_head=False),
            web.get("/v1/responses/{id}/input_items", responses.input_items),
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
            web.get("/openapi.json", admin.openapi),
        ]
    )
    if settings.access.admin_port is None:
        app.add_routes([web.get("/metrics", admin.metrics)])
    return app


def build_admin_app(app: web.Application) -> web.Application:
    """What operators ask of `app`, for an address of its own."""
    ours = _bare_app(app[gate.LLM], app[gate.SETTINGS])
    ours[admin.METRICS] = app[admin.METRICS]
    ours.add_routes(
        [
            web.get("/health", admin.health),
            web.get("/ready", admin.ready),
            web.get("/version", admin.version),
            web.get("/metrics", admin.metrics),
        ]
    )
    return ours


def _bare_app(llm: AsyncLLM, settings: Settings) -> web.Application:
    middlewares = [gate.answer_errors, anthropic.answer_errors]
    app = web.Application(middlewares=middlewares, client_max_size=settings.max_body_bytes)
    app[gate.LLM], app[gate.SETTINGS] = llm, settings
    app.on_response_prepare.append(gate.add_request_id)
    app.on_response_prepare.append(anthropic.add_request_id)
    app.on_response_prepare.append(access.allow_origin)
    return app


def _beside(work: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[web.Application], AsyncIterator[None]]:
    """cleanup_ctx: `work` goes on while the server lives."""

    async def context(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(work())
        yield
        task.cancel()
        await asyncio.wait([task])

    return context


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
    app = build_app(llm, settings)
    check_parser()
    tls = tls_context(settings.access)
    async with contextlib.AsyncExitStack() as stack:
        open_port = await stack.enter_async_context(_open(app, host, port, settings, tls))
        if settings.access.admin_port is not None:
            own = msgspec.structs.replace(settings, access=Access(hosts=access.LOOPBACK_NAMES))
            admin_app, admin_port = build_admin_app(app), settings.access.admin_port
            await stack.enter_async_context(_open(admin_app, "127.0.0.1", admin_port, own, None))
        yield _url("https" if tls else "http", host, open_port)


@contextlib.asynccontextmanager
async def _open(
    app: web.Application, host: str, port: int, settings: Settings, tls: ssl.SSLContext | None
) -> AsyncIterator[int]:
    """One address, and what answers there; yields the port."""
    # aiohttp leaves handlers of clients that left running; only tests' servers cancel them by default.
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=_CLOSING_S)
    await runner.setup()
    try:
        manager = runner.server
        assert manager is not None
        manager.request_handler = access.guarded(manager.request_handler, settings)
        doors = Doors(lambda doors: _door(doors, manager), settings)
        loop = asyncio.get_running_loop()
        handshake_s = settings.header_timeout_s if tls else None
        try:
            server = await loop.create_server(
                doors, host, port, ssl=tls, backlog=2048, reuse_address=True, ssl_handshake_timeout=handshake_s
            )
        except OSError as error:
            raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
        try:
            yield int(server.sockets[0].getsockname()[1])
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _door(doors: Doors, manager: web.Server) -> Door:
    return Door(
        doors,
        manager,
        loop=asyncio.get_running_loop(),
        access_log=None,
        logger=log,
        keepalive_timeout=doors.settings.keepalive_s,
        lingering_time=_CLOSING_S,
        auto_decompress=False,  # nothing compressed is read, so nothing can be a bomb
    )


def check(settings: Settings) -> None:
    """What can be known before anything is loaded.

    Raises:
        ValueError, OSError: as `listening` would.
    """
    check_parser()
    tls_context(settings.access)


def tls_context(access: Access) -> ssl.SSLContext | None:
    """
    Raises:
        ValueError: one file without the other, or an encrypted key. OSError: they cannot be read or do not fit.
    """
    certfile, keyfile = access.certfile, access.keyfile
    if certfile is None and keyfile is None:
        return None
    if certfile is None or keyfile is None:
        raise ValueError("TLS needs both a certificate and its key: --ssl-certfile and --ssl-keyfile")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certfile, keyfile, password=_no_password)
    except OSError as error:
        raise OSError(f"the TLS certificate {certfile} and key {keyfile} cannot be used: {error}") from None
    return context


def _no_password() -> str:
    raise ValueError("the TLS key is encrypted; give one that is not, readable by this user alone")


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
    watched, collected = _watched(llm, settings.watchdog_s), collected_when_idle(llm)
    async with signals, listening(llm, host, port, settings) as url, watched, collected:
        on_ready(url)
        if not await _first(signals.wait(), llm.wait_died()):
            return _exit_code(llm)
        log.info("draining for at most %g s; a second signal stops at once", settings.drain_s)
        if await _first(llm.drain(settings.drain_s), signals.wait()):
            return _exit_code(llm)
        await llm.drain(0)
        return EXIT_STOPPED_AT_ONCE


def _exit_code(llm: AsyncLLM) -> int:
    return llm.dead.exit_code if isinstance(llm.dead, EngineDead) else EXIT_OK


@contextlib.asynccontextmanager
async def _watched(llm: AsyncLLM, limit_s: float) -> AsyncIterator[None]:
    """The engine watched by the loop, and the loop by a thread of C that needs no GIL."""
    if not limit_s:
        yield
        return
    watches = [asyncio.create_task(llm.watch(limit_s)), asyncio.create_task(turning(limit_s * BLOCKED_LIMITS))]
    try:
        yield
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)


async def turning(limit_s: float) -> None:
    """While this runs, a loop that stands still for limit_s ends the process, and all stacks go to stderr first."""
    limit_s = max(limit_s, BLOCKED_AT_LEAST_S)
    try:
        while True:
            faulthandler.dump_traceback_later(limit_s, exit=True)
            await asyncio.sleep(limit_s / 8)
    finally:
        faulthandler.cancel_dump_traceback_later()


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


def _url(scheme: str, host: str, port: int) -> str:
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
