"""A model on disk, independent of its format: its configuration and its tensor entries."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from paceline.errors import CorruptModel, UnknownArchitecture
from paceline.target.weights.model_config import ModelConfig
from paceline.target.weights.tensors import TensorEntry

FAMILIES: Final = ("llama", "mistral", "qwen2", "qwen3", "gemma3")


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
