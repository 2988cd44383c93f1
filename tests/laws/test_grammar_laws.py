"""The laws again, for requests that follow a grammar beside others that do not; and what its rows cost the loop."""

import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from asyncllm.bridge import Abort, Finish, Update
from asyncllm.errors import InvalidRequest, StepFailed
from asyncllm.text.grammars import Grammars, Masker
from asyncllm.text.tokenizer import Tokenizer
from asyncllm.types import FinishReason, GrammarSpec, SamplingParams
from tests.fakes import House, engine_config
from tests.manual_device import ManualDevice
from tests.tiny import EOS_ID, make_checkpoint, num_tokens

from .test_shaping_laws import Asked, assert_equal, house_of, said, solo, submit

PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "tags": {"type": "array", "items": {"enum": [1, 2]}},
        },
        "required": ["name", "tags"],
        "additionalProperties": False,
    }
)
SPECS = (
    None,
    GrammarSpec("json", PERSON),
    GrammarSpec("regex", "(the|a) (quick )*[a-z]{2,20}[.!]"),
    GrammarSpec("choice", '["yes", "no", "perhaps the third"]'),
    GrammarSpec("regex", "[0-9a-f]*"),  # an end may be drawn anywhere
)
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0}, {"temperature": 1.2}, {"temperature": 0.9, "top_k": 5, "frequency_penalty": 0.5, "logprobs": 2},
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny") / "float32", "qwen3", "float32")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars.of(tokenizer, num_tokens())
    assert made is not None
    yield made
    made.close()


def asked(seed: int, grammars: Grammars) -> dict[str, Asked]:
    rng = random.Random(seed)
    requests = {}
    for i in range(25):
        spec, kind = SPECS[i % len(SPECS)], KINDS[i % len(KINDS)]
        params = SamplingParams(**kind, grammar=None if spec is None else grammars.compile(spec))
        prompt = [rng.randrange(num_tokens()) for _ in range(rng.choice([1, 2, 9, 30]))]
        requests[f"r{i}"] = Asked(prompt, rng.randrange(10, 45), params, rng.getrandbits(64), ())
    return requests


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("max_step_tokens", [8, 512], ids=["chunk8", "whole"])
def test_a_row_says_in_company_what_it_says_alone(
    folder: Path, tokenizer: Tokenizer, grammars: Grammars, overlap: bool, max_step_tokens: int
) -> None:
    """Preempted too: the pool has pages for two of eight."""
    requests = asked(max_step_tokens, grammars)
    expected = solo(folder, requests)
    house = house_of(
        folder, ManualDevice(patience=2), overlap=overlap, num_pages=25, page_size=4, max_step_tokens=max_step_tokens
    )
    for name, request in requests.items():
        submit(house, name, request)
    house.run()
    assert house.scheduler.roster.num_preemptions > 0
    for i, name in enumerate(requests):
        assert_equal(said(house, name), expected[name])
        terminal = house.out.terminal(name)
        assert terminal is not None
        if terminal.finish_reason is FinishReason.STOP:
            check(SPECS[i % len(SPECS)], tokenizer.decode(house.out.token_ids(name)))


def check(spec: GrammarSpec | None, text: str) -> None:
    if spec is None:
        return
    if spec.kind == "json":
        assert set(json.loads(text)) == {"name", "tags"}
    elif spec.kind == "choice":
        assert text in json.loads(spec.source)
    else:
        assert re.fullmatch(spec.source, text), text


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
def test_an_answer_ends_with_its_grammar_and_its_overrun_is_not_told(grammars: Grammars, overlap: bool) -> None:
    house = House(engine_config(overlap=overlap), vocab_size=num_tokens())
    params = SamplingParams(temperature=0, grammar=grammars.compile(GrammarSpec("regex", "[a-c]{4}")))
    house.submit("r", [5], 20, params=params)  # without an EOS that could end it
    house.run()
    terminal = house.out.terminal("r")
    assert terminal is not None and terminal.finish_reason is FinishReason.STOP and terminal.stop_reason is None
    assert 1 <= len(house.out.token_ids("r")) <= 4


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("fails", ["launch", "result"])
def test_a_failed_step_leaves_matchers_where_the_committed_tokens_are(
    grammars: Grammars, overlap: bool, fails: str
) -> None:
    """Those of the step end; who waited for a slot goes on and keeps to its grammar."""
    house = House(engine_config(overlap=overlap, max_running=2), vocab_size=num_tokens())
    params = SamplingParams(temperature=0, grammar=grammars.compile(GrammarSpec("regex", "[a-z]{20}")))
    for name in ("one", "two", "three"):
        house.submit(name, [5], 40, params=params, stop_ids=(EOS_ID,))
    for _ in range(3):
        house.turn()

    def fail(batch: Any) -> None:
        house.runner.on_launch = house.runner.on_result = lambda batch: None
        raise RuntimeError("the step failed")

    setattr(house.runner, f"on_{fails}", fail)
    house.run()
    ends = [house.out.terminal(name) for name in ("one", "two", "three")]
    assert isinstance(ends[0] and ends[0].error, StepFailed) and isinstance(ends[1] and ends[1].error, StepFailed)
    assert ends[2] is not None and ends[2].finish_reason is FinishReason.STOP


class Slow(Masker):
    """Has time for some of the rows."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(1)
        self.rng, self.num_late = rng, 0

    def fill(self, rows: Any, masks: Any, budget_s: float) -> int:
        count = self.rng.randrange(1, len(rows) + 1)
        self.num_late += len(rows) - count
        return super().fill(rows[:count], masks, 1e9)


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
@pytest.mark.parametrize("max_step_tokens", [8, 512], ids=["chunk8", "whole"])
def test_a_late_mask_costs_its_row_a_step_and_changes_no_token(
    folder: Path, grammars: Grammars, overlap: bool, max_step_tokens: int
) -> None:
    """Penalised, scored, preempted, in the step after the prompt's last chunk: as alone."""
    requests = asked(max_step_tokens + 1, grammars)
    expected = solo(folder, requests)
    house = house_of(
        folder, ManualDevice(patience=2), overlap=overlap, num_pages=25, page_size=4, max_step_tokens=max_step_tokens
    )
    house.scheduler._matching.masker = slow = Slow(random.Random(1))
    for name, request in requests.items():
        submit(house, name, request)
    house.run()
    assert slow.num_late > 100 and house.scheduler.roster.num_preemptions > 0
    for name in requests:
        assert_equal(said(house, name), expected[name])


@pytest.mark.parametrize("overlap", [False, True], ids=["serial", "overlap"])
def test_a_storm_leaves_every_row_within_its_grammar(grammars: Grammars, overlap: bool) -> None:
    """Aborts, changed limits, preemptions and finishes at random moments, checked at every turn."""
    rng = random.Random(overlap)
    config = engine_config(overlap=overlap, num_pages=30, max_step_tokens=16)
    house, compiled = House(config, vocab_size=num_tokens()), [spec and grammars.compile(spec) for spec in SPECS]
    house.scheduler._matching.masker = Slow(rng)
    asked: dict[str, Any] = {}
    while len(asked) < 500 or not house.scheduler.idle:
        if len(asked) < 500 and rng.random() < 0.6:
            name, grammar = f"r{len(asked)}", rng.choice(compiled)
            asked[name] = grammar
            prompt = [rng.randrange(9) for _ in range(rng.randrange(1, 30))]
            params = SamplingParams(temperature=0, grammar=grammar)
            house.submit(name, prompt, rng.randrange(1, 60), params=params, stop_ids=(EOS_ID,))
        if asked and rng.random() < 0.2:
            name = rng.choice(list(asked))
            house.inbox.put(rng.choice([Abort(name), Finish(name), Update(request_id=name, max_tokens=9)]))
        if not house.scheduler.idle or house.inbox.wait(0):
            house.turn()
    assert house.scheduler.roster.num_preemptions > 0
    reasons = set()
    for name, grammar in asked.items():
        terminal, token_ids = house.out.terminal(name), house.out.token_ids(name)
        assert terminal is not None and terminal.error is None
        reasons.add(terminal.finish_reason)
        if grammar is not None:
            assert grammar.matcher().try_consume_tokens(token_ids) == len(token_ids)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}


def test_a_grammar_that_cannot_be_followed_ends_its_own_request(grammars: Grammars) -> None:
    class Broken:
        """A matcher that llguidance has given up."""

        def is_stopped(self) -> bool:
            return True

        def is_error(self) -> bool:
            return True

        def get_error(self) -> str:
            return "ParserTooComplex\nmore"

    class Filler:
        def fill(self, rows: Any, masks: Any, budget_s: float) -> int:
            masks[:] = -1
            return len(rows)

        def accept(self, tokens: Any) -> list[bool]:
            return [False] * len(tokens)

    class Grammar:
        is_worn = False

        def matcher(self) -> Broken:
            return Broken()

        def wear_out(self) -> None:
            self.is_worn = True

        def failure(self, matcher: Any) -> Exception:
            return InvalidRequest(matcher.get_error())

    grammar = Grammar()
    house = House(engine_config(), vocab_size=num_tokens())
    house.scheduler._matching.masker = Filler()
    house.submit("bad", [5], 20, params=SamplingParams(temperature=0, grammar=grammar))
    house.submit("good", [6], 20)
    house.run()
    bad, good = house.out.terminal("bad"), house.out.terminal("good")
    assert bad is not None and isinstance(bad.error, InvalidRequest) and "ParserTooComplex" in str(bad.error)
    assert good is not None and good.finish_reason is FinishReason.LENGTH
    assert grammar.is_worn


def test_masks_are_filled_while_the_step_runs_and_before_its_tail(grammars: Grammars) -> None:
    """Overlap: launch N+1's forward, commit N, fill, N+1's tail. Rows without a grammar change nothing of it."""
    order: list[str] = []
    house = House(engine_config(overlap=True), vocab_size=num_tokens())
    params = SamplingParams(temperature=0, grammar=grammars.compile(GrammarSpec("regex", "[a-z]{40}")))
    house.submit("masked", [5], 60, params=params)
    house.submit("plain", [6], 60)
    house.runner.on_launch = lambda batch: order.append(f"forward {batch.step}")
    house.runner.on_result = lambda batch: order.append(f"commit {batch.step}")
    fill, enqueue = house.scheduler.fill_masks, house.runner.enqueue
    house.scheduler.fill_masks = lambda *args: (order.append("fill"), fill(*args))[1]
    house.runner.enqueue = lambda batch: (order.append(f"tail {batch.step}"), enqueue(batch))[1]
    for _ in range(3):
        house.turn()
    assert order == [
        "forward 1", "fill", "tail 1",
        "forward 2", "commit 1", "fill", "tail 2",
        "forward 3", "commit 2", "fill", "tail 3",
    ]  # fmt: skip
