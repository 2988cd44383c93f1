"""What a benchmark sends, and when: every request is made before the first goes out.

Any thread. It never knows sockets, processes or results.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

FIRST_TOKEN_ID = 1000  # below are bytes and control tokens, in most vocabularies
_WORDS = (
    "the of and to in is was for on that with as his they at be this had not are but from or have an one all "
    "were her she there would their we him been has when who will more no if out so said what up its about into"
).split()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests arrive: all at once ("rate", inf), at a Poisson rate, or `value` at a time."""

    kind: Literal["rate", "concurrency"]
    value: float


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark. Lengths are tokens, from and to, drawn evenly."""

    url: str
    loads: tuple[Load, ...] = (Load(kind="rate", value=float("inf")),)
    api_key: str | None = None
    model: str | None = None  # None: the first that the server names
    endpoint: Literal["completions", "chat"] = "completions"
    prompt: Literal["ids", "text"] | None = None  # text: about as many words; None: ids where they can be
    num_requests: int = 256
    prompt_len: tuple[int, int] = (512, 512)
    output_len: tuple[int, int] = (128, 128)
    shared_prefix_len: int = 0  # more tokens, the same before each prompt
    vocab_size: int = 10_000
    temperature: float = 0.0
    ignore_eos: bool = True
    goodput_ms: dict[str, float] = msgspec.field(default_factory=dict)
    num_processes: int | None = None
    num_warmup: int = 1
    seed: int = 0
    plot: Path | None = None


class Planned(msgspec.Struct, frozen=True):
    at_s: float  # after the start
    body: bytes


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One process's share."""

    host: str
    port: int
    tls: bool
    head: bytes  # of every request, up to its length
    requests: list[Planned]
    concurrency: int | None


def jobs(options: Options, load: Load, num: int) -> list[Job]:
    """The plan, dealt out. Every request is made before the first is sent."""
    parts = urlsplit(options.url)
    requests = [Planned(at_s, body) for at_s, body in zip(arrivals(options, load), bodies(options), strict=True)]
    is_closed = load.kind == "concurrency"
    num = min(num, max(1, int(load.value))) if is_closed else num
    return [
        Job(
            host=parts.hostname or "",
            port=parts.port or (443 if parts.scheme == "https" else 80),
            tls=parts.scheme == "https",
            head=_head(options),
            requests=requests[i::num],
            concurrency=len(range(i, int(load.value), num)) if is_closed else None,
        )
        for i in range(num)
    ]


def arrivals(options: Options, load: Load) -> list[float]:
    """Seconds after the start. Poisson gaps, stretched so that the whole has exactly the rate, as vLLM does it."""
    num = options.num_requests
    if load.kind == "concurrency" or load.value == float("inf"):
        return [0.0] * num
    generator = random.Random(options.seed)
    times = [0.0]
    for _ in range(num - 1):
        times.append(times[-1] + generator.expovariate(load.value))
    stretch = (num - 1) / load.value / times[-1] if num > 1 else 1.0
    return [at_s * stretch for at_s in times]


def bodies(options: Options) -> Iterator[bytes]:
    """The JSON of each request; the same for the same seed."""
    generator = random.Random(options.seed)
    prefix = _tokens(options, generator, options.shared_prefix_len)
    for _ in range(options.num_requests):
        prompt = prefix + _tokens(options, generator, generator.randint(*options.prompt_len))
        yield msgspec.json.encode(
            {
                "model": options.model,
                **_prompt(options, prompt),
                "max_tokens": generator.randint(*options.output_len),
                "temperature": options.temperature,
                "ignore_eos": options.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )


def _tokens(options: Options, generator: random.Random, num: int) -> list[Any]:
    if options.prompt == "text":
        return generator.choices(_WORDS, k=num)
    return [generator.randrange(min(FIRST_TOKEN_ID, options.vocab_size // 2), options.vocab_size) for _ in range(num)]


def _prompt(options: Options, tokens: list[Any]) -> dict[str, Any]:
    prompt = " ".join(tokens) if options.prompt == "text" else tokens
    if options.endpoint == "chat":
        return {"messages": [{"role": "user", "content": prompt}]}
    return {"prompt": prompt}


def _head(options: Options) -> bytes:
    parts = urlsplit(options.url)
    path = f"{parts.path}/{'chat/' if options.endpoint == 'chat' else ''}completions"
    lines = [
        f"POST {path} HTTP/1.1",
        f"Host: {parts.netloc.rpartition('@')[2]}",
        "Content-Type: application/json",
        "Accept: text/event-stream",
    ]
    if options.api_key:
        lines.append(f"Authorization: Bearer {options.api_key}")
    return "\r\n".join(lines).encode()
