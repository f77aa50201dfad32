"""Small decoders of every family, and ways to run a target, for the tests of the forward passes."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.target.weights.model_config import ModelConfig, Rope, Weights
from paceline.types import NO_DRAFT, Draft, Feed, Seq, Target

T = TypeVar("T")
# As Transformers names them; `yarn` is a qwen3, `phi4_mini` a phi3 with LongRoPE on a part of each head.
WRITTEN = ("llama", "mistral", "qwen2", "qwen3", "gemma3_text", "yarn")  # a folder can be written of them
TRAINED = (*WRITTEN, "phi3", "phi4_mini")  # training knows them
FAMILIES = (*TRAINED, "gemma2", "qwen3_moe", "mixtral", "gpt_oss")
VOCAB = 131
CONFIG = EngineConfig(device="cpu", cache_mb=16)

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 60,  # no multiple of any vector width
    "intermediate_size": 108,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
}


def longrope(rotated: int) -> dict[str, Any]:
    """LongRoPE with other divisors for each frequency, and others still within 32 tokens."""
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "long_factor": [1.0 + 0.75 * i for i in range(rotated // 2)],
        "short_factor": [1.0 + 0.25 * i for i in range(rotated // 2)],
        "original_max_position_embeddings": 32,
    }


def reference_config(family: str, **other: Any) -> Any:
    """other: sizes to take in place of the usual ones."""
    import transformers as hf

    sizes: Any = _SIZES | other
    if family == "llama":
        return hf.LlamaConfig(**sizes, rope_parameters=_LLAMA3, attention_bias=True)
    if family == "mistral":
        return hf.MistralConfig(**{"sliding_window": None, **sizes})
    if family == "qwen2":
        return hf.Qwen2Config(**sizes, tie_word_embeddings=True)
    if family == "qwen3":
        return hf.Qwen3Config(**sizes)
    if family == "yarn":
        return hf.Qwen3Config(**sizes, rope_parameters=_YARN)
    if family in ("phi3", "phi4_mini"):
        sizes |= {
            "num_attention_heads": 4,
            "hidden_size": 64,
            "original_max_position_embeddings": 32,
            **other,
        }
        del sizes["head_dim"]
        head_dim = sizes["hidden_size"] // sizes["num_attention_heads"]
        if family == "phi3":
            return hf.Phi3Config(**{"sliding_window": 24, "pad_token_id": 0, **sizes})
        rope = longrope(3 * head_dim // 4) | {"partial_rotary_factor": 0.75}
        return hf.Phi3Config(**sizes, rope_parameters=rope, tie_word_embeddings=True, pad_token_id=0)
    experts = {"num_local_experts": 5, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        widths = {"moe_intermediate_size": 44, "mlp_only_layers": [1]}
        return hf.Qwen3MoeConfig(**{**experts, **widths, **sizes})
    if family == "mixtral":
        return hf.MixtralConfig(**{**experts, **sizes})
    if family == "gpt_oss":
        yarn = _YARN | {"truncate": False}
        return hf.GptOssConfig(
            **{**experts, "sliding_window": 16, "swiglu_limit": 0.8, **sizes}, rope_parameters=yarn
        )
    if family == "gemma2":
        caps = {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}
        return hf.Gemma2Config(**{"sliding_window": 16, "query_pre_attn_scalar": 20, **caps, **sizes})
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    gemma3 = {"sliding_window": 16, "layer_types": kinds, "query_pre_attn_scalar": 20}
    return hf.Gemma3TextConfig(**{**gemma3, **sizes})


def save_reference(family: str, folder: Path, **other: Any) -> Any:
    """A random model of the family, saved as a folder; every weight matters, norms and biases too."""
    from transformers import AutoModelForCausalLM

    generator = torch.Generator().manual_seed(FAMILIES.index(family))
    model = AutoModelForCausalLM.from_config(
        reference_config(family, **other), attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 1:
                weight += 0.3 * torch.randn(weight.shape, generator=generator)
            else:
                weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return model


def random_weights(
    seed: int = 0, width: int = 64, layers: int = 2, kv_heads: int = 2, ff: int = 96, head_dim: int = 16
) -> Weights:
    """A llama with random weights, made without a file."""
    heads, generator = 4, torch.Generator().manual_seed(seed)
    shape = ModelConfig(
        "llama", layers, width, heads, kv_heads, head_dim, ff, VOCAB, 4096, 1e-5, Rope(10000.0)
    )
    sizes = {
        "q": (heads * head_dim, width),
        "k": (kv_heads * head_dim, width),
        "v": (kv_heads * head_dim, width),
        "o": (width, heads * head_dim),
        "gate": (ff, width),
        "up": (ff, width),
        "down": (width, ff),
    }
    tensors = {"embed": torch.randn(VOCAB, width, generator=generator), "norm": torch.ones(width)}
    for i in range(layers):
        for name, (rows, columns) in sizes.items():
            tensors[f"layers.{i}.{name}"] = torch.randn(rows, columns, generator=generator) * columns**-0.5
        tensors |= {f"layers.{i}.{name}": torch.ones(width) for name in ("attn_norm", "ffn_norm")}
    return Weights(shape, tensors, f"random {seed}")


def some_tokens(count: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    return torch.randint(0, vocab, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def open_with(target: Target, seq_id: str, tokens: Sequence[int], chunk: int = 256, tenant: str = "") -> int:
    """Computes all these tokens; gives how many were found in the cache."""
    shared = target.open(Seq(seq_id, list(tokens), len(tokens), tenant=tenant))
    for start in range(shared, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        target.forward([Feed(seq_id, piece, scored=False)])
        target.keep(seq_id, start + len(piece))
    return shared


def rows_in_one_pass(target: Target, seq_id: str, length: int, tokens: Sequence[int]) -> Tensor:
    """Logits after each token, the first fed and the others guessed; the sequence stays `length` long."""
    logits = target.forward([Feed(seq_id, tokens[:1], Draft(tuple(tokens[1:])))]).logits
    target.keep(seq_id, length)
    return logits


def rows_one_by_one(target: Target, seq_id: str, length: int, tokens: Sequence[int]) -> Tensor:
    """The same, each token in a pass of its own; the sequence stays `length` long."""
    rows = []
    for i, token in enumerate(tokens):
        rows.append(target.forward([Feed(seq_id, [token])]).logits)
        target.keep(seq_id, length + i + 1)
    target.keep(seq_id, length)
    return torch.cat(rows)


def random_tree(nodes: int, width: int, seed: int, vocab: int = VOCAB) -> Draft:
    """Each node hangs from the root or from a random node before it, never from more than `width` ways on."""
    generator = torch.Generator().manual_seed(seed)
    parents: list[int] = []
    for node in range(nodes):
        free = [p for p in range(-1, node) if parents.count(p) < width]
        parents.append(free[int(torch.randint(len(free), (1,), generator=generator))])
    return Draft(tuple(some_tokens(nodes, seed, vocab)), tuple(parents))


def feed_draft(target: Target, seq_id: str, token: int, draft: Draft = NO_DRAFT) -> Tensor:
    return target.forward([Feed(seq_id, [token], draft)]).logits


def some_layers(tensors: Mapping[str, T], layers: Sequence[int]) -> dict[str, T]:
    """The tensors of a model by canonical name, without its other layers."""
    found = {name: tensor for name, tensor in tensors.items() if not name.startswith("layers.")}
    for place, layer in enumerate(layers):
        old, new = f"layers.{layer}.", f"layers.{place}."
        found |= {new + n.removeprefix(old): t for n, t in tensors.items() if n.startswith(old)}
    return found
