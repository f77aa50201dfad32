"""The C++ of this folder, built for one kind of processor, and its structures as ctypes sees them."""

import ctypes as c
import os
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Final

from paceline import native_build
from paceline.errors import SettingError

FOLDER: Final = Path(__file__).parent / "csrc"
SETTING: Final = "PACELINE_CPU"
# A path, the features a processor must have for it, by Linux's names, and the compiler's flags. Of each
# architecture the best path comes first.
AVX2: Final = ("-mavx2", "-mfma", "-mf16c")
AVX512: Final = ("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
NEON: Final = ("-DPACELINE_NEON", "-fno-schedule-insns")  # GCC would move loads up until registers run out
_AVX512: Final = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni")
TILES: Final = "avx512amx"  # used only where a trial shows that it works, is right and is faster
NEEDS: Final = {
    TILES: (*_AVX512, "amx_tile", "amx_int8"),
    "avx512": _AVX512,
    "avx2vnni": ("avx2", "fma", "f16c", "avx_vnni"),
    "avx2": ("avx2", "fma", "f16c"),
    "neoni8mm": ("asimd", "asimddp", "i8mm"),
    "neondotprod": ("asimd", "asimddp"),
    "neon": ("asimd",),
    "portable": (),
}
FLAGS: Final = {
    TILES: (*AVX2, *AVX512, "-mamx-tile", "-mamx-int8"),
    "avx512": (*AVX2, *AVX512),
    "avx2vnni": (*AVX2, "-mavxvnni"),
    "avx2": AVX2,
    "neoni8mm": (*NEON, "-march=armv8.2-a+dotprod+i8mm"),
    "neondotprod": (*NEON, "-march=armv8.2-a+dotprod"),
    "neon": NEON,
    "portable": ("-O1",),  # it is slow either way, and builds in a third of the time
}
VECTOR_CODE: Final = ("decoder", "block_head", "block_head_sample")  # compiled for the path
PLAIN_CODE: Final = ("pack", "page_file")  # the same on all
# What $PACELINE_CPU may say, and the paths that each choice allows, the best one first.
CHOICES: Final = {
    "auto": tuple(path for path in NEEDS if path != "portable"),
    "amx": (TILES,),
    "avx512": ("avx512",),
    "avx2": ("avx2vnni", "avx2"),
    "neon": ("neoni8mm", "neondotprod", "neon"),
    "portable": ("portable",),
    "torch": (),
}

# Packed formats and encodings, in the order of formats.h and pack.cpp.
FORMATS: Final = ("K4", "K8", "H4", "H8", "O4", "O8", "K6", "F4")
CODE_BYTES: Final = dict(zip(FORMATS, (256, 512, 256, 512, 256, 512, 384, 256), strict=True))
SCALE_BYTES: Final = dict(zip(FORMATS, (320, 320, 64, 64, 32, 32, 288, 32), strict=True))
SCALE_GROUPS: Final = dict(zip(FORMATS, (8, 8, 1, 1, 1, 1, 8, 1), strict=True))
ENCODINGS: Final = {
    "Q4_K": "K4",
    "Q5_K": "K8",
    "Q4_1": "H4",
    "Q5_1": "H8",
    "Q4_0": "O4",
    "Q5_0": "O8",
    "Q8_0": "O8",
    "Q6_K": "K6",
    "Q3_K": "K6",
    "F32": "O8",
    "F32 to 4": "O4",
    "MXFP4": "F4",
}
ACTIVATIONS: Final = ("silu", "gelu_tanh", "clamped_swiglu")  # in the order of model.h
LINEARS: Final = ("q", "k", "v", "o", "gate", "up", "down")
EXPERT_LINEARS: Final = ("gate", "up", "down")
VECTORS: Final = (
    *("attn_norm", "ffn_norm", "q_bias", "k_bias", "v_bias", "o_bias", "q_norm", "k_norm"),
    *("post_attn_norm", "post_ffn_norm", "sinks", "router", "router_bias"),
)
TILE: Final = 16
GROUP: Final = 32
UNIT: Final = 32
SUB_BLOCK: Final = 16
MAX_HEAD_DIM: Final = 256


class Linear(c.Structure):
    _fields_ = (
        ("format", c.c_int32),
        ("outputs", c.c_int32),
        ("inputs", c.c_int32),
        ("reserved", c.c_int32),
        ("codes", c.c_void_p),
        ("scales", c.c_void_p),
        ("codes_pair", c.c_int64),
        ("scales_pair", c.c_int64),
    )


class Layer(c.Structure):
    _fields_ = (
        *((name, Linear) for name in LINEARS),
        *((name, c.c_void_p) for name in (*VECTORS, "experts", "expert_biases")),
        *((name, c.c_int32) for name in ("local", "reserved")),
    )


class Model(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim")),
        *((name, c.c_int32) for name in ("ff_width", "vocab", "window")),
        *((name, c.c_int32) for name in ("experts", "experts_used", "renormalise", "activation")),
        *((name, c.c_float) for name in ("norm_eps", "attn_scale", "embed_scale")),
        *((name, c.c_float) for name in ("attn_softcap", "logit_softcap", "gate_limit", "gate_slope")),
        ("reserved", c.c_int32),
        ("layer", c.c_void_p),
        ("embed", Linear),
        ("head", Linear),
        *((name, c.c_void_p) for name in ("norm", "keys", "values")),
        ("sub_blocks", c.c_int64),
    )


class Pass(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("rows", "spans", "scored", "taps", "copies", "layers")),
        *((name, c.c_void_p) for name in ("tokens", "cosines", "sines", "local_cosines", "local_sines")),
        *((name, c.c_void_p) for name in ("span", "span_rows", "tables")),
        *((name, c.c_void_p) for name in ("write_starts", "writes", "copy", "scored_rows", "tap_layers")),
        *((name, c.c_void_p) for name in ("run_layers", "logits", "hidden")),
    )


class Runs(c.Structure):
    _fields_ = (("at", c.c_void_p), *((name, c.c_int64) for name in ("count", "stride", "bytes")))


class Page(c.Structure):
    _fields_ = (
        *((name, c.c_char_p) for name in ("path", "header")),
        *((name, c.c_int32) for name in ("header_bytes", "checksum_at")),
        ("parts", Runs * 2),
        *((name, c.c_int32) for name in ("status", "reserved")),
    )


class BlockModel(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("layers", "width", "heads", "kv_heads", "head_dim")),
        *((name, c.c_int32) for name in ("draft_vocab", "block", "rank")),
        *((name, c.c_float) for name in ("norm_eps", "attn_scale", "embed_scale", "sure_bias")),
        ("layer", c.c_void_p),
        *((name, Linear) for name in ("embed", "fc", "head", "markov_out")),
        *((name, c.c_void_p) for name in ("context_norm", "norm", "mask", "markov_in", "sure")),
        *((name, c.c_void_p) for name in ("ids", "weights")),
        ("weights_bytes", c.c_int64),
    )


class Part(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("hidden", "context")),
        *((name, c.c_int32) for name in ("start", "rows")),
    )


class Reading(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("parts", "taps")),
        *((name, c.c_void_p) for name in ("part", "cosines", "sines")),
    )


class Text(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("context", "hidden", "base")),
        *((name, c.c_int32) for name in ("count", "position", "anchor", "reserved")),
    )


class Filling(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("texts", "slots")),
        *((name, c.c_void_p) for name in ("text", "cosines", "sines")),
    )


class Chain(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("base", "hidden")),
        *((name, c.c_int32) for name in ("slot", "previous", "steps", "reserved")),
        *((name, c.c_void_p) for name in ("choose", "settings", "keys")),
    )


class Chaining(c.Structure):
    _fields_ = (
        *((name, c.c_int32) for name in ("chains", "steps")),
        *((name, c.c_void_p) for name in ("chain", "numbers", "sure", "logits")),
    )


class DraftCall(c.Structure):
    _fields_ = (("reading", Reading), ("filling", Filling), ("chaining", Chaining))


def _check_layout(library: c.CDLL) -> None:
    """Both sides must mean the same by a structure: a slip would be silent."""
    tables = (CODE_BYTES, SCALE_BYTES, SCALE_GROUPS)
    ours = [c.sizeof(kind) for kind in (Linear, Layer, Model, Pass)]
    ours += [table[name] for table in tables for name in FORMATS]
    theirs = (c.c_int32 * len(ours))()
    library.paceline_layout(theirs)
    assert list(theirs) == ours, "library.py does not describe formats.h and model.h"
    ours = [c.sizeof(kind) for kind in (BlockModel, Part, Reading, Text, Filling, Chain, DraftCall)]
    theirs = (c.c_int32 * len(ours))()
    library.paceline_block_layout(theirs)
    assert list(theirs) == ours, "library.py does not describe block_model.h"
    assert library.paceline_page_layout() == c.sizeof(Page), "library.py does not describe page_file.cpp"


def chosen() -> str:
    """The path chosen by $PACELINE_CPU."""
    choice = os.environ.get(SETTING) or "auto"
    if choice not in CHOICES:
        raise SettingError(SETTING, choice, f"one of {', '.join(CHOICES)}")
    return choice


def best_path(choice: str) -> str | None:
    """The path to build for; None where a processor has none of the vector instructions it takes."""
    from paceline.target import hardware  # needs torch, which is not there when a wheel is built

    paths = [path for path in CHOICES[choice] if usable(path)]
    if choice == "auto" and TILES in paths and hardware.tiles(source_digest()) == "slower":
        paths.remove(TILES)
    return next(iter(paths), None)


def usable(path: str) -> bool:
    """Whether this processor runs a path, with the right bits."""
    from paceline.target import hardware

    if not hardware.has(NEEDS[path]):
        return False
    return path != TILES or hardware.tiles(source_digest()) in ("slower", "faster")


def paths_of(machine: str) -> list[str]:
    """The paths of an architecture: those of ARM need asimd, those of x86 other features, portable none."""
    arm = machine in ("aarch64", "arm64")
    return [path for path, needs in NEEDS.items() if not needs or ("asimd" in needs) == arm]


def sources(path: str) -> native_build.Sources:
    """Of the library for one path."""
    flags = f"-DPACELINE_PATH={path}", *FLAGS[path]
    units = [
        *(native_build.Unit(FOLDER / f"{name}.cpp", flags) for name in VECTOR_CODE),
        *(native_build.Unit(FOLDER / f"{name}.cpp") for name in PLAIN_CODE),
    ]
    return native_build.Sources(f"forward-{path}", units, sorted(FOLDER.glob("*.h")))


@cache
def source_digest() -> str:
    """Of the C++ and of how it is compiled, the same for all paths, which compute the same bits."""
    digest = sha256(repr(native_build.COMPILE).encode())
    for source in sorted(FOLDER.glob("*.*")):
        digest.update(f"\n{source.name}\n".encode() + source.read_bytes())
    return digest.hexdigest()


def build(path: str, extra: tuple[str, ...] = ()) -> Path:
    """The library's file, compiled unless it is in the cache. extra: more flags, such as a sanitizer's."""
    return native_build.library(*sources(path), extra)


@cache
def load(path: str, extra: tuple[str, ...] = ()) -> c.CDLL:
    """Raises NotCompiled where it cannot be built. extra: see `build`."""
    library = native_build.load(*sources(path), extra)
    _check_layout(library)
    library.paceline_pool_open.restype = c.c_void_p
    library.paceline_pool_open.argtypes = (c.c_int,)
    library.paceline_pool_close.restype = None
    library.paceline_pool_close.argtypes = (c.c_void_p,)
    library.paceline_pool_stop_prefetching.restype = None
    library.paceline_pool_stop_prefetching.argtypes = (c.c_void_p,)
    library.paceline_block_open.restype = c.c_void_p
    library.paceline_block_open.argtypes = (c.POINTER(BlockModel), c.c_void_p)
    library.paceline_block_close.restype = None
    library.paceline_block_close.argtypes = (c.c_void_p,)
    library.paceline_block_run.argtypes = (c.c_void_p, c.POINTER(DraftCall))
    library.paceline_open.restype = c.c_void_p
    library.paceline_open.argtypes = (c.POINTER(Model), c.c_void_p)
    library.paceline_close.restype = None
    library.paceline_close.argtypes = (c.c_void_p,)
    library.paceline_forward.argtypes = (c.c_void_p, c.POINTER(Pass))
    library.paceline_multiply.argtypes = (c.POINTER(Linear), c.c_void_p, c.c_int, c.c_void_p)
    library.paceline_unpack.restype = None
    library.paceline_unpack.argtypes = (c.POINTER(Linear), c.c_void_p, c.c_int, c.c_void_p)
    library.paceline_xxh64.restype = c.c_uint64
    library.paceline_xxh64.argtypes = (c.c_void_p, c.c_int64, c.c_uint64)
    library.paceline_read_pages.restype = None
    library.paceline_read_pages.argtypes = (c.c_void_p, c.POINTER(Page), c.c_int32)
    library.paceline_pack.restype = None
    library.paceline_pack.argtypes = (
        *(c.c_int, c.c_void_p, c.c_int64, c.c_int, c.c_void_p),
        *(c.POINTER(Linear), c.c_int, c.c_int),
    )
    return library
