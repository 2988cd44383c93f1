"""Config, and the pure resolve() that turns wishes, a model's shape and a machine into numbers.

Frozen structs, read by everyone. Imports nothing of ours; the environment is read in cli.py alone.
"""

import math

import msgspec

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")
DEVICES = ("auto", "cpu", "cuda")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}


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
    max_step_tokens: int | None = None
    max_model_len: int | None = None
    overlap: bool | None = None
    prefix_cache: bool = True


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What resolve() needs to know of a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    dtype: str


class MachineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What resolve() needs to know of a machine."""

    device: str  # "cpu" or "cuda"
    num_cores: int
    free_bytes: int  # memory of the device


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Every number decided. `num_pages` counts the dummy page 0."""

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
    if max_step_tokens <= max_running - 1:
        raise ValueError(f"max_step_tokens {max_step_tokens} must be at least max_running {max_running}")
    num_pages = _num_pages(config, model, machine, dtype, page_size, max_running, max_model_len)
    return EngineConfig(
        device=machine.device,
        dtype=dtype,
        threads=_positive("threads", config.threads, default=max(1, machine.num_cores - 1)),
        page_size=page_size,
        num_pages=num_pages,
        max_running=max_running,
        max_waiting=_positive("max_waiting", config.max_waiting, default=1024),
        max_step_tokens=max_step_tokens,
        max_model_len=max_model_len,
        # A CPU computes inside launch(), so a step launched ahead only makes the last one's tokens late.
        overlap=on_gpu if config.overlap is None else config.overlap,
        prefix_cache=config.prefix_cache,
    )


def kv_page_bytes(model: ModelFacts, dtype: str, page_size: int) -> int:
    """Bytes of one page over all layers, keys and values."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_dim * page_size * DTYPE_BYTES[dtype]


def _num_pages(
    config: Config, model: ModelFacts, machine: MachineFacts, dtype: str, page_size: int, max_running: int, max_len: int
) -> int:
    if config.num_pages is not None and config.kv_cache_bytes is not None:
        raise ValueError("give num_pages or kv_cache_bytes, not both")
    if config.num_pages is not None:
        if config.num_pages < 2:
            raise ValueError(f"num_pages must be at least 2 (page 0 is a dummy), got {config.num_pages}")
        return config.num_pages
    page_bytes = kv_page_bytes(model, dtype, page_size)
    # More than every slot full to the context can never be used.
    most = 1 + max_running * math.ceil(max_len / page_size)
    budget = config.kv_cache_bytes
    if budget is None:
        budget = min(machine.free_bytes // 4, 1 << 30) if machine.device == "cpu" else machine.free_bytes
    num_pages = min(most, budget // page_bytes)
    if num_pages < 2:
        raise ValueError(
            f"kv_cache_bytes {budget} holds {num_pages} pages of {page_bytes} bytes; at least 2 are needed: "
            "raise kv_cache_bytes or lower page_size"
        )
    return num_pages


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
