"""Published checkpoints of EAGLE-3 and Medusa, and heads to exchange."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.convert.foreign_checkpoint import TargetModel
from paceline.heads.base import DraftHead
from paceline.heads.calibration import Calibration
from paceline.heads.eagle import EagleConfig, EagleHead
from paceline.heads.head_checkpoint import Card
from paceline.train.recipe import pieces_of
from support.heads import some_ids, tiny_model
from support.models import VOCAB

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Eagle3Config:
    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    attention_bias: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


class Attention(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, hidden, size = config, config.hidden_size, config.head_dim
        kv, bias = config.num_key_value_heads * size, config.attention_bias
        self.q_proj = nn.Linear(2 * hidden, config.num_attention_heads * size, bias=bias)
        self.k_proj = nn.Linear(2 * hidden, kv, bias=bias)
        self.v_proj = nn.Linear(2 * hidden, kv, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * size, hidden, bias=bias)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        config, size = self.config, self.config.head_dim
        inverse = 1.0 / config.rope_theta ** (torch.arange(0, size, 2).float() / size)
        angles = positions.float()[:, None] * inverse
        cos, sin = (torch.cat((f(angles),) * 2, -1)[None] for f in (torch.cos, torch.sin))
        made = (self.q_proj(x), self.k_proj(x), self.v_proj(x))
        q, k, v = (y.view(len(x), -1, size).transpose(0, 1) for y in made)
        q, k = (y * cos + rotate_half(y) * sin for y in (q, k))
        groups = config.num_attention_heads // config.num_key_value_heads
        k, v = (y.repeat_interleave(groups, 0) for y in (k, v))
        seen = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0]
        out: Tensor = self.o_proj(seen.transpose(0, 1).flatten(1))
        return out


class MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class MidLayer(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.self_attn, self.mlp = Attention(config), MLP(config)
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        normed = self.hidden_norm(hidden)
        residual = normed if self.config.norm_before_residual else hidden
        x = self.self_attn(torch.cat((self.input_layernorm(embeds), normed), -1), positions)
        residual = residual + x
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3(nn.Module):
    d2t: Tensor  # what to add to a draft token

    def __init__(self, config: Eagle3Config, layers_read: int = 3) -> None:
        super().__init__()
        self.config, size, eps = config, config.hidden_size, config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, size)
        self.fc = nn.Linear(layers_read * size, size, bias=False)
        self.midlayer, self.norm = MidLayer(config), RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, config.draft_vocab_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = RMSNorm(layers_read * size, eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in range(layers_read))
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))

    @torch.no_grad()
    def draft(self, tokens: Tensor, layers: list[Tensor], guesses: int) -> tuple[list[int], list[Tensor]]:
        """tokens [n + 1], and what the layers read made of the first n -> tokens guessed, and logits."""
        hidden = layers
        if self.config.fc_norm:
            hidden = [norm(x) for norm, x in zip(self.fc_norm, layers, strict=True)]
        together = torch.cat(hidden, -1)
        rows = self.fc(self.input_norm(together) if self.config.norm_before_fc else together)
        follow, drafted, logits = tokens[1:], [], []
        for _ in range(guesses):
            out = self.midlayer(self.embed_tokens(follow), rows, torch.arange(len(rows)))[-1:]
            normed = self.norm(out)
            logits.append(self.lm_head(normed)[0])
            best = logits[-1].argmax()
            drafted.append(int(best + self.d2t[best]))
            rows = torch.cat((rows, normed if self.config.norm_output else out))
            follow = torch.cat((follow, torch.tensor(drafted[-1:])))
        return drafted, logits


class ResBlock(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


def medusa_heads(size: int, vocab: int, heads: int, layers: int) -> nn.ModuleList:
    return nn.ModuleList(
        nn.Sequential(*(ResBlock(size) for _ in range(layers)), nn.Linear(size, vocab, bias=False))
        for _ in range(heads)
    )


def shaken(module: M, seed: int) -> M:
    """Every weight random, so that every one matters."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in module.parameters():
            if weight.dim() > 1:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[1] ** -0.5)
            else:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return module


MODEL = tiny_model()
PIECES = pieces_of(MODEL)
TARGET = TargetModel("tiny", MODEL.shape, PIECES)


def shaken_head(net: DraftHead, seed: int) -> DraftHead:
    generator = torch.Generator().manual_seed(seed)
    net.init_weights(PIECES, generator)
    with torch.no_grad():
        for weight in net.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))
    return net


def an_eagle(draft_vocab: int = 40, seed: int = 0, **settings: Any) -> EagleHead:
    settings = {"window": 7} | settings
    shape = EagleConfig(48, 4, 2, 16, 64, VOCAB, draft_vocab, (0, 2, 4), 3, **settings)
    net = shaken_head(EagleHead(shape, PIECES, some_ids(draft_vocab)), seed)
    assert isinstance(net, EagleHead)
    return net


def a_card(kind: str, net: Any) -> Card:
    calibration = Calibration((1.5,) * net.shape.block, (0.25,) * net.shape.block)
    return Card(kind, net.shape, "tiny", PIECES.fingerprint, "float32", calibration)
