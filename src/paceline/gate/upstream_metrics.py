"""Figures of a whole upstream, from the text of its `/metrics` (Prometheus).

vLLM's counters of tokens and speculation, which paceline's server has too; paceline's seconds of engine time;
GPU utilization as NVIDIA's DCGM exporter shows it. `leg_recorder` reads the figures of a single response.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, Final

from paceline.gate.pair import Leg

_SPEC: Final = "vllm:spec_decode_num_"
_TOKENS: Final = "vllm:generation_tokens_total"
_ENGINE_S: Final = tuple(f"paceline_{part}_seconds_total" for part in ("prefill", "draft", "verify"))
_UTILIZATION: Final = "DCGM_FI_DEV_GPU_UTIL"  # per cent
_READ: Final = (_SPEC, _TOKENS, *_ENGINE_S, _UTILIZATION)  # beginnings of the lines that are parsed


@dataclass(frozen=True, slots=True)
class UpstreamCounters:
    """Counters of a server since its start, over all engines and models, or their growth."""

    drafts: int = 0  # passes that verified a draft of a sequence
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    generated_tokens: int = 0
    engine_s: float | None = None  # of prefill, drafting and verification; None: not reported
    gpu_utilization: float | None = None  # 0 to 1, mean over its GPUs; a gauge
    gpus: int = 0  # that report their utilization

    @property
    def accepted_per_draft(self) -> float:
        return self.accepted_tokens / self.drafts if self.drafts else 0.0

    @property
    def acceptance(self) -> float:
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0

    @property
    def passes(self) -> int:
        """Of the target, per sequence: each writes the accepted tokens and one more."""
        return self.generated_tokens - self.accepted_tokens

    @property
    def tokens_per_pass(self) -> float:
        return self.generated_tokens / self.passes if self.passes > 0 else 0.0

    @property
    def acceptance_histogram(self) -> tuple[int, ...]:
        """Drafts by their accepted tokens: 0, 1, ..."""
        return tuple(a - b for a, b in pairwise((self.drafts, *self.accepted_by_position, 0)))

    def gpu_s(self, seconds: float) -> float | None:
        """GPU time of a growth over so many seconds: the engine's own, or by utilization."""
        if self.engine_s is not None:
            return self.engine_s
        return None if self.gpu_utilization is None else self.gpu_utilization * self.gpus * seconds

    def __add__(self, other: "UpstreamCounters") -> "UpstreamCounters":
        positions = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        shares = [one for one in (self, other) if one.gpu_utilization is not None]
        gpus = sum(one.gpus for one in shares)
        return UpstreamCounters(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            tuple(a + b for a, b in positions),
            self.generated_tokens + other.generated_tokens,
            _total(self.engine_s, other.engine_s),
            sum((one.gpu_utilization or 0.0) * one.gpus for one in shares) / gpus if gpus else None,
            gpus,
        )

    def __sub__(self, before: "UpstreamCounters") -> "UpstreamCounters":
        """The growth since `before`. A server that was restarted counts from zero again."""
        if self.generated_tokens < before.generated_tokens or self.drafts < before.drafts:
            return self
        old = before.accepted_by_position + (0,) * len(self.accepted_by_position)
        spent = None if self.engine_s is None else self.engine_s - (before.engine_s or 0.0)
        return UpstreamCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(a - b for a, b in zip(self.accepted_by_position, old, strict=False)),
            self.generated_tokens - before.generated_tokens,
            spent,
            _mean(before.gpu_utilization, self.gpu_utilization),
            self.gpus,
        )


def _total(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else a + b


def _mean(a: float | None, b: float | None) -> float | None:
    return a if b is None else b if a is None else (a + b) / 2


def read_counters(exposition: str) -> UpstreamCounters:
    """From the text of `/metrics`. Counters that are absent count as zero: speculation is off."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, float] = {}
    positions: dict[int, int] = {}
    utilization: list[float] = []
    for family in text_string_to_metric_families("\n".join(_relevant(exposition)) + "\n"):
        for sample in family.samples:
            if sample.name == f"{_SPEC}accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + int(sample.value)
            elif sample.name == _UTILIZATION:
                utilization.append(sample.value / 100)
            else:
                totals[sample.name] = totals.get(sample.name, 0.0) + sample.value
    engine_s = [totals[name] for name in _ENGINE_S if name in totals]
    return UpstreamCounters(
        int(totals.get(f"{_SPEC}drafts_total", 0)),
        int(totals.get(f"{_SPEC}draft_tokens_total", 0)),
        int(totals.get(f"{_SPEC}accepted_tokens_total", 0)),
        tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
        int(totals.get(_TOKENS, 0)),
        sum(engine_s) if engine_s else None,
        sum(utilization) / len(utilization) if utilization else None,
        len(utilization),
    )


def _relevant(exposition: str) -> Iterator[str]:
    return (line for line in exposition.splitlines() if line.startswith(_READ))


def with_counters(leg: Leg, growth: UpstreamCounters) -> Leg:
    """A leg with the figures that its response did not have, by the growth of the upstream's counters.

    Only where the upstream wrote these tokens and no others meanwhile.
    """
    if not leg.completion_tokens or growth.generated_tokens != leg.completion_tokens:
        return leg
    spent = growth.gpu_s(leg.seconds)
    found: dict[str, Any] = {
        "passes": max(1, growth.passes),
        "gpu_s": spent,
        "gpu_utilization": growth.gpu_utilization
        if growth.engine_s is None or leg.seconds <= 0
        else min(1.0, growth.engine_s / leg.seconds),
    }
    if growth.drafts and leg.draft_tokens is None:
        found |= {
            "draft_tokens": growth.draft_tokens,
            "accepted_tokens": growth.accepted_tokens,
            "acceptance_histogram": growth.acceptance_histogram,
        }
    missing = {name: value for name, value in found.items() if getattr(leg, name) in (None, ())}
    return replace(leg, **missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamWindow:
    """The growth of both arms' counters over the same seconds, users' requests and all others together."""

    created: float  # unix seconds, of its end
    seconds: float
    baseline: UpstreamCounters
    candidate: UpstreamCounters

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "UpstreamWindow":
        arms = {name: _counters(values[name]) for name in ("baseline", "candidate")}
        return cls(created=values["created"], seconds=values["seconds"], **arms)


def _counters(values: Mapping[str, Any]) -> UpstreamCounters:
    return UpstreamCounters(**{**values, "accepted_by_position": tuple(values["accepted_by_position"])})
