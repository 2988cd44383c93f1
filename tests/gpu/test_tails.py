"""The tail's kernels, step after step on packed entries, against torch's reference; in Triton's interpreter too."""

import os
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncllm.device.cpu import CpuDevice
from asyncllm.engine.batch import ALL_BARRED, NO_TOKEN, Batch, NewRow
from asyncllm.runner import kernels as k
from asyncllm.runner.frame import KINDS, Frame, Kind, Packed, Packer, Shape
from asyncllm.runner.masks import Mask
from asyncllm.runner.penalties import recount
from asyncllm.runner.ranking import WIDTH
from asyncllm.runner.sampler import Draw, SamplingRows, pick
from asyncllm.runner.scoring import read, score
from asyncllm.runner.shaping import SlotShaping, counted
from asyncllm.runner.state import SlotSampling
from asyncllm.runner.tails import Tail
from asyncllm.types import MAX_LOGPROBS
from tests.runner.driving import engine_config, make_batch, new_row, shaping

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if IS_INTERPRETED else "cuda")
NUM_TOKENS, VOCAB = (4500, 4512) if IS_INTERPRETED else (151_669, 151_936)
MAX_ROWS = 10


class Place(CpuDevice):
    """Memory where the kernels run."""

    torch_device = DEVICE

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=DEVICE)


class Model:
    """Logits by token index, as they are put here."""

    hidden_size = 8

    class decoder:
        embedding = torch.zeros(1, dtype=torch.bfloat16)

    def __init__(self) -> None:
        self.given = torch.zeros(0, VOCAB)

    def logits(self, buffers: Any, rows: torch.Tensor, normed: Any, out: torch.Tensor) -> None:
        out.copy_(self.given[rows.long()])


class House:
    """Frame, packer and tail on one side, the reference's slots, pool and counts on the other."""

    def __init__(self) -> None:
        # An entry that holds the allowed ids of two rows.
        config = engine_config(max_running=MAX_ROWS, max_model_len=200, max_step_tokens=NUM_TOKENS // 8)
        self.frame = Frame(Place(), config, 4, NUM_TOKENS)
        self.packer = Packer(self.frame, NUM_TOKENS)
        self.model = Model()
        self.tail = Tail(Place(), self.frame, self.model, None, VOCAB, NUM_TOKENS)  # type: ignore[arg-type]
        self.sampling, self.shaping = SlotSampling(MAX_ROWS + 1), SlotShaping()
        self.texts: dict[int, list[int]] = {}
        self._step = 0

    def step(
        self, new: list[NewRow], given: torch.Tensor, masked: dict[int, np.ndarray] | None = None
    ) -> tuple[list[int], Kind]:
        """Every slot draws once from its row of `given`, as the reference does; `masked` are masks by row."""
        for row in new:
            self.texts[row.slot] = row.token_ids.tolist()
        rows = [(slot, len(text) - 1, 1, True) for slot, text in self.texts.items()]
        batch = make_batch(self._step, rows, new)
        if masked is not None:
            batch = msgspec.structs.replace(batch, masked=np.array(list(masked), np.int32))
        packed = self.pack(batch)
        counted_rows = [row for row in new if row.shaping is not None and row.shaping.counts]
        if counted_rows:
            slots = torch.tensor([row.slot for row in counted_rows], dtype=torch.int32, device=DEVICE)
            longest = max(len(row.token_ids) for row in counted_rows)
            recount(slots, self.frame.params, self.frame.token_pool, self.frame.counts, longest)
        self.model.given = torch.zeros(MAX_ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE)
        self.model.given[: len(rows)] = given.to(DEVICE)
        if masked is not None:
            self.send_masks(batch, masked)
        self.tail.run(MAX_ROWS, packed.kind)
        drawn = self.frame.outputs[self._step % 4, : len(rows)].tolist()
        told = self.told(batch)
        expected, expected_told = self.reference(batch, given[:, :NUM_TOKENS], masked or {})
        assert drawn == expected
        for (got, want), row in zip(zip(told, expected_told, strict=True), batch.slots.tolist(), strict=True):
            self.compare(got, want, row)
        for slot, token in zip(self.texts, drawn, strict=True):
            self.texts[slot].append(max(token, 0))
        self._step += 1
        self.check_counts()
        return drawn, packed.kind

    def pack(self, batch: Batch) -> Packed:
        frame = self.frame
        self.packer.note(batch)
        entry = np.zeros(frame.entry_len, np.int32)
        packed = self.packer.pack(batch, entry, Shape(16, batch.num_rows, False), batch.num_rows, batch.num_rows)
        frame.ring[self._step % 4] = torch.from_numpy(entry).to(DEVICE)
        frame.counter.fill_(self._step)
        k.unpack(frame.ring, frame.counter, frame.meta, frame.state, frame.slots, frame.positions)
        return packed

    def told(self, batch: Batch) -> list[Any]:
        ranked = self.frame.ranked[self._step % 4, : batch.num_rows].cpu().numpy()
        asked = self.packer.num_top[batch.slots]
        return [read(ranked[i : i + 1], 1) if asked[i] >= 0 else None for i in range(batch.num_rows)]

    def send_masks(self, batch: Batch, masked: dict[int, np.ndarray]) -> None:
        numbers = np.full(MAX_ROWS, -1, np.int32)
        numbers[list(masked)] = np.arange(len(masked))
        words = np.concatenate([numbers, *masked.values()])
        self.frame.masks[: len(words)] = torch.from_numpy(words).to(DEVICE)

    def reference(
        self, batch: Batch, given: torch.Tensor, masked: dict[int, np.ndarray]
    ) -> tuple[list[int], list[Any]]:
        self.sampling.write(batch.new_rows)
        self.shaping.write(batch.new_rows)
        slots, positions = batch.slots.astype(np.int64), (batch.starts + 1).astype(np.int64)
        pool, counts = torch.zeros(MAX_ROWS + 1, 201, dtype=torch.int32), torch.zeros(MAX_ROWS + 1, NUM_TOKENS)
        counts = counts.to(torch.int32)
        for slot, text in self.texts.items():
            pool[slot, : len(text)] = torch.tensor(text)
            ids, totals = counted(np.array(text, np.int32), self.prompt_len(slot))
            counts[slot, torch.from_numpy(ids)] = torch.from_numpy(totals).to(torch.int32)
        shaped = given.clone()
        if (shape := self.shaping.stage(slots, positions, NUM_TOKENS, 201, torch.from_numpy)) is not None:
            shape.apply(shaped, pool, counts)
        if masked:
            words = np.stack(list(masked.values()))
            Mask.of(np.array(list(masked)), words, NUM_TOKENS, torch.from_numpy).apply(shaped)
        banned = self.sampling.banned(slots, positions, NUM_TOKENS)
        sampling, at = self.sampling, np.flatnonzero(self.sampling.temperature[slots] > 0)
        of = slots[at]
        draw = Draw.of(
            SamplingRows(at, sampling.temperature[of], sampling.top_k[of], sampling.top_p[of], sampling.min_p[of],
                         sampling.seed[of], positions[at]), torch.from_numpy) if len(at) else None  # fmt: skip
        tokens = pick(shaped, None if banned is None else torch.from_numpy(banned), draw)
        told = [read(score(given[i : i + 1], tokens[i : i + 1], MAX_LOGPROBS).numpy(), 1) for i in range(len(slots))]
        asked = sampling.num_logprobs[slots] >= 0
        return tokens.tolist(), [one if asks else None for one, asks in zip(told, asked, strict=True)]

    def prompt_len(self, slot: int) -> int:
        shaping = self.shaping._shapings.get(slot)
        return shaping.prompt_len if shaping is not None else 0

    def compare(self, got: Any, want: Any, slot: int) -> None:
        assert (got is None) == (want is None)
        if got is None:
            return
        num_top = int(self.packer.num_top[slot])
        np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
        assert got.top_ids[:, :num_top].tolist() == want.top_ids[:, :num_top].tolist()
        np.testing.assert_allclose(got.top_logprobs[:, :num_top], want.top_logprobs[:, :num_top], atol=1e-4)

    def check_counts(self) -> None:
        for slot, text in self.texts.items():
            if self.shaping.counts(slot):
                ids, totals = counted(np.array(text, np.int32), self.prompt_len(slot))
                expected = torch.zeros(NUM_TOKENS, dtype=torch.int32)
                expected[torch.from_numpy(ids)] = torch.from_numpy(totals).to(torch.int32)
                assert torch.equal(self.frame.counts[slot].cpu(), expected)


def text(slot: int, length: int) -> list[int]:
    return [(3 + 7 * slot + 13 * j) % 60 for j in range(length)]


def mixed_rows() -> list[NewRow]:
    few = np.arange(40, 48, dtype=np.int32)
    sampled = [{"temperature": temperature, "seed": seed} for temperature, seed in ((0.8, 5), (1.1, 9), (1.0, 2))]
    words = ((40, 41), (42,), (41, 40, 40), (40, 40))
    penalties = shaping(prompt_len=8, presence=1.0, frequency=0.5, repetition=1.3)
    return [
        new_row(1, text(1, 9)),
        new_row(2, text(2, 30), num_logprobs=2, **sampled[0]),
        new_row(3, text(3, 12), num_logprobs=0, shaping=penalties),
        new_row(4, text(4, 5), num_logprobs=20, top_k=30, shaping=shaping(prompt_len=5, frequency=-0.7), **sampled[1]),
        new_row(5, text(5, 3), shaping=shaping({7: 9.5, 4499: -3.0, 8: -100.0}, 3, bad=((7,),))),
        new_row(6, text(6, 4), shaping=shaping(prompt_len=4, allowed=few, repetition=2.0), **sampled[2]),
        new_row(7, text(7, 6), shaping=shaping(prompt_len=2, allowed=few[:3], bad=words)),
        new_row(8, text(8, 4), stop_ids=tuple(range(0, 4500, 2)[:60]), min_len=9),
    ]


def logits(num_rows: int, seed: int) -> torch.Tensor:
    return (torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3).to(torch.bfloat16)


def test_shaped_ranked_and_plain_rows_step_after_step() -> None:
    house = House()
    assert house.step(mixed_rows(), logits(8, 0))[1] == Kind(True, True, True, True)
    for seed in range(1, 7):
        house.step([], logits(8, seed))
    again = [new_row(3, text(9, 20), shaping=shaping(prompt_len=20, presence=2.0)), new_row(4, text(1, 7))]
    house.step(again, logits(8, 20))
    house.step([], logits(8, 21))


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_each_kind_is_chosen_and_draws_as_the_reference(kind: Kind) -> None:
    house = House()
    more: dict[str, Any] = {"temperature": 0.9, "seed": 3} if kind.sample else {}
    if kind.shape:
        more["shaping"] = shaping({9: 3.0}, 4, frequency=0.4)
    if kind.rank:
        more["num_logprobs"] = 5
    if kind == Kind(True, True):
        more["top_p"] = 0.8
    masked = {1: mask_of(range(0, NUM_TOKENS, 5))} if kind.mask else None
    new = [new_row(1, text(1, 6)), new_row(2, text(2, 8), **more)]
    for seed in range(3):
        drawn, chosen = house.step(new if not seed else [], logits(2, seed), masked)
        assert chosen == kind and (not kind.mask or drawn[1] % 5 == 0)


def mask_of(ids: Any) -> np.ndarray:
    bits = np.zeros(32 * -(-NUM_TOKENS // 32), np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def test_masked_rows_among_others_and_what_no_mask_leaves() -> None:
    house = House()
    masks = {1: mask_of([NUM_TOKENS - 1]), 4: mask_of(range(31, 65)), 6: mask_of([])}
    drawn, kind = house.step(mixed_rows(), logits(8, 0), masks)
    assert kind == Kind(True, True, True, True, True)
    assert drawn[1] == NUM_TOKENS - 1 and 31 <= drawn[4] < 65 and drawn[6] == ALL_BARRED
    house.step([], logits(8, 1), {7: mask_of(range(9))})
    house.step([], logits(8, 2))


def test_rows_alone_draw_what_they_draw_among_others() -> None:
    rows, given = mixed_rows()[1:6], [logits(5, seed) for seed in range(3)]
    together, alone = House(), [House() for _ in rows]
    for step in range(3):
        drawn, _ = together.step(rows if not step else [], given[step])
        for i, row in enumerate(rows):
            assert alone[i].step([row] if not step else [], given[step][i : i + 1])[0] == [drawn[i]]


def test_equal_logits_rank_by_id_and_a_broken_row_ends_alone() -> None:
    house = House()
    rows = [new_row(1, text(1, 5), num_logprobs=3), new_row(2, text(2, 5), shaping=shaping(prompt_len=5, presence=1.0))]
    house.step(rows, logits(2, 0))
    batch = make_batch(1, [(1, 5, 1, True), (2, 5, 1, True)])
    packed = house.pack(batch)
    given = torch.ones(MAX_ROWS, VOCAB, dtype=torch.bfloat16, device=DEVICE)
    given[1, 17] = float("nan")
    house.model.given = given
    house.tail.run(MAX_ROWS, packed.kind)
    assert house.frame.outputs[1, :2].tolist() == [0, NO_TOKEN]
    assert house.frame.ranked[1, 0, 1:4].tolist() == [0, 1, 2]
    assert int((house.frame.counts[2] & (2**30 - 1)).sum()) == 1, "what is no token is not counted"


def test_a_prompt_is_scored_position_by_position() -> None:
    house = House()
    prompt = text(4, 37)
    batch = make_batch(0, [(3, 36, 1, True)], [new_row(3, prompt)])
    house.pack(batch)
    given = logits(36, 1)
    house.model.given = given.to(DEVICE)
    at = torch.arange(36, dtype=torch.int32, device=DEVICE)
    scored = house.tail.score(at, 3, 1, 4)
    assert scored.shape == (36, WIDTH)
    got = read(scored.cpu().numpy(), 36)
    want = read(score(given[:, :NUM_TOKENS], torch.tensor(prompt[1:]), 4).numpy(), 36)
    np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    assert got.top_ids[:, :4].tolist() == want.top_ids.tolist()
    np.testing.assert_allclose(got.top_logprobs[:, :4], want.top_logprobs, atol=1e-4)
    own = got.top_ids[:, :4] == np.array(prompt[1:])[:, None]
    assert (got.top_logprobs[:, :4][own] == np.broadcast_to(got.logprobs[:, None], own.shape)[own]).all(), "bit for bit"
