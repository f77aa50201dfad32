"""A draft model with trainable weights: all of them, or low-rank adapters (LoRA, arXiv 2106.09685)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.target.weights.model_config import Weights
from paceline.train.train_decoder import JOINED, Attend, Layer, Rotation, TrainDecoder

MATRICES: Final = tuple(JOINED)


class TrainableDraftModel:
    """Computes in float32; the given weights are not changed."""

    def __init__(
        self, weights: Weights, device: torch.device | str, rank: int = 0, alpha: float = 0.0, seed: int = 0
    ) -> None:
        """rank: of the adapters; 0: all weights are trained. alpha: adapters are scaled by alpha / rank."""
        self.model = TrainDecoder(weights, device, torch.float32)
        self._of = weights
        if rank:
            generator = torch.Generator().manual_seed(seed)
            self.trained = add_adapters(self.model, rank, alpha, generator)
        else:
            self.trained = self._all_weights()

    def _all_weights(self) -> dict[str, Tensor]:
        """Replaces the weights by trainable copies."""
        model, tied = self.model, self.model.head is self.model.embed
        model.embed, model.norm = _leaf(model.embed), _leaf(model.norm)
        model.head = model.embed if tied else _leaf(model.head)
        trained = {"embed": model.embed, "norm": model.norm} | ({} if tied else {"head": model.head})
        for i, layer in enumerate(model.layers):
            layer.parts = {name: _leaf(part) for name, part in layer.parts.items()}
            trained |= {f"layers.{i}.{name}": part for name, part in layer.parts.items()}
        return trained

    def hidden(self, tokens: Tensor, start: int = 0) -> Tensor:
        """tokens [b, n], right-padded -> final hidden states, normed [b, n - start, width].

        No gradient goes through the first `start` tokens.
        """
        model, length = self.model, tokens.shape[1]
        rotations = model.rotations(length)
        if not start:
            return model.run(tokens, rotations, model.causal(length))[-1]
        prompt = _PromptCache()
        with torch.no_grad():
            model.run(tokens[:, :start], _rows(rotations, 0, start), prompt.recording(model.causal(start)))
        attend = prompt.attention(model, start, length)
        return model.run(tokens[:, start:], _rows(rotations, start, length), attend)[-1]

    @torch.no_grad()
    def weights(self) -> dict[str, Tensor]:
        """All weights under canonical names, adapters merged; training cannot continue afterwards."""
        merge(self.model)
        tensors = {"embed": self.model.embed, "norm": self.model.norm}
        if "head" in self._of.tensors:
            tensors["head"] = self.model.head
        for i, layer in enumerate(self.model.layers):
            own = {name.rpartition(".")[2] for name in self._of.tensors if name.startswith(f"layers.{i}.")}
            for name, part in layer.parts.items():
                tensors |= {f"layers.{i}.{n}": t for n, t in self._split(name, part, i).items() if n in own}
        return {name: tensor.detach() for name, tensor in tensors.items()}

    def _split(self, name: str, part: Tensor, layer: int) -> dict[str, Tensor]:
        """Splits joined matrices again."""
        joined, bias, _ = name.partition("_bias")
        if joined not in JOINED:
            return {name: part}
        sizes = [len(self._of.tensors[f"layers.{layer}.{n}"]) for n in JOINED[joined]]
        return {n + bias: piece for n, piece in zip(JOINED[joined], torch.split(part, sizes), strict=True)}


class _PromptCache:
    """Keys and values of the prompt, computed without gradients."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def recording(self, attend: Attend) -> Attend:
        def record(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self._layers[layer] = k, v
            return attend(layer, q, k, v)

        return record

    def attention(self, model: TrainDecoder, start: int, length: int) -> Attend:
        everything = model.visible(length)[start:]
        window = model.visible(length, model.shape.window)[start:] if any(model.shape.local_layers) else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            old_k, old_v = self._layers[layer]
            k, v = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
            mask = window if model.local(layer) else everything
            return F.scaled_dot_product_attention(q, k, v, mask, scale=model.scale, enable_gqa=True)

        return attend


def _rows(rotations: tuple[Rotation, Rotation], start: int, stop: int) -> tuple[Rotation, Rotation]:
    (cos, sin), (local_cos, local_sin) = rotations
    return (cos[start:stop], sin[start:stop]), (local_cos[start:stop], local_sin[start:stop])


def _leaf(weight: Tensor) -> Tensor:
    return weight.detach().clone().requires_grad_()


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """Adds scale * up @ down to a matrix."""

    down: Tensor  # [rank, inputs]
    up: Tensor  # [outputs, rank]; zero at first, so that nothing is added
    scale: float

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(F.linear(x, self.down), self.up) * self.scale

    def product(self) -> Tensor:
        return self.scale * (self.up @ self.down)


def add_adapters(
    model: TrainDecoder, rank: int, alpha: float, generator: torch.Generator
) -> dict[str, Tensor]:
    """Adds adapters to every matrix of every layer; returns the trainable tensors by name."""
    trained: dict[str, Tensor] = {}
    for name_prefix, layer, name in _matrices(model):
        rows, columns = layer.parts[name].shape
        bound = columns**-0.5
        down = (2 * torch.rand(rank, columns, generator=generator) - 1) * bound
        made = LoraAdapter(
            down.to(model.device).requires_grad_(),
            torch.zeros(rows, rank, device=model.device, requires_grad=True),
            alpha / rank,
        )
        layer.added[name] = made
        trained |= {f"{name_prefix}.{name}.down": made.down, f"{name_prefix}.{name}.up": made.up}
    return trained


@torch.no_grad()
def merge(model: TrainDecoder) -> None:
    """Merges every adapter into its matrix."""
    for _, layer, name in _matrices(model):
        added = layer.added.pop(name, None)
        if isinstance(added, LoraAdapter):
            layer.parts[name] = layer.parts[name] + added.product()


def _matrices(model: TrainDecoder) -> Iterator[tuple[str, Layer, str]]:
    for i, layer in enumerate(model.layers):
        for name in MATRICES:
            yield f"layers.{i}", layer, name
