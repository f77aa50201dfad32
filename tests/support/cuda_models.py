"""Small models that the CUDA kernels can run, and what they should compute."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.heads.base import DenseTargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.head_checkpoint import Card, Int8Weights, StoredHead
from paceline.target.eager.rope import frequencies
from paceline.target.weights.model_config import ModelConfig, Rope, Weights

VOCAB = 500  # no multiple of a tile


def tiny_weights(
    family: str = "llama",
    head_dim: int = 64,
    window: int = 0,
    seed: int = 0,
    heads: int = 4,
    width: int = 128,
) -> Weights:
    """Two layers of a family with random weights in bfloat16; norms and biases matter."""
    layers, kv_heads, ff = 2, 2, 2 * width
    shape = ModelConfig(
        family, layers, width, heads, kv_heads, head_dim, ff, VOCAB, 4096, 1e-5, Rope(10000.0),
        window=window, local_layers=(True, False) if window else (),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator)

    tensors = {"embed": normal(VOCAB, width), "norm": 1 + 0.1 * normal(width)}
    if family != "qwen2":  # which is tied here
        tensors["head"] = normal(VOCAB, width) * width**-0.5
    q, kv = heads * head_dim, kv_heads * head_dim
    sizes = {"q": (q, width), "k": (kv, width), "v": (kv, width), "o": (width, q)}
    sizes |= {"gate": (ff, width), "up": (ff, width), "down": (width, ff)}
    for i in range(layers):
        name = f"layers.{i}."
        tensors |= {name + part: normal(*size) * size[1] ** -0.5 for part, size in sizes.items()}
        tensors |= {name + part: 1 + 0.1 * normal(width) for part in ("attn_norm", "ffn_norm")}
        if family == "qwen2":
            tensors |= {f"{name}{part}_bias": 0.3 * normal(sizes[part][0]) for part in "qkvo"}
        if family == "qwen3":
            tensors |= {name + part: 1 + 0.1 * normal(head_dim) for part in ("q_norm", "k_norm")}
    return Weights(
        shape, {name: t.to(torch.bfloat16) for name, t in tensors.items()}, f"tiny {family} {seed}"
    )


def reference_logits(weights: Weights, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab] in float64, rounded to bfloat16 where the kernels round."""
    shape = weights.shape
    t = {name: tensor.double() for name, tensor in weights.tensors.items()}
    n, d = len(tokens), shape.head_dim
    x = t["embed"][list(tokens)]
    angles = torch.arange(n, dtype=torch.float32)[:, None] * frequencies(shape.rope, d)
    cos, sin = angles.double().cos()[:, None], angles.double().sin()[:, None]
    for i in range(shape.layers):
        layer = {name.rpartition(".")[2]: v for name, v in t.items() if name.startswith(f"layers.{i}.")}

        def linear(y: Tensor, part: str, layer: dict[str, Tensor] = layer) -> Tensor:
            return y @ layer[part].T + layer.get(f"{part}_bias", torch.zeros(1).double())

        def project(part: str, heads: int, x: Tensor = x, layer: dict[str, Tensor] = layer) -> Tensor:
            y = _bf16(x * layer["attn_norm"]) @ layer[part].T * _inverse_rms(x, shape)
            y = (y + layer.get(f"{part}_bias", torch.zeros(1).double())).view(n, heads, d)
            if f"{part}_norm" in layer:
                y = y * _inverse_rms(y, shape) * layer[f"{part}_norm"]
            return y

        q = _rotate(project("q", shape.heads), cos, sin)
        k = _bf16(_rotate(project("k", shape.kv_heads), cos, sin))
        v = _bf16(project("v", shape.kv_heads))
        group = shape.heads // shape.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        score = torch.einsum("qhd,khd->hqk", q, k) * d**-0.5
        at = torch.arange(n)
        hidden = at[None, :] > at[:, None]
        if shape.local_layers and shape.local_layers[i]:
            hidden |= at[None, :] <= at[:, None] - shape.window
        weight = score.masked_fill(hidden, -math.inf).softmax(-1)
        seen = torch.einsum("hqk,khd->qhd", weight, v).reshape(n, -1)
        x = x + linear(_bf16(seen), "o")
        normed = _bf16(x * layer["ffn_norm"])
        factor = _inverse_rms(x, shape)
        gate, up = linear(normed, "gate") * factor, linear(normed, "up") * factor
        x = x + linear(_bf16(gate * torch.sigmoid(gate) * up), "down")
    return _bf16(x * t["norm"]) @ t.get("head", t["embed"]).T * _inverse_rms(x, shape)


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _inverse_rms(x: Tensor, shape: ModelConfig) -> Tensor:
    return (x.pow(2).mean(-1, keepdim=True) + shape.norm_eps).rsqrt()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def gap(got: Tensor, expected: Tensor) -> float:
    """Relative to the norm."""
    return float((got.double() - expected).norm() / expected.norm())


BLOCK = BlockConfig(128, 4, 2, 64, 256, VOCAB, 200, (0, 1), layers=2, block=6, markov_rank=64, window=300)


def embeddings_of(weights: Weights) -> DenseTargetEmbeddings:
    t = {name: tensor.float() for name, tensor in weights.tensors.items() if "layers" not in name}
    return DenseTargetEmbeddings(t["embed"], t.get("head", t["embed"]), t["norm"], weights.fingerprint)


def block_net(weights: Weights, shape: BlockConfig = BLOCK, seed: int = 0) -> BlockHead:
    """A block head for a small model. Every weight matters."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randperm(shape.vocab, generator=generator)[: shape.draft_vocab].sort().values
    net = BlockHead(shape, embeddings_of(weights), ids)
    net.init_weights(embeddings_of(weights), generator)
    with torch.no_grad():
        for weight in net.parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.add_(scale * torch.randn(weight.shape, generator=generator))
    return net.eval()


def stored_block(net: BlockHead, fingerprint: str) -> StoredHead:
    card = Card("block", net.shape, "tiny", fingerprint, "float32")
    return StoredHead(card, net.draft_ids.cpu(), Int8Weights(dict(net.state_dict())))
