"""Tensor entries of the safetensors files in a folder.

Their headers are read here rather than through the safetensors package, which returns whole tensors: this way
both formats are decoded in the same chunks, without a second copy in memory.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from paceline.errors import CorruptModel
from paceline.target.weights.dequant import ENCODINGS
from paceline.target.weights.tensors import TensorEntry, require_whole

SINGLE: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
LENGTH_BYTES: Final = 8  # the header's length, little-endian, comes before it


def read_json(path: Path) -> dict[str, Any]:
    try:
        return _table(path, path.read_bytes())
    except FileNotFoundError:
        raise CorruptModel(f"{path.parent.name} has no {path.name}; pull it again") from None


def tensor_entries(folder: Path) -> dict[str, TensorEntry]:
    tensors: dict[str, TensorEntry] = {}
    for shard in _shards(folder):
        for entry in _entries(shard):
            tensors[entry.name] = entry
    return tensors


def _shards(folder: Path) -> list[Path]:
    if not (folder / INDEX).is_file():
        if not (folder / SINGLE).is_file():
            raise CorruptModel(f"{folder.name} has neither {SINGLE} nor {INDEX}; pull it again")
        return [folder / SINGLE]
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CorruptModel(f"{INDEX} is damaged: weight_map does not name files; pull it again")
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CorruptModel(f"{folder.name} has no {name}, which {INDEX} lists; pull it again")
    return [folder / name for name in names]


def _entries(file: Path) -> Iterator[TensorEntry]:
    data, header = _header(file)
    begins: dict[str, int] = {}
    ends: dict[str, int] = {}
    for name, fields in header.items():
        begin, end = _span(file, name, fields)
        begins[name], ends[name] = data + begin, data + end
    require_whole(file, ends)
    for name, fields in header.items():
        entry = TensorEntry(file, name, fields["dtype"], tuple(fields["shape"]), begins[name])
        if entry.encoding in ENCODINGS and entry.nbytes != ends[name] - begins[name]:
            raise _damaged(file, f"{name} of shape {list(entry.shape)} does not fill its bytes")
        yield entry


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """The offset of the data, and the entry of every tensor."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(LENGTH_BYTES), "little")
        if LENGTH_BYTES + length > size:
            raise CorruptModel(
                f"{file.name} is truncated: expected {LENGTH_BYTES + length} bytes for its header alone, "
                f"found {size}; pull it again"
            )
        header = _table(file, stream.read(length))
    header.pop("__metadata__", None)
    return LENGTH_BYTES + length, header


def _table(file: Path, text: bytes) -> dict[str, Any]:
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise _damaged(file, "it is not JSON")
    return table


def _span(file: Path, name: str, entry: Any) -> tuple[int, int]:
    """Begin and end of a tensor in bytes from the start of the data; checks the whole entry."""
    match entry:
        case {"dtype": str(kind), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            sound = 0 <= begin <= end and all(isinstance(size, int) and size >= 0 for size in shape)
            if sound and (name + kind).isprintable():
                return begin, end
    raise _damaged(file, f"the entry of {name[:80]!r} is not usable")


def _damaged(file: Path, what: str) -> CorruptModel:
    return CorruptModel(f"{file.name} is damaged: {what}; pull it again")
