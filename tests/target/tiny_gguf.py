"""Small GGUF files, written with the gguf package."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, FF, VOCAB = 2, 256, 4, 2, 64, 512, 96

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
EXTRA: Mapping[str, Mapping[str, int | float]] = {
    "llama": {"rope.dimension_count": HEAD_DIM},
    "qwen2": {},
    "qwen3": {"attention.key_length": HEAD_DIM, "attention.value_length": HEAD_DIM},
    "gemma3": {
        "attention.key_length": HEAD_DIM,
        "attention.value_length": HEAD_DIM,
        "attention.sliding_window": 16,
    },
}


def layer_shapes(family: str) -> dict[str, tuple[int, ...]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {
        "attn_norm.weight": (WIDTH,),
        "attn_q.weight": (q, WIDTH),
        "attn_k.weight": (kv, WIDTH),
        "attn_v.weight": (kv, WIDTH),
        "attn_output.weight": (WIDTH, q),
        "ffn_norm.weight": (WIDTH,),
        "ffn_gate.weight": (FF, WIDTH),
        "ffn_up.weight": (FF, WIDTH),
        "ffn_down.weight": (WIDTH, FF),
    }
    if family == "qwen2":
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if family in ("qwen3", "gemma3"):
        shapes |= {"attn_q_norm.weight": (HEAD_DIM,), "attn_k_norm.weight": (HEAD_DIM,)}
    if family == "gemma3":
        shapes |= {"post_attention_norm.weight": (WIDTH,), "post_ffw_norm.weight": (WIDTH,)}
    return shapes


def tensors(family: str, seed: int = 0) -> dict[str, NDArray[np.float32]]:
    random = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCAB, WIDTH), "output_norm.weight": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in layer_shapes(family).items()}
    return {name: random.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def encoded(values: NDArray[np.float32], kind: str) -> NDArray[np.uint8]:
    """What a file of this type may hold for these values; random codes where gguf cannot quantise."""
    number = gguf.GGMLQuantizationType[kind]
    try:
        return np.ascontiguousarray(gguf.quants.quantize(values, number)).view(np.uint8)
    except NotImplementedError:
        block, nbytes = gguf.GGML_QUANT_SIZES[number]
        codes = np.random.default_rng(7).integers(
            0, 60, (*values.shape[:-1], values.shape[-1] // block * nbytes)
        )
        return codes.astype(np.uint8)  # a byte below 60 never makes an infinite float16


def write(
    path: Path,
    family: str,
    weights: Mapping[str, NDArray[np.float32]] | None = None,
    kind: str = "F32",
    settings: Mapping[str, Any] | None = None,
    alignment: int = 0,
) -> Path:
    """Matrices are stored as `kind`, vectors as F32. Settings replace the usual ones, None removes one."""
    writer = gguf.GGUFWriter(path, family)
    if alignment:
        writer.add_custom_alignment(alignment)
    for key, value in {**COMMON, **EXTRA.get(family, {}), **(settings or {})}.items():
        _add(writer, key if key.startswith("split.") else f"{family}.{key}", value)
    writer.add_token_list([f"<{i}>" for i in range(VOCAB)])
    writer.add_token_scores([float(i) for i in range(5000)])
    for name, values in (tensors(family) if weights is None else weights).items():
        stored = kind if values.ndim > 1 else "F32"
        writer.add_tensor(name, encoded(values, stored), raw_dtype=gguf.GGMLQuantizationType[stored])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: Any, key: str, value: object) -> None:
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
