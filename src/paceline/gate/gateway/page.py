"""GET /page/gate: the experiments for the page's gate view; verdicts as `gate status` has them.

Figures are for everybody who may use the gate, as /metrics is. Texts of pairs are other people's: an
operator's key shows them or, without keys, a gate that only this machine reaches.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import asdict
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.errors import unknown_name
from paceline.gate.gateway.config import GateConfig, Route
from paceline.gate.gateway.metrics import GateMetrics
from paceline.gate.policy import Policy
from paceline.gate.promotion import audit
from paceline.gate.report import pair_view, report
from paceline.gate.store import GateStore
from paceline.gate.verdict import decide
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import Key

MAX_REPORTS: Final = 16  # in memory, those made last


class GatePage:
    """executor: computes reports, as the promoter's verdicts; None: a thread does."""

    def __init__(
        self,
        config: Callable[[], GateConfig],
        metrics: GateMetrics,
        store: GateStore | None,
        store_url: str | None,
        operator: Callable[[Key | None], bool],
        executor: Callable[[], Executor | None],
    ) -> None:
        self._config, self._metrics, self._operator = config, metrics, operator
        self._store, self._store_url, self._executor = store, store_url, executor
        self._reports: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._computing = asyncio.Lock()

    async def about(self, http: Request) -> Response:
        return JSONResponse(
            {
                "model": "release gate",
                "version": __version__,
                "views": ["gate"],
                "operator": self._operator(http.state.key),
            }
        )

    async def experiments(self, http: Request) -> Response:
        """All that the configuration mirrors, with the health of their mirrors."""
        routes = [route for route in self._config().routes if route.mirror is not None]
        found = await asyncio.to_thread(lambda: [self._experiment(route) for route in routes])
        return JSONResponse({"experiments": found})

    async def report(self, http: Request) -> Response:
        """The report of one experiment over its current stage, beside the A/A experiments of the gate."""
        route, texts = self._route(http.path_params["experiment"]), self._operator(http.state.key)
        controls = [one for one in self._config().routes if one.is_aa and one.experiment != route.experiment]
        own = await self._report(route, texts)
        aa = [await self._report(control, False) for control in controls]
        changes = await asyncio.to_thread(self._changes, route.experiment)
        return JSONResponse(
            {
                **own,
                "experiment": await asyncio.to_thread(self._experiment, route),
                "changes": changes,
                "texts": texts,
                "aa": [
                    {
                        "experiment": control.experiment,
                        "verdict": one["verdict"],
                        "pairs": one["pairs"],
                        "evidence": one["evidence"],
                    }
                    for control, one in zip(controls, aa, strict=True)
                ],
            }
        )

    async def pair(self, http: Request) -> Response:
        """One pair side by side."""
        route, id = self._route(http.path_params["experiment"]), http.path_params["id"]
        store = self._store
        found = None if store is None else await asyncio.to_thread(store.pair, route.experiment, id)
        if found is None:
            raise ApiError(404, "there is no such pair", param="id", code="pair_not_found")
        texts = self._operator(http.state.key)
        return JSONResponse(pair_view(found if texts else found.without_text()))

    def _route(self, experiment: str) -> Route:
        routes = {one.experiment: one for one in self._config().routes if one.mirror is not None}
        if experiment not in routes or self._store is None:
            message = unknown_name("experiment", experiment, sorted(routes))
            raise ApiError(404, message, param="experiment", code="experiment_not_found")
        return routes[experiment]

    def _experiment(self, route: Route) -> dict[str, Any]:
        assert route.mirror is not None
        facts: dict[str, Any] = {
            "experiment": route.experiment,
            "route": route.name,
            "baseline": sorted(route.upstreams),
            "candidate": route.mirror.candidate,
            "aa": route.is_aa,
            "mirrored_share": route.mirror.share,
            "records_text": route.mirror.text,
            "automatic": route.promotion is not None and route.promotion.automatic,
            "stages": None if route.promotion is None else list(route.promotion.stages),
            "health": self._metrics.mirror_health(route.name),
        }
        if self._store is not None:
            rollout = self._store.rollout(route.experiment)
            facts |= {"rollout": asdict(rollout) if route.promotion is not None else None}
            facts |= {"pairs": self._store.count(route.experiment, rollout.since)}
        return facts

    def _changes(self, experiment: str) -> list[dict[str, Any]]:
        return [] if self._store is None else audit(self._store, experiment)

    async def _report(self, route: Route, texts: bool) -> dict[str, Any]:
        """Computed once for the same pairs: seconds of arithmetic, beside the event loop."""
        store = self._store
        assert store is not None
        assert route.mirror is not None
        policy = Policy() if route.promotion is None else route.promotion.policy
        async with self._computing:
            rollout = await asyncio.to_thread(store.rollout, route.experiment)
            count = await asyncio.to_thread(store.count, route.experiment, rollout.since)
            key = (route.experiment, rollout.since, count, policy.hash, texts)
            made = self._reports.get(key)
            if made is None:
                about = {"route": route.name, "baseline": ", ".join(sorted(route.upstreams))}
                about |= {"candidate": route.mirror.candidate}
                made = await asyncio.get_running_loop().run_in_executor(
                    self._executor(),
                    stored_report,
                    self._store_url,
                    route.experiment,
                    rollout.since,
                    policy.model_dump(mode="json"),
                    about,
                    texts,
                )
                while len(self._reports) >= MAX_REPORTS:
                    self._reports.pop(next(iter(self._reports)))
                self._reports[key] = made
            return made


def stored_report(
    store_url: str | None,
    experiment: str,
    since: float,
    policy: Mapping[str, Any],
    about: dict[str, Any],
    texts: bool,
) -> dict[str, Any]:
    """The report of a stage. Arguments and result can go to another process and come back."""
    store = GateStore.open(store_url, create=False)
    try:
        pairs = list(store.pairs(experiment, since))
        feedback, windows = store.feedback(experiment, since), store.windows(experiment, since)
    finally:
        store.close()
    verdict = decide(pairs, Policy.model_validate(policy, strict=False), feedback, windows)
    return report(verdict, pairs if texts else [pair.without_text() for pair in pairs], about)
