"""The laws, exactly, on a float64 model: whatever is batched, cached, chunked, overlapped or preempted,
every request's tokens are those it gets alone."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from asyncllm.bridge import Abort
from asyncllm.config import EngineConfig
from asyncllm.runner.runner import build_runner
from asyncllm.types import Delta, FinishReason, SamplingParams
from tests.fakes import House, engine_config
from tests.manual_device import ManualDevice
from tests.tiny import EOS_ID, make_checkpoint, num_tokens


class Asked(NamedTuple):
    prompt: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int


GREEDY = SamplingParams(temperature=0)
SAMPLED = (
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.05, min_tokens=5),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "float64", "qwen3", "float64")


@pytest.fixture(scope="module")
def asked() -> dict[str, Asked]:
    """Random lengths, half of them behind a shared prefix; greedy and sampled side by side."""
    rng = random.Random(7)
    shared = [rng.randrange(num_tokens()) for _ in range(100)]
    requests = {}
    for i in range(200):
        own = [rng.randrange(num_tokens()) for _ in range(rng.randrange(1, 40))]
        prompt = shared[: rng.randrange(100)] + own if i % 2 else own
        max_tokens = rng.choice([1, *([rng.randrange(2, 8)] * 6), rng.randrange(60, 110)])
        requests[f"r{i}"] = Asked(prompt, max_tokens, rng.choice([GREEDY, *SAMPLED]), rng.getrandbits(64))
    return requests


@pytest.fixture(scope="module")
def solo(folder: Path, asked: dict[str, Asked]) -> dict[str, list[int]]:
    """Each request alone: serial, no cache, the prompt whole."""
    house = house_of(folder, overlap=False, prefix_cache=False, max_step_tokens=512, num_pages=200)
    for name, request in asked.items():
        submit(house, name, request)
        house.run()
    return {name: house.out.token_ids(name) for name in asked}


def house_of(folder: Path, device: Any = None, **changes: Any) -> House:
    config: EngineConfig = engine_config(**({"dtype": "float64", "max_model_len": 256} | changes))
    runner = build_runner(folder, config, num_tokens(), device)
    return House(config, runner=runner, vocab_size=num_tokens())


def submit(house: House, name: str, request: Asked) -> None:
    house.submit(
        name, request.prompt, request.max_tokens, params=request.params, seed=request.seed, stop_ids=(EOS_ID,)
    )


def assert_equals_solo(name: str, house: House, solo: dict[str, list[int]]) -> None:
    terminal, got = house.out.terminal(name), house.out.token_ids(name)
    assert isinstance(terminal, Delta), f"{name} never ended"
    if terminal.finish_reason is FinishReason.ABORT:
        assert got == solo[name][: len(got)]
    else:
        assert terminal.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert got == solo[name]


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("max_step_tokens", [8, 512], ids=["chunk8", "whole"])
def test_200_random_requests_equal_their_solo_output(
    folder: Path, asked: Any, solo: dict[str, list[int]], overlap: bool, page_size: int, max_step_tokens: int
) -> None:
    rng = random.Random(page_size + max_step_tokens)
    house = house_of(
        folder,
        ManualDevice(patience=2),
        overlap=overlap,
        page_size=page_size,
        num_pages=1 + 256 // page_size,  # tokens for two of eight
        max_step_tokens=max_step_tokens,
    )
    waiting = list(asked)
    while waiting or not house.scheduler.idle:
        while waiting and rng.random() < 0.5:
            submit(house, name := waiting.pop(), asked[name])
        if rng.random() < 0.03:
            house.inbox.put(Abort(rng.choice(list(asked))))
        if waiting or not house.scheduler.idle:
            house.turn()
    for name in asked:
        assert_equals_solo(name, house, solo)
    stats = house.scheduler.stats()
    assert stats.num_preemptions > 0 and stats.pages_used == 0
    assert house.scheduler.cache.pool.num_free + stats.pages_cached == stats.pages_total


def test_overlap_equals_serial_whenever_copies_land(folder: Path, solo: dict[str, list[int]], asked: Any) -> None:
    """The copy of a step lands one, two or many polls after the next step has been launched."""
    some = dict(list(asked.items())[:24])
    for patience in (1, 3, 7):
        house = house_of(folder, ManualDevice(patience), overlap=True)
        for name, request in some.items():
            submit(house, name, request)
        house.run()
        for name in some:
            assert_equals_solo(name, house, solo)


def test_a_step_is_launched_before_the_last_ones_copy_has_landed(folder: Path) -> None:
    device = ManualDevice()
    house = house_of(folder, device, overlap=True)
    house.submit("a", [5, 6, 7], max_tokens=4)
    house.turn()
    assert (device.num_launched, device.num_landed) == (1, 0)
    device.land()
    house.turn()  # launches step 2 on the device's own token of step 1, then reads that one
    assert device.num_launched == 2 and len(house.out.token_ids("a")) == 1
    device.land()
    house.turn()
    assert device.num_launched == 3 and len(house.out.token_ids("a")) == 2


@pytest.mark.parametrize("neighbours", [0, 1, 7])
def test_SAMP_6_a_seed_means_the_same_tokens_whoever_is_beside(folder: Path, neighbours: int) -> None:
    """Alone, among others, after a cache hit and with chunked prefill; unseeded ones differ."""
    request = Asked(list(range(20, 50)), 16, SamplingParams(temperature=0.9, top_p=0.95), seed=42)
    outputs = []
    for changes in ({}, {"max_step_tokens": 8}, {"page_size": 16, "prefix_cache": False}):
        house = house_of(folder, overlap=False, **changes)
        for i in range(neighbours):
            submit(house, f"n{i}", Asked(list(range(i, 20)), 16, SamplingParams(temperature=1.0), seed=i))
        for repeat in ("first", "after a cache hit"):
            submit(house, repeat, request)
            house.run()
            outputs.append(house.out.token_ids(repeat))
    assert len({tuple(output) for output in outputs}) == 1
    house = house_of(folder, overlap=False)
    for seed in range(8):
        submit(house, f"s{seed}", request._replace(seed=seed))
    house.run()
    assert len({tuple(house.out.token_ids(f"s{seed}")) for seed in range(8)}) == 8
