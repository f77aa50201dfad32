"""Small models in quantised files, and native targets made of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.target.load import load_target
from paceline.target.native import library
from paceline.target.native.target import NativeTarget
from support import tiny_gguf
from support.packed_cases import built
from support.tiny_gguf import Sizes

# A vocabulary and a feed-forward width that are no multiple of a tile.
SIZES = Sizes(layers=2, width=256, heads=4, kv_heads=2, head_dim=64, ff=512, vocab=131, context=4096)
# Every encoding somewhere; gate and up are encoded alike in one layer, and so woven, and not in the other.
MIX: Mapping[str, tuple[str, str]] = {
    "attn_q": ("Q4_K", "Q3_K"),
    "attn_k": ("Q5_K", "Q5_0"),
    "attn_v": ("Q6_K", "Q5_1"),
    "attn_output": ("Q4_0", "Q8_0"),
    "ffn_gate": ("Q4_1", "Q4_K"),
    "ffn_up": ("Q4_1", "Q5_K"),
    "ffn_down": ("Q8_0", "Q6_K"),
}


def sized(head_dim: int, heads: int, kv_heads: int, ff: int = 512, vocab: int = 131) -> Sizes:
    return Sizes(2, 256, heads, kv_heads, head_dim, ff, vocab, 4096)


def mixed(name: str) -> str:
    """The encoding of a tensor in a file of every encoding."""
    if not name.startswith("blk."):
        return "Q6_K"
    _, layer, part, _ = name.split(".")
    return MIX[part][int(layer) % 2]


def tiny_model(
    path: Path,
    family: str = "llama",
    kind: str | None = None,
    sizes: Sizes = SIZES,
    tied: bool = True,
    seed: int = 0,
    **text: Any,
) -> Path:
    """A model whose activations stay near one; matrices are all of one kind, or mixed; text: a tokenizer."""
    random = np.random.default_rng(seed + 1000)
    weights = tiny_gguf.tensors(family, seed, sizes)
    if not tied:
        weights["output.weight"] = random.standard_normal((sizes.vocab, sizes.width), dtype=np.float32)
    for name, values in weights.items():
        if name.endswith("norm.weight"):
            values *= 0.3
            values += 1
        elif values.ndim == 2:
            values *= 0.5 if name == "token_embd.weight" else values.shape[1] ** -0.5
        else:
            values *= 0.3
    kinds = {name: kind or mixed(name) for name, values in weights.items() if values.ndim == 2}
    return tiny_gguf.write(path, family, weights, kinds, sizes.settings(family), **text)


def wanted_path() -> str:
    """The path that $PACELINE_CPU asks for, or the best one; a test is skipped where there is none."""
    path = library.best_path(library.chosen())
    if path is None or library.chosen() == "torch":
        pytest.skip(f"no native path here for {library.SETTING}={library.chosen()}")
    built(path)
    return path


def native_target(
    model: Path,
    path: str | None = None,
    threads: int = 2,
    cache_mb: int = 16,
    dtype: str = "auto",
    home: Path | None = None,
) -> NativeTarget:
    """On one path, or on the wanted one. home: where packed weights go, if not beside the model."""
    path = path or wanted_path()
    built(path)  # before the folder changes, so that it is not built anew in each
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(library.SETTING, path.removesuffix("vnni"))
        patch.setattr(library, "best_path", lambda _: path)  # a processor may have a better one
        patch.setenv("PACELINE_HOME", str(home or model.parent / "home"))
        patch.setattr("paceline.target.hardware.cores", lambda: threads)  # a setting may not exceed them
        config = EngineConfig(device="cpu", dtype=dtype, cache_mb=cache_mb)
        target = load_target(model, config)
    assert isinstance(target, NativeTarget)
    assert (target.path, target.threads) == (path, threads)
    return target
