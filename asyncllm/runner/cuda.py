"""From a model folder to a runner on the GPU: weights, one profiled step, the KV pool in what is left, graphs.

GPU thread, once at start. It never knows batches or how a step runs.
"""

import logging
import time
from pathlib import Path

import torch

from ..config import EngineConfig, ModelFacts, sized, timed
from ..device.cuda import CudaDevice
from ..engine.batch import Runner
from ..errors import ModelError
from ..models.config import ModelConfig
from ..models.layers import Placement, PlainLinear
from ..models.loader import load_model
from .buckets import token_buckets
from .runner import build_runner

log = logging.getLogger(__name__)

_LOWER = "lower --gpu-memory-utilization, --max-step-tokens, --max-running or --max-model-len"
_PLAIN_ACTIVATION_BYTES = 4 << 30  # of ModelRunner's fresh tensors; its gathered pages are the largest


def build_cuda_runner(
    folder: Path, config: EngineConfig, facts: ModelFacts, num_tokens: int, device: CudaDevice | None = None
) -> tuple[Runner, EngineConfig]:
    """The runner, and the config with its number of pages.

    Raises:
        ModelError: the GPU's memory does not hold it, and what to lower.
    """
    began_s = time.monotonic()
    device = device or CudaDevice()
    try:
        with torch.inference_mode():
            build = _build_plain if config.attention == "sdpa" else _build_graphs
            runner, config = build(folder, config, facts, num_tokens, device)
    except torch.OutOfMemoryError as error:
        raise ModelError(f"out of GPU memory at start ({str(error).splitlines()[0]}); {_LOWER}") from error
    except ValueError as error:
        raise ModelError(str(error)) from error
    log.info("%r in %.1f s", runner, time.monotonic() - began_s)
    return runner, config


def _build_graphs(
    folder: Path, config: EngineConfig, facts: ModelFacts, num_tokens: int, device: CudaDevice
) -> tuple[Runner, EngineConfig]:
    from .graphs import build_graph_runner

    model_config = ModelConfig.from_folder(folder)
    dtype = getattr(torch, config.dtype)
    # All of the head's rows: cut to an odd number of ids, its product would leave the tensor cores' alignment.
    model = load_model(folder, model_config, Placement(device.torch_device, dtype, dtype, PlainLinear, None, 1))
    loaded_s = time.monotonic()
    runner = build_graph_runner(model, model_config, config, device, num_tokens)
    runner.warm_up()
    torch.cuda.empty_cache()
    config = sized(config, facts, *torch.cuda.mem_get_info(device.torch_device))
    warm_s = time.monotonic()
    runner.use_pages(config.num_pages)
    runner.capture()
    step_s, break_even_context = runner.time_steps()
    config = timed(config, step_s, break_even_context, token_buckets(config.max_step_tokens))
    log.info("warm-up %.1f s, pool and graphs %.1f s", warm_s - loaded_s, time.monotonic() - warm_s)
    log.info(
        "%d tokens take %.0f ms; with running streams a step has %d at most, and fewer the deeper in a context: %d "
        "tokens of it cost as much again",
        config.max_step_tokens, 1e3 * step_s, config.max_mixed_tokens, break_even_context,
    )  # fmt: skip
    return runner, config


def _build_plain(
    folder: Path, config: EngineConfig, facts: ModelFacts, num_tokens: int, device: CudaDevice
) -> tuple[Runner, EngineConfig]:
    free_bytes, total_bytes = torch.cuda.mem_get_info(device.torch_device)
    weight_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    config = sized(config, facts, max(0, free_bytes - weight_bytes - _PLAIN_ACTIVATION_BYTES), total_bytes)
    return build_runner(folder, config, num_tokens, device), config
