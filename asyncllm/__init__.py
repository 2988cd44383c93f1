"""asyncllm: serve a language model to many clients from one Python process.

Names are imported on first use, so that a client never loads torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .build import load, start
    from .client import AsyncClient
    from .config import Config
    from .errors import AsyncLLMError
    from .llm import AsyncLLM
    from .offline import LLM
    from .types import Completion, Delta, FinishReason, GrammarSpec, SamplingParams

_HOMES = {
    "start": "build", "load": "build", "AsyncClient": "client", "Config": "config", "AsyncLLMError": "errors",
    "AsyncLLM": "llm", "LLM": "offline", "Completion": "types", "Delta": "types", "FinishReason": "types",
    "GrammarSpec": "types", "SamplingParams": "types",
}  # fmt: skip

__all__ = [
    "LLM", "AsyncClient", "AsyncLLM", "AsyncLLMError", "Completion", "Config", "Delta", "FinishReason",
    "GrammarSpec", "SamplingParams", "load", "start",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'asyncllm' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f".{_HOMES[name]}", __name__), name)
