"""The configuration of a decoder: everything the forward pass needs besides the weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import log, sqrt
from typing import Literal

from torch import Tensor

from paceline.target.weights.tensors import EncodedMatrix


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions. Frequencies are theta ** (-2i / dims), then scaled.

    yarn: arXiv 2309.00071. LongRoPE (arXiv 2402.13753) has divisors for long contexts and others for short
    ones. Which of them apply is settled for a model as a whole (`within`), never by the length of a sequence:
    a row must not change its bits when the sequence grows.
    """

    theta: float
    kind: Literal["none", "linear", "llama3", "yarn"] = "none"
    factor: float = 1.0  # linear, llama3 and yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3, yarn and LongRoPE
    divisors: tuple[float, ...] = ()  # per frequency, where a file lists them itself; replaces `kind`
    short_divisors: tuple[float, ...] = ()  # LongRoPE: replace `divisors` within the original context
    beta_fast: float = 32.0  # yarn: turns within the original context from which a frequency stays as it is
    beta_slow: float = 1.0  # yarn: turns up to which it is divided by the factor
    whole_bounds: bool = True  # yarn: the bounds between the two are whole frequencies
    attention_factor: float = 1.0  # cosines and sines are multiplied by it
    dims: int = 0  # of each head, rotated; the others stay as they are. 0: all

    def within(self, max_context: int) -> "Rope":
        """For sequences of at most so many tokens; 0: as many as the model takes."""
        if self.short_divisors and 0 < max_context <= self.original_context:
            return replace(self, divisors=self.short_divisors, short_divisors=())
        return self


def longrope_amplitude(factor: float, original_context: int) -> float:
    """The usual attention factor for contexts `factor` times the original one."""
    return sqrt(1 + log(factor) / log(original_context)) if factor > 1 else 1.0


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: each row goes through those whose router scores are highest."""

    count: int
    used: int  # by a row
    ff_width: int
    layers: tuple[bool, ...]  # which layers have them; the others are dense
    renormalise: bool  # the softmax weights of those used are divided by their sum


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str  # a family of checkpoint.FAMILIES
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
    activation: Literal["silu", "gelu_tanh", "clamped_swiglu"] = "silu"
    gate_limit: float = 7.0  # clamped_swiglu: of gate (above) and up (both sides), before the activation
    gate_slope: float = 1.702  # clamped_swiglu: gate * sigmoid(slope * gate) * (up + 1)
    embed_scale: float = 1.0  # gemma: sqrt(width), rounded as the reference does
    attn_scale: float = 0.0  # 0: head_dim ** -0.5
    attn_softcap: float = 0.0  # gemma2: scores become cap * tanh(score / cap); 0: they stay as they are
    logit_softcap: float = 0.0  # the same for logits
    experts: Experts | None = None

    def within(self, max_context: int) -> "ModelConfig":
        """For sequences of at most so many tokens: see Rope.within."""
        return replace(self, rope=self.rope.within(max_context))

    def local(self, layer: int) -> bool:
        return bool(self.local_layers) and self.local_layers[layer]

    def sparse(self, layer: int) -> bool:
        """True if the layer's feed-forward network is a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]


@dataclass(frozen=True, slots=True)
class Weights:
    """Dense weights under canonical names, in the convention of the half-rotation (NeoX) RoPE.

    embed [vocab, width], norm [width], head [vocab, width] (absent when tied to embed), and for each layer i
    "layers.{i}." + attn_norm, q, k, v, o, ffn_norm, gate, up, down, and where the family has them
    q_bias, k_bias, v_bias, o_bias, q_norm, k_norm, post_attn_norm, post_ffn_norm, and sinks [heads]: a score
    beside those of the keys, with no value. A layer with experts has router [experts, width] and
    experts.{e}.gate, .up and .down in place of gate, up and down; each may have a bias (router_bias, ...).
    Dimensions of q and k that are not rotated lie behind the rotated ones of each half of a head.
    A norm weight is what the normalised row is multiplied by (gemma's 1 + w is already added).
    """

    shape: ModelConfig
    tensors: Mapping[str, Tensor]
    fingerprint: str  # tells models apart; see stored.fingerprint for what it covers
    encoded: Mapping[str, EncodedMatrix] = field(default_factory=dict)  # matrices left as the file holds them


def layer_share(shape: ModelConfig) -> float:
    """The share of one layer, on average, in the weights that one row of a pass is multiplied with."""
    attention = 2 * shape.width * (shape.heads + shape.kv_heads) * shape.head_dim
    dense, sparse = 3 * shape.width * shape.ff_width, 0
    if shape.experts is not None:
        sparse = shape.width * (3 * shape.experts.used * shape.experts.ff_width + shape.experts.count)
    every = sum(attention + (sparse if shape.sparse(i) else dense) for i in range(shape.layers))
    return every / shape.layers / (every + shape.vocab_size * shape.width)
