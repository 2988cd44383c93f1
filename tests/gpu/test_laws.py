"""The design's laws on the GPU, in bf16: near the reference, overlap equals serial, and a storm leaves nothing."""

import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.bridge import Abort, Finish
from asyncllm.engine.loop import Engine
from asyncllm.types import FinishReason, SamplingParams
from tests.fakes import House
from tests.gpu.houses import REAL, TINY, VOCAB, graph_logits, graph_runner, needs, no_sync, plain_logits, plain_runner

TINIES = ["tiny-qwen3", "tiny-llama", "tiny-qwen2"]


def text(length: int, seed: int = 0, most: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, most) for _ in range(length)]


@pytest.mark.parametrize("name", TINIES)
def test_logits_are_as_near_to_float32_as_sdpa_in_bf16(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Teacher-forced over 130 positions, across two page edges."""
    folder, forced = needs(TINY / name), text(130)
    exact = plain_logits(plain_runner(folder, dtype="float32"), forced, 3, monkeypatch).log_softmax(-1)
    sdpa = plain_logits(plain_runner(folder), forced, 3, monkeypatch).log_softmax(-1)
    runner, driver, _ = graph_runner(folder)
    ours = graph_logits(runner, driver, forced, 3).log_softmax(-1)
    noise, error = (sdpa - exact).abs().max(), (ours - exact).abs().max()
    assert error <= 2 * noise + 0.02, f"{error:.4f} against sdpa's {noise:.4f}"
    best = exact.topk(2).values
    clear = best[:, 0] - best[:, 1] > 4 * noise
    assert clear.sum() >= 10
    assert torch.equal(ours.argmax(-1)[clear], exact.argmax(-1)[clear])


@pytest.mark.parametrize("name", TINIES)
def test_greedy_ids_equal_transformers_where_the_gap_is_clear(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """expected.json's answers, which transformers gave in float32, forced; our argmax agrees where it can."""
    folder = needs(TINY / name)
    runner, driver, _ = graph_runner(folder)
    references = [plain_runner(folder, dtype=dtype) for dtype in ("float32", "bfloat16")]
    num_clear = 0
    for case in json.loads((folder / "expected.json").read_text())["cases"]:
        forced = [*case["prompt_ids"], *case["greedy_ids_eos_banned"]]
        if (start := len(case["prompt_ids"]) - 1) < 1:
            continue
        exact, sdpa = (plain_logits(reference, forced, start, monkeypatch)[:-1] for reference in references)
        ours = graph_logits(runner, driver, forced, start)[:-1]
        for logits in (exact, sdpa, ours):
            logits[:, 2] = -1e4  # EOS was banned there
        expected = torch.tensor(forced[start + 1 :], device=ours.device)
        best = exact.topk(2).values
        clear = best[:, 0] - best[:, 1] > 4 * (sdpa - exact).abs().max()
        num_clear += int(clear.sum())
        assert torch.equal(exact.argmax(-1)[clear], expected[clear]), case["prompt"]
        assert torch.equal(ours.argmax(-1)[clear], expected[clear]), case["prompt"]
    assert num_clear > 10


@pytest.mark.parametrize("name", TINIES)
def test_what_other_gpus_run_is_as_near(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """fa2, launched kernel by kernel, and the split-KV decode kernel."""
    folder, forced = needs(TINY / name), text(130)
    exact = plain_logits(plain_runner(folder, dtype="float32"), forced, 3, monkeypatch).log_softmax(-1)
    sdpa = plain_logits(plain_runner(folder), forced, 3, monkeypatch).log_softmax(-1)
    runner, driver, _ = graph_runner(folder, attention="fa2")
    ours = graph_logits(runner, driver, forced, 3).log_softmax(-1)
    noise, error = (sdpa - exact).abs().max(), (ours - exact).abs().max()
    assert error <= 2 * noise + 0.02, f"{error:.4f} against sdpa's {noise:.4f}"


@pytest.mark.skipif("ASYNCLLM_COMPILE" not in os.environ, reason="compiles fa3 with a window: ASYNCLLM_COMPILE=1")
def test_sliding_windows_are_as_near_to_float32_as_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    folder, forced = needs(TINY / "tiny-mistral"), text(130)  # a window of 32
    exact = plain_logits(plain_runner(folder, dtype="float32"), forced, 70, monkeypatch).log_softmax(-1)
    sdpa = plain_logits(plain_runner(folder), forced, 70, monkeypatch).log_softmax(-1)
    runner, driver, _ = graph_runner(folder)
    ours = graph_logits(runner, driver, forced, 70).log_softmax(-1)
    noise, error = (sdpa - exact).abs().max(), (ours - exact).abs().max()
    assert error <= 2 * noise + 0.02, f"{error:.4f} against sdpa's {noise:.4f}"


def submit_all(house: House, count: int, most: int = VOCAB) -> None:
    rng = random.Random(7)
    for i in range(count):
        params = SamplingParams(temperature=rng.choice([0.0, 0.7, 1.0]), top_p=rng.choice([1.0, 0.9]))
        prompt = text(rng.randrange(1, 300), i, most)
        house.submit(f"r{i}", prompt, max_tokens=rng.randrange(1, 60), params=params, seed=i)


@pytest.mark.parametrize("folder", [TINY / "tiny-qwen3", REAL], ids=["tiny", "0.6b"])
def test_overlap_equals_serial_token_for_token(folder: Path) -> None:
    """Nobody waits for a slot, so the steps are the same in both, and bf16 gives the same bits."""
    sizes = {"max_running": 48, "num_pages": 600, "cuda_graph_max_batch": 48}
    runner, _, config = graph_runner(needs(folder), **sizes)
    outputs = []
    for overlap in (True, False):
        house = House(config, runner=runner)
        house.engine._step = Engine.overlap_step.__get__(house.engine) if overlap else house.engine.serial_step
        submit_all(house, 48)
        with no_sync():
            house.run()
        outputs.append({f"r{i}": house.out.token_ids(f"r{i}") for i in range(48)})
    assert outputs[0] == outputs[1]
    assert all(outputs[0].values())


class Residues:
    """A grammar of which ids may follow: those whose remainder by 7 is the number of the token, by 7 too. Compiled,
    matcher and masker in one, as this machine may lack llguidance."""

    def __init__(self) -> None:
        self.num_tokens = 0

    def matcher(self) -> "Residues":
        return Residues()

    def is_stopped(self) -> bool:
        return self.num_tokens == 40

    def is_error(self) -> bool:
        return False

    def fill(self, rows: list[tuple["Residues", int]], masks: np.ndarray, budget_s: float) -> int:
        for matcher, row in rows:
            bits = np.zeros(32 * masks.shape[1], np.uint8)
            bits[matcher.num_tokens % 7 :: 7] = 1
            masks[row] = np.packbits(bits, bitorder="little").view(np.int32)
        return len(rows)

    def accept(self, tokens: list[tuple["Residues", int]]) -> list[bool]:
        for matcher, token_id in tokens:
            assert token_id % 7 == matcher.num_tokens % 7
            matcher.num_tokens += 1
        return [True] * len(tokens)


def test_masked_rows_keep_to_their_grammar_among_others_and_overlap_equals_serial() -> None:
    sizes = {"max_running": 24, "num_pages": 400, "cuda_graph_max_batch": 16}  # the larger tails run eagerly
    runner, _, config = graph_runner(needs(TINY / "tiny-qwen3"), **sizes)
    outputs = []
    for overlap in (True, False):
        house = House(config, runner=runner)
        house.scheduler._matching.masker = Residues()
        house.engine._step = Engine.overlap_step.__get__(house.engine) if overlap else house.engine.serial_step
        for i in range(24):
            grammar = Residues() if i % 2 else None
            params = SamplingParams(temperature=(0.0, 0.9)[i % 3 == 0], grammar=grammar)
            house.submit(f"r{i}", text(10 + 13 * i, i), max_tokens=30 + i, params=params, seed=i)
        with no_sync():
            house.run()
        outputs.append({f"r{i}": house.out.token_ids(f"r{i}") for i in range(24)})
    assert outputs[0] == outputs[1]
    for i in range(24):
        masked = [token_id % 7 == n % 7 for n, token_id in enumerate(outputs[0][f"r{i}"])]
        assert all(masked) if i % 2 else not all(masked)


def test_the_real_shape_is_near_sdpa(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random Qwen3-0.6B, teacher-forced in bf16 against sdpa in bf16 and in float32."""
    folder, forced = needs(REAL), text(80)
    exact = plain_logits(plain_runner(folder, dtype="float32"), forced, 60, monkeypatch).log_softmax(-1)
    sdpa = plain_logits(plain_runner(folder), forced, 60, monkeypatch).log_softmax(-1)
    runner, driver, _ = graph_runner(folder)
    ours = graph_logits(runner, driver, forced, 60).log_softmax(-1)
    noise, error = (sdpa - exact).abs().max(), (ours - exact).abs().max()
    assert error <= 2 * noise + 0.02, f"{error:.4f} against sdpa's {noise:.4f}"


def test_shared_prefixes_equal_computed_ones() -> None:
    """Cache on and off: the same text within bf16's noise, so greedy ids are compared up to the first near tie."""
    outputs = []
    for prefix_cache in (True, False):
        runner, _, config = graph_runner(needs(TINY / "tiny-qwen3"), prefix_cache=prefix_cache, overlap=True)
        house = House(config, runner=runner)
        for i in range(6):
            house.submit(f"r{i}", text(200) + text(10, i + 1), max_tokens=12)
            if i % 2:
                house.run()
        outputs.append([house.out.token_ids(f"r{i}") for i in range(6)])
        cached = [house.out.by_request[f"r{i}"][0].num_cached_tokens for i in range(6)]
        assert (max(cached) >= 192) is prefix_cache
    same = sum(a == b for a, b in zip(*outputs, strict=True))
    assert same >= 4, outputs


def test_a_storm_leaves_everything_as_it_was() -> None:
    """Random admissions, aborts, finishes and preemptions, checked at every turn, without one wait for the device."""
    seconds = float(os.environ.get("ASYNCLLM_STORM_S", "300"))
    runner, _, config = graph_runner(
        needs(TINY / "tiny-qwen3"), max_running=16, num_pages=33, max_step_tokens=256, overlap=True
    )
    house, rng, names = House(config, runner=runner), random.Random(3), itertools.count()
    live: list[str] = []
    ended: dict[str, int] = dict.fromkeys(FinishReason, 0)
    until_s = time.monotonic() + seconds

    def act() -> None:
        if len(live) < 40 and rng.random() < 0.4:
            name = f"s{next(names)}"
            params = SamplingParams(
                temperature=rng.choice([0.0, 1.0]), top_k=rng.choice([0, 5]), top_p=rng.choice([1.0, 0.8])
            )
            prompt = text(rng.choice([1, 5, 63, 64, 65, 200, 500]), rng.randrange(4))
            stop_ids = tuple(rng.sample(range(VOCAB), rng.choice([0, 60])))
            fields = {"params": params, "seed": rng.getrandbits(64), "stop_ids": stop_ids}
            house.submit(name, prompt, max_tokens=rng.randrange(1, 200), **fields)
            live.append(name)
        elif live and rng.random() < 0.15:
            message: Any = rng.choice([Abort, Finish])(rng.choice(live))
            house.inbox.put(message)

    with no_sync():
        while time.monotonic() < until_s:
            act()
            house.turn()
            if next(names) % 512 == 0:
                for name in live[:]:
                    if (end := house.out.terminal(name)) is not None:
                        ended[end.finish_reason] += 1
                        del house.out.by_request[name]
                        live.remove(name)
        house.run()
    for name in live:
        end = house.out.terminal(name)
        assert end is not None
        ended[end.finish_reason] += 1
    assert ended[FinishReason.ERROR] == 0, ended
    assert ended[FinishReason.ABORT] and ended[FinishReason.STOP] and ended[FinishReason.LENGTH], ended
    assert house.scheduler.roster.num_preemptions > 0
    print(f"storm: {ended}, {house.scheduler.roster.num_preemptions} preemptions, step {house.scheduler.stats().step}")
