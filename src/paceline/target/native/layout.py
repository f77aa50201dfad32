"""Where each packed tensor lies in the packed file."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from paceline.target.native.library import (
    CODE_BYTES,
    ENCODINGS,
    GROUP,
    MOST_HEAD_DIM,
    SCALE_BYTES,
    SCALE_GROUPS,
    TILE,
    UNIT,
)
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.tensors import StoredTensor

ALIGNMENT: Final = 4096
FLOATS: Final = ("F32", "F16", "BF16")
TO_FOUR_BITS: Final = "F32 to 4"  # made of floats, whatever the file holds
MATRICES: Final = ("q", "k", "v", "o", "gate", "up", "down", "embed", "head")


@dataclass(frozen=True, slots=True)
class Matrix:
    """Offsets in bytes from the start of the data; *_pair: from one pair of tiles to the next."""

    encoding: str  # a key of ENCODINGS
    outputs: int
    inputs: int
    codes: int
    scales: int
    codes_pair: int
    scales_pair: int


@dataclass(frozen=True, slots=True)
class Vector:
    offset: int
    length: int  # padded, float32


@dataclass(frozen=True, slots=True)
class Layout:
    matrices: Mapping[str, Matrix]
    vectors: Mapping[str, Vector]
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def reason_against(shape: ModelConfig, tensors: Mapping[str, StoredTensor], quantise: bool) -> str | None:
    """Why a model cannot run natively, or None. quantise: whether float weights may be rounded."""
    if shape.architecture not in ("llama", "mistral", "qwen2", "qwen3"):
        return f"the {shape.architecture} family is not known to it"
    if any(shape.local_layers):
        return "it knows no sliding windows"
    if shape.head_dim % GROUP or shape.head_dim > MOST_HEAD_DIM:
        return f"heads of {shape.head_dim}: it wants a multiple of {GROUP}, at most {MOST_HEAD_DIM}"
    for name, stored in tensors.items():
        if _part(name) not in MATRICES:
            continue
        if stored.encoding in FLOATS:
            if not quantise:
                return f"{name} is {stored.encoding}; dtype=int8 would round such weights to 8 bits"
        elif stored.encoding not in ENCODINGS:
            return f"{name} is {stored.encoding}"
    return None


def plan(tensors: Mapping[str, StoredTensor], four_bits: bool = False) -> Layout:
    """four_bits: whatever takes more is rounded to 4 bits a weight."""
    cursor = _Cursor()
    encodings = {name: encoding_of(stored, four_bits) for name, stored in tensors.items()}
    matrices: dict[str, Matrix] = {}
    vectors: dict[str, Vector] = {}
    for name, stored in tensors.items():
        if _part(name) not in MATRICES:
            length = _up(stored.elements, UNIT)
            vectors[name] = Vector(cursor.take(4 * length), length)
        elif _part(name) == "up" and _paired(encodings, name):
            gate = matrices[name.removesuffix("up") + "gate"]
            matrices[name] = replace(
                gate, codes=gate.codes + gate.codes_pair // 2, scales=gate.scales + gate.scales_pair // 2
            )
        else:
            wide = _part(name) == "gate" and _paired(encodings, name.removesuffix("gate") + "up")
            matrices[name] = _matrix(stored, encodings[name], cursor, 2 if wide else 1)
    return Layout(matrices, vectors, cursor.at)


def _paired(encodings: Mapping[str, str], up: str) -> bool:
    """Gate and up lie in turns, two tiles each, if they are encoded alike: both are read as one stream."""
    return encodings[up] == encodings[up.removesuffix("up") + "gate"]


def _matrix(stored: StoredTensor, encoding: str, cursor: "_Cursor", woven: int) -> Matrix:
    """woven: how many matrices share the stretch of memory."""
    kind = ENCODINGS[encoding]
    outputs, inputs = _up(stored.shape[0], UNIT), _up(stored.shape[1], GROUP)
    groups = inputs // GROUP
    codes, scales = groups * CODE_BYTES[kind], groups // SCALE_GROUPS[kind] * SCALE_BYTES[kind]
    tiles = woven * outputs // TILE
    return Matrix(
        encoding,
        outputs,
        inputs,
        cursor.take(tiles * codes),
        cursor.take(tiles * scales),
        woven * 2 * codes,
        woven * 2 * scales,
    )


def encoding_of(stored: StoredTensor, four_bits: bool = False) -> str:
    if four_bits and not stored.encoding.startswith(("Q4", "Q3")):
        return TO_FOUR_BITS
    return "F32" if stored.encoding in FLOATS else stored.encoding


class _Cursor:
    def __init__(self) -> None:
        self.at = 0

    def take(self, nbytes: int) -> int:
        start = self.at
        self.at = _up(start + nbytes, ALIGNMENT)
        return start


def _part(name: str) -> str:
    return name.rpartition(".")[2]


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
