"""What decoders are made of: linears, norm, rotary embedding, attention and feed-forward blocks.

GPU thread. It never knows pages, rows or sampling: attention arrives as a Plan, everything else as tensors.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from ..attention.base import Plan
from .config import ModelConfig, RopeConfig

Linear = Callable[[Tensor], Tensor]  # [..., in_features] -> [..., out_features]
MakeLinear = Callable[[Tensor, Tensor | None], Linear]  # weight [out_features, in_features], bias


class Placement(NamedTuple):
    """Where a model goes and how its linears are computed there."""

    device: torch.device
    dtype: torch.dtype  # of stored weights
    compute_dtype: torch.dtype  # of activations
    make_linear: MakeLinear
    num_tokens: int | None = None  # ids the tokenizer knows; the head's padding rows beyond are never computed
    max_len: int | None = None  # positions the rotary table covers


class Weights(Protocol):
    """A model's tensors by name, as a family's build() reads them."""

    def __call__(self, name: str, num_rows: int | None = None) -> Tensor:
        """One tensor, or its first rows, in the placement's dtype on its device."""

    def fused(self, *names: str) -> Tensor:
        """Several tensors stacked along their rows."""


@dataclass(frozen=True, slots=True)
class PlainLinear:
    weight: Tensor  # [out_features, in_features], device
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class PackedLinear:
    """float16 weights in FBGEMM's layout, float32 activations: 16-bit weights on a CPU without bf16 instructions.

    All linears of SmolLM2-135M, 2 threads of AVX2, ms a step: 23 against 28 for F.linear in bf16 at batch 1,
    52 against 208 at batch 8 (278 for widening the weights to float32 first), and at 512 rows within 16% of
    float32 weights, which are twice the bytes. A bf16 weight of magnitude 2^-17 to 65504 is exact in float16,
    a smaller one is off by 3e-8 at most; float32 activations make the step more exact than bf16's own.
    """

    LARGEST = 65504.0
    BLOCK = 512  # FBGEMM gives memory to whole blocks of input features, also where the last is nearly empty
    WASTE_BYTES = 1 << 20

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        num_packed = weight.shape[1] - self._num_beside(*weight.shape)
        bias = None if bias is None else bias.float()
        self._packed = torch.ops.quantized.linear_prepack_fp16(weight[:, :num_packed].float(), bias)
        self._num_packed = num_packed
        self._beside = weight[:, num_packed:].t().float().contiguous()  # [in_features - num_packed, out_features]

    @classmethod
    def _num_beside(cls, out_features: int, in_features: int) -> int:
        """Input features that are kept in float32 beside the packed ones, where a block for them would waste much.

        SmolLM2's 576 features fill 1.125 blocks: its gate_up and head so take 108 MB less. These two cost the
        same at batch 1 and 6 to 17% more at batch 8 (one thread).
        """
        over = in_features % cls.BLOCK
        saved = out_features * (2 * (cls.BLOCK - over) - 2 * over)
        return over if over < in_features and 0 < over < cls.BLOCK // 4 and saved > cls.WASTE_BYTES else 0

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor
        if self._num_packed == x.shape[1]:
            out = torch.ops.quantized.linear_dynamic_fp16(x, self._packed)
            return out
        out = torch.ops.quantized.linear_dynamic_fp16(x[:, : self._num_packed], self._packed)
        return out.addmm_(x[:, self._num_packed :], self._beside)


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    """PackedLinear, or float32 weights where float16 cannot hold them."""
    low, high = torch.aminmax(weight)
    if max(-float(low), float(high)) > PackedLinear.LARGEST:
        return PlainLinear(weight.float(), None if bias is None else bias.float())
    return PackedLinear(weight, bias)


class RMSNorm:
    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight  # [..., size], compute dtype, device
        self.eps = eps
        self._eps_tensor = weight.new_tensor(eps)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [..., size], normed over its last dimension."""
        if x.element_size() < 4:
            return F.rms_norm(x, x.shape[-1:], None, self.eps) * self.weight  # sums in float32 inside
        # 21 us at batch 1 where torch's own, on a CPU a chain of seven operators, took 37; 61 of them a step.
        length = torch.linalg.vector_norm(x, 2, -1, True)  # [..., 1]
        scale = torch.addcmul(self._eps_tensor, length, length, value=1 / x.shape[-1]).rsqrt_()
        return (x * scale).mul_(self.weight)


@dataclass(frozen=True, slots=True)
class Rotation:
    """cos and sin of one step's positions, in the form rotate() wants them."""

    cos: Tensor  # [num_tokens, 1, head_dim], compute dtype, device
    sin: Tensor  # [num_tokens, 1, head_dim], the first half negated

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, num_heads, head_dim]; pairs are (i, i + head_dim / 2)."""
        # roll with a negated half: 17 us where negating and concatenating took 34.
        return torch.addcmul(x * self.cos, x.roll(x.shape[-1] // 2, -1), self.sin)


class RotaryTable:
    """cos and sin of every position, computed once."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device, max_len: int) -> None:
        # float32 on purpose, as in transformers: models were trained with its rounding. float64 stays exact.
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        frequencies = inverse_frequencies(config.rope, config.head_dim, exact)
        angles = torch.outer(torch.arange(max_len, dtype=exact), frequencies)
        factor = attention_factor(config.rope)
        cos, sin = angles.cos() * factor, angles.sin() * factor
        self._cos = torch.cat((cos, cos), -1)[:, None].to(device, dtype)  # [max_len, 1, head_dim]
        self._sin = torch.cat((-sin, sin), -1)[:, None].to(device, dtype)

    def at(self, positions: Tensor) -> Rotation:
        return Rotation(self._cos.index_select(0, positions), self._sin.index_select(0, positions))


def inverse_frequencies(rope: RopeConfig, head_dim: int, dtype: torch.dtype) -> Tensor:
    """[head_dim / 2]"""
    exponents = torch.arange(0, head_dim, 2).to(dtype) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, head_dim)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    turns = rope.original_max_position * plain / (2 * math.pi)
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return (1 - keep) * plain / rope.factor + keep * plain


def _yarn(plain: Tensor, rope: RopeConfig, head_dim: int) -> Tensor:
    """As llama3, with the blend linear in the index of the frequency instead of in its turns."""

    def index_of(num_turns: float) -> float:
        turns = rope.original_max_position / (num_turns * 2 * math.pi)
        return head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2).to(plain.dtype)
    stretch = ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    return plain / rope.factor * stretch + plain * (1 - stretch)


def attention_factor(rope: RopeConfig) -> float:
    """What yarn multiplies cos and sin by; 1 for the other kinds."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    qkv: Linear
    output: Linear
    qk_norm: RMSNorm | None  # weight [num_heads + num_kv_heads, head_dim]
    num_heads: int
    num_kv_heads: int

    def __call__(self, x: Tensor, rotation: Rotation, layer: int, plan: Plan) -> Tensor:
        heads, kv_heads = self.num_heads, self.num_kv_heads
        qkv = self.qkv(x).view(x.shape[0], heads + 2 * kv_heads, -1)  # [num_tokens, heads + 2 kv_heads, head_dim]
        qk, v = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        if self.qk_norm is not None:
            qk = self.qk_norm(qk)
        qk = rotation(qk)
        return self.output(plan.run(layer, qk[:, :heads], qk[:, heads:], v))


@dataclass(frozen=True, slots=True)
class FeedForward:
    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))


@dataclass(frozen=True, slots=True)
class Block:
    attention_norm: RMSNorm
    attention: SelfAttention
    feed_forward_norm: RMSNorm
    feed_forward: FeedForward

    def __call__(self, x: Tensor, rotation: Rotation, layer: int, plan: Plan) -> Tensor:
        """x: [num_tokens, hidden_size], the residual stream, added to in place."""
        x += self.attention(self.attention_norm(x), rotation, layer, plan)
        x += self.feed_forward(self.feed_forward_norm(x))
        return x


@dataclass(frozen=True, slots=True)
class Decoder:
    """A whole model. `hidden` leaves the last norm to logits(), which sees fewer rows."""

    embedding: Tensor  # [vocab_size, hidden_size], weights' dtype, device
    rotary: RotaryTable
    blocks: tuple[Block, ...]
    norm: RMSNorm
    head: Linear
    compute_dtype: torch.dtype  # of activations

    def __call__(self, ids: Tensor, positions: Tensor, plan: Plan) -> Tensor:
        """ids, positions: [num_tokens], device. Returns [num_tokens, hidden_size], compute dtype."""
        x = F.embedding(ids, self.embedding).to(self.compute_dtype)  # [num_tokens, hidden_size], a copy either way
        rotation = self.rotary.at(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, rotation, layer, plan)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [num_rows, hidden_size] -> [num_rows, num_tokens of the tokenizer], compute dtype."""
        return self.head(self.norm(hidden))
