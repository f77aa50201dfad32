"""A routes file with the advised settings, for `paceline serve --routes`."""

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from paceline.advise.advice import RouteAdvice

DEFAULT: str = "default"


def routes_yaml(
    advised: Sequence[RouteAdvice],
    existing: Mapping[str, Any] | None = None,
    command: str = "paceline serve MODEL --routes FILE",
    provisional: bool = False,
) -> str:
    """existing: a routes file as read. Its routes keep their order, conditions and limits.

    command: the server with all drafters that the routes need. provisional: the machine was busy.
    """
    undecided = [one for one in advised if one.decision == "too little data"]
    advised = [one for one in advised if one not in undecided]
    by_name = {one.route: one for one in advised}
    listed = [dict(route) for route in (existing or {}).get("routes") or ()]
    known = {route.get("name") for route in listed}
    for route in listed:
        if (one := by_name.get(str(route.get("name")))) is not None:
            route.pop("predicted", None)
            route.update(_settings(one))
    routes, unmatched = _new([one for one in advised if one.route not in known], closed=_is_closed(listed))
    lines = [f"# Written by `paceline advise`, for: {command}"]
    if provisional:
        lines.append("# The machine was busy when passes were measured: speed-ups are provisional.")
    lines += [f"# {one.route}: {one.reason}" for one in advised]
    lines += [f"# {one.route} is not set here: too little data, {one.reason}" for one in undecided]
    lines += [
        f"# {one.route} is left out: nothing in its requests tells it from the others. Add it with a match."
        for one in unmatched
    ]
    body = [*listed[:-1], *routes, listed[-1]] if _is_closed(listed) else [*listed, *routes]
    return "\n".join(lines) + "\n" + yaml.safe_dump({"routes": body}, sort_keys=False, allow_unicode=True)


def route_yaml(one: RouteAdvice) -> str | None:
    """The entry of one route; None: there is too little data to set anything."""
    if one.decision == "too little data":
        return None
    entry = {"name": one.route, **({"match": dict(one.match)} if one.match else {}), **_settings(one)}
    return yaml.safe_dump([entry], sort_keys=False, allow_unicode=True)


def _is_closed(routes: Sequence[Mapping[str, Any]]) -> bool:
    """The last route takes everything."""
    return bool(routes) and "match" not in routes[-1]


def _new(advised: Sequence[RouteAdvice], closed: bool) -> tuple[list[dict[str, Any]], list[RouteAdvice]]:
    """Routes for a file, and those that cannot be told apart.

    Of these, the one with the most requests takes what no other does, unless another route does already.
    """
    matched = [one for one in advised if one.match and one.route != DEFAULT]
    loose = sorted((one for one in advised if one not in matched), key=lambda one: -one.workload.requests)
    routes = [{"name": one.route, "match": dict(one.match), **_settings(one)} for one in matched]
    if loose and not closed:
        routes.append({"name": loose[0].route, **_settings(loose[0])})
        loose = loose[1:]
    return routes, loose


def _settings(one: RouteAdvice) -> dict[str, Any]:
    """predicted: what the server compares with what it measures."""
    if not one.enabled:
        return {"enabled": False}
    rate, speedup = one.best.tokens_per_pass.value, one.best.speedup.value
    others = [p for p in one.loads if p.concurrency != one.concurrency]
    return {
        "enabled": True,
        "drafters": list(one.best.drafters),
        "max_draft": one.best.max_draft,
        "predicted": {
            **_predicted(rate, speedup, one.concurrency),
            "loads": [_predicted(p.tokens_per_pass, p.speedup, p.concurrency) for p in others],
        },
    }


def _predicted(rate: float, speedup: float, concurrency: int) -> dict[str, Any]:
    figures = {"tokens_per_pass": round(max(1.0, rate), 3), "speedup": round(speedup, 3)}
    return {**figures, "concurrency": concurrency}
