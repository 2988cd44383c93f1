"""Our kernels beside those they replaced, on work as steps have it: graph replays, medians, a JSON line each.

    python -m bench.kernels [--part decode matvec]

`decode`: one layer's attention of decode rows, beside FlashInfer's XQA; `floor_us` is what their keys and values take
at the bandwidth of a device copy, measured in the same run. `matvec`: one token's linears of a layer, with norm and
activation, beside cuBLAS (16 rows, as it is fastest) and the activation's kernel; there the norm of qkv waits for
attention's kernel, which is in neither.
"""

import argparse
import functools
import json
import random
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from asyncllm.attention.base import Lacking
from asyncllm.attention.decode import Decode
from asyncllm.models.kernels import silu_mul
from asyncllm.models.matvec import Norm, matvec

from .burst import machine

DEVICE = torch.device("cuda")
PAGE = 64
NUM_LAYERS = 10  # that take turns, so that no replay finds its keys in the cache
XQA_WORKSPACE_BYTES = 128 << 20


def replay_us(run: Callable[[], None], times: int = 15) -> float:
    """Device time of a run, launched as a graph."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
        graph.replay()
        return statistics.median(_timed(graph, stream) for _ in range(times))


def _timed(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record(stream)
    graph.replay()
    end.record(stream)
    stream.synchronize()
    return 1e3 * begin.elapsed_time(end)


@functools.cache
def bytes_a_us() -> float:
    """Of a device copy, read and written bytes counted."""
    source = torch.randn(1 << 28, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / replay_us(lambda: target.copy_(source))


def burst_lengths(count: int) -> list[int]:
    """Context lengths as of rows somewhere in burst-256."""
    rng = random.Random(count)
    return [rng.randint(100, 1024) + rng.randint(0, rng.randint(100, 1024)) for _ in range(count)]


CASES = {
    "1 x 768": [768], "4 x 768": [768] * 4, "16 x 768": [768] * 16,
    **{f"{count} of burst-256": burst_lengths(count) for count in (32, 64, 128, 192, 256)},
    "32k and 15 x 500": [32768] + [500] * 15, "100k and 63 x 500": [100_000] + [500] * 63,
}  # fmt: skip


class DecodeCase:
    def __init__(self, lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int) -> None:
        counts = [-(-length // PAGE) for length in lengths]
        order = (torch.randperm(sum(counts), device=DEVICE) + 1).to(torch.int32)
        self.tables = torch.zeros(len(lengths), max(counts) + 1, dtype=torch.int32, device=DEVICE)
        begin = 0
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[begin : begin + count]
            begin += count
        shape = (sum(counts) + 1, 2, num_kv_heads, PAGE, head_dim)
        self.pages = [torch.randn(shape, dtype=torch.bfloat16, device=DEVICE) for _ in range(NUM_LAYERS)]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        self.q = torch.randn(len(lengths), num_heads, head_dim, dtype=torch.bfloat16, device=DEVICE)
        self.out = torch.empty_like(self.q)
        self.floor_us = 4 * sum(lengths) * num_kv_heads * head_dim / bytes_a_us()
        page_shape = (num_kv_heads, PAGE, head_dim)
        self._decode = Decode(len(lengths), self.tables.shape[1], page_shape, num_heads, None, DEVICE)
        self._decode.plan(self.tables, self.seq_lens)

    def ours(self) -> None:
        for pages in self.pages:
            self._decode.run(self.q, self.out, pages)

    def xqa(self, workspace: Tensor) -> None:
        import flashinfer

        for pages in self.pages:
            flashinfer.decode.xqa_batch_decode_with_kv_cache(
                query=self.q, kv_cache=(pages[:, 0], pages[:, 1]), workspace_buffer=workspace,
                block_tables=self.tables, seq_lens=self.seq_lens, max_seq_len=self.tables.shape[1] * PAGE,
                bmm1_scale=self.q.shape[-1] ** -0.5, bmm2_scale=1.0, out=self.out, kv_layout="HND",
            )  # fmt: skip


def decode() -> Iterator[dict[str, Any]]:
    workspace = torch.zeros(XQA_WORKSPACE_BYTES, dtype=torch.uint8, device=DEVICE)
    for heads in ((16, 8, 128), (32, 8, 128), (32, 8, 64)):
        for name, lengths in CASES.items():
            case = DecodeCase(lengths, *heads)
            yield {
                "kernel": "decode", "heads": heads, "rows": name, "floor_us": case.floor_us,
                "xqa_us": replay_us(lambda case=case: case.xqa(workspace)) / NUM_LAYERS,  # type: ignore[misc]
                "ours_us": replay_us(case.ours) / NUM_LAYERS,
            }  # fmt: skip


# name: (in_features, out_features, normed, gated)
SHAPES = {
    "qwen3-0.6b": {
        "qkv": (1024, 4096, True, False), "output": (2048, 1024, False, False),
        "gate_up": (1024, 3072, True, True), "down": (3072, 1024, False, False),
    },
    "qwen3-8b": {
        "qkv": (4096, 6144, True, False), "output": (4096, 4096, False, False),
        "gate_up": (4096, 12288, True, True), "down": (12288, 4096, False, False),
    },
}  # fmt: skip


class MatvecCase:
    def __init__(self, size: int, num_out: int, normed: bool, gated: bool) -> None:
        self._normed, self._gated = normed, gated
        rows = num_out * (2 if gated else 1)
        self.weights = [
            (torch.randn(rows, size, device=DEVICE) * size**-0.5).to(torch.bfloat16) for _ in range(NUM_LAYERS)
        ]
        self._x = torch.randn(16, size, dtype=torch.bfloat16, device=DEVICE)
        self._wide = torch.empty(16, rows, dtype=torch.bfloat16, device=DEVICE)
        self._out = torch.zeros(16, num_out, dtype=torch.bfloat16, device=DEVICE)

    def ours(self) -> None:
        norm = Norm(1e-6, 1.0) if self._normed else None
        for weight in self.weights:
            matvec(self._x[:1], weight, None, self._out[:1], norm=norm, glu=self._gated, add=not self._normed)

    def cublas(self) -> None:
        for weight in self.weights:
            if self._normed:
                torch.mm(self._x, weight.t(), out=self._wide)
            else:
                self._out.addmm_(self._x, weight.t())
            if self._gated:
                silu_mul(self._wide, Lacking(self._x, 1e-6, 1.0, None), self._out)


def one_token() -> Iterator[dict[str, Any]]:
    for model, linears in SHAPES.items():
        for name, shape in linears.items():
            case = MatvecCase(*shape)
            yield {
                "kernel": "matvec", "model": model, "linear": name,
                "floor_us": case.weights[0].nbytes / bytes_a_us(),
                "cublas_us": replay_us(case.cublas) / NUM_LAYERS, "ours_us": replay_us(case.ours) / NUM_LAYERS,
            }  # fmt: skip


PARTS = {"decode": decode, "matvec": one_token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", default=list(PARTS), choices=tuple(PARTS))
    with torch.inference_mode():
        for part in parser.parse_args().part:
            for line in PARTS[part]():
                rounded = {name: round(value, 2) if isinstance(value, float) else value for name, value in line.items()}
                print(json.dumps(rounded | machine()), flush=True)


if __name__ == "__main__":
    main()
