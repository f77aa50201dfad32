"""Speculation of a whole upstream, by its Prometheus counters: vLLM's names, which paceline's server has too.

`leg_recorder` reads the figures of a single request.
"""

from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

PREFIX: Final = "vllm:spec_decode_num_"


@dataclass(frozen=True, slots=True)
class SpecCounters:
    """Counters of a server since its start, over all engines and models, or their growth."""

    drafts: int = 0  # passes that verified a draft of a sequence
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()
    generated_tokens: int = 0

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

    def __add__(self, other: "SpecCounters") -> "SpecCounters":
        pairs = zip_longest(self.accepted_by_position, other.accepted_by_position, fillvalue=0)
        return SpecCounters(
            self.drafts + other.drafts,
            self.draft_tokens + other.draft_tokens,
            self.accepted_tokens + other.accepted_tokens,
            tuple(a + b for a, b in pairs),
            self.generated_tokens + other.generated_tokens,
        )

    def __sub__(self, before: "SpecCounters") -> "SpecCounters":
        """The growth since `before`. A server that was restarted counts from zero again."""
        if self.generated_tokens < before.generated_tokens or self.drafts < before.drafts:
            return self
        old = before.accepted_by_position + (0,) * len(self.accepted_by_position)
        return SpecCounters(
            self.drafts - before.drafts,
            self.draft_tokens - before.draft_tokens,
            self.accepted_tokens - before.accepted_tokens,
            tuple(a - b for a, b in zip(self.accepted_by_position, old, strict=False)),
            self.generated_tokens - before.generated_tokens,
        )


def read_counters(exposition: str) -> SpecCounters:
    """From the text of `/metrics`. Counters that are absent count as zero: speculation is off."""
    from prometheus_client.parser import text_string_to_metric_families

    totals: dict[str, int] = {}
    positions: dict[int, int] = {}
    for family in text_string_to_metric_families(exposition):
        if not family.name.startswith("vllm:"):
            continue
        for sample in family.samples:
            if sample.name == f"{PREFIX}accepted_tokens_per_pos_total":
                position = int(sample.labels["position"])
                positions[position] = positions.get(position, 0) + int(sample.value)
            else:
                totals[sample.name] = totals.get(sample.name, 0) + int(sample.value)
    return SpecCounters(
        totals.get(f"{PREFIX}drafts_total", 0),
        totals.get(f"{PREFIX}draft_tokens_total", 0),
        totals.get(f"{PREFIX}accepted_tokens_total", 0),
        tuple(positions.get(i, 0) for i in range(max(positions, default=-1) + 1)),
        totals.get("vllm:generation_tokens_total", 0),
    )
