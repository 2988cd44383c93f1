"""Laws of the sampler: the generator's known answers, independence of rows, the right distribution, the edges."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from asyncllm.engine.batch import ALL_BARRED, NO_TOKEN
from asyncllm.runner.sampler import Draw, SamplingRows, gumbel, mix, philox, pick

torch.set_num_threads(1)
VOCAB = 50


def draw(num_rows: int, **changes: Any) -> Draw:
    values: dict[str, Any] = {
        "at": np.arange(num_rows), "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0,
        "seed": np.arange(num_rows), "position": np.full(num_rows, 7),
    } | changes  # fmt: skip
    kinds = {"at": np.int64, "top_k": np.int64, "position": np.int64, "seed": np.uint64}
    columns = {
        name: np.broadcast_to(value, num_rows).astype(kinds.get(name, np.float64)) for name, value in values.items()
    }
    return Draw.of(SamplingRows(**columns), torch.from_numpy)


def random_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def hex_words(counter: int, key: int) -> list[str]:
    words = philox(torch.tensor([[counter]]), torch.tensor([[key]]), torch.tensor([[key]]), high=counter)
    return [f"{int(word):08x}" for word in words]


def test_philox_known_answers() -> None:
    """Random123's vectors."""
    assert hex_words(0, 0) == ["6627e8d5", "e169c58d", "bc57ac4c", "9b00dbd8"]
    assert hex_words(0xFFFFFFFF, 0xFFFFFFFF) == ["408f276d", "41c83b0e", "a20bc7c6", "6d5451fd"]


def test_a_token_draws_word_id_mod_4_of_counter_id_div_4() -> None:
    words = philox(torch.tensor([[3]]), torch.tensor([[11]]), torch.tensor([[22]]))
    noise = gumbel(torch.tensor([[[11]], [[22]]]), 15)
    for word in range(3):
        uniform = ((int(words[word]) >> 9) + 0.5) * 2.0**-23
        assert noise[0, 12 + word] == pytest.approx(-math.log(-math.log(uniform)), rel=1e-5)


def test_uniforms_are_exact_and_inside_the_open_interval() -> None:
    ends = torch.tensor([0, 2**23 - 1])
    uniform = (ends.to(torch.float32) + 0.5) * 2.0**-23
    assert uniform.tolist() == [2.0**-24, 1 - 2.0**-24]


def test_mix_is_splitmix64() -> None:
    """Its published first outputs for seed 1234567, and for seed 0."""
    out = mix(np.full(3, 1234567, np.uint64), np.arange(3))
    assert out.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert int(mix(np.zeros(1, np.uint64), np.zeros(1, np.int64))[0]) == 0xE220A8397B1DCDAF


def test_permuting_rows_permutes_tokens() -> None:
    logits = random_logits(16)
    settings = {"temperature": np.linspace(0.5, 2, 16), "top_k": np.arange(16) % 5, "top_p": 0.9, "min_p": 0.01}
    tokens = pick(logits.clone(), None, draw(16, **settings))
    order = np.random.default_rng(0).permutation(16)
    permuted = {name: np.broadcast_to(value, 16)[order] for name, value in settings.items()}
    again = pick(logits[order].clone(), None, draw(16, seed=order, **permuted))
    assert again.tolist() == tokens[order].tolist()
    for i in range(16):
        row = {name: np.broadcast_to(value, 16)[i] for name, value in settings.items()}
        assert int(pick(logits[i : i + 1].clone(), None, draw(1, seed=i, **row))) == int(tokens[i]), "alone"


def test_seed_and_position_decide() -> None:
    logits = random_logits(1).expand(64, -1)
    one = pick(logits.clone(), None, draw(64, seed=5, position=np.arange(64)))
    assert one.tolist() == pick(logits.clone(), None, draw(64, seed=5, position=np.arange(64))).tolist()
    assert len(set(one.tolist())) > 3
    assert one.tolist() != pick(logits.clone(), None, draw(64, seed=6, position=np.arange(64))).tolist()


def chi_square(counts: np.ndarray, probability: np.ndarray) -> float:
    kept = probability * counts.sum() >= 5
    expected = probability[kept] * counts.sum()
    return float(((counts[kept] - expected) ** 2 / expected).sum() / max(1, kept.sum() - 1))


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits = random_logits(1, seed=4)
    num_draws = 20_000
    tokens = pick(
        logits.repeat(num_draws, 1),
        None,
        draw(num_draws, temperature=temperature, seed=1, position=np.arange(num_draws)),
    )
    counts = np.bincount(tokens.numpy(), minlength=VOCAB)
    assert chi_square(counts, (logits[0].double() / temperature).softmax(0).numpy()) < 1.8  # fmt: skip


def kept(logits: list[float], **settings: Any) -> set[int]:
    row = torch.tensor([logits])
    return set(pick(row.repeat(3000, 1), None, draw(3000, position=np.arange(3000), **settings)).tolist())


def test_filters_in_their_documented_order() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(logits) == {0, 1, 2, 3}
    assert kept(logits, top_k=2) == {0, 1}
    assert kept(logits, top_k=1) == {0}
    assert kept(logits, top_k=99) == {0, 1, 2, 3}
    assert kept(logits, top_p=0.65) == {0, 1}
    assert kept(logits, top_p=0.75) == {0, 1, 2}
    assert kept(logits, top_p=0.0) == {0}
    assert kept(logits, min_p=0.6) == {0, 1}
    assert kept(logits, min_p=1.0) == {0}
    assert kept(logits, top_k=3, top_p=0.7) == {0, 1}, "top_p works on what top_k left: 0.44 + 0.33"
    assert kept(logits, temperature=0.5, top_p=0.8) == {0, 1}, "temperature first: 0.53, 0.30, 0.13, 0.03"


def test_equal_logits_rank_by_id() -> None:
    assert kept([1.0, 1.0, 1.0, 1.0], top_k=2) == {0, 1}
    assert pick(torch.ones(2, 9), None, None).tolist() == [0, 0]


@pytest.mark.parametrize("temperature", [1e-45, 1e-300, 1e-38, 1e-20])
def test_the_smallest_temperatures_are_greedy(temperature: float) -> None:
    logits = random_logits(32)
    greedy = pick(logits.clone(), None, None)
    assert pick(logits.clone(), None, draw(32, temperature=temperature)).tolist() == greedy.tolist()
    assert pick(logits.clone(), None, draw(32, temperature=temperature, top_p=0.9)).tolist() == greedy.tolist()


def test_only_sampled_rows_sample() -> None:
    logits = random_logits(6)
    mixed = pick(logits.clone(), None, draw(2, at=np.array([1, 4])))
    greedy = pick(logits.clone(), None, None)
    assert [int(mixed[i]) for i in (0, 2, 3, 5)] == [int(greedy[i]) for i in (0, 2, 3, 5)]


@pytest.mark.parametrize("sampled", [False, True])
def test_rows_without_a_finite_number_yield_no_token(sampled: bool) -> None:
    logits = random_logits(5)
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    logits[3] = math.nan
    alone = pick(random_logits(5), None, draw(5) if sampled else None)
    tokens = pick(logits, None, draw(5) if sampled else None).tolist()
    assert tokens == [int(alone[0]), NO_TOKEN, ALL_BARRED, NO_TOKEN, int(alone[4])]


def test_banned_places_are_never_drawn() -> None:
    logits = random_logits(2)
    best = pick(logits.clone(), None, None)
    tokens = pick(logits.clone(), torch.tensor([VOCAB + int(best[1])]), None)
    assert int(tokens[0]) == int(best[0]) and int(tokens[1]) != int(best[1])
