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
WORDS = (  # each a token of its own in most vocabularies, with a space before it or not
    "the of and to in is was for on that with as his they at be this had not are but from or have an one all "
    "were her she there would their we him been has when who will more no if out so said what up its about into"
).split()


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """How requests arrive: all at once ("rate", inf), at a Poisson rate, or `value` at a time."""

    kind: Literal["rate", "concurrency"]
    value: float


class Wording(msgspec.Struct, frozen=True, kw_only=True):
    """How many tokens a text prompt has: those around it, and those of each of our words."""

    around: int = 0
    of_word: float = 1.0

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.around) / self.of_word))


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark. Lengths are tokens, from and to, drawn evenly."""

    url: str
    loads: tuple[Load, ...] = (Load(kind="rate", value=float("inf")),)
    api_key: str | None = None
    model: str | None = None  # None: the first that the server names
    transport: Literal["sse", "websocket"] = "sse"
    lanes: int = 1  # of a WebSocket: streams side by side on it
    endpoint: Literal["completions", "chat", "responses"] | None = None  # None: what the transport has
    prompt: Literal["ids", "text"] | None = None  # None: ids where they can be
    wording: Wording = Wording()
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
    head: bytes  # of every request up to its length, or of every upgrade
    lanes: int | None  # a WebSocket's; None: server-sent events
    requests: list[Planned]
    concurrency: int | None


def settle(options: Options) -> Options:
    """The options with nothing left open.

    Raises:
        ValueError: options that do not go together.
    """
    socket = options.transport == "websocket"
    endpoint = options.endpoint or ("responses" if socket else "completions")
    if socket and endpoint != "responses":
        raise ValueError(f"only responses go over a WebSocket, not {endpoint}")
    if options.lanes < 1 or (options.lanes > 1 and not socket):
        raise ValueError("lanes are of a WebSocket, and at least one")
    prompt = options.prompt or ("ids" if endpoint == "completions" else "text")
    if prompt == "ids" and endpoint != "completions":
        raise ValueError(f"{endpoint} takes no token ids; use text prompts")
    return msgspec.structs.replace(options, endpoint=endpoint, prompt=prompt)


def jobs(options: Options, load: Load, num: int, run: int = 0) -> list[Job]:
    """The plan, dealt out. Every request is made before the first is sent."""
    parts = urlsplit(options.url)
    requests = [Planned(at_s, body) for at_s, body in zip(arrivals(options, load), bodies(options, run), strict=True)]
    is_closed = load.kind == "concurrency"
    num = min(num, max(1, int(load.value))) if is_closed else num
    return [
        Job(
            host=parts.hostname or "",
            port=parts.port or (443 if parts.scheme == "https" else 80),
            tls=parts.scheme == "https",
            head=_head(options),
            lanes=options.lanes if options.transport == "websocket" else None,
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


def lengths(options: Options) -> list[tuple[int, int]]:
    """Each request's prompt and output, in tokens; the same for the same seed, whatever is asked and how.

    Drawn as Mini-SGLang's offline benchmark draws them, ids between and all: seed 0 with 256 requests of 100:1024
    has its very lengths, so that a served figure stands beside an offline one.
    """
    generator = random.Random(options.seed)
    prompt_lens = []
    for _ in range(options.num_requests):
        prompt_lens.append(generator.randint(*options.prompt_len))
        for _ in range(prompt_lens[-1]):
            generator.randint(0, 10000)
    return [(prompt_len, generator.randint(*options.output_len)) for prompt_len in prompt_lens]


def bodies(options: Options, run: int = 0) -> Iterator[bytes]:
    """The JSON of each request. Another run of the same seed has other prompts: a server may keep the old ones."""
    generator = random.Random(f"{options.seed} {run}")
    prefix = _tokens(options, generator, options.shared_prefix_len)
    common: dict[str, Any] = {"model": options.model, "temperature": options.temperature}
    if options.ignore_eos:
        common["ignore_eos"] = True
    for prompt_len, output_len in lengths(options):
        yield msgspec.json.encode(common | _asked(options, prefix, prompt_len, output_len, generator))


def _asked(
    options: Options, prefix: list[Any], prompt_len: int, output_len: int, generator: random.Random
) -> dict[str, Any]:
    num = options.wording.num_words(prompt_len) if options.prompt == "text" else prompt_len
    tokens = prefix + _tokens(options, generator, num)
    prompt = " ".join(tokens) if options.prompt == "text" else tokens
    if options.endpoint == "responses":
        how = {"stream": True} if options.transport == "sse" else {"type": "response.create"}
        return {"input": prompt, "max_output_tokens": output_len, "store": False, **how}
    what = {"messages": [{"role": "user", "content": prompt}]} if options.endpoint == "chat" else {"prompt": prompt}
    return {**what, "max_tokens": output_len, "stream": True, "stream_options": {"include_usage": True}}


def _tokens(options: Options, generator: random.Random, num: int) -> list[Any]:
    if options.prompt == "text":
        return generator.choices(WORDS, k=num)
    return [generator.randrange(min(FIRST_TOKEN_ID, options.vocab_size // 2), options.vocab_size) for _ in range(num)]


def _head(options: Options) -> bytes:
    parts = urlsplit(options.url)
    path = f"{parts.path}/{'chat/completions' if options.endpoint == 'chat' else options.endpoint}"
    host = f"Host: {parts.netloc.rpartition('@')[2]}"
    if options.transport == "websocket":
        lines = [f"GET {path} HTTP/1.1", host, "Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13"]
    else:
        lines = [f"POST {path} HTTP/1.1", host, "Content-Type: application/json", "Accept: text/event-stream"]
    if options.api_key:
        lines.append(f"Authorization: Bearer {options.api_key}")
    return "\r\n".join(lines).encode()
