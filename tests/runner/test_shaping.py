"""Each stage of shaping against a few lines of Python that say what it means."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from asyncllm.engine.batch import ALL_BARRED, Shaping
from asyncllm.runner.runner import build_runner
from asyncllm.runner.scoring import read, score
from asyncllm.runner.shaping import IN_PROMPT, SlotShaping, counted, stage_recount
from tests.runner.driving import Driver, engine_config, new_row, shaping
from tests.tiny import make_checkpoint, num_tokens

VOCAB, MAX_LEN = 40, 64


def shaped(logits: torch.Tensor, texts: list[list[int]], shapings: list[Shaping | None]) -> torch.Tensor:
    """Slot i + 1 holds text i, all of it known when it was admitted."""
    slots = SlotShaping()
    rows = [new_row(i, text, shaping=one) for i, (text, one) in enumerate(zip(texts, shapings, strict=True), 1)]
    slots.write(rows)
    pool = torch.zeros(len(texts) + 1, MAX_LEN, dtype=torch.int32)
    counts = torch.zeros(len(texts) + 1, VOCAB, dtype=torch.int32)
    for i, text in enumerate(texts, 1):
        pool[i, : len(text)] = torch.tensor(text)
    if (recount := stage_recount(rows, VOCAB, torch.from_numpy)) is not None:
        counts.view(-1).index_copy_(0, recount[0], recount[1].to(torch.int32))
    ends = np.array([len(text) for text in texts])
    shape = slots.stage(np.arange(1, len(texts) + 1), ends, VOCAB, MAX_LEN, torch.from_numpy)
    out = logits.clone()
    if shape is not None:
        shape.apply(out, pool, counts)
    return out


def expected(logits: list[float], text: list[int], one: Shaping | None) -> list[float]:
    """The same, said plainly."""
    x = list(logits)
    if one is None:
        return x
    for token_id, bias in zip(one.bias_ids.tolist(), one.biases.tolist(), strict=True):
        x[token_id] += bias
    output = text[one.prompt_len :]
    banned = {word[-1] for word in one.bad if len(word) == 1 or tuple(output[1 - len(word) :]) == word[:-1]}
    for i in range(VOCAB):
        if i in banned or (one.allowed is not None and i not in one.allowed.tolist()):
            x[i] = -math.inf
        if i in text:
            x[i] = x[i] / one.repetition if x[i] > 0 else x[i] * one.repetition
        x[i] -= one.frequency * output.count(i) + one.presence * (i in output)
    return x


def test_every_stage_and_their_order() -> None:
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(200, VOCAB)) * 5)
    texts = [rng.integers(0, 12, rng.integers(2, 12)).tolist() for _ in range(200)]
    some = [
        None,
        shaping(bias={3: 2.5, 7: -100.0}),
        shaping(allowed=np.array([1, 5, 9], np.int32), presence=1.0),
        shaping(bad=((4,), (1, 2), (3, 4, 2), (2, 2))),
        shaping(presence=0.5, frequency=0.25, repetition=1.3),
        shaping(repetition=0.7, bias={2: 4.0}, bad=((2,),)),
        shaping(frequency=-1.5, prompt_len=1),
    ]
    shapings = [some[i % len(some)] for i in range(200)]
    got = shaped(logits, texts, shapings)
    for i in range(200):
        want = torch.tensor(expected(logits[i].tolist(), texts[i], shapings[i]), dtype=torch.float64)
        torch.testing.assert_close(got[i], want, rtol=1e-6, atol=1e-6)


def test_what_a_count_says() -> None:
    ids, totals = counted(np.array([5, 5, 2, 5, 2, 9], np.int32), 3)
    assert dict(zip(ids.tolist(), totals.tolist(), strict=True)) == {2: IN_PROMPT + 1, 5: IN_PROMPT + 1, 9: 1}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_scores_are_log_softmax_and_rank_equals_by_id(dtype: torch.dtype) -> None:
    logits = torch.randn(9, VOCAB, generator=torch.Generator().manual_seed(1)).to(dtype)
    logits[3] = 1.0
    logits[4, :30] = -math.inf
    ids = torch.arange(9)
    got = read(score(logits.clone(), ids, 5).numpy(), 9)
    likely = logits.float().log_softmax(-1).clamp_min(-9999.0)
    assert got.logprobs.tolist() == likely[torch.arange(9), ids].tolist()
    best = likely.sort(dim=-1, descending=True, stable=True)
    assert got.top_ids.tolist() == best.indices[:, :5].tolist()
    assert got.top_logprobs.tolist() == best.values[:, :5].tolist()
    assert np.isfinite(got.logprobs).all() and got.logprobs[4] == -9999.0


def test_a_row_without_any_id_left_ends_alone(tmp_path: Path) -> None:
    config = engine_config(dtype="float64")
    driver = Driver(build_runner(make_checkpoint(tmp_path, "llama", "float64"), config, num_tokens()), config)
    driver.admit(1, [5, 6, 7], shaping=shaping(prompt_len=3, allowed=np.array([8], np.int32), bad=((8,),)))
    driver.admit(2, [5, 6, 7])
    drawn = driver.step((1, 3, True), (2, 3, True))
    assert drawn[0] == ALL_BARRED and drawn[1] >= 0
