"""The header of a GGUF file: its metadata and where each tensor lies.

Arrays such as the tokenizer's are nearly all of a header; whoever does not need them has them stepped over.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from paceline.errors import CorruptModel, ModelError, UnknownModel

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
ALIGNMENT: Final = "general.alignment"
LONG: Final = 4096  # items; settings of the model itself are shorter

STRING: Final = 8
ARRAY: Final = 9
SCALARS: Final = {
    number: struct.Struct("<" + code)
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
U32: Final = SCALARS[4]
U64: Final = SCALARS[10]

ENCODINGS: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K",
    11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    name: str
    encoding: str
    shape: tuple[int, ...]  # outermost first
    offset: int  # bytes from the start of the file


@dataclass(frozen=True, slots=True)
class GgufHeader:
    metadata: Mapping[str, Any]  # numbers, truths, strings, and lists of them
    tensors: Mapping[str, TensorInfo]
    raw: bytes  # the header as stored


def read_header(path: Path, long_arrays: bool = True) -> GgufHeader:
    """Without long arrays, lists of strings and of more than 4096 items are left out."""
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise CorruptModel(
                    f"{path.name} is not a GGUF file; give a GGUF file or a folder with config.json"
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Reader(data, path.name, long_arrays))
    except FileNotFoundError:
        raise UnknownModel(f"there is no {path.name}; check the path, or pull the model first") from None
    except OSError as error:
        raise ModelError.unreadable(path, error) from error


class _Reader:
    """Reads a header front to back; running off its end means that the file is truncated."""

    def __init__(self, data: mmap.mmap, name: str, long_arrays: bool) -> None:
        self.data, self.name, self.long_arrays = data, name, long_arrays
        self.at, self.end = 0, len(data)

    def step(self, count: int) -> int:
        """Moves on by `count` bytes and returns where they begin."""
        begin, self.at = self.at, self.at + count
        if self.at > self.end:
            raise CorruptModel(
                f"{self.name} is truncated: its header runs past {self.end} bytes; pull it again"
            )
        return begin

    def whole(self, kind: struct.Struct = U64) -> int:
        return int(kind.unpack_from(self.data, self.step(kind.size))[0])

    def text(self) -> str:
        length = self.whole()
        begin = self.step(length)
        try:
            return self.data[begin : begin + length].decode()
        except UnicodeDecodeError:
            raise self.damaged("a text that is not UTF-8") from None

    def value(self, number: int) -> Any:
        """A metadata value of this type; None for an array that was stepped over."""
        if number == STRING:
            return self.text()
        if number == ARRAY:
            return self.array()
        kind = self.kind(number)
        return kind.unpack_from(self.data, self.step(kind.size))[0]

    def array(self) -> list[Any] | None:
        number, length = self.whole(U32), self.whole()
        if number == STRING and not self.long_arrays:
            self.step_over_texts(length)
            return None
        if number in (STRING, ARRAY):
            return [self.value(number) for _ in range(length)]
        kind = self.kind(number)
        begin = self.step(length * kind.size)
        if length > LONG and not self.long_arrays:
            return None
        return [item for (item,) in kind.iter_unpack(self.data[begin : self.at])]

    def step_over_texts(self, count: int) -> None:
        unpack, data, at, last = U64.unpack_from, self.data, self.at, self.end - U64.size
        for _ in range(count):
            if at > last:
                at = self.end + 1
                break
            at += U64.size + unpack(data, at)[0]
        self.step(at - self.at)

    def kind(self, number: int) -> struct.Struct:
        if number not in SCALARS:
            raise self.damaged(f"a value of the unknown type {number}")
        return SCALARS[number]

    def damaged(self, what: str) -> CorruptModel:
        return CorruptModel(f"{self.name} is damaged: its header holds {what}; pull it again")


def _parse(reader: _Reader) -> GgufHeader:
    reader.step(len(MAGIC))
    version = reader.whole(U32)
    if version not in VERSIONS:
        raise CorruptModel(
            f"{reader.name} is GGUF version {version}, expected one of {list(VERSIONS)}; convert it again"
        )
    n_tensors, n_values = reader.whole(), reader.whole()
    metadata = _metadata(reader, n_values)
    listed = [_tensor(reader) for _ in range(n_tensors)]
    raw, data = reader.data[: reader.at], _data_start(reader, metadata.get(ALIGNMENT, 32))
    tensors = {t.name: TensorInfo(t.name, t.encoding, t.shape, data + t.offset) for t in listed}
    if len(tensors) != len(listed):
        raise reader.damaged("one tensor twice")
    return GgufHeader(metadata, tensors, raw)


def _metadata(reader: _Reader, count: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    try:
        for _ in range(count):
            key, value = reader.text(), reader.value(reader.whole(U32))
            if value is not None:
                metadata[key] = value
    except RecursionError:
        raise reader.damaged("arrays of arrays without end") from None
    return metadata


def _tensor(reader: _Reader) -> TensorInfo:
    """The next tensor, its offset still counted from the start of the data."""
    name, n_dims = reader.text(), reader.whole(U32)
    if n_dims > 4 or not name.isprintable():
        raise reader.damaged(f"the tensor {name[:40]!r} of {n_dims} dimensions")
    shape = tuple(reader.whole() for _ in range(n_dims))[::-1]
    number = reader.whole(U32)
    return TensorInfo(name, ENCODINGS.get(number, f"type {number}"), shape, reader.whole())


def _data_start(reader: _Reader, alignment: object) -> int:
    """Data begins at the first aligned byte after the header."""
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise reader.damaged(f"the alignment {str(alignment)[:40]!r}")
    return -(-reader.at // alignment) * alignment
