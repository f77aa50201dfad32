"""Settings. Frozen; an unknown key is an error that lists the known ones."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Final, TypeVar

from paceline.errors import SettingError

T = TypeVar("T")

DTYPES: Final = ("auto", "float32", "bfloat16", "float16")


def settings(cls: type[T], given: Mapping[str, Any]) -> T:
    """Builds a settings dataclass from names and values that came from outside."""
    known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in given:
        if key not in known:
            near = get_close_matches(key, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise SettingError(f"unknown setting {key!r}{hint} Known: {', '.join(known)}")
    return cls(**given)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine runs, whatever the request."""

    device: str = "auto"  # auto, cpu, cuda, cuda:1 ...
    dtype: str = "auto"  # auto: float32 on a CPU, bfloat16 on a GPU
    threads: int = 0  # CPU threads; 0: all cores
    cache_mb: int = 1024  # memory for the KV cache
    max_batch: int = 16  # sequences in one pass
    prefill_chunk: int = 256  # prompt tokens of one sequence in one pass

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise SettingError(f"dtype={self.dtype!r} is not usable: expected one of {', '.join(DTYPES)}")
        for name in ("cache_mb", "max_batch", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name}={getattr(self, name)!r} is not usable: expected 1 or more")
        if self.threads < 0:
            raise SettingError(f"threads={self.threads!r} is not usable: expected 0 (all cores) or more")
