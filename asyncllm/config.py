"""Config, and the pure resolve() that turns wishes, a model's shape and a machine into numbers.

Frozen structs, read by everyone. Imports nothing of ours; the environment is read in cli.py alone.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import msgspec

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
DEVICES = ("auto", "cpu", "cuda")
ATTENTIONS = ("auto", "fa3", "fa2", "sdpa")
PacePolicy = Literal["adaptive", "every_step", "gather"]  # when unread text goes out, as pace.py has it
PACES: tuple[PacePolicy, ...] = get_args(PacePolicy)
TOOL_PARSERS = ("auto", "none", "hermes", "mistral", "mistral_named", "llama3", "json")
REASONING_PARSERS = ("auto", "none", "think", "magistral")
SAMPLING_DEFAULTS = ("model", "openai")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


GRAPH_BYTES = 1 << 30  # what captured graphs and late allocations take beside the KV pool
MAX_GRAPH_ROWS = 512
# A step of short prompts takes this long beside running streams, as it is timed at start; the longest wait measured,
# with decode rows, deep contexts and a warm GPU, is 83 ms. Two thirds of it take 0.5% of a burst's speed, a third 2.5%:
# its last prompts come in later, and then few rows read all weights.
MIXED_STEP_S = 0.065


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user asked for. None and "auto" leave the choice to resolve()."""

    model: str | None = None  # a folder or a Hugging Face id; None is the default model
    served_model_name: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    threads: int | None = None  # torch threads
    page_size: int | None = None  # tokens
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    max_running: int | None = None  # sequences
    max_waiting: int = 1024  # submissions
    max_waiting_tokens: int = 1 << 20  # of their prompts
    queue_timeout_s: float = 30.0  # 0: they wait for ever
    max_step_tokens: int | None = None
    max_mixed_tokens: int | None = None  # of a step in which answers go on beside prompts
    max_model_len: int | None = None
    overlap: bool | None = None
    prefix_cache: bool = True
    attention: str = "auto"
    pace: PacePolicy = "adaptive"
    gpu_memory_utilization: float = 0.9  # of the GPU's memory, the share that this process may fill
    tool_parser: str = "auto"  # how the model writes calls of tools; auto: as its chat template shows
    reasoning_parser: str = "auto"
    sampling_defaults: str = "model"  # for what a request leaves open: generation_config.json's, or OpenAI's
    cuda_graph_max_batch: int | None = None  # rows of the largest captured step; 0 captures none


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What resolve() needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    dtype: str
    num_heads: int = 0  # 0: unknown, as where nothing depends on it


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What resolve() needs to know of a machine."""

    device: str  # "cpu" or "cuda"
    num_cores: int
    free_bytes: int  # memory of the device
    compute_capability: tuple[int, int] = (0, 0)
    no_flashinfer: str | None = None  # why FlashInfer cannot be used, where it cannot


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every number decided, save those of a GPU that are 0 or empty until the model is there and a step has been
    profiled (`sized`: num_pages) and timed (`timed`: the last four). Pages count the dummy 0."""

    device: str
    dtype: str
    threads: int
    page_size: int
    num_pages: int
    max_running: int
    max_waiting: int
    max_step_tokens: int
    max_model_len: int
    overlap: bool
    prefix_cache: bool
    attention: str = "sdpa"  # "fa3" or "fa2": FlashInfer's prefill kernel; decode, norms and graphs come with both
    why_plain: str | None = None  # why attention is sdpa on a GPU
    gpu_memory_utilization: float = 0.9
    cuda_graph_max_batch: int = 0
    max_mixed_tokens: int = 0
    mixed_work: int = 0  # of a mixed step, in tokens without a context; 0: as max_mixed_tokens
    break_even_context: int = 0  # tokens of context whose attention costs a token as much as its products; 0: nothing
    step_sizes: tuple[int, ...] = ()  # that steps with a prompt chunk are padded to, ascending

    @property
    def usable_pages(self) -> int:
        return self.num_pages - 1


def make(**wishes: object) -> Config:
    """A Config from keyword arguments.

    Raises:
        ValueError: an unknown name (the known ones are listed) or a value of the wrong kind.
    """
    known = Config.__struct_fields__
    if unknown := sorted(set(wishes) - set(known)):
        raise ValueError(f"unknown option {', '.join(unknown)}; known are {', '.join(known)}")
    try:
        return msgspec.convert(wishes, Config)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def resolve(config: Config, model: ModelFacts, machine: MachineFacts) -> EngineConfig:
    """Decide everything left open.

    Raises:
        ValueError: a wish that cannot be met, saying which and what would do.
    """
    dtype = _choice("dtype", config.dtype, DTYPES, default=model.dtype)
    page_size = _positive("page_size", config.page_size, default=64 if machine.device == "cuda" else 16)
    if page_size > 128 or page_size & (page_size - 1):
        raise ValueError(f"page_size must be a power of two up to 128, got {page_size}")
    _choice("tool_parser", config.tool_parser, TOOL_PARSERS, default="auto")
    _choice("reasoning_parser", config.reasoning_parser, REASONING_PARSERS, default="auto")
    _choice("sampling_defaults", config.sampling_defaults, SAMPLING_DEFAULTS, default="model")
    max_model_len = _positive("max_model_len", config.max_model_len, default=model.max_position)
    if max_model_len > model.max_position:
        raise ValueError(f"max_model_len {max_model_len} is above the model's {model.max_position} positions")
    if max_model_len < 2:
        raise ValueError("max_model_len must be at least 2: one prompt token and one answer token")
    on_gpu = machine.device == "cuda"
    max_running = _positive("max_running", config.max_running, default=256 if on_gpu else 32)
    max_step_tokens = _positive(
        "max_step_tokens", config.max_step_tokens, default=max(8192 if on_gpu else 512, 2 * max_running)
    )
    if max_step_tokens < max_running:
        raise ValueError(f"max_step_tokens {max_step_tokens} must be at least max_running {max_running}")
    num_pages = _num_pages(config, model, machine, dtype, page_size, max_running, max_model_len)
    attention, why_plain = _attention(config, model, machine, dtype, page_size)
    return EngineConfig(
        device=machine.device,
        dtype=dtype,
        threads=_positive("threads", config.threads, default=max(1, machine.num_cores - 1)),
        page_size=page_size,
        num_pages=num_pages,
        max_running=max_running,
        max_waiting=_positive("max_waiting", config.max_waiting, default=1024),
        max_step_tokens=max_step_tokens,
        max_mixed_tokens=_max_mixed_tokens(config, max_step_tokens, max_running, on_gpu),
        max_model_len=max_model_len,
        # A CPU computes inside launch(), so a step launched ahead only makes the last one's tokens late.
        overlap=on_gpu if config.overlap is None else config.overlap,
        prefix_cache=config.prefix_cache,
        attention=attention,
        why_plain=why_plain,
        gpu_memory_utilization=_share("gpu_memory_utilization", config.gpu_memory_utilization),
        cuda_graph_max_batch=_graph_rows(config, max_running, on_gpu),
    )


def sized(config: EngineConfig, model: ModelFacts, free_bytes: int, total_bytes: int) -> EngineConfig:
    """With the KV pool that fits a GPU on which `free_bytes` are left once everything else is there.

    Raises:
        ValueError: not even two pages fit, and what to lower.
    """
    page_bytes = kv_page_bytes(model, config.dtype, config.page_size)
    budget = free_bytes - int((1 - config.gpu_memory_utilization) * total_bytes) - GRAPH_BYTES
    most = 1 + config.max_running * math.ceil(config.max_model_len / config.page_size)
    num_pages = config.num_pages or min(most, budget // page_bytes)
    if config.num_pages * page_bytes > free_bytes:
        raise ValueError(
            f"num_pages {config.num_pages} take {config.num_pages * page_bytes >> 20} MiB; {free_bytes >> 20} MiB of "
            f"GPU memory are left, which is {free_bytes // page_bytes} pages: lower num_pages"
        )
    if num_pages < 2:
        raise ValueError(
            f"{free_bytes >> 20} MiB of GPU memory are left for the KV pool, of which gpu_memory_utilization "
            f"{config.gpu_memory_utilization} allows {max(0, budget) >> 20}; lower max_step_tokens or max_running, "
            "or raise gpu_memory_utilization"
        )
    return msgspec.structs.replace(config, num_pages=num_pages)


def attention_problem(kind: str, model: ModelFacts, machine: MachineFacts, dtype: str, page_size: int) -> str | None:
    """Why this model on this machine cannot run on FlashInfer's fa3 or fa2 and what comes with them; None if it can."""
    group = model.num_heads // model.num_kv_heads
    capability = ".".join(map(str, machine.compute_capability))
    if machine.no_flashinfer is not None:
        return machine.no_flashinfer
    if kind == "fa3" and machine.compute_capability != (9, 0):
        return f"fa3 is made for compute capability 9.0 (Hopper), this GPU has {capability}"
    if machine.compute_capability < (8, 0):
        return f"compute capability {capability} is below 8.0 (Ampere)"
    if dtype not in ("bfloat16", "float16"):
        return f"dtype {dtype} is not a 16-bit one"
    if model.head_dim not in (64, 128, 256) or not 1 <= group <= 16:
        return f"head_dim {model.head_dim} with {group} query heads a KV head is not among its kernels"
    if page_size not in (16, 32, 64, 128):
        return f"page_size {page_size} is not 16, 32, 64 or 128"
    return None

def kv_page_bytes(model: ModelFacts, dtype: str, page_size: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * page_size * DTYPE_BYTES[dtype]


def _check_memory(name: str, num_bytes: int, machine: MachineFacts) -> None:
    if machine.device == "cpu" and num_bytes > machine.free_bytes:
        needed, free = num_bytes / 2**30, machine.free_bytes / 2**30
        raise ValueError(f"{name} asks for {needed:.1f} GiB of KV pages and {free:.1f} GiB are free: lower it")


def _num_pages(
    config: Config, model: ModelFacts, machine: MachineFacts, dtype: str, page_size: int, max_running: int, max_len: int
) -> int:
    if config.num_pages is not None and config.kv_cache_bytes is not None:
        raise ValueError("give num_pages or kv_cache_bytes, not both")
    if config.num_pages is not None:
        if config.num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is a dummy), got {config.num_pages}")
        _check_memory("num_pages", config.num_pages * kv_page_bytes(model, dtype, page_size), machine)
        return config.num_pages
    if machine.device == "cuda" and config.kv_cache_bytes is None:
        return 0  # see sized()
    page_bytes = kv_page_bytes(model, dtype, page_size)
    # More than every slot full to the context can never be used.
    most = 1 + max_running * math.ceil(max_len / page_size)
    budget = config.kv_cache_bytes
    if budget is not None:
        _check_memory("kv_cache_bytes", budget, machine)
    else:
        budget = min(machine.free_bytes // 4, 1 << 30)
    num_pages = min(most, budget // page_bytes)
    if num_pages < 2:
        raise ValueError(
            f"kv_cache_bytes {budget} holds {num_pages} pages of {page_bytes} bytes; at least 2 are needed: "
            "raise kv_cache_bytes or lower page_size"
        )
    return num_pages


def _attention(
    config: Config, model: ModelFacts, machine: MachineFacts, dtype: str, page_size: int
) -> tuple[str, str | None]:
    """By shape: FlashInfer where it has kernels for the model on the machine, else torch's own operators; and, on a
    GPU, why those."""
    wish = _choice("attention", config.attention, ATTENTIONS, default="auto")
    if machine.device == "cpu":
        if wish not in ("auto", "sdpa"):
            raise ValueError(f"attention {wish} needs a GPU; use sdpa or auto")
        return "sdpa", None
    if wish == "sdpa":
        return "sdpa", "attention sdpa was asked for"
    best = "fa3" if machine.compute_capability == (9, 0) else "fa2"
    kind = best if wish == "auto" else wish
    problem = attention_problem(kind, model, machine, dtype, page_size)
    if problem is None:
        return kind, None
    if wish != "auto":
        raise ValueError(f"attention {wish} cannot be used: {problem}; use auto")
    return "sdpa", problem


def _max_mixed_tokens(config: Config, max_step_tokens: int, max_running: int, on_gpu: bool) -> int:
    tokens = config.max_mixed_tokens
    if tokens is None:
        return 0 if on_gpu else max_step_tokens
    if not max_running < tokens <= max_step_tokens:
        raise ValueError(
            f"max_mixed_tokens must be above max_running {max_running} and at most max_step_tokens {max_step_tokens}, "
            f"got {tokens}"
        )
    return tokens


def timed(config: EngineConfig, step_s: float, break_even_context: int, sizes: Sequence[int]) -> EngineConfig:
    """With the budget of a mixed step that takes MIXED_STEP_S, where a step of max_step_tokens takes `step_s`: one of
    the sizes that steps are padded to, for a fuller step would pay for the next. Where a step of any tokens is shorter,
    the time that is left is for attention."""
    fitting = int(config.max_step_tokens * MIXED_STEP_S / step_s)
    tokens = max((size for size in sizes if size <= fitting), default=0)
    tokens = min(max(tokens, 2 * config.max_running, 256), config.max_step_tokens)
    return msgspec.structs.replace(
        config,
        max_mixed_tokens=config.max_mixed_tokens or tokens,
        mixed_work=max(fitting, tokens) if tokens == config.max_step_tokens and not config.max_mixed_tokens else 0,
        break_even_context=break_even_context,
        step_sizes=tuple(sizes),
    )


def _graph_rows(config: Config, max_running: int, on_gpu: bool) -> int:
    rows = config.cuda_graph_max_batch
    if rows is None:
        return min(max_running, MAX_GRAPH_ROWS) if on_gpu else 0
    if rows < 0:
        raise ValueError(f"cuda_graph_max_batch must be at least 0, got {rows}")
    return min(rows, max_running) if on_gpu else 0


def _share(name: str, value: float) -> float:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, got {value}")
    return value


def _positive(name: str, value: int | None, *, default: int) -> int:
    if value is None:
        return default
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    return value


def _choice(name: str, value: str, known: tuple[str, ...], *, default: str) -> str:
    if value not in known:
        raise ValueError(f"{name} {value!r} is unknown; known are {', '.join(known)}")
    return default if value == "auto" else value
