"""A model on disk, independent of its format: its configuration and its tensor entries."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from paceline.errors import CorruptModel, UnknownArchitecture
from paceline.target.weights.model_config import Experts, ModelConfig
from paceline.target.weights.tensors import Columns, Gathered, MxRows, TensorEntry

FAMILIES: Final = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"),
    *("phi3", "gemma2", "gemma3", "gpt_oss"),
)
EXPERT_STACKS: Final = {  # [experts, ...] each
    **{f"{part}_exps": part for part in ("gate", "up", "down")},
    **{f"{part}_exps_bias": f"{part}_bias" for part in ("gate", "up", "down")},
}
# Whether it is the way down, and how it is stored; the others are gate and up.
JOINED_EXPERTS: Final = {
    f"{part}_experts{suffix}": (part == "down", suffix.removeprefix("_") or "matrix")
    for part in ("gate_up", "down")
    for suffix in ("", "_bias", "_blocks", "_scales")
}


@dataclass(frozen=True, slots=True)
class Checkpoint:
    source: str  # name of the file or folder, for messages
    shape: ModelConfig
    tensors: Mapping[str, TensorEntry]  # by canonical name
    unmapped: tuple[str, ...]  # tensors that have no canonical name
    tied: bool  # the head is the embedding
    interleaved: bool  # rows of q and k lie in the order of the interleaved RoPE
    norm_shift: float  # to add to norm weights
    identity: bytes  # the metadata as stored


class Fields:
    """Metadata of a model, checked as it is read. None counts as absent."""

    def __init__(self, source: str, values: Mapping[str, object], prefix: str = "") -> None:
        self.source, self.values, self.prefix = source, values, prefix

    def raw(self, key: str) -> object:
        return self.values.get(self.prefix + key)

    def integer(self, key: str, default: int | None = None, maximum: int = 2**31) -> int:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= maximum:
            raise self.unusable(key, value, f"a whole number from 1 to {maximum}")
        return value

    def number(self, key: str, default: float | None = None, maximum: float = sys.float_info.max) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= maximum:
            raise self.unusable(key, value, f"a number above 0, at most {maximum:.3g}")
        return float(value)

    def numbers(self, key: str, count: int) -> tuple[float, ...]:
        value = self.raw(key)
        if not isinstance(value, list) or len(value) != count:
            raise self.unusable(key, value, f"{count} numbers")
        each = Fields(self.source, {f"{key}[{i}]": number for i, number in enumerate(value)})
        return tuple(each.number(name) for name in each.values)

    def flag(self, key: str, default: bool) -> bool:
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise self.unusable(key, value, "true or false")
        return value

    def fields(self, key: str) -> "Fields":
        """A nested table; an empty one where there is none."""
        value = self._value(key, {})
        if not isinstance(value, Mapping):
            raise self.unusable(key, value, "a table")
        return Fields(self.source, value)

    def unusable(self, key: str, value: object, expected: str) -> CorruptModel:
        problem = f"is {str(value)[:40]!r}" if value is not None else "is missing"
        return CorruptModel(
            f"{self.source}: {self.prefix}{key} {problem}, expected {expected}; pull it again"
        )

    def _value(self, key: str, default: object) -> object:
        value = self.raw(key)
        return default if value is None else value


def split_joined(tensors: Mapping[str, TensorEntry], shape: ModelConfig) -> dict[str, TensorEntry]:
    """Each matrix under its own name, where a file stores several as one: by rows, or by experts."""
    q, kv, ff = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.ff_width
    joined = {"qkv": {"q": q, "k": kv, "v": kv}, "gate_up": {"gate": ff, "up": ff}}
    split: dict[str, TensorEntry] = {}
    for name, entry in tensors.items():
        layer, _, part = name.rpartition(".")
        if part in joined:
            split |= {f"{layer}.{own}": rows for own, rows in _cut(entry, joined[part])}
        elif part in JOINED_EXPERTS and shape.experts is not None:
            split |= _joined_experts(layer, part, tensors, shape.experts, shape.width)
        elif part in EXPERT_STACKS and shape.experts is not None:
            experts = _cut(entry, dict.fromkeys(map(str, range(shape.experts.count)), 1))
            for index, rows in experts:
                matrix = replace(rows, shape=rows.shape[1:])
                split[f"{layer}.experts.{index}.{EXPERT_STACKS[part]}"] = matrix
        else:
            split[name] = entry
    return split


def _joined_experts(
    layer: str, part: str, tensors: Mapping[str, TensorEntry], experts: Experts, width: int
) -> dict[str, TensorEntry]:
    """gpt-oss: gate and up in turns, and matrices stored inputs first, or in MXFP4 beside their scales."""
    entry, (down, kind) = tensors[f"{layer}.{part}"], JOINED_EXPERTS[part]
    outputs, inputs = (width, experts.ff_width) if down else (2 * experts.ff_width, width)
    owned = {"down": slice(None)} if down else {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    scales = tensors.get(f"{layer}.{part.replace('blocks', 'scales')}")
    if kind == "scales":  # read with their blocks
        return {}
    stored = {
        "matrix": (experts.count, inputs, outputs),
        "bias": (experts.count, outputs),
        "blocks": (experts.count, outputs, inputs // 32, 16),
    }[kind]
    as_bytes = kind == "blocks"
    sound = entry.shape == stored and (entry.encoding == "U8") == as_bytes
    if not sound or (as_bytes and (scales is None or scales.shape != stored[:3] or scales.encoding != "U8")):
        raise CorruptModel(
            f"{entry.file.name}: {entry.name} has shape {list(entry.shape)}, expected {list(stored)}"
            f"{' of bytes with their scales' if as_bytes else ''}; pull it again"
        )
    split = {}
    for expert in range(experts.count):
        for own, taken in owned.items():
            rows = len(range(outputs)[taken])
            if as_bytes and scales is not None:
                groups = inputs // 32
                own_scales = replace(scales, offset=scales.offset + expert * outputs * groups)
                how: Gathered = MxRows(outputs, groups, own_scales, taken)
                found = replace(entry, encoding="MXFP4", shape=(rows, inputs))
            else:
                entry.require_readable()
                size = entry.nbytes // entry.elements
                how = Columns(1 if kind == "bias" else inputs, outputs, size, taken)
                found = replace(entry, shape=(rows,) if kind == "bias" else (rows, inputs))
            name = f"{layer}.experts.{expert}.{own}{'_bias' if kind == 'bias' else ''}"
            split[name] = replace(found, offset=entry.offset + expert * how.span, gathered=how)
    return split


def _cut(entry: TensorEntry, sizes: Mapping[str, int]) -> Iterator[tuple[str, TensorEntry]]:
    """sizes: of the parts, along the outermost dimension."""
    entry.require_readable()
    inner = entry.shape[1:]
    if entry.shape[0] != sum(sizes.values()):
        raise CorruptModel(
            f"{entry.file.name}: {entry.name} has shape {list(entry.shape)}, expected "
            f"{[sum(sizes.values()), *inner]}; pull it again"
        )
    offset = entry.offset
    for name, size in sizes.items():
        part = replace(entry, shape=(size, *inner), offset=offset)
        offset += part.nbytes
        yield name, part


def unsupported(source: str, what: str) -> UnknownArchitecture:
    """what: a feature of the model that the forward pass does not have."""
    return UnknownArchitecture(f"{source} needs {what}, which paceline cannot run; use another model")


def require_family(source: str, family: object, known: tuple[str, ...]) -> str:
    if family not in known:
        raise UnknownArchitecture(
            f"{source} is of the architecture {str(family)[:40]!r}, which paceline cannot run; "
            f"known: {', '.join(known)}"
        )
    return str(family)
