"""resolve(): the numbers of a GPU, the attention by shape and machine, the pool in what is left."""

from functools import partial
from typing import Any

import pytest

from asyncllm import config as configs
from asyncllm.config import MachineFacts, ModelFacts

GIB = 1 << 30
QWEN = ModelFacts(num_layers=28, num_kv_heads=8, head_dim=128, max_position=40960, dtype="bfloat16", num_heads=16)


def machine(**changes: Any) -> MachineFacts:
    values: dict[str, Any] = {"device": "cuda", "num_cores": 16, "free_bytes": 0, "compute_capability": (9, 0)}
    return MachineFacts(**(values | changes))


def resolve(model: ModelFacts = QWEN, on: MachineFacts | None = None, **wishes: Any) -> configs.EngineConfig:
    return configs.resolve(configs.make(**wishes), model, on or machine())


def test_a_gpu_has_its_own_defaults() -> None:
    chosen = resolve()
    assert (chosen.page_size, chosen.max_running, chosen.max_step_tokens, chosen.overlap) == (64, 256, 8192, True)
    assert chosen.attention == "fa3" and chosen.cuda_graph_max_batch == 256
    assert chosen.num_pages == 0, "open until a step has been profiled"


@pytest.mark.parametrize(
    "on,wishes,model,reason",
    [
        (machine(no_flashinfer="flashinfer is not installed"), {}, QWEN, "not installed"),
        (machine(compute_capability=(7, 5)), {}, QWEN, "7.5 is below 8.0"),
        (machine(), {"dtype": "float32"}, QWEN, "float32"),
        (machine(), {"page_size": 8}, QWEN, "page_size 8"),
        (machine(), {}, ModelFacts(num_layers=2, num_kv_heads=2, head_dim=80, max_position=99, dtype="bfloat16",
                                   num_heads=4), "head_dim 80"),
    ],
)  # fmt: skip
def test_what_flashinfer_cannot_do_torch_does(on: Any, wishes: Any, model: ModelFacts, reason: str) -> None:
    chosen = resolve(model, on, **wishes)
    assert chosen.attention == "sdpa" and chosen.why_plain is not None and reason in chosen.why_plain
    with pytest.raises(ValueError, match=reason):
        resolve(model, on, attention="fa2", **wishes)


def test_other_gpus_than_hopper_take_fa2() -> None:
    ampere = machine(compute_capability=(8, 0))
    assert resolve(on=ampere).attention == "fa2" and resolve(attention="fa2").attention == "fa2"
    with pytest.raises(ValueError, match="9.0"):
        resolve(on=ampere, attention="fa3")
    assert resolve(attention="sdpa").why_plain == "attention sdpa was asked for"


def test_a_cpu_has_neither_kernels_nor_graphs() -> None:
    cpu = MachineFacts(device="cpu", num_cores=2, free_bytes=8 * GIB)
    assert resolve(on=cpu).attention == "sdpa" and resolve(on=cpu, cuda_graph_max_batch=9).cuda_graph_max_batch == 0
    with pytest.raises(ValueError, match="needs a GPU"):
        resolve(on=cpu, attention="fa3")


def test_the_pool_takes_what_is_left() -> None:
    page_bytes = configs.kv_page_bytes(QWEN, "bfloat16", 64)
    chosen = configs.sized(resolve(gpu_memory_utilization=0.8), QWEN, free_bytes=100 * GIB, total_bytes=140 * GIB)
    assert chosen.num_pages == int((100 - 28 - 1) * GIB) // page_bytes
    assert configs.sized(resolve(num_pages=77), QWEN, 100 * GIB, 140 * GIB).num_pages == 77
    small = configs.sized(resolve(max_model_len=640), QWEN, 100 * GIB, 140 * GIB)
    assert small.num_pages == 1 + 256 * 10, "more than every slot full can never be used"
    with pytest.raises(ValueError, match="lower max_step_tokens"):
        configs.sized(resolve(), QWEN, free_bytes=2 * GIB, total_bytes=140 * GIB)
    with pytest.raises(ValueError, match="lower num_pages"):
        configs.sized(resolve(num_pages=10_000), QWEN, free_bytes=2 * GIB, total_bytes=140 * GIB)


def test_a_mixed_step_is_as_long_as_the_gpu_is_fast() -> None:
    chosen = resolve()
    assert chosen.max_mixed_tokens == 0, "open until a step has been timed"
    sizes = [256, 1024, 2048, 3072, 8192]
    timed = partial(configs.timed, break_even_context=17_000, sizes=sizes)
    fast = timed(chosen, 0.020)
    assert (fast.max_mixed_tokens, fast.mixed_work) == (8192, 26_624), "what attention may take is not bound by tokens"
    slow = timed(chosen, 0.200)
    assert (slow.max_mixed_tokens, slow.mixed_work) == (2048, 0), "2662 would be padded to 3072"
    assert timed(chosen, 9.000).max_mixed_tokens == 2 * chosen.max_running
    wished = timed(resolve(max_mixed_tokens=1000), 0.170)
    assert (wished.max_mixed_tokens, wished.break_even_context, wished.step_sizes) == (1000, 17_000, tuple(sizes))
    with pytest.raises(ValueError, match="at most max_step_tokens 8192"):
        resolve(max_mixed_tokens=9000)


@pytest.mark.parametrize("wish", [{"gpu_memory_utilization": 0.0}, {"gpu_memory_utilization": 1.1},
                                  {"cuda_graph_max_batch": -1}, {"attention": "magic"}])  # fmt: skip
def test_wishes_out_of_range_are_named(wish: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wish))):
        resolve(**wish)
