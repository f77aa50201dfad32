"""The report of a gate: one HTML file that needs nothing else, and the JSON of a verdict."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import isfinite, log
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, Template, select_autoescape

from paceline.gate.checks.cost import acceptance_by_position
from paceline.gate.checks.finding import Finding
from paceline.gate.checks.latency import end_to_end_ratio, tpot_ratio
from paceline.gate.pair import Pair
from paceline.gate.policy import HARM_SHARE, LATENCY_WEIGHTS
from paceline.gate.stats.mean import MIN_SAMPLES, running_radius
from paceline.gate.verdict import Verdict

MAX_POINTS: Final = 1000  # in a picture
MAX_DIVERGED: Final = 10  # pairs whose texts are shown
_CONTEXT: Final = 80  # characters before and after a divergence
_WORDS: Final = {"promote": "Promote", "hold": "Hold", "roll back": "Roll back"}


@dataclass(frozen=True, slots=True)
class Bar:
    """A finding's interval against its margin, in per cent of the width."""

    left: float
    width: float
    estimate: float
    margin: float
    zero: float


def json_report(verdict: Verdict, about: dict[str, Any]) -> str:
    return json.dumps({**verdict.to_dict(), "about": about}, indent=2, allow_nan=False) + "\n"


def html_report(verdict: Verdict, pairs: Sequence[Pair], about: dict[str, Any]) -> str:
    """about: what was compared, shown as it is."""
    rows = [(finding, bar(finding)) for finding in verdict.findings]
    candidates = [pair.candidate for pair in pairs]
    diverged = [shown for pair in pairs if pair.same is False and (shown := divergence(pair))]
    return _template().render(
        verdict=verdict,
        title=_WORDS[verdict.decision],
        about=about,
        measured=[row for row in rows if row[0].segment == "all" and row[0].status != "skipped"],
        segments=[row for row in rows if row[0].segment != "all" and row[0].status != "skipped"],
        skipped=[f for f in verdict.findings if f.status == "skipped" and f.segment == "all"],
        scatter=scatter(pairs),
        evidence=[e for e in (evidence("TPOT", pairs), evidence("end to end", pairs)) if e],
        positions=acceptance_by_position(candidates),
        diverged=diverged[:MAX_DIVERGED],
        more_diverged=max(0, len(diverged) - MAX_DIVERGED),
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader("paceline.gate", "."),
        autoescape=select_autoescape(default=True),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["shown"] = shown
    return environment.get_template("report.html")


def bar(finding: Finding) -> Bar | None:
    if finding.estimate is None or finding.margin is None or finding.unit == "p-value":
        return None
    neutral = 1.0 if finding.unit == "ratio" else 0.0
    reach = 2.5 * max(abs(finding.margin - neutral), abs(finding.estimate - neutral), 1e-3)

    def percent(value: float) -> float:
        return round(100 * min(1.0, max(0.0, (value - neutral + reach) / (2 * reach))), 2)

    left, right = percent(finding.interval.lower), percent(finding.interval.upper)
    return Bar(
        left, max(0.5, right - left), percent(finding.estimate), percent(finding.margin), percent(neutral)
    )


def scatter(pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """TPOT of candidate over baseline, both on one logarithmic scale, in a square of 100."""
    points = [
        (pair.baseline.tpot_s, pair.candidate.tpot_s)
        for pair in pairs
        if pair.ok and pair.baseline.tpot_s and pair.candidate.tpot_s
    ][:MAX_POINTS]
    if not points:
        return None
    flat = [value for point in points for value in point if value]
    low, high = log(min(flat)), log(max(flat))
    span = max(high - low, 1e-6)
    scaled = [(100 * (log(b or 1) - low) / span, 100 - 100 * (log(c or 1) - low) / span) for b, c in points]
    return {
        "points": [(round(x, 1), round(y, 1)) for x, y in scaled],
        "low_ms": 1000 * min(flat),
        "high_ms": 1000 * max(flat),
    }


def evidence(name: str, pairs: Sequence[Pair]) -> dict[str, Any] | None:
    """The interval of the mean ratio after each pair: a path for its upper and one for its lower bound."""
    of, check = (tpot_ratio, "tpot") if name == "TPOT" else (end_to_end_ratio, "end_to_end")
    ratios = [ratio for pair in pairs if (ratio := of(pair)) is not None]
    if len(ratios) <= MIN_SAMPLES:
        return None
    values = np.log(ratios)
    n = np.arange(1, len(values) + 1, dtype=float)
    mean = values.cumsum() / n
    deviation = np.sqrt(np.maximum(0, (values**2).cumsum() / n - mean**2) * n / np.maximum(1, n - 1))
    radius = running_radius(n, deviation, 2 * 0.05 * HARM_SHARE * LATENCY_WEIGHTS[check])
    step = max(1, len(values) // 200)
    chosen = np.arange(MIN_SAMPLES - 1, len(values), step)
    reach = max(0.1, float(np.abs(np.concatenate([mean + radius, mean - radius])[chosen]).max()))
    x = 300 * (chosen - chosen[0]) / max(1, chosen[-1] - chosen[0])

    def path(series: Any) -> str:
        points = zip(x, 50 - 50 * series[chosen] / reach, strict=True)
        return " ".join(f"{left:.1f},{top:.1f}" for left, top in points)

    return {
        "name": name,
        "upper": path(mean + radius),
        "mean": path(mean),
        "lower": path(mean - radius),
        "band": path(mean + radius) + " " + " ".join(reversed(path(mean - radius).split())),
        "first": MIN_SAMPLES,
        "last": len(values),
        "top": np.exp(reach),
        "bottom": np.exp(-reach),
    }


def divergence(pair: Pair) -> dict[str, Any] | None:
    """The texts around their first difference; None: texts are not recorded."""
    at = pair.divergence
    baseline, candidate = pair.baseline.output, pair.candidate.output
    if at is None or baseline is None or candidate is None:
        return None
    start = max(0, at.character - _CONTEXT)
    return {
        "id": pair.id,
        "before": baseline[start : at.character],
        "baseline": baseline[at.character : at.character + _CONTEXT],
        "candidate": candidate[at.character : at.character + _CONTEXT],
        "margin": at.margin,
    }


def shown(value: float | None, unit: str) -> str:
    """A figure of a finding, in its unit."""
    if value is None or not isfinite(value):
        return "–"
    match unit:
        case "ratio":
            return f"{value:.3f} ×"
        case "p-value":
            return f"{value:.4f}"
        case _:
            return f"{100 * value:.2f} %"
