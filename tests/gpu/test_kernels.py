"""Our Triton kernels equal torch's operators, and the sampler the CPU's, draw for draw."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from asyncllm.attention.base import Lacking
from asyncllm.attention.kernels import FEW_TOKENS, cos_sin_table, rotate_and_store
from asyncllm.engine.batch import ALL_BARRED, NO_TOKEN
from asyncllm.models.kernels import norm_rows, put_rows, silu_mul, take_rows
from asyncllm.models.matvec import Norm, matvec
from asyncllm.runner import kernels as k
from asyncllm.runner.cutoff import NUM_KEYS, find_cuts
from asyncllm.runner.frame import _params
from asyncllm.runner.sampler import Draw, SamplingRows, pick
from tests.runner.driving import new_row

DEVICE = torch.device("cuda")


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(DEVICE, torch.bfloat16)


def close(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Row for row."""
    got, expected = got.float().flatten(1), expected.float().flatten(1)
    error = ((got - expected).norm(dim=1) / expected.norm(dim=1)).max()
    assert error < 6e-3, f"relative error {error:.2e}"


def unlike(rows: torch.Tensor) -> torch.Tensor:
    """Among them one of noughts, and one so small that eps counts: neither may touch another."""
    rows[1], rows[2] = 0, rows[2] * 1e-5
    return rows


def scale(rows: torch.Tensor, gain: float) -> torch.Tensor:
    return gain * torch.rsqrt(rows.float().square().mean(-1, keepdim=True) + 1e-6)


@pytest.mark.parametrize("size", [64, 896, 1024, 4096])
def test_norm_rows(size: int) -> None:
    x, weight = random(37, size, scale=9.0, seed=1), random(size, seed=3)
    x[5] *= 1e-4  # eps counts
    at = torch.tensor([36, 0, 5], dtype=torch.int32, device=DEVICE)
    rows = torch.empty(3, size, dtype=x.dtype, device=DEVICE)
    norm_rows(x, at, weight, rows, 1e-6)
    close(rows, F.rms_norm(x.float(), (size,), weight.float(), 1e-6)[[36, 0, 5]])


@pytest.mark.parametrize("size,hidden", [(160, 64), (3072, 1024), (12288, 4096), (8960, 1536)])
@pytest.mark.parametrize("bias", [False, True])
def test_silu_mul(size: int, hidden: int, bias: bool) -> None:
    x, out = random(19, 2 * size), torch.empty(19, size, dtype=torch.bfloat16, device=DEVICE)
    rows, offset = unlike(random(19, hidden, scale=40.0, seed=1)), random(2 * size, seed=2) if bias else None
    silu_mul(x, Lacking(rows, 1e-6, 64.0, offset), out)
    whole = x.float() * scale(rows, 64.0) + (0 if offset is None else offset.float())
    close(out, F.silu(whole[:, :size]) * whole[:, size:])


@pytest.mark.parametrize("size", [64, 896, 4096])
def test_rows_are_taken_and_put_back(size: int) -> None:
    source, at = random(50, size), torch.tensor([3, 7, 49, 0, 0], dtype=torch.int32, device=DEVICE)
    number = torch.tensor([3], dtype=torch.int32, device=DEVICE)
    some, back = (torch.zeros(n, size, dtype=torch.bfloat16, device=DEVICE) for n in (5, 50))
    take_rows(source, at, number, some)
    put_rows(some, at, number, back)
    assert torch.equal(some[:3], source[[3, 7, 49]]) and not some[3:].any()
    assert torch.equal(back[[3, 7, 49]], source[[3, 7, 49]]) and torch.count_nonzero(back.any(1)) == 3


@pytest.mark.parametrize("size,num_out", [(64, 256), (896, 1152), (1024, 4096), (3072, 1024), (12288, 4096)])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("glu,add", [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("magnitude", [3.0, 1e-3])  # at the second eps is half of it
def test_matvec(size: int, num_out: int, norm: bool, bias: bool, glu: bool, add: bool, magnitude: float) -> None:
    x, wide = random(1, size, scale=magnitude, seed=1), num_out * (2 if glu else 1)
    weight, offset = random(wide, size, scale=size**-0.5, seed=4), random(wide, seed=5) if bias else None
    out = random(1, num_out, seed=6)
    expected = F.linear(x.float() * (scale(x, 4.0) if norm else 1), weight.float())
    expected += 0 if offset is None else offset.float()
    expected = F.silu(expected[:, :num_out]) * expected[:, num_out:] if glu else expected
    expected += out.float() if add else 0
    matvec(x, weight, offset, out, norm=Norm(1e-6, 4.0) if norm else None, glu=glu, add=add)
    close(out, expected)


HEADS = [(16, 8, 128), (32, 8, 128), (4, 2, 64), (9, 3, 64), (14, 2, 64), (10, 5, 80), (12, 6, 96), (8, 1, 256)]


@pytest.mark.parametrize("heads,kv_heads,head_dim", HEADS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("lacks", ["nothing", "scale", "bias"])
@pytest.mark.parametrize("num_tokens", [33, FEW_TOKENS + 3])
def test_rotate_and_store(
    heads: int, kv_heads: int, head_dim: int, norm: bool, lacks: str, num_tokens: int
) -> None:
    page_size, width = 64, (heads + 2 * kv_heads) * head_dim
    qkv = random(num_tokens, width)
    weight = random(heads + kv_heads, head_dim, seed=1) if norm else None
    rows, bias = unlike(random(num_tokens, 320, scale=20.0, seed=2)), random(width, seed=3) if lacks == "bias" else None
    lacking = None if lacks == "nothing" else Lacking(rows, 1e-6, 16.0, bias)
    angles = torch.rand(512, head_dim // 2, device=DEVICE) * 6
    cos, sin = torch.cat((angles.cos(),) * 2, -1)[:, None], torch.cat((-angles.sin(), angles.sin()), -1)[:, None]
    slots = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE)  # slot 0 pads
    positions = torch.arange(num_tokens, dtype=torch.int32, device=DEVICE) * 13 % 512
    table = torch.randperm(8 * num_tokens, device=DEVICE).to(torch.int32).view(num_tokens, 8) + 1
    pages = torch.zeros(8 * num_tokens + 1, 2, kv_heads, page_size, head_dim, dtype=torch.bfloat16, device=DEVICE)
    q_out = torch.empty(num_tokens, heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
    rotate_and_store(qkv, lacking, q_out, pages, weight, 1e-6, cos_sin_table(cos, sin), slots, positions, table)

    x = qkv.float() * (1 if lacking is None else scale(rows, 16.0)) + (0 if bias is None else bias.float())
    x = x.view(num_tokens, -1, head_dim)
    qk, v = x[:, : heads + kv_heads], x[:, heads + kv_heads :]
    if weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, 1e-6) * weight.float()
    at = positions.long()
    qk = qk * cos[at] + qk.roll(head_dim // 2, -1) * sin[at]
    close(q_out, qk[:, :heads])
    for token in range(1, num_tokens):
        page, offset = table[token, positions[token] // page_size], positions[token] % page_size
        close(pages[page, 0, :, offset], qk[token, heads:])
        close(pages[page, 1, :, offset], v[token])
        pages[page, :, :, offset] = 0
    assert not pages.any(), "something else was written"


class Rows:
    """Places of the kernels for `num_rows` rows that draw from random logits."""

    def __init__(self, num_rows: int, vocab: int, num_padding: int = 2) -> None:
        self.num_rows, self.vocab = num_rows, vocab
        padded = num_rows + num_padding
        self.meta = torch.zeros(k.HEADER + padded, dtype=torch.int32, device=DEVICE)
        self.meta[k.NUM_ROWS] = num_rows
        self.meta[k.HEADER : k.HEADER + num_rows] = torch.arange(num_rows)
        self.slots = torch.arange(1, padded + 1, dtype=torch.int32, device=DEVICE)
        self.positions = torch.zeros(padded, dtype=torch.int32, device=DEVICE)
        self.params = torch.zeros(padded + 1, k.NUM_PARAMS, dtype=torch.int32, device=DEVICE)
        blocks = -(-vocab // k.BLOCK_TOKENS) * padded
        self.scratch = (torch.zeros(blocks, device=DEVICE), torch.zeros(blocks, dtype=torch.int32, device=DEVICE),
                        torch.zeros(blocks, device=DEVICE))  # fmt: skip
        self.outputs = torch.full((4, padded), -7, dtype=torch.int32, device=DEVICE)
        self.pool = torch.zeros(padded + 1, 4096, dtype=torch.int32, device=DEVICE)
        self.counts = torch.zeros(padded, NUM_KEYS, dtype=torch.int32, device=DEVICE)
        self.cut = (torch.zeros(padded, device=DEVICE), torch.zeros(padded, dtype=torch.int32, device=DEVICE))

    def draw(self, logits: torch.Tensor, columns: dict[str, np.ndarray], *, cut: bool = True) -> list[int]:
        position = columns["position"]
        self.positions[: self.num_rows] = torch.from_numpy(position - 1).to(DEVICE, torch.int32)
        named = {name: column.tolist() for name, column in columns.items() if name != "position"}
        rows = [_params(new_row(1, [1], **{name: named[name][i] for name in named})) for i in range(self.num_rows)]
        self.params[1 : self.num_rows + 1] = torch.from_numpy(np.stack(rows)).to(DEVICE)
        where = self.meta, self.slots, self.positions, self.params
        padded = torch.zeros(len(self.positions), logits.shape[1], dtype=logits.dtype, device=DEVICE)
        padded[: self.num_rows] = logits
        if cut:
            find_cuts(*where, padded, self.counts, self.cut, self.vocab)
            assert not self.counts.any(), "the histogram must be clean again"
        bounds = self.cut if cut else None
        k.draw(*where, padded, self.vocab, self.scratch, self.outputs, self.pool, bounds, sample=True)
        drawn: list[int] = self.outputs[0, : self.num_rows].tolist()
        pooled = self.pool[torch.arange(1, self.num_rows + 1), torch.from_numpy(position)].tolist()
        assert pooled == [max(token, 0) for token in drawn]
        return drawn


def reference(logits: torch.Tensor, columns: dict[str, np.ndarray]) -> list[int]:
    at = np.flatnonzero(columns["temperature"] > 0)
    kinds = {"temperature": np.float64, "top_p": np.float64, "min_p": np.float64, "seed": np.uint64}
    rows = SamplingRows(at, *(columns[name][at].astype(kinds.get(name, np.int64)) for name in
                              ("temperature", "top_k", "top_p", "min_p", "seed", "position")))  # fmt: skip
    drawn: list[int] = pick(logits.cpu().clone(), None, Draw.of(rows, torch.from_numpy)).tolist()
    return drawn


def settings(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    off = rng.random((3, num_rows)) < 0.4
    return {
        "temperature": np.where(rng.random(num_rows) < 0.15, 0.0, rng.uniform(0.3, 1.8, num_rows)),
        "top_k": np.where(off[0], 0, rng.integers(1, 100, num_rows)),
        "top_p": np.where(off[1], 1.0, rng.uniform(0.05, 0.99, num_rows)),
        "min_p": np.where(off[2], 0.0, rng.uniform(0.001, 0.3, num_rows)),
        "seed": rng.integers(0, 2**63, num_rows, dtype=np.int64),
        "position": rng.integers(1, 4000, num_rows),
    }


@pytest.mark.parametrize("vocab", [512, 4096, 50257, 151669])
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_draws_equal_the_reference(vocab: int, scale: float) -> None:
    """Over thousands of draws, filtered and not; what little may differ stands at equal values to 1e-5."""
    num_rows, differing, total = 64, 0, 0
    rows = Rows(num_rows, vocab)
    for seed in range(6):
        logits = random(num_rows, vocab + 11, scale=scale, seed=seed)
        columns = settings(num_rows, seed)
        got, expected = rows.draw(logits, columns), reference(logits[:, :vocab], columns)
        differing += sum(a != b for a, b in zip(got, expected, strict=True))
        total += num_rows
    assert differing <= total // 300, f"{differing} of {total} draws differ"


def test_unfiltered_draws_equal_the_reference_exactly() -> None:
    rows = Rows(256, 151669)
    for seed in range(4):
        logits, columns = random(256, 151936, scale=2.0, seed=seed), settings(256, seed)
        columns |= {"top_k": np.zeros(256, np.int64), "top_p": np.ones(256), "min_p": np.zeros(256)}
        assert rows.draw(logits, columns, cut=False) == reference(logits[:, :151669], columns)


def test_equal_logits_rank_by_id() -> None:
    rows = Rows(8, 9000)
    columns = settings(8, 0) | {"top_k": np.full(8, 3), "temperature": np.ones(8)}
    columns |= {"top_p": np.ones(8), "min_p": np.zeros(8)}
    for seed in range(20):
        columns["seed"] = np.arange(8) + 8 * seed
        assert set(rows.draw(torch.ones(8, 9000, dtype=torch.bfloat16, device=DEVICE), columns)) <= {0, 1, 2}


def test_rows_without_a_finite_number_yield_no_token() -> None:
    rows = Rows(5, 9000)
    logits, columns = random(5, 9000), settings(5, 1)
    logits[1, 8999], logits[2], logits[3, 0] = float("nan"), float("-inf"), float("inf")
    drawn = rows.draw(logits, columns)
    assert [min(token, 0) for token in drawn] == [0, NO_TOKEN, ALL_BARRED, NO_TOKEN, 0]


def test_the_smallest_temperatures_are_greedy() -> None:
    rows = Rows(32, 9000)
    logits, columns = random(32, 9000), settings(32, 2)
    columns["temperature"] = np.array([1e-45, 1e-38, 1e-20, 1e-9] * 8)
    drawn = torch.tensor(rows.draw(logits, columns), device=DEVICE)
    assert torch.equal(logits[torch.arange(32), drawn], logits.amax(-1)), "one of the equal best, by its noise"


def test_draws_follow_the_softmax() -> None:
    """Chi-square over 40 probable tokens of 4,100."""
    rows = Rows(256, 4100)
    logits = torch.full((1, 4100), -12.0)
    logits[0, 50:4050:100] = torch.randn(40, generator=torch.Generator().manual_seed(4)) * 1.5
    logits = logits.to(DEVICE, torch.bfloat16)
    counts = np.zeros(4100)
    columns = {"temperature": np.full(256, 0.8), "top_k": np.zeros(256, np.int64), "top_p": np.ones(256),
               "min_p": np.zeros(256), "seed": np.full(256, 11)}  # fmt: skip
    for batch in range(80):
        columns["position"] = np.arange(256) + 256 * (batch % 15) + 1
        columns["seed"] = np.full(256, 11 + batch)
        counts += np.bincount(rows.draw(logits.expand(256, -1), columns, cut=False), minlength=4100)
    probability = (logits[0].double().cpu() / 0.8).softmax(0).numpy()
    likely = probability * counts.sum() >= 5
    expected = probability[likely] * counts.sum()
    assert ((counts[likely] - expected) ** 2 / expected).sum() / (likely.sum() - 1) < 1.8
