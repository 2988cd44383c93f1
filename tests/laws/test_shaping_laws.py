"""The laws again, for requests that shape their logits and ask for log probabilities, beside plain ones."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from asyncllm.bridge import Update
from asyncllm.runner.runner import build_runner
from asyncllm.types import Logprob, PromptLogprobs, SamplingParams
from tests.fakes import House, engine_config
from tests.manual_device import ManualDevice
from tests.tiny import EOS_ID, make_checkpoint, num_tokens

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7, "temperature": 0},
    {"repetition_penalty": 1.8, "temperature": 0, "logprobs": 3},
    {"frequency_penalty": -1.0, "temperature": 0.8, "top_p": 0.9},
    {"logit_bias": {40: 5.0, 41: 6.5, 42: -100.0}, "logprobs": 0},
    {"allowed_token_ids": tuple(range(30, 90)), "presence_penalty": 1.0, "logprobs": 20},
    {"temperature": 0, "prompt_logprobs": 2, "logprobs": 1},
    {"prompt_logprobs": 0, "min_tokens": 6},
]


class Asked(NamedTuple):
    prompt: list[int]
    max_tokens: int
    params: SamplingParams
    seed: int
    bad_ids: tuple[tuple[int, ...], ...]


class Said(NamedTuple):
    token_ids: list[int]
    logprobs: list[Logprob]
    prompt_logprobs: PromptLogprobs | None


@pytest.fixture(scope="module", params=["float64", "float32"])
def folder(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / request.param, "qwen3", request.param)


def asked(seed: int) -> dict[str, Asked]:
    rng = random.Random(seed)
    requests = {}
    for i in range(18):
        prompt = [rng.randrange(num_tokens()) for _ in range(rng.choice([1, 2, 9, 40, 90]))]
        params = SamplingParams(**KINDS[i % len(KINDS)])
        bad = ((rng.randrange(num_tokens()),), (5, 6)) if i % 5 == 0 else ()
        requests[f"r{i}"] = Asked(prompt, rng.randrange(20, 110), params, rng.getrandbits(64), bad)
    return requests


def house_of(folder: Path, device: Any = None, **changes: Any) -> House:
    config = engine_config(**({"dtype": folder.name, "max_model_len": 256, "num_pages": 200} | changes))
    return House(config, runner=build_runner(folder, config, num_tokens(), device), vocab_size=num_tokens())


def submit(house: House, name: str, request: Asked) -> None:
    prompt, max_tokens, params, seed, bad_ids = request
    house.submit(name, prompt, max_tokens, params=params, seed=seed, stop_ids=(EOS_ID,), bad_ids=bad_ids)


def said(house: House, name: str) -> Said:
    deltas = house.out.by_request[name]
    prompts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs is not None]
    logprobs = [logprob for delta in deltas for logprob in delta.logprobs]
    assert len(prompts) <= 1
    return Said(house.out.token_ids(name), logprobs, prompts[0] if prompts else None)


def solo(folder: Path, requests: dict[str, Asked]) -> dict[str, Said]:
    house = house_of(folder, overlap=False, prefix_cache=False, max_step_tokens=512)
    for name, request in requests.items():
        submit(house, name, request)
        house.run()
    return {name: said(house, name) for name in requests}


def assert_equal(got: Said, expected: Said) -> None:
    assert got.token_ids == expected.token_ids
    for mine, theirs in ((got.logprobs, expected.logprobs), (entries(got), entries(expected))):
        assert [(one.token_id, [i for i, _ in one.top]) for one in mine] == [
            (one.token_id, [i for i, _ in one.top]) for one in theirs
        ]
        flat = [[value for one in each for value in (one.logprob, *(v for _, v in one.top))] for each in (mine, theirs)]
        np.testing.assert_allclose(*flat, rtol=1e-4, atol=1e-4)


def entries(one: Said) -> list[Logprob]:
    return [] if one.prompt_logprobs is None else list(one.prompt_logprobs.entries())


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("max_step_tokens", [8, 512], ids=["chunk8", "whole"])
def test_whatever_is_beside_and_however_it_is_cut_the_output_is_that_of_alone(
    folder: Path, overlap: bool, max_step_tokens: int
) -> None:
    """Preempted too: the pool has pages for two of eight."""
    requests = asked(max_step_tokens)
    expected = solo(folder, requests)
    house = house_of(
        folder, ManualDevice(patience=2), overlap=overlap, num_pages=17, page_size=16, max_step_tokens=max_step_tokens
    )
    for name, request in requests.items():
        submit(house, name, request)
    house.run()
    for name in requests:
        assert_equal(said(house, name), expected[name])
    assert house.scheduler.stats().num_preemptions > 0


def test_every_token_asked_about_has_its_logprob_and_no_other(folder: Path) -> None:
    requests = asked(1)
    for name, one in solo(folder, requests).items():
        params, prompt = requests[name].params, requests[name].prompt
        assert len(one.logprobs) == (0 if params.logprobs is None else len(one.token_ids))
        assert [logprob.token_id for logprob in one.logprobs] in ([], one.token_ids)
        assert all(len(logprob.top) == params.logprobs for logprob in one.logprobs)
        assert (one.prompt_logprobs is None) == (params.prompt_logprobs is None)
        if one.prompt_logprobs is not None:
            assert one.prompt_logprobs.token_ids == prompt[1:]
            assert all(len(logprob.top) == params.prompt_logprobs for logprob in entries(one))


def test_a_prompts_logprobs_are_those_of_generating_it(folder: Path) -> None:
    """Each token of an answer, scored as a prompt, is as likely as when it was drawn."""
    request = Asked([7, 8, 9], 24, SamplingParams(temperature=0.7, logprobs=4, ignore_eos=True), 3, ())
    drawn = solo(folder, {"a": request})["a"]
    text = [7, 8, 9, *drawn.token_ids]
    scored = solo(folder, {"a": Asked(text, 1, SamplingParams(prompt_logprobs=4), 0, ())})["a"]
    assert_equal(Said([], entries(scored)[2:], None), Said([], drawn.logprobs, None))


def test_a_changed_temperature_keeps_the_counts(folder: Path) -> None:
    """Rewriting a row between steps counts its text anew, which is what was counted before."""
    request = Asked([5, 6, 7], 20, SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=1.5), 0, ())
    expected = solo(folder, {"a": request})["a"]
    house = house_of(folder, ManualDevice(patience=1), overlap=True)
    submit(house, "a", request)
    for turn in range(60):
        if turn % 4 == 3:
            house.inbox.put(Update(request_id="a", temperature=0.0))
        house.turn()
    assert said(house, "a").token_ids == expected.token_ids


def test_a_cached_prefix_is_computed_again_to_be_scored(folder: Path) -> None:
    prompt = list(range(20, 70))
    house = house_of(folder, overlap=False, page_size=16)
    for name in ("first", "again"):
        submit(house, name, Asked(prompt, 3, SamplingParams(temperature=0, prompt_logprobs=1), 0, ()))
        house.run()
    assert_equal(said(house, "again"), said(house, "first"))
    submit(house, "plain", Asked(prompt, 3, SamplingParams(temperature=0), 0, ()))
    house.run()
    assert house.out.by_request["plain"][-1].num_cached_tokens == 48
