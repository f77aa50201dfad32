"""The memory that a route's traffic needs on a device: weights, drafters, KV cache at the planned load."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from paceline.advise.advice import RouteAdvice
from paceline.types import Target

MIB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes."""

    target: Mapping[str, int]  # by use, as loaded
    drafters: Mapping[str, int]  # weights of trained drafters and draft models
    cache: int  # that the engine is set to
    token: int  # of one token in the cache
    cache_needed: int  # at the planned load
    concurrency: int
    tokens: int  # of one output with its prompt, 95 of 100
    free: int | None  # on the device now, this model loaded; None: not known

    @property
    def cache_mb(self) -> int:
        """The setting that holds the planned load, in steps of 64."""
        return -(-self.cache_needed // (64 * MIB)) * 64

    @property
    def verdict(self) -> str:
        if self.cache_needed <= self.cache:
            return "the cache holds the planned load"
        more = self.cache_needed - self.cache
        advice = f"give --cache-mb {self.cache_mb}: the planned load needs {more / MIB:,.0f} MiB more"
        if self.free is not None and more > self.free:
            return f"{advice} than are set, and {self.free / MIB:,.0f} MiB are free: plan for fewer at once"
        return f"{advice} than are set"


def memory_estimate(
    target: Target,
    uses: Mapping[str, int],
    drafters: Mapping[str, int],
    cache_mb: int,
    routes: Sequence[RouteAdvice],
    free: int | None,
) -> MemoryEstimate:
    """uses: of the target, by use. The cache holds `capacity` positions in `cache_mb`."""
    token = cache_mb * MIB // max(1, target.capacity)
    tokens = max(int(r.workload.prompt_tokens.p95 + r.workload.output_tokens.p95) for r in routes)
    tokens, planned = min(tokens, target.max_context), max(r.concurrency for r in routes)
    return MemoryEstimate(
        dict(uses), dict(drafters), cache_mb * MIB, token, token * tokens * planned, planned, tokens, free
    )
