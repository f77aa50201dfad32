"""The decoder in float64, with the roundings the native pass makes on purpose.

Rows are rounded to eight bits before every product, keys and values to half precision; float weights to eight
bits where that was asked for. Softmax is over all keys at once, and all its sums are in float64, as are those
of what follows it. Only the way to queries, keys and values is in float32, step by step as the pass does it:
were the last bit of one row's key another, so would be the codes of all rows that attend to it. Products on
that way are taken from the library; test_products.py checks them against float64 on their own.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.target.eager.rope import frequencies
from paceline.target.native.library import GROUP
from paceline.target.native.target import NativeTarget
from paceline.target.weights.reader import load
from support.packed_cases import Doubles, Floats, Packed, as_taken


class FloatReference:
    def __init__(self, model: Path, target: NativeTarget, int8: bool = False) -> None:
        self._target = target
        weights = load(model, torch.float32)
        self.shape = weights.shape
        self._weights: dict[str, Floats] = {}
        for name, tensor in weights.tensors.items():
            values = tensor.numpy()
            self._weights[name] = eight_bits(values) if int8 and values.ndim == 2 else values
        self._frequencies = frequencies(self.shape.rope, self.shape.head_dim).numpy()

    def run(self, tokens: list[int]) -> Doubles:
        """Logits [rows, vocab] after every token."""
        x = self.embedded(tokens)
        for layer in range(self.shape.layers):
            x = self.layer(layer, x)
        return self.scores(x)

    def embedded(self, tokens: list[int]) -> Doubles:
        return self._weights["embed"][tokens].astype(np.float64)

    def layer(self, layer: int, x: Doubles) -> Doubles:
        """What one layer makes of the rows of a whole sequence."""
        x = x + self._attention(layer, x)
        normed = self._norm(x, f"layers.{layer}.ffn_norm")
        gate, up = (self._times(normed, f"layers.{layer}.{part}") for part in ("gate", "up"))
        return x + self._times(gate / (1 + np.exp(-gate)) * up, f"layers.{layer}.down")

    def scores(self, x: Doubles) -> Doubles:
        return self._times(self._norm(x, "norm"), "head" if "head" in self._weights else "embed")

    def _attention(self, layer: int, x: Doubles) -> Doubles:
        shape, rows = self.shape, len(x)
        normed = self._norm32(x.astype(np.float32), f"layers.{layer}.attn_norm")
        q, k, v = (self._heads32(normed, f"layers.{layer}.{part}") for part in "qkv")
        if f"layers.{layer}.q_norm" in self._weights:
            q, k = self._norm32(q, f"layers.{layer}.q_norm"), self._norm32(k, f"layers.{layer}.k_norm")
        repeat = shape.heads // shape.kv_heads
        queries = self._rotated(q).astype(np.float64)
        keys, values = (np.repeat(each, repeat, axis=0) for each in (_as_half(self._rotated(k)), _as_half(v)))
        scores = queries @ keys.swapaxes(1, 2) * (shape.attn_scale or shape.head_dim**-0.5)
        scores[:, ~np.tri(rows, dtype=bool)] = -np.inf
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        return self._times((shares @ values).swapaxes(0, 1).reshape(rows, -1), f"layers.{layer}.o")

    def _heads32(self, x: Floats, name: str) -> Floats:
        """[heads, rows, head_dim]"""
        weight = Packed(self._target._held[0].matrix(name), np.empty(0, np.uint8))
        product = weight.times(self._target._lib, np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP))))
        product += self._weights.get(f"{name}_bias", np.zeros(1, np.float32))
        return product.reshape(len(x), -1, self.shape.head_dim).swapaxes(0, 1)

    def _norm32(self, x: Floats, name: str) -> Floats:
        """Squares are added up in sixteen lanes, which are then folded in halves."""
        padded = np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % GROUP)])
        lanes = np.zeros((*x.shape[:-1], 16), np.float32)
        for i in range(0, padded.shape[-1], 16):
            piece = padded[..., i : i + 16].astype(np.float64)
            lanes = (piece * piece + lanes).astype(np.float32)
        for half in (8, 4, 2, 1):
            lanes = lanes[..., :half] + lanes[..., half : 2 * half]
        eps = np.float32(self.shape.norm_eps)
        inverse = np.float32(1) / np.sqrt(lanes / np.float32(x.shape[-1]) + eps)
        return np.asarray(x * inverse * self._weights[name])

    def _times(self, x: Doubles, name: str) -> Doubles:
        weight = self._weights[name].astype(np.float64)
        padding = -x.shape[1] % GROUP
        taken = as_taken(np.pad(x, ((0, 0), (0, padding))).astype(np.float32))[:, : x.shape[1]]
        product: Doubles = taken @ weight.T
        return product + self._weights.get(f"{name}_bias", np.zeros(1, np.float32))

    def _norm(self, x: Doubles, name: str) -> Doubles:
        rms = np.sqrt((x * x).mean(-1, keepdims=True) + self.shape.norm_eps)
        scaled: Doubles = x / rms * self._weights[name]
        return scaled

    def _rotated(self, x: Floats) -> Floats:
        angles = (np.arange(x.shape[1], dtype=np.float32)[:, None] * self._frequencies).astype(np.float64)
        a, b = np.split(x, 2, axis=-1)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)


def _as_half(x: Floats) -> Doubles:
    return x.astype(np.float16).astype(np.float64)


def eight_bits(values: Floats) -> Floats:
    """Groups of 32 inputs as 8-bit codes and a half-precision scale."""
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % GROUP)))
    groups = padded.reshape(len(values), -1, GROUP)
    scale = (np.abs(groups).max(-1, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        codes: NDArray[np.float32] = np.clip(np.nan_to_num(np.rint(groups / scale)), -127, 127)
    return np.asarray(codes * scale).reshape(padded.shape)[:, : values.shape[1]]
