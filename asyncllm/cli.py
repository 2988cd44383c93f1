"""The command line: flags and environment to a Config, and what a person sees while a server starts.

Main thread, before and around the loop. The environment is read here and nowhere else.
"""

import argparse
import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from . import __version__
from . import config as configs
from .config import ATTENTIONS, DEVICES, DTYPES, Config
from .errors import ModelError

EXIT_CANNOT_START = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; exits with its code."""
    args = _parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        sys.exit(_run(_serve(args)))
    except (ModelError, ValueError, OSError) as error:
        print(f"asyncllm: {error}", file=sys.stderr)
        sys.exit(EXIT_CANNOT_START)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


async def _serve(args: argparse.Namespace) -> int:
    from . import build
    from .server.app import serve
    from .server.settings import Settings

    started_s = time.monotonic()
    settings = Settings(drain_s=args.drain_seconds, max_body_bytes=args.max_body_bytes)
    async with build.serving(_config(args)) as llm:

        def on_ready(url: str) -> None:
            print(f"{llm.model_name} is ready after {time.monotonic() - started_s:.1f} s. Try:\n")
            print(_curl(url, llm.model_name, chat=llm.chat_template is not None), flush=True)

        return await serve(llm, args.host, args.port, settings=settings, on_ready=on_ready)


def _curl(url: str, model: str, *, chat: bool) -> str:
    prompt = "What is the capital of France?"
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    route = "chat/completions" if chat else "completions"
    body = json.dumps({"model": model, **asked, "temperature": 0, "stream": True}).replace("'", "'\\''")
    return f"curl -N {url}/v1/{route} -H 'Content-Type: application/json' -d '{body}'\n"


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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncllm", description="Serve a language model to many clients at once.")
    parser.add_argument("--version", action="version", version=f"asyncllm {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_server_flags(serve)
    _add_engine_flags(serve)
    return parser


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", help="a folder or a Hugging Face id; left out: SmolLM2-135M-Instruct, fetched once")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on; 0 lets the system choose")
    add("--served-model-name", help="the model's name in requests and replies, if not its own")
    add("--log-level", default="info", choices=("debug", "info", "warning", "error"), help="what to log to stderr")
    add("--drain-seconds", type=float, default=30.0, help="after SIGTERM, how long running requests may go on")
    add("--max-body-bytes", type=int, default=32 << 20, help="the largest request body")


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Every field of Config but the model's; None leaves the choice to resolve()."""
    add = parser.add_argument
    add("--device", default="auto", choices=DEVICES, help="where to compute")
    add("--dtype", default="auto", choices=DTYPES, help="of weights and KV cache; auto: as the checkpoint")
    add("--threads", type=int, help="torch threads; by default one core is left to the event loop")
    add("--page-size", type=int, help="tokens in a KV page")
    add("--num-pages", type=int, help="pages in the KV pool, the dummy page included")
    add("--kv-cache-bytes", type=int, help="size of the KV pool, instead of --num-pages")
    add("--max-running", type=int, help="sequences computed together")
    add("--max-waiting", type=int, default=1024, help="requests that may queue behind them; more get 503")
    add("--max-step-tokens", type=int, help="tokens computed in one step: decodes first, prompt chunks in the rest")
    add("--max-model-len", type=int, help="prompt and answer together; by default what the model was made for")
    add("--overlap", action=argparse.BooleanOptionalAction, help="schedule a step while the last one runs")
    add("--prefix-cache", action=argparse.BooleanOptionalAction, default=True, help="share KV of equal prefixes")
    add("--attention", default="auto", choices=ATTENTIONS, help="kernels; auto: by the GPU and the model's shape")
    add("--gpu-memory-utilization", type=float, default=0.9, help="share of the GPU's memory to fill, KV pool last")
    add("--cuda-graph-max-batch", type=int, help="rows of the largest captured step; 0 captures none")
