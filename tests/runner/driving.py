"""Hand-made batches: drive a ModelRunner without a scheduler."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncllm.config import EngineConfig
from asyncllm.engine.batch import Batch, NewRow, Shaping
from asyncllm.runner.runner import ModelRunner


def engine_config(**changes: Any) -> EngineConfig:
    values: dict[str, Any] = {
        "device": "cpu", "dtype": "float32", "threads": 1, "page_size": 16, "num_pages": 129,
        "max_running": 8, "max_waiting": 8, "max_step_tokens": 512, "max_model_len": 256,
        "overlap": False, "prefix_cache": False,
    }  # fmt: skip
    return EngineConfig(**(values | changes))


def new_row(slot: int, token_ids: Sequence[int], **changes: Any) -> NewRow:
    values: dict[str, Any] = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0, "stop_ids": (), "min_len": 0,
    }  # fmt: skip
    return NewRow(slot=slot, token_ids=np.array(token_ids, np.int32), **(values | changes))


def shaping(bias: dict[int, float] | None = None, prompt_len: int = 2, **changes: Any) -> Shaping:
    ids, values = np.array(list(bias or {}), np.int32), np.array(list((bias or {}).values()), np.float32)
    return Shaping(prompt_len=prompt_len, bias_ids=ids, biases=values, **changes)


def make_batch(
    step: int,
    rows: Sequence[tuple[int, int, int, bool]],  # slot, start, length, wants_token
    new_rows: Sequence[NewRow] = (),
    page_deltas: Sequence[tuple[int, int, int]] = (),
) -> Batch:
    slots, starts, lengths, wants_token = zip(*rows, strict=True)
    return Batch(
        step=step,
        slots=np.array(slots, np.int32),
        starts=np.array(starts, np.int32),
        lengths=np.array(lengths, np.int32),
        wants_token=np.array(wants_token, np.bool_),
        new_rows=tuple(new_rows),
        page_deltas=np.array(page_deltas, np.int32).reshape(-1, 3),
    )


class Driver:
    """Slots with pages of their own, in shuffled order so that no page happens to be where it would be anyway."""

    def __init__(self, runner: ModelRunner, config: EngineConfig, seed: int = 0) -> None:
        self.runner = runner
        self.lengths: dict[int, int] = {}  # computed positions of each slot
        self.outputs: dict[int, list[int]] = {}
        self._step = 0
        self._pages_a_slot = config.usable_pages // config.max_running
        self._pages = np.random.default_rng(seed).permutation(np.arange(1, config.num_pages)).tolist()
        self._new: list[NewRow] = []
        self._deltas: list[tuple[int, int, int]] = []

    def admit(self, slot: int, prompt_ids: Sequence[int], **sampling: Any) -> None:
        """Put a prompt into a slot with the next step()."""
        self._deltas += [(slot, i, page) for i, page in enumerate(self.pages_of(slot))]
        self.rewrite(slot, prompt_ids, **sampling)
        self.lengths[slot], self.outputs[slot] = 0, []

    def pages_of(self, slot: int) -> list[int]:
        first = (slot - 1) * self._pages_a_slot
        return self._pages[first : first + self._pages_a_slot]

    def rewrite(self, slot: int, token_ids: Sequence[int], **sampling: Any) -> None:
        """Put another text into the token pool with the next step(), as a resume does."""
        self._new.append(new_row(slot, token_ids, **sampling))

    def step(self, *rows: tuple[int, int, bool]) -> list[int]:
        """Compute (slot, length, wants_token) rows; returns and records the drawn tokens."""
        batch = make_batch(
            self._step, [(slot, self.lengths[slot], n, wants) for slot, n, wants in rows], self._new, self._deltas
        )
        self._step, self._new, self._deltas = self._step + 1, [], []
        drawn: list[int] = self.runner.launch(batch).result().token_ids.tolist()
        for slot, length, _ in rows:
            self.lengths[slot] += length
        for slot, token in zip([slot for slot, _, wants in rows if wants], drawn, strict=True):
            self.outputs[slot].append(token)
        return drawn

    def generate(self, slot: int, prompt_ids: Sequence[int], num_tokens: int, chunk: int = 512, **kw: Any) -> list[int]:
        """One prompt alone: in chunks, then token by token."""
        self.admit(slot, prompt_ids, **kw)
        for begin in range(0, len(prompt_ids), chunk):
            length = min(chunk, len(prompt_ids) - begin)
            self.step((slot, length, begin + length == len(prompt_ids)))
        for _ in range(num_tokens - 1):
            self.step((slot, 1, True))
        return self.outputs[slot]
