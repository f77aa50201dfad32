"""From single answers to rows of results.

A row pools its answers: tokens over seconds, not means of means. Low and high are over single answers.
A ratio is pooled over the prompts both sides answered in the same round, its low and high over single pairs.
Systems stop at the model's end token, so that they write what an agent would read; answers then differ in
length, and what is compared is time per token: TPOT = (total - first) / (tokens - 1).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bench.peers.systems import Entry
from bench.workload import FREE_TEXT

AGENT_TURNS: Final = "agent turns"  # all workloads of agents, pooled
OURS: Final = "paceline"
FIELDS: Final = (
    "system",
    "mode",
    "workload",
    "temperature",
    "tokens_per_s",
    "tpot_ms",
    "ttft_ms",
    "tokens_per_pass",
    "peak_mb",
    "n",
    "identical_to_plain",
)

Row = dict[str, Any]
Key = tuple[int, float, str, str]  # one measured moment: round, temperature, workload, prompt


@dataclass(frozen=True)
class Sample:
    """One answer."""

    entry: Entry
    round: int
    temperature: float
    workload: str
    prompt: str
    tokens: tuple[int, ...]
    ttft: float
    total: float
    passes: int | None

    @property
    def key(self) -> Key:
        return self.round, self.temperature, self.workload, self.prompt

    @property
    def decode(self) -> float:
        return self.total - self.ttft

    @property
    def steps(self) -> int:
        return len(self.tokens) - 1


def tpot(samples: Iterable[Sample]) -> float | None:
    """Seconds per token after the first, of all together."""
    timed = [s for s in samples if s.steps > 0]
    return sum(s.decode for s in timed) / sum(s.steps for s in timed) if timed else None


def per_token(samples: Iterable[Sample]) -> float | None:
    """Seconds per token, the wait for the first included."""
    timed = [s for s in samples if s.tokens]
    return sum(s.total for s in timed) / sum(len(s.tokens) for s in timed) if timed else None


Cost = Callable[[Iterable[Sample]], float | None]


def ratio(slow: Sequence[Sample], fast: Sequence[Sample], cost: Cost) -> dict[str, Any] | None:
    """How many times as long `slow` takes as `fast`, over the moments both were measured at."""
    theirs = {s.key: s for s in slow}
    pairs = [(theirs[s.key], s) for s in fast if s.key in theirs]
    singles = [a / b for x, y in pairs if (a := cost([x])) and (b := cost([y]))]
    above, below = cost([x for x, _ in pairs]), cost([y for _, y in pairs])
    if not singles or not above or not below:
        return None
    return {
        "ratio": round(above / below, 3),
        "low": round(min(singles), 3),
        "high": round(max(singles), 3),
        "pairs": len(singles),
    }


def identical(samples: Sequence[Sample], plain: Sequence[Sample]) -> float | None:
    """The share of prompts whose answer equals the same system's plain answer, token for token."""
    expected = {s.key: s.tokens for s in plain}
    same = [s.tokens == expected[s.key] for s in samples if s.key in expected]
    return round(sum(same) / len(same), 3) if same else None


def rows(
    samples: Sequence[Sample],
    entries: Sequence[Entry],
    peaks: Mapping[Entry, float],
    errors: Mapping[Entry, str],
    temperatures: Sequence[float],
    workloads: Sequence[str],
) -> list[Row]:
    """One for each system, mode, workload and temperature, also where nothing came out of it."""
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in workloads}
    agents = tuple(name for name in workloads if name not in FREE_TEXT)
    if len(agents) > 1:
        groups[AGENT_TURNS] = agents
    found = []
    for temperature in temperatures:
        for group, names in groups.items():
            here = [s for s in samples if s.temperature == temperature and s.workload in names]
            by_entry = {e: [s for s in here if s.entry == e] for e in entries}
            for entry in entries:
                row = _row(entry, by_entry, group, temperature)
                row["peak_mb"] = peaks.get(entry)
                found.append(row | ({"error": errors[entry]} if entry in errors else {}))
    return found


def _row(entry: Entry, by_entry: Mapping[Entry, Sequence[Sample]], workload: str, temperature: float) -> Row:
    mine = by_entry[entry]
    plain = next((by_entry[e] for e in by_entry if e.build == entry.build and e.plain), [])
    tokens, counted = sum(len(s.tokens) for s in mine), [s for s in mine if s.passes]
    each = [t for s in mine if (t := tpot([s]))]
    passes = sum(s.passes or 0 for s in counted)
    seconds, pooled = per_token(mine), tpot(mine)
    row: Row = {
        "system": entry.system,
        "mode": entry.label,
        "workload": workload,
        "temperature": temperature,
        "tokens_per_s": _rounded(1 / seconds if seconds else None),
        "tpot_ms": _rounded(1000 * pooled if pooled else None),
        "tpot_ms_low": _rounded(1000 * min(each) if each else None),
        "tpot_ms_high": _rounded(1000 * max(each) if each else None),
        "ttft_ms": _rounded(1000 * sum(s.ttft for s in mine) / len(mine) if mine else None, 1),
        "tokens_per_pass": _rounded(sum(len(s.tokens) for s in counted) / passes if passes else None),
        "peak_mb": None,
        "n": len(mine),
        "tokens": tokens,
        "identical_to_plain": identical(mine, plain),
    }
    for name, wanted in (("vs_plain_peer", True), ("vs_speculative_peer", False)):
        row[name] = against(mine, best_peer(by_entry, wanted), by_entry)
    return row


def best_peer(by_entry: Mapping[Entry, Sequence[Sample]], plain: bool) -> Entry | None:
    """The fastest of the others, by time per output token."""
    costs = {
        entry: cost
        for entry, samples in by_entry.items()
        if entry.system != OURS and entry.plain == plain and (cost := tpot(samples))
    }
    return min(costs, key=lambda e: costs[e]) if costs else None


def against(
    mine: Sequence[Sample], peer: Entry | None, by_entry: Mapping[Entry, Sequence[Sample]]
) -> dict[str, Any] | None:
    """How many times as fast this is as the peer: per output token, and with the first token's wait."""
    if peer is None or not mine:
        return None
    decode, whole = ratio(by_entry[peer], mine, tpot), ratio(by_entry[peer], mine, per_token)
    return {"peer": f"{peer.system} {peer.label}", "tpot": decode, "total": whole} if decode else None


def _rounded(value: float | None, digits: int = 3) -> float | None:
    return None if value is None else round(value, digits)
