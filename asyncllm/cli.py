"""The command line: flags and environment to a Config, and what a person sees while a server starts.

Main thread, before and around the loop. The environment is read here and nowhere else.
"""

import argparse
import asyncio
import errno
import json
import logging
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from . import __version__, logs, supervise
from . import config as configs
from .config import Config
from .errors import AsyncLLMError, EngineDead
from .flags import LIMITS, add_bench_flags, add_chat_flags, add_engine_flags, add_server_flags

if TYPE_CHECKING:
    from .server.settings import Access

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

FAULT = "ASYNCLLM_FAULT"
EXIT_FAILED_REQUESTS = 1
EXIT_CANNOT_START = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; exits with its code."""
    args, unknown = _parser().parse_known_args(argv)
    if unknown:  # parse_args would name the program, and point at the help that lists no flags
        args.refuse(f"unrecognized arguments: {' '.join(unknown)}")
    args.arguments = sys.argv[1:] if argv is None else argv
    logs.set_up(args.log_level)
    try:
        _leave(args.run(args))
    except (AsyncLLMError, ValueError, OSError) as error:
        logging.debug("cannot go on", exc_info=True)
        print(f"asyncllm: {error}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _leave(code: int) -> NoReturn:
    """An engine that died may hold its thread in a kernel; the interpreter's way out would wait for that."""
    if code >= EngineDead.exit_code:
        logging.shutdown()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def _serve(args: argparse.Namespace) -> int:
    if args.supervise:
        later = {name: value for name, value in os.environ.items() if name != FAULT}  # a fault is for the first life
        return supervise.Supervisor(supervise.command_of(args.arguments), dict(os.environ), later).run()
    _raise_file_limit()
    return _run(_serving(args))


def _raise_file_limit() -> None:
    """As many connections as the system lets this user have: its default of 1,024 is from another age."""
    if resource is not None:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serving(args: argparse.Namespace) -> int:
    from . import build
    from .server.app import check, serve
    from .server.settings import Settings

    started_s = time.monotonic()
    _check_address(args.host, args.port)
    settings = Settings(**{name: getattr(args, name) for name in LIMITS}, access=_access(args))
    check(settings)  # told of before a model is loaded for nothing
    async with build.serving(_config(args), *_faults(args)) as llm:

        def on_ready(url: str) -> None:
            print(f"{llm.model_name} is ready after {time.monotonic() - started_s:.1f} s. Try:\n")
            has_key = bool(settings.access.keys)
            print(_curl(url, llm.model_name, chat=llm.chat_template is not None, has_key=has_key), flush=True)

        return await serve(llm, args.host, args.port, settings=settings, on_ready=on_ready)


def _check_address(host: str, port: int) -> None:
    """Told before a model is loaded for nothing. Who takes the port meanwhile is told of by `listening`.

    Raises:
        OSError: the address cannot be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
        try:
            probe.bind((host, port))
        except OSError as error:
            other = "; --port names another, 0 takes any that is free" if error.errno == errno.EADDRINUSE else ""
            raise OSError(f"cannot listen on {host}:{port}: {error.strerror}{other}") from None


def _faults(args: argparse.Namespace) -> list[str]:
    """What is to be broken on purpose, by ASYNCLLM_FAULT."""
    if (fault := os.environ.get(FAULT)) is None:
        return []
    if not args.allow_fault_injection:
        raise ValueError(f"{FAULT} is set; --allow-fault-injection says that this is meant")
    from .runner.faults import parse

    parse(fault)  # told of before a model is loaded for nothing
    return [fault]


def _access(args: argparse.Namespace) -> "Access":
    """Keys come from flags, a file and the environment together.

    Raises:
        ValueError: a key that is none. OSError: a file that cannot be read.
    """
    from .server.keys import read_keys
    from .server.settings import Access

    lines = [*args.api_key, *os.environ.get("ASYNCLLM_API_KEY", "").split(",")]
    if args.api_key_file is not None:
        lines += _lines_of_keys(args.api_key_file)
    keys = read_keys(lines)
    if not keys and (args.api_key or args.api_key_file is not None):
        raise ValueError("an API key was announced, and none is there")  # not: served to everybody
    return Access(
        keys=keys,
        hosts=_allowed_hosts(args),
        origins=tuple(args.allowed_origin),
        admin_port=args.admin_port,
        certfile=args.ssl_certfile,
        keyfile=args.ssl_keyfile,
    )


def _lines_of_keys(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError as error:
        raise OSError(f"--api-key-file {path} cannot be read: {error.strerror}") from None


def _allowed_hosts(args: argparse.Namespace) -> tuple[str, ...] | None:
    """On loopback, where a browser may be led to from any page, the names of loopback alone."""
    if args.allowed_host:
        return None if "*" in args.allowed_host else tuple(name.lower() for name in args.allowed_host)
    return ("localhost",) if args.host in ("localhost", "127.0.0.1", "::1") else None


def _curl(url: str, model: str, *, chat: bool, has_key: bool) -> str:
    prompt = "What is the capital of France?"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    route = "chat/completions" if chat else "completions"
    body = json.dumps({"model": model, **asked, "temperature": 0, "stream": True}).replace("'", "'\\''")
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if has_key else ""
    return f"curl -N {url}/v1/{route}{key} -H 'Content-Type: application/json' -d '{body}'\n"


def _chat(args: argparse.Namespace) -> int:
    from .client import chat

    fields = {name: value for name in ("temperature", "max_tokens") if (value := getattr(args, name)) is not None}
    if _is_url(args.model):
        opening = partial(chat.over_http, args.model, os.environ.get("OPENAI_API_KEY"), args.served_model_name, fields)
    elif _is_bare_address(args.model):
        raise ValueError(f"a server's address begins with http:// or https://: http://{args.model}")
    else:
        opening = partial(_engine_answers, _config(args), fields)
    return chat.talk(opening, args.system)


def _is_url(target: str | None) -> bool:
    return target is not None and target.startswith(("http://", "https://"))


def _is_bare_address(target: str | None) -> bool:
    """host:port, and no folder of that name."""
    return target is not None and re.match(r"[\w.-]+:\d+(/|$)", target) is not None and not Path(target).exists()


@asynccontextmanager
async def _engine_answers(config: Config, fields: dict[str, Any]) -> AsyncIterator[tuple[str, Any]]:
    """An engine in this process as what a chat talks to: the client's floor does not know engines."""
    from . import build
    from .client.chat import Piece

    async with build.serving(config) as llm:

        @asynccontextmanager
        async def answer(messages: list[dict[str, str]]) -> AsyncIterator[AsyncIterator[Piece]]:
            async with await llm.chat(messages, **fields) as stream:
                yield (Piece(delta.text, delta.num_output_tokens) async for delta in stream)

        yield llm.model_name, answer


def _bench(args: argparse.Namespace) -> int:
    from .client import load, plan, report

    kind: Literal["rate", "concurrency"] = "rate" if args.concurrency is None else "concurrency"
    values = args.rate if args.concurrency is None else args.concurrency
    given = {name: value for name in plan.Options.__struct_fields__ if (value := getattr(args, name, None)) is not None}
    options = plan.Options(
        **given | {"goodput_ms": report.goodput_limits(args.goodput)},
        loads=tuple(plan.Load(kind=kind, value=value) for value in values),
        api_key=os.environ.get("OPENAI_API_KEY"),
    )
    num_failed = 0
    for run in load.bench(options):
        num_failed += run["num_failed"]
        for error, count in run["errors"].items():
            print(f"{count} of {run['num_requests']} requests failed: {error}", file=sys.stderr)
    return EXIT_FAILED_REQUESTS if num_failed else 0


def _run(main: Coroutine[Any, Any, int]) -> int:
    if sys.platform == "win32":
        return asyncio.run(main)
    import uvloop

    return int(uvloop.run(main))


def _config(args: argparse.Namespace) -> Config:
    wishes = {name: getattr(args, name) for name in Config.__struct_fields__}
    if wishes["overlap"] is None and _flag_from_environment("ASYNCLLM_DISABLE_OVERLAP"):
        wishes["overlap"] = False
    return configs.make(**wishes)


def _flag_from_environment(name: str) -> bool:
    value = os.environ.get(name, "0")
    if value not in ("0", "1"):
        raise ValueError(f"{name} must be 0 or 1, got {value!r}")
    return value == "1"


class _Parser(argparse.ArgumentParser):
    """Whose errors are not preceded by fifty lines of usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_CANNOT_START, f"{self.prog}: error: {message}; `{self.prog} --help` lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="asyncllm", description="Serve a language model to many clients at once.")
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, run, help_text, *groups in (
        ("serve", _serve, "serve a model over HTTP", add_engine_flags, add_server_flags),
        ("chat", _chat, "talk to a server, or to a model in this process", add_chat_flags, add_engine_flags),
        ("bench", _bench, "measure a server under load, one JSON line a run", add_bench_flags),
    ):
        command = commands.add_parser(name, help=help_text)
        command.set_defaults(run=run, refuse=command.error)
        for add_flags in groups:
            add_flags(command)
    return parser
