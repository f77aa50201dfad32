"""The configuration of a decoder: everything the forward pass needs besides the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from paceline.target.weights.tensors import EncodedMatrix


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. Frequencies are theta ** (-2i / head_dim), then scaled."""

    theta: float
    kind: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0  # linear and llama3
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3
    divisors: tuple[float, ...] = ()  # per frequency, where a file lists them itself; replaces `kind`


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # llama, mistral, qwen2, qwen3, gemma3
    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ff_width: int
    vocab_size: int
    max_context: int
    norm_eps: float
    rope: Rope
    local_rope: Rope | None = None  # for sliding layers where it differs (gemma3)
    window: int = 0  # sliding window of local layers, 0: none
    local_layers: tuple[bool, ...] = ()  # which layers attend to the window only; () : none
    activation: Literal["silu", "gelu_tanh"] = "silu"
    embed_scale: float = 1.0  # gemma: sqrt(width), rounded as the reference does
    attn_scale: float = 0.0  # 0: head_dim ** -0.5


@dataclass(frozen=True, slots=True)
class Weights:
    """Dense weights under canonical names, in the convention of the half-rotation (NeoX) RoPE.

    embed [vocab, width], norm [width], head [vocab, width] (absent when tied to embed), and for each layer i
    "layers.{i}." + attn_norm, q, k, v, o, ffn_norm, gate, up, down, and where the family has them
    q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, post_attn_norm, post_ffn_norm.
    A norm weight is what the normalised row is multiplied by (gemma's 1 + w is already added).
    """

    shape: ModelConfig
    tensors: Mapping[str, Tensor]
    fingerprint: str  # tells models apart; see stored.fingerprint for what it covers
    encoded: Mapping[str, EncodedMatrix] = field(default_factory=dict)  # matrices left as the file holds them


def layer_share(shape: ModelConfig) -> float:
    """The share of one layer in the weights that one row of a pass is multiplied with."""
    attention = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_dim
    layer = attention + 3 * shape.width * shape.ff_width
    return layer / (shape.layers * layer + shape.vocab_size * shape.width)
