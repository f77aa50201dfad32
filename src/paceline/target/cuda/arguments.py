"""The structures of csrc/*.h, field by field, and the constants that host and kernels share."""

import ctypes as c
from typing import Final

MAX_ROWS: Final = 64  # of a group of rows; a pass has up to MAX_GROUPS of them
MAX_GROUPS: Final = 4
MAX_SEQUENCES: Final = 64
MAX_DEPTH: Final = 64
PAGE: Final = 64
KEY_CHUNK: Final = 128
WARPS: Final = 8
THREADS: Final = 32 * WARPS
SPLITS: Final = 8
BINS: Final = 64
IN_PROMPT: Final = 2**30
MAX_CANDIDATES: Final = 2048
MAX_TEXTS: Final = 16
MAX_BLOCK: Final = 16

_POINTER, _INT, _LONG, _FLOAT = c.c_void_p, c.c_int, c.c_longlong, c.c_float
_ROWS_I = c.c_int * MAX_ROWS
_Type = type[c._SimpleCData]  # type: ignore[type-arg]


def _by_sequence(kind: _Type, *names: str) -> tuple[tuple[str, type[c.Array]], ...]:  # type: ignore[type-arg]
    return tuple((name, kind * MAX_SEQUENCES) for name in names)


class PassInput(c.Structure):
    _fields_ = (
        *((name, _INT) for name in ("number", "rows", "sequences", "paths")),
        *((name, _ROWS_I) for name in ("token", "position", "slot", "path", "part", "sequence", "parent")),
        *_by_sequence(_INT, "first_row", "row_count", "length", "last_position"),
        *_by_sequence(_INT, "first_path", "path_count", "table"),
        *_by_sequence(c.c_ulonglong, "seed"),
        *_by_sequence(c.c_uint, "choice", "index_shift"),
        *_by_sequence(_FLOAT, "inverse_temperature"),
        *_by_sequence(_INT, "top_k"),
        *_by_sequence(c.c_double, "top_p"),
        *_by_sequence(_FLOAT, "min_p_logit"),
        *_by_sequence(_INT, "history"),
        *_by_sequence(_FLOAT, "repetition"),
        *_by_sequence(c.c_double, "presence", "frequency"),
        ("path_slot", c.c_int * (MAX_ROWS * MAX_DEPTH)),
    )


class KvCache(c.Structure):
    _fields_ = (("keys", _POINTER), ("values", _POINTER), ("head_stride", _LONG))


class Linear(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("weight", "scale", "bias", "x", "square_sum")),
        *((name, _INT) for name in ("inputs", "first_feature", "starts_next_late")),
        ("inverse_width", _FLOAT),
        ("norm_eps", _FLOAT),
        ("input", _POINTER),
        ("queries", _POINTER),
        ("cache", KvCache),
        ("cos", _POINTER),
        ("sin", _POINTER),
        *((name, _INT) for name in ("head_dim", "heads", "kv_heads")),
        ("query_scale", _FLOAT),
        *((name, _POINTER) for name in ("residual", "next_norm", "next_square_sum", "tap", "out", "out_f32")),
        ("columns", _INT),
        ("out_rows", _POINTER),
        *((name, _INT) for name in ("row_groups", "square_stride")),
        ("sums", _POINTER),
        ("features", _INT),
    )


class Attention(c.Structure):
    _fields_ = (
        ("queries", _POINTER),
        ("cache", KvCache),
        *((name, _POINTER) for name in ("tables", "input", "partial", "weight", "out")),
        *((name, _INT) for name in ("heads", "kv_heads", "max_pages", "max_parts", "window")),
    )


class HeadNorm(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "query_norm", "key_norm", "cos", "sin", "input", "queries")),
        ("cache", KvCache),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("norm_eps", _FLOAT),
        ("query_scale", _FLOAT),
    )


class TakeInput(c.Structure):
    _fields_ = (("host", _POINTER), ("input", _POINTER), ("host_taken", _POINTER))


class Embed(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "embeddings", "norm", "residual", "square_sums", "out")),
        ("width", _INT),
        ("norms", _INT),
    )


class MoveRows(c.Structure):
    _fields_ = (
        ("keys", _POINTER),
        ("values", _POINTER),
        ("head_stride", _LONG),
        ("head_dim", _INT),
        ("count", _INT),
        ("source", c.c_int * MAX_DEPTH),
        ("target", c.c_int * MAX_DEPTH),
    )


class Chosen(c.Structure):
    _fields_ = (("number", _INT), ("token", _ROWS_I))


class Choose(c.Structure):
    _fields_ = (
        ("logits", _POINTER),
        ("vocab", _INT),
        ("stride", _INT),
        *((name, _POINTER) for name in ("input", "top", "score", "token", "arrived", "host")),
        *((name, _POINTER) for name in ("cut_counts", "cut_weights", "cut_candidates", "cut_found")),
        *((name, _POINTER) for name in ("processed", "bias", "counts")),
        *((name, _POINTER) for name in ("host_masks", "masks", "masked")),
        ("mask_words", _INT),
    )


class HostMasks(c.Structure):
    _fields_ = (("masked", c.c_int * (4 * MAX_ROWS)),)


class CountTokens(c.Structure):
    _fields_ = (("counts", _POINTER), ("count", _INT), ("token", c.c_int * MAX_DEPTH))


# ---- block heads

_BY_TEXT: Final = c.c_int * MAX_TEXTS
_TEXT_ADDRESSES: Final = c.c_void_p * MAX_TEXTS


class DraftInput(c.Structure):
    _fields_ = (
        *((name, _INT) for name in ("number", "read_rows", "texts", "slots", "chains")),
        ("padding", _INT * 3),
        ("hidden", _POINTER * MAX_ROWS),
        ("tap_stride", _LONG * MAX_ROWS),
        ("cache_row", _POINTER * MAX_ROWS),
        ("read_position", _ROWS_I),
        *((name, _TEXT_ADDRESSES) for name in ("context", "logits", "sure")),
        *((name, _BY_TEXT) for name in ("token", "position", "length")),
        *((name, _TEXT_ADDRESSES) for name in ("chain_logits", "chain_sure")),
        *((name, _BY_TEXT) for name in ("slot", "previous", "size")),
        ("inverse_temperature", _FLOAT * MAX_TEXTS),
        ("key", c.c_uint * (2 * MAX_BLOCK * MAX_TEXTS)),
    )


class DraftResult(c.Structure):
    _fields_ = (
        ("number", _INT),
        ("token", _INT * (MAX_TEXTS * MAX_BLOCK)),
        ("sure", _FLOAT * (MAX_TEXTS * MAX_BLOCK)),
    )


class TakeDraft(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("host", "input", "pass_input", "rows", "best", "host_taken")),
        ("columns", _INT),
    )


class GatherTaps(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "out", "residual", "square_sum")),
        ("taps", _INT),
        ("width", _INT),
    )


class ContextKeys(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("products", "key_norm", "cos", "sin", "input")),
        ("layers", _INT),
        ("kv_heads", _INT),
        ("norm_eps", _FLOAT),
    )


class EmbedBlock(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "embeddings", "mask", "norm", "residual")),
        ("square_sums", _POINTER),
        ("out", _POINTER),
        ("width", _INT),
        ("norms", _INT),
    )


class BlockHeads(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "query_norm", "key_norm", "cos", "sin", "input")),
        ("queries", _POINTER),
        ("own", _POINTER),
        ("heads", _INT),
        ("kv_heads", _INT),
        ("norm_eps", _FLOAT),
        ("query_scale", _FLOAT),
    )


class BlockAttention(c.Structure):
    _fields_ = (
        ("attention", Attention),
        ("draft", _POINTER),
        ("own", _POINTER),
        ("layer", _INT),
        ("row_size", _INT),
    )


class BlockSure(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "residual", "norm", "weight", "square_sum")),
        ("width", _INT),
        *((name, _FLOAT) for name in ("bias", "inverse_width", "norm_eps")),
    )


class ChainStep(c.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "markov_in", "markov_out", "weight", "ids", "best")),
        *((name, _POINTER) for name in ("sure", "arrived", "host")),
        *((name, _INT) for name in ("draft_vocab", "columns", "rank", "step", "steps")),
    )


# In the order of size_of in kernels.cu.
STRUCTURES: Final = (
    PassInput, Linear, Attention, HeadNorm, TakeInput, Embed, MoveRows, Choose, Chosen, HostMasks,
    CountTokens, DraftInput, DraftResult, TakeDraft, GatherTaps, ContextKeys, EmbedBlock, BlockHeads,
    BlockAttention, BlockSure, ChainStep,
)  # fmt: skip
