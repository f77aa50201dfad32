"""The report of a gate: one HTML file that needs nothing else, and the JSON of a verdict."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from math import isfinite, log
from typing import Any, Final

import numpy as np
from jinja2 import Environment, PackageLoader, Template, select_autoescape

from paceline.gate.checks.cost import acceptance_by_position
from paceline.gate.checks.finding import Finding
from paceline.gate.checks.latency import end_to_end_ratio, tpot_ratio
from paceline.gate.pair import Leg, Pair
from paceline.gate.policy import HARM_SHARE, LATENCY_WEIGHTS, Policy
from paceline.gate.stats.mean import MIN_SAMPLES, running_radius
from paceline.gate.verdict import Verdict

MAX_POINTS: Final = 1000  # in a picture
MAX_DIVERGED: Final = 10  # pairs whose texts are shown in the HTML report
MAX_PAIRS: Final = 40  # shown side by side: first those whose texts differ
MAX_TEXT: Final = 20_000  # characters of an answer in the view of a pair
MAX_CHUNKS: Final = 2000  # of an answer in the view of a pair
_CONTEXT: Final = 80  # characters before and after a divergence
_WORDS: Final = {"promote": "Promote", "hold": "Hold", "roll back": "Roll back"}
_EVIDENCE: Final = {"TPOT": (tpot_ratio, "tpot"), "end to end": (end_to_end_ratio, "end_to_end")}


@dataclass(frozen=True, slots=True)
class Bar:
    """A finding's interval against its margin, in per cent of the width."""

    left: float
    width: float
    estimate: float
    margin: float
    zero: float


def json_report(verdict: Verdict, about: dict[str, Any], pairs: Sequence[Pair] = ()) -> str:
    """The verdict, and all that the HTML report and the page draw."""
    return json.dumps(report(verdict, pairs, about), indent=2, allow_nan=False) + "\n"


def report(verdict: Verdict, pairs: Sequence[Pair], about: dict[str, Any]) -> dict[str, Any]:
    """JSON. about: what was compared, shown as it is."""
    candidates = [pair.candidate for pair in pairs]
    diverged = sum(pair.same is False for pair in pairs)
    return {
        **verdict.to_dict(),
        "title": _WORDS[verdict.decision],
        "headline": verdict.headline,
        "about": about,
        "findings": [_finding(finding) for finding in verdict.findings],
        "scatter": scatter(pairs),
        "evidence": [e for name in _EVIDENCE if (e := evidence(name, pairs, verdict.policy))],
        "positions": list(acceptance_by_position(candidates)),
        "diverged": diverged,
        "identical": sum(pair.same is True for pair in pairs),
        "shown_pairs": [pair_view(pair) for pair in shown_pairs(pairs)],
    }


def _finding(finding: Finding) -> dict[str, Any]:
    """With its figures as text, and its bar."""
    drawn, unit, interval = bar(finding), finding.unit, finding.interval
    texts = {
        "estimate": shown(finding.estimate, unit),
        "interval": f"{shown(interval.lower, unit)} to {shown(interval.upper, unit)}",
        "margin": shown(finding.margin, unit),
    }
    return {**finding.to_dict(), "text": texts, "bar": None if drawn is None else asdict(drawn)}


def shown_pairs(pairs: Sequence[Pair]) -> list[Pair]:
    """Those whose texts differ, then the latest."""
    differing = [pair for pair in pairs if pair.same is False]
    others = [pair for pair in reversed(pairs) if pair.same is not False]
    return [*differing, *others][:MAX_PAIRS]


def pair_view(pair: Pair) -> dict[str, Any]:
    """A pair side by side. Texts are as recorded, or null."""
    return {
        "id": pair.id,
        "created": pair.created,
        "route": pair.route,
        "cohort": pair.cohort,
        "order": pair.order,
        "temperature": pair.temperature,
        "same": pair.same,
        "divergence": None if pair.divergence is None else asdict(pair.divergence),
        "tpot_ratio": tpot_ratio(pair),
        "end_to_end_ratio": end_to_end_ratio(pair),
        "baseline": _leg_view(pair.baseline),
        "candidate": _leg_view(pair.candidate),
    }


def _leg_view(leg: Leg) -> dict[str, Any]:
    output = leg.output
    return {
        "upstream": leg.upstream,
        "model": leg.model,
        "ok": leg.ok,
        "error": leg.error,
        "finish_reason": leg.finish_reason,
        "seconds": leg.seconds,
        "ttft_s": leg.ttft_s,
        "tpot_s": leg.tpot_s,
        "completion_tokens": leg.completion_tokens,
        "passes": leg.passes,
        "draft_tokens": leg.draft_tokens,
        "accepted_tokens": leg.accepted_tokens,
        "chunk_s": leg.chunk_s[:MAX_CHUNKS],
        "chunk_tokens": leg.chunk_tokens[:MAX_CHUNKS],
        "scores": dict(leg.scores),
        "output": None if output is None else output[:MAX_TEXT],
        "cut": output is not None and len(output) > MAX_TEXT,
    }


def html_report(verdict: Verdict, pairs: Sequence[Pair], about: dict[str, Any]) -> str:
    """about: what was compared, shown as it is."""
    rows = [(finding, bar(finding)) for finding in verdict.findings]
    diverged = [shown for pair in pairs if pair.same is False and (shown := divergence(pair))]
    drawn = report(verdict, pairs, about)
    return _template().render(
        verdict=verdict,
        title=drawn["title"],
        about=about,
        measured=[row for row in rows if row[0].segment == "all" and row[0].status != "skipped"],
        segments=[row for row in rows if row[0].segment != "all" and row[0].status != "skipped"],
        skipped=[f for f in verdict.findings if f.status == "skipped" and f.segment == "all"],
        scatter=drawn["scatter"] and _scatter_svg(drawn["scatter"]),
        evidence=[_evidence_svg(one) for one in drawn["evidence"]],
        positions=drawn["positions"],
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
    """TPOT of both legs, in milliseconds."""
    points: list[dict[str, Any]] = [
        {"id": pair.id, "baseline_ms": 1000 * baseline, "candidate_ms": 1000 * candidate, "same": pair.same}
        for pair in pairs
        if pair.ok and (baseline := pair.baseline.tpot_s) and (candidate := pair.candidate.tpot_s)
    ][:MAX_POINTS]
    if not points:
        return None
    flat = [point[name] for point in points for name in ("baseline_ms", "candidate_ms")]
    return {"points": points, "low_ms": min(flat), "high_ms": max(flat)}


def _scatter_svg(drawn: dict[str, Any]) -> dict[str, Any]:
    """Both on one logarithmic scale, in a square of 100."""
    low, high = log(drawn["low_ms"]), log(drawn["high_ms"])
    span = max(high - low, 1e-6)

    def scaled(value: float) -> float:
        return round(100 * (log(value) - low) / span, 1)

    points = [(scaled(p["baseline_ms"]), 100 - scaled(p["candidate_ms"])) for p in drawn["points"]]
    return {**drawn, "points": points}


def evidence(name: str, pairs: Sequence[Pair], policy: Policy) -> dict[str, Any] | None:
    """The mean ratio and its interval after each pair, against its margin."""
    ratio_of, check = _EVIDENCE[name]
    ratios = [ratio for pair in pairs if (ratio := ratio_of(pair)) is not None]
    if len(ratios) <= MIN_SAMPLES:
        return None
    values = np.log(ratios)
    n = np.arange(1, len(values) + 1, dtype=float)
    mean = values.cumsum() / n
    deviation = np.sqrt(np.maximum(0, (values**2).cumsum() / n - mean**2) * n / np.maximum(1, n - 1))
    radius = running_radius(n, deviation, 2 * policy.alpha * HARM_SHARE * LATENCY_WEIGHTS[check])
    step = max(1, len(values) // 200)
    chosen = np.arange(MIN_SAMPLES - 1, len(values), step)
    return {
        "name": name,
        "pairs": (chosen + 1).tolist(),
        "mean": np.exp(mean[chosen]).tolist(),
        "lower": np.exp((mean - radius)[chosen]).tolist(),
        "upper": np.exp((mean + radius)[chosen]).tolist(),
        "margin": {"tpot": policy.max_tpot_ratio, "end_to_end": policy.max_end_to_end_ratio}[check],
        "last": len(values),
    }


def _evidence_svg(drawn: dict[str, Any]) -> dict[str, Any]:
    """Paths in a picture of 300 x 100 with a logarithmic axis, 1 in its middle."""
    count, series = np.array(drawn["pairs"]), {n: np.log(drawn[n]) for n in ("mean", "lower", "upper")}
    reach = max(0.1, float(np.abs(np.concatenate(list(series.values()))).max()))
    x = 300 * (count - count[0]) / max(1, count[-1] - count[0])

    def path(values: Any) -> str:
        points = zip(x, 50 - 50 * values / reach, strict=True)
        return " ".join(f"{left:.1f},{top:.1f}" for left, top in points)

    paths = {name: path(values) for name, values in series.items()}
    return {
        "name": drawn["name"],
        **paths,
        "band": paths["upper"] + " " + " ".join(reversed(paths["lower"].split())),
        "first": drawn["pairs"][0],
        "last": drawn["last"],
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
        case "ms":
            return f"{value:.2f} ms"
        case "p-value":
            return f"{value:.4f}"
        case _:
            return f"{100 * value:.2f} %"
