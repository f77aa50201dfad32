"""Reads the metrics of upstreams that are compared, and records how both arms' counters grew meanwhile."""

import asyncio
import time
from collections.abc import Callable, Mapping
from functools import reduce
from operator import add
from typing import Final, NamedTuple

from paceline.gate.gateway.config import GateConfig, Route
from paceline.gate.gateway.metrics import GateMetrics
from paceline.gate.gateway.upstream_client import UpstreamClient
from paceline.gate.upstream import read_metrics
from paceline.gate.upstream_metrics import UpstreamCounters, UpstreamWindow

WINDOW_S: Final = 30.0

Save = Callable[[str, UpstreamWindow], object]  # experiment


class _Reading(NamedTuple):
    at: float  # of `clock`
    counters: UpstreamCounters


class MetricsPoller:
    """Off the users' path: an upstream without metrics, or one that is slow to give them, costs nobody time.

    clock: monotonic seconds.
    """

    def __init__(
        self,
        client: UpstreamClient,
        config: Callable[[], GateConfig],
        metrics: GateMetrics,
        save: Save,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self._config, self._metrics, self._save = client, config, metrics, save
        self._clock = clock
        self._last: dict[str, _Reading] = {}  # by upstream

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self.read()
            await asyncio.sleep(WINDOW_S)

    async def read(self) -> None:
        """One reading of each upstream; the second one makes the first windows."""
        routes = [route for route in self._config().routes if route.mirror is not None]
        names = sorted({name for route in routes for name in (*baselines(route), candidate(route))})
        before, self._last = self._last, await self._readings(names)
        grown = {
            name: (now.at - before[name].at, now.counters - before[name].counters)
            for name, now in self._last.items()
            if name in before
        }
        for name, (seconds, growth) in grown.items():
            self._metrics.upstream_read(name, growth, seconds)
        for route in routes:
            if (window := window_of(route, grown)) is not None:
                self._save(route.experiment, window)

    async def _readings(self, names: list[str]) -> dict[str, _Reading]:
        states = [self._client.states[name] for name in names if name in self._client.states]
        session = self._client.session
        found = await asyncio.gather(
            *(read_metrics(session, state.upstream, state.config.metrics_urls) for state in states)
        )
        now = self._clock()
        return {
            state.name: _Reading(now, counters)
            for state, counters in zip(states, found, strict=True)
            if counters is not None
        }


def baselines(route: Route) -> list[str]:
    return [name for name, weight in route.upstreams.items() if weight]


def candidate(route: Route) -> str:
    assert route.mirror is not None
    return route.mirror.candidate


def window_of(route: Route, grown: Mapping[str, tuple[float, UpstreamCounters]]) -> UpstreamWindow | None:
    """None where an upstream of the route gave no figures, or where nothing was written."""
    names = [*baselines(route), candidate(route)]
    if not all(name in grown for name in names):
        return None
    total = reduce(add, (grown[name][1] for name in names[:-1]))
    seconds, other = grown[names[-1]]
    if not total.generated_tokens or not other.generated_tokens:
        return None
    return UpstreamWindow(created=time.time(), seconds=seconds, baseline=total, candidate=other)
