"""Small GGUF files, written with the gguf package."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
from numpy.typing import NDArray

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 2, 256, 4, 2, 64, 512, 96
EXPERTS, EXPERT_FF = 5, 256


@dataclass(frozen=True, slots=True)
class Sizes:
    layers: int = LAYERS
    width: int = WIDTH
    heads: int = HEADS
    kv_heads: int = KV_HEADS
    head_dim: int = HEAD_DIM
    ff: int = FF
    vocab: int = VOCAB
    context: int = 128

    def settings(self, family: str) -> dict[str, int]:
        """The metadata of a file of this family."""
        said = {
            "block_count": self.layers,
            "context_length": self.context,
            "embedding_length": self.width,
            "feed_forward_length": self.ff,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
        }
        return said | ({"rope.dimension_count": self.head_dim} if family == "llama" else {})


USUAL = Sizes()

COMMON: Mapping[str, int | float] = {
    "block_count": LAYERS,
    "context_length": 128,
    "embedding_length": WIDTH,
    "feed_forward_length": FF,
    "attention.head_count": HEADS,
    "attention.head_count_kv": KV_HEADS,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 50_000.0,
}
EXTRA: Mapping[str, Mapping[str, int | float | str]] = {
    "llama": {"rope.dimension_count": HEAD_DIM},
    "qwen2": {},
    "qwen3": {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    "gemma3": {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 16,
    },
    "gemma2": {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 16,
        "attn_logit_softcapping": 4.0,
        "final_logit_softcapping": 3.0,
    },
    "qwen3moe": {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": EXPERT_FF,
    },
    "gpt-oss": {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 16,
        "expert_count": EXPERTS,
        "expert_used_count": 2,
        "expert_feed_forward_length": EXPERT_FF,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    },
}


def layer_shapes(family: str, sizes: Sizes = USUAL) -> dict[str, tuple[int, ...]]:
    q, kv, width, ff = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim, sizes.width, sizes.ff
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (width,),
        "attn_q.weight": (q, width),
        "attn_k.weight": (kv, width),
        "attn_v.weight": (kv, width),
        "attn_output.weight": (width, q),
        "ffn_norm.weight": (width,),
        "ffn_gate.weight": (ff, width),
        "ffn_up.weight": (ff, width),
        "ffn_down.weight": (width, ff),
    }
    if family == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if family in ("qwen3", "qwen3moe", "gemma3"):
        shapes |= {"attn_q_norm.weight": (sizes.head_dim,), "attn_k_norm.weight": (sizes.head_dim,)}
    if family in ("gemma2", "gemma3"):
        shapes |= {"post_attention_norm.weight": (width,), "post_ffw_norm.weight": (width,)}
    if family in ("qwen3moe", "gpt-oss"):
        for part in ("gate", "up", "down"):
            del shapes[f"ffn_{part}.weight"]
        shapes["ffn_gate_inp.weight"] = (EXPERTS, width)
        shapes |= {f"ffn_{part}_exps.weight": (EXPERTS, EXPERT_FF, width) for part in ("gate", "up")}
        shapes["ffn_down_exps.weight"] = (EXPERTS, width, EXPERT_FF)
    if family == "gpt-oss":
        del shapes["ffn_norm.weight"]
        shapes |= {"post_attention_norm.weight": (width,), "attn_sinks.weight": (sizes.heads,)}
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
        shapes |= {"attn_output.bias": (width,), "ffn_gate_inp.bias": (EXPERTS,)}
        shapes |= {f"ffn_{part}_exps.bias": (EXPERTS, EXPERT_FF) for part in ("gate", "up")}
        shapes["ffn_down_exps.bias"] = (EXPERTS, width)
    return shapes


def tensors(family: str, seed: int = 0, sizes: Sizes = USUAL) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (sizes.vocab, sizes.width),
        "output_norm.weight": (sizes.width,),
    }
    for layer in range(sizes.layers):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(family, sizes).items()}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


# Where a block has its half-precision numbers, and how large they are so that values centre on zero.
HALVES: Mapping[str, Mapping[int, float]] = {
    "Q2_K": {80: 1.0, 82: 1.5},
    "Q3_K": {108: 1.0},
    "Q4_K": {0: 1.0, 2: 7.5},
    "Q5_K": {0: 1.0, 2: 15.5},
    "Q6_K": {208: 1.0},
}


def encoded(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """Bytes that a file of this type may hold for these values; random codes where gguf cannot quantise."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return np.ascontiguousarray(gguf.quants.quantize(values, number)).view(np.uint8)
    except NotImplementedError:
        pass
    block, nbytes = gguf.GGML_QUANT_SIZES[number]
    seed = crc32(values.tobytes())  # other codes for every tensor
    blocks = np.random.default_rng(seed).integers(0, 256, (values.size // block, nbytes), dtype=np.uint8)
    if kind not in HALVES:
        blocks %= 60  # such a byte never makes an infinite float16
        return blocks.reshape(*values.shape[:-1], -1)
    _set_halves(blocks, kind, 1.0)
    spread = np.std(np.asarray(gguf.quants.dequantize(blocks, number)))
    _set_halves(blocks, kind, float(values.std() / spread))
    return blocks.reshape(*values.shape[:-1], -1)


def _set_halves(blocks: NDArray[np.uint8], kind: str, scale: float) -> None:
    for at, size in HALVES[kind].items():
        blocks[:, at : at + 2] = np.array([scale * size], np.float16).view(np.uint8)


def write(
    path: Path,
    family: str,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    kind: str | Mapping[str, str] = "F32",
    settings: Mapping[str, Any] | None = None,
    alignment: int = 0,
    tokenizer: Mapping[str, Any] | None = None,
    template: str = "",
    part_tensors: int = 0,
) -> Path:
    """Matrices are stored as `kind`, which may name one for each, vectors as F32.

    Settings replace the usual ones, None removes one. tokenizer: keys after `tokenizer.ggml.`.
    part_tensors: if not 0, the file is split after so many tensors, and the path is that of the first part.
    """
    writer = gguf.GGUFWriter(path, family, split_max_tensors=part_tensors)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in {**COMMON, **EXTRA.get(family, {}), **(settings or {})}.items():
        add_fact(writer, key if key.startswith("split.") else f"{family}.{key}", value)
    if tokenizer is None:
        writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
        writer.add_token_scores([float(i) for i in range(5000)])
    else:
        for key, value in tokenizer.items():
            add_fact(writer, f"tokenizer.ggml.{key}", value)
    if template:
        writer.add_chat_template(template)
    for name, values in (tensors(family) if weights is None else weights).items():
        stored = "F32" if values.ndim == 1 else kind if isinstance(kind, str) else kind[name]
        writer.add_tensor(name, encoded(values, stored), raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}-*-of-*.gguf")) if part_tensors else path


def add_fact(writer: Any, key: str, value: object) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list):
        writer.add_array(key, value)
