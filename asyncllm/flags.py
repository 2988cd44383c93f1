"""What each command can be told: its flags, their values' types, and their help.

Main thread, while the command line is read. It never knows what a flag does.
"""

import argparse
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

from .config import ATTENTIONS, DEVICES, DTYPES, PACES, REASONING_PARSERS, SAMPLING_DEFAULTS, TOOL_PARSERS
from .server.settings import Settings

LOG_LEVELS = ("debug", "info", "warning", "error")
Value = TypeVar("Value")


def _checked(convert: Callable[[str], Value], valid: Callable[[Value], bool], wanted: str) -> Callable[[str], Value]:
    """A flag's type that says what it wants; argparse would say this function's name."""

    def parse(text: str) -> Value:
        try:
            if valid(value := convert(text)):
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return parse


def _to_span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    return int(low), int(high or low)


_port = _checked(int, lambda port: 0 <= port < 65536, "a port from 0 to 65535")
_size = _checked(int, lambda number: number >= 0, "a whole number")
_count = _checked(int, lambda number: number > 0, "a whole number above 0")
_seconds = _checked(float, lambda seconds: 0 <= seconds < math.inf, "a number of seconds")
_some_seconds = _checked(float, lambda seconds: 0 < seconds < math.inf, "a number of seconds above 0")
_span = _checked(_to_span, lambda span: 1 <= span[0] <= span[1], "a length above 0, or a range as 100:1024")
_floats = _checked(
    lambda text: [float(part) for part in text.split(",")],
    lambda values: all(value > 0 for value in values),
    "a number above 0, or several as 1,2,inf",
)


LIMITS: dict[str, tuple[Callable[[str], float], str]] = {
    "drain_s": (_seconds, "how long requests may run on after SIGTERM"),
    "watchdog_s": (_seconds, "a step that takes longer is stuck, and ends the process; 0: none is"),
    "max_body_bytes": (_count, "the largest request body, and the largest WebSocket message"),
    "body_timeout_s": (_some_seconds, "how long a request's body may take to arrive"),
    "header_timeout_s": (_some_seconds, "and its head before that"),
    "max_connections": (_size, "connections open at once; 0: four fifths of the open files allowed"),
    "requests_per_minute": (_seconds, "requests a key may send in a minute; 0: any number"),
    "send_timeout_s": (_some_seconds, "how long a reader may leave its socket full before it is cut off"),
    "max_unread_bytes": (_count, "how much text may wait for such a reader"),
    "peer_timeout_s": (_some_seconds, "after which a peer that answers no packet is gone"),
    "keepalive_s": (_some_seconds, "how long an idle connection is kept; longer than the proxy's in front"),
    "sse_comment_s": (_seconds, "how often a silent event stream gets a comment; 0: never, some readers choke on them"),
    "retention_s": (_seconds, "how long an ended response can be asked for"),
    "max_retained_bytes": (_count, "what all of them may take"),
    "resume_grace_s": (_seconds, "how long a resumable response goes on without a client"),
    "max_sockets": (_count, "WebSockets open at once"),
    "max_lanes": (_count, "named lanes of a WebSocket"),
    "max_active_per_socket": (_count, "responses that run at once on a WebSocket; more wait"),
    "max_queued_per_socket": (_count, "and how many may wait"),
    "socket_lifetime_s": (_some_seconds, "after which a WebSocket takes no more responses"),
    "heartbeat_s": (_some_seconds, "how often a WebSocket is pinged"),
}


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", help="a folder or a Hugging Face id; left out: SmolLM2-135M-Instruct, fetched once")
    add("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    add("--port", type=_port, default=8000, help="port to listen on; 0: the system chooses one; default: 8000")
    add("--served-model-name", help="the model's name in requests and replies, if not its own")
    add("--log-level", default="info", choices=LOG_LEVELS, help="what to log to stderr; default: info")
    add("--allow-fault-injection", action="store_true", help="obey ASYNCLLM_FAULT=KIND@STEP; for tests")
    add("--supervise", action="store_true", help="start the server again when it dies, under a small parent process")
    _add_access_flags(parser)
    _add_limit_flags(parser)


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", nargs="?", metavar="URL|MODEL", help="a server (key: OPENAI_API_KEY), or a model as in serve")
    add("--served-model-name", help="which of the server's models; by default its first")
    add("--system", help="a system message")
    add("--temperature", type=float, help="0 always takes the likeliest token")
    add("--max-tokens", type=int, help="the longest answer")
    add("--log-level", default="warning", choices=LOG_LEVELS, help="what to log; default: warning")


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """The names of plan.Options; what is not given has its default there."""
    add = partial(parser.add_argument, default=argparse.SUPPRESS)
    add("url", help="any OpenAI-compatible server (key: OPENAI_API_KEY)")
    add("--model", help="by default the server's first")
    add("--transport", choices=("sse", "websocket"), help="how answers come; default: sse")
    add("--lanes", type=int, help="streams side by side on one WebSocket; default: 1")
    add("--endpoint", choices=("completions", "chat", "responses"), help="default: completions; websocket: responses")
    add("--prompt", choices=("ids", "text"), help="random token ids, or words; default: ids for completions")
    add("--num-requests", type=int, help="in each run; default: 256")
    parser.add_argument("--rate", type=_floats, default="inf", help="requests a second, Poisson; or a sweep: 1,2,inf")
    parser.add_argument("--concurrency", type=_floats, help="instead: so many at a time; or a sweep")
    add("--prompt-len", type=_span, help="tokens, as 512 or 100:1024; default: 512")
    add("--output-len", type=_span, help="tokens, as 128 or 100:1024; default: 128")
    add("--shared-prefix-len", type=int, help="tokens before each prompt, the same for all; default: 0")
    add("--vocab-size", type=int, help="random ids are below it; default: 10000")
    add("--temperature", type=float, help="default: 0")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="answers of full length; default: yes")
    parser.add_argument("--goodput", default="", help="limits in ms, as ttft:200,tpot:50,e2el:5000")
    add("--num-processes", type=int, help="client processes; default: half the cores, four at most")
    add("--num-warmup", type=int, help="requests before the first run, not measured; default: 1")
    add("--seed", type=int, help="of prompts, lengths and arrivals; default: 0")
    add("--plot", type=Path, help="a PNG of latency against load; needs matplotlib (extra: bench)")
    parser.set_defaults(log_level="warning")


def _add_limit_flags(parser: argparse.ArgumentParser) -> None:
    """Every field of Settings."""
    add = parser.add_argument_group("limits on what one client can cost").add_argument
    usual = Settings()
    for name, (kind, text) in LIMITS.items():
        default = getattr(usual, name)
        flag = "--" + re.sub("_s$", "-seconds", name).replace("_", "-")
        unit = {"seconds": "SECONDS", "bytes": "BYTES"}.get(flag.rpartition("-")[2], "N")
        shown = default if isinstance(default, int) else f"{default:g}"
        add(flag, dest=name, type=kind, default=default, metavar=unit, help=f"{text}; default: {shown}")


def _add_access_flags(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("who may come in").add_argument
    add("--api-key", action="append", default=[], help="KEY or 'NAME KEY'; ps shows it to others: better a file")
    add("--api-key-file", type=Path, help="of such lines; or ASYNCLLM_API_KEY=KEY,KEY in the environment")
    add("--allowed-host", action="append", default=[], help="a name that Host may say; *: any, as off loopback")
    add("--allowed-origin", action="append", default=[], help="a page that may ask (CORS), as https://example.org")
    add("--admin-port", type=_port, help="/metrics there, on 127.0.0.1, and not among the other routes")
    add("--ssl-certfile", help="TLS: the certificate and its chain, PEM")
    add("--ssl-keyfile", help="and its key, without a password")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Every field of Config but the model's; None leaves the choice to resolve()."""
    add = parser.add_argument_group("the engine, where the model runs in this process").add_argument
    add("--device", default="auto", choices=DEVICES, help="where to compute; default: auto")
    add("--dtype", default="auto", choices=DTYPES, help="of weights and KV cache; default: the checkpoint's")
    add("--threads", type=int, help="torch threads; by default one core is left to the event loop")
    add("--page-size", type=int, help="tokens in a KV page; default: 64 on a GPU, 16 on a CPU")
    add("--num-pages", type=int, help="pages in the KV pool, the dummy page included")
    add("--kv-cache-bytes", type=int, help="of the KV pool, instead; default on a CPU: 1 GiB, on a GPU what is free")
    add("--max-running", type=int, help="sequences computed together; default: 256 on a GPU, 32 on a CPU")
    add("--max-waiting", type=int, default=1024, help="how many may queue behind them; default: 1024; more get 503")
    add("--max-waiting-tokens", type=_count, default=1 << 20, help="and of how many prompt tokens; default: 1048576")
    add("--queue-timeout-seconds", dest="queue_timeout_s", type=_seconds, default=30.0,
        help="who waits longer gets 503, and who would at once; 0: nobody does; default: 30")  # fmt: skip
    add("--max-step-tokens", type=int, help="tokens a step computes, decodes first, prompts in the rest")
    add("--max-mixed-tokens", type=int, help="the same where streams run; default: what the GPU does in 65 ms")
    add("--max-model-len", type=int, help="prompt and answer together; by default what the model was made for")
    add("--overlap", action=argparse.BooleanOptionalAction, help="schedule while a step runs; default: on a GPU")
    add("--prefix-cache", action=argparse.BooleanOptionalAction, default=True, help="share prefixes; default: yes")
    add("--attention", default="auto", choices=ATTENTIONS, help="kernels; default: fa3 on Hopper, fa2 on other GPUs")
    add("--pace", default="adaptive", choices=PACES, help="when text goes out; default: each step, unless that lags")
    add("--tool-parser", default="auto", choices=TOOL_PARSERS, help="how calls are written; default: see the template")
    add("--reasoning-parser", default="auto", choices=REASONING_PARSERS, help="its tags; default: see the template")
    add("--sampling-defaults", default="model", choices=SAMPLING_DEFAULTS,
        help="where a request says nothing: generation_config.json's, or OpenAI's; default: model")  # fmt: skip
    add("--gpu-memory-utilization", type=float, default=0.9, help="of its memory to fill; default: 0.9")
    add("--cuda-graph-max-batch", type=int, help="rows of the largest captured step; 0 captures none")
