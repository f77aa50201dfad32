"""From single schemas to rows by category."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from bench.constraints.timed_cursor import Clock
from bench.table import Column, number

SLOW: Final = 10.0  # seconds that one schema may take
LARGE: Final = 500.0  # MB that one may take
ONE_ROW: Final = "json-schema-test-suite"  # its categories are too many for a table
COLUMNS: Final = (
    *(Column(key, key) for key in ("category", "schemas", "accepted", "refused", "completed", "valid")),
    Column("not checkable", "unchecked"),
    Column("cut", "cut"),
    Column("ended by error", "ended_by_error"),
    Column("equal", "equal"),
    Column("tokens per pass, prompt included", lambda r: number(r["tokens_per_pass"])),
    Column("good instances accepted", lambda r: "{} of {}".format(*r["good_taken"])),
    Column("bad instances rejected", lambda r: "{} of {}".format(*r["bad_refused"])),
    Column("longest compile ms", lambda r: number(r["compile_ms_max"], 0)),
    *(Column(key, key) for key in ("slow", "large", "crashed")),
)


@dataclass
class Outcome:
    """The result of one schema."""

    source: str
    category: str
    id: str
    refused: str | None = None
    crashed: str = ""
    compile_ms: float = 0.0
    grown_mb: float = 0.0  # while it was compiled
    clock: Clock = field(default_factory=Clock)  # all work on the grammar
    answers: list[tuple[int, ...]] = field(default_factory=list)  # plain, then speculative
    passes: list[int] = field(default_factory=list)
    completed: int = 0
    valid: int = 0
    unchecked: int = 0  # complete, but the validator cannot read the schema
    cut: int = 0
    errors: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # answers that the schema does not take
    instances: Counter[tuple[bool, bool]] = field(default_factory=Counter)  # by: is valid, was taken

    @property
    def equal(self) -> bool:
        """An error must come with drafts where it comes without them."""
        return len(self.answers) != 1 and len(set(self.answers)) <= 1

    @property
    def slow(self) -> bool:
        return self.clock.seconds > SLOW

    @property
    def large(self) -> bool:
        return self.grown_mb > LARGE

    def problems(self) -> list[str]:
        found = [f"wrong: {text}" for text in self.wrong] + [f"ended: {text}" for text in set(self.errors)]
        found += [] if self.equal else ["plain and speculative answers differ"]
        found += [f"crashed: {self.crashed}"] if self.crashed else []
        found += [f"took {self.clock.seconds:.1f} s"] if self.slow else []
        found += [f"took {self.grown_mb:.0f} MB"] if self.large else []
        return [f"{self.id}: {text}" for text in found]


def rows(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(_group(outcome), []).append(outcome)
    return [*(_row(name, group) for name, group in groups.items()), _row("all", outcomes)]


def _group(outcome: Outcome) -> str:
    return ONE_ROW if "test-suite" in outcome.source.lower() else outcome.category


def _row(name: str, group: Sequence[Outcome]) -> dict[str, Any]:
    accepted = [o for o in group if o.refused is None]
    instances = sum((o.instances for o in accepted), Counter[tuple[bool, bool]]())
    guessed = [(len(o.answers[1]), o.passes[1]) for o in accepted if len(o.answers) == 2]
    return {
        "category": name,
        "schemas": len(group),
        "accepted": len(accepted),
        "refused": len(group) - len(accepted),
        "completed": sum(o.completed for o in accepted),
        "valid": sum(o.valid for o in accepted),
        "unchecked": sum(o.unchecked for o in accepted),
        "cut": sum(o.cut for o in accepted),
        "ended_by_error": sum(len(o.errors) for o in accepted),
        "equal": sum(o.equal for o in accepted),
        "tokens_per_pass": sum(n for n, _ in guessed) / max(1, sum(p for _, p in guessed)),
        "good_taken": [instances[True, True], instances[True, True] + instances[True, False]],
        "bad_refused": [instances[False, False], instances[False, True] + instances[False, False]],
        "compile_ms_max": max((o.compile_ms for o in group), default=0.0),
        "grammar_s_max": max((o.clock.seconds for o in group), default=0.0),
        "grown_mb_max": max((o.grown_mb for o in group), default=0.0),
        "slow": sum(o.slow for o in group),
        "large": sum(o.large for o in group),
        "crashed": sum(bool(o.crashed) for o in group),
    }
