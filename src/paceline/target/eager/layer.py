"""One decoder layer: attention, then a gated feed-forward network or a mixture of such, each added to the
residual stream."""

from collections.abc import Callable, Iterator, MutableMapping
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.target.eager.attention import SERIAL, Layout, attend_spans
from paceline.target.eager.linear import (
    CUDA_TILE,
    GroupedLinear,
    Linear,
    RowTile,
    bytes_of,
    make_linear,
)
from paceline.target.eager.rope import rotate
from paceline.target.weights.model_config import Experts, ModelConfig

Rotation = tuple[Tensor, Tensor]  # cosines, signed sines: see rope.rotate
Activation = Callable[[Tensor, Tensor], None]  # in place, of gate and up [rows, ff]


class Norm:
    """Root-mean-square norm of a float32 row."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight, self._eps = weight, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self._eps)


class Store:
    """Weights by name. Each is taken out once, so that a packed copy replaces what it was made of."""

    def __init__(self, tensors: MutableMapping[str, Tensor], device: torch.device, eps: float) -> None:
        self._tensors, self._device, self._eps = tensors, device, eps
        self.dtype = tensors["embed"].dtype
        self.bytes_held = 0

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def take(self, name: str) -> Tensor:
        return self._tensors.pop(name).to(self._device)

    def small(self, name: str) -> Tensor:
        """A float32 copy, which keeps no larger buffer alive."""
        tensor = self.take(name).to(torch.float32, copy=True)
        self.bytes_held += bytes_of(tensor)
        return tensor

    def norm(self, name: str) -> Norm:
        return Norm(self.small(name), self._eps)

    def maybe_norm(self, name: str) -> Norm | None:
        return self.norm(name) if name in self else None

    def linear(self, *names: str) -> Linear:
        """One product for several weights of the same input."""
        weights = [self.take(name) for name in names]
        bias = None
        if any(f"{name}_bias" in self for name in names):
            parts = [
                self.take(f"{name}_bias") if f"{name}_bias" in self else weight.new_zeros(len(weight))
                for name, weight in zip(names, weights, strict=True)
            ]
            bias = torch.cat(parts)
        return self.linear_of(weights[0] if len(weights) == 1 else torch.cat(weights), bias)

    def linear_of(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        made = make_linear(weight.contiguous(), bias)
        self.bytes_held += made.bytes_held
        return made


class Layer:
    def __init__(self, index: int, shape: ModelConfig, store: Store) -> None:
        name = f"layers.{index}."
        self.local = shape.local(index)
        self._dtype, self._eps = store.dtype, shape.norm_eps
        self._heads, self._kv_heads, self._head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self._attn_norm = store.norm(name + "attn_norm")
        self.qkv = store.linear(name + "q", name + "k", name + "v")
        self._qk_norm = _qk_norm(name, shape, store)
        self._sinks = store.small(name + "sinks") if name + "sinks" in store else None
        self.o = store.linear(name + "o")
        self._post_attn_norm = store.maybe_norm(name + "post_attn_norm")
        self._ffn_norm = store.norm(name + "ffn_norm")
        self.mixture = None
        if shape.experts is not None and shape.sparse(index):
            self.mixture = Mixture(name, shape.experts, _activation(shape), store)
        self.feed_forward = self.mixture or FeedForward(name, _activation(shape), store)
        self._post_ffn_norm = store.maybe_norm(name + "post_ffn_norm")

    def products(self) -> Iterator[tuple[str, object, str]]:
        """Of every product a name shared by those of one shape, its holder, and the holder's attribute."""
        yield from (("qkv", self, "qkv"), ("o", self, "o"))
        yield from self.feed_forward.products()

    def __call__(
        self, x: Tensor, layout: Layout, rotation: Rotation, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Adds to x [rows, width] in place; gives the layout's keys and values."""
        qkv = layout.arrange(self.qkv(self._attn_norm(x).to(self._dtype))).float()
        qkv = qkv.view(len(qkv), -1, self._head_dim).transpose(0, 1)
        qk, v = qkv[: -self._kv_heads], qkv[-self._kv_heads :]
        if self._qk_norm is not None:
            qk = F.rms_norm(qk, (self._head_dim,), None, self._eps) * self._qk_norm
        qk = rotate(qk, *rotation)
        q, k = qk[: self._heads], qk[self._heads :]
        seen = layout.restore(attend_spans(q, k, v, keys, values, layout, self.local, self._sinks))
        _add(x, self.o(seen.to(self._dtype)), self._post_attn_norm)
        _add(x, self.feed_forward(self._ffn_norm(x).to(self._dtype)), self._post_ffn_norm)
        return k, v


class FeedForward:
    """A gated network (arXiv 2002.05202)."""

    def __init__(self, name: str, activate: Activation, store: Store) -> None:
        self.gate_up = store.linear(name + "gate", name + "up")
        self.down = store.linear(name + "down")
        self._activate = activate

    def products(self, kind: str = "") -> Iterator[tuple[str, object, str]]:
        yield from ((kind + part, self, part) for part in ("gate_up", "down"))

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        rows = max(1, SERIAL // gate.shape[-1]) if x.device.type == "cpu" else len(x)
        for some_gate, some_up in zip(torch.split(gate, rows), torch.split(up, rows), strict=True):
            self._activate(some_gate, some_up)
        return self.down(gate * up)


class Mixture:
    """A mixture of experts (arXiv 1701.06538), of which the router chooses some for each row.

    An expert takes the rows that chose it together, padded to the row tile, and a row adds up its experts in
    their order, so that its bits do not depend on the choices of other rows.
    """

    def __init__(self, name: str, experts: Experts, activate: Activation, store: Store) -> None:
        self.tile = RowTile(CUDA_TILE)
        self.router = store.linear(name + "router")
        each = (f"{name}experts.{i}." for i in range(experts.count))
        self._experts = [FeedForward(expert, activate, store) for expert in each]
        self._used, self._renormalise = experts.used, experts.renormalise

    def products(self) -> Iterator[tuple[str, object, str]]:
        yield "router", self, "router"
        for expert in self._experts:
            yield from expert.products("expert ")

    def __call__(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(self._used)
        if self._renormalise:
            weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros(x.shape, device=x.device)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, rank = (chosen == expert).nonzero(as_tuple=True)
            padded = F.pad(rows, (0, self.tile.padded(len(rows)) - len(rows)))
            made = self._experts[expert](x.index_select(0, padded))[: len(rows)].float()
            out.index_add_(0, rows, made * weights[rows, rank, None])
        return out


def group_rows(holder: object, name: str, rows: int) -> None:
    setattr(holder, name, GroupedLinear(getattr(holder, name), rows))


def _qk_norm(name: str, shape: ModelConfig, store: Store) -> Tensor | None:
    """[heads + kv_heads, 1, head_dim]: one factor for queries and keys, which are normed together."""
    if name + "q_norm" not in store:
        return None
    q, k = store.small(name + "q_norm"), store.small(name + "k_norm")
    return torch.cat((q.expand(shape.heads, 1, -1), k.expand(shape.kv_heads, 1, -1)))


def _add(x: Tensor, y: Tensor, norm: Norm | None) -> None:
    x.add_(y if norm is None else norm(y.float()))


def silu(gate: Tensor, up: Tensor) -> None:
    F.silu(gate, inplace=True)


def _gelu_tanh(gate: Tensor, up: Tensor) -> None:
    torch.ops.aten.gelu_(gate, approximate="tanh")


def _clamped_swiglu(gate: Tensor, up: Tensor, limit: float, slope: float) -> None:
    """The product of the two becomes gate * sigmoid(slope * gate) * (up + 1), both clamped before."""
    up.clamp_(-limit, limit).add_(1).mul_(gate.clamp_(max=limit))
    gate.mul_(slope).sigmoid_()


def _activation(shape: ModelConfig) -> Activation:
    if shape.activation == "clamped_swiglu":
        return partial(_clamped_swiglu, limit=shape.gate_limit, slope=shape.gate_slope)
    return silu if shape.activation == "silu" else _gelu_tanh
