"""Predicted against measured: tokens per pass and speed-up of each route, of late.

The speed-up compares the time of decoding rounds with that of plain ones for the same tokens. No plain round
is run for that: its time is that of the cost curve, times what passes of the route without a draft take of
theirs, or all passes where there are few such.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Final, Literal

from paceline.server.routes import Predicted, PredictedLoad
from paceline.target.cost import PassCost, batch_ms
from paceline.types import Round

WINDOW: Final = 20_000  # tokens of a route after which older ones count half
LOG_EVERY_S: Final = 600.0
MIN_TOKENS: Final = 500  # of a route, before its figures are compared with a prediction
MAX_ERROR: Final = 0.15  # of a prediction, beyond which the log warns
MAX_RATIO: Final = 2.0  # of outputs in a pass to those of a prediction, beyond which it is of another load
MAX_ROWS: Final = 65  # of one output in a pass that only decodes: its own and those of the longest draft
MIN_PLAIN: Final = 50  # rounds in passes without a draft, before their time counts
PLAIN_SHARE: Final = 0.95  # of rounds without a draft, from which on a route counts as decoding plainly

Prediction = Predicted | PredictedLoad
State = Literal["off", "idle", "plain", "drafting"]
log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class RouteFigures:
    """Of decoding rounds, of late."""

    tokens: int
    tokens_per_pass: float
    speedup: float
    drafted_per_pass: float
    acceptance: float  # share of drafted tokens
    plain_rounds: float  # share
    batch: float  # outputs in a pass, mean


@dataclass(slots=True)
class _Sums:
    tokens: float = 0.0
    passes: float = 0.0
    plain_rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    batch: float = 0.0
    draft_us: float = 0.0
    target_us: float = 0.0
    curve_us: float = 0.0  # of the same passes, by the cost curve
    undrafted: float = 0.0  # rounds in passes without any draft, and what follows for them alone
    undrafted_us: float = 0.0
    undrafted_curve_us: float = 0.0
    plain_us: float = 0.0  # of plain passes for the same tokens, by the cost curve

    def halve(self) -> None:
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) / 2)

    def figures(self) -> RouteFigures:
        measured, expected = self.target_us, self.curve_us
        if self.undrafted >= MIN_PLAIN:
            measured, expected = self.undrafted_us, self.undrafted_curve_us
        drift = measured / expected if expected else 1.0
        spent = self.draft_us + self.target_us
        return RouteFigures(
            tokens=round(self.tokens),
            tokens_per_pass=self.tokens / self.passes,
            speedup=self.plain_us * drift / spent if spent and self.plain_us else 1.0,
            drafted_per_pass=self.drafted / self.passes,
            acceptance=self.accepted / self.drafted if self.drafted else 0.0,
            plain_rounds=self.plain_rounds / self.passes,
            batch=self.batch / self.passes,
        )


class RouteAccounting:
    """Adds up decoding rounds by route. cost: without it, speed-ups are not known and count as 1."""

    def __init__(self, cost: PassCost | None = None, clock: Callable[[], float] = monotonic) -> None:
        self.cost, self._clock = cost, clock
        self._sums: dict[str, _Sums] = {}
        self._predicted: dict[str, Predicted] = {}
        self._logged_at = clock()
        self._active: set[str] = set()  # routes with rounds since the last log line

    def predict(self, predictions: Mapping[str, Predicted]) -> None:
        """Replaces the predictions of all routes."""
        self._predicted = dict(predictions)

    def add(self, route: str, r: Round) -> None:
        """A round that decodes: neither the first of its output nor one of a prompt."""
        if r.rows > MAX_ROWS * r.batch:  # a prompt of another output is in the pass
            return
        sums = self._sums.setdefault(route, _Sums())
        sums.tokens += len(r.tokens)
        sums.passes += 1
        sums.plain_rounds += not len(r.draft)
        sums.drafted += len(r.draft)
        sums.accepted += len(r.path)
        sums.batch += r.batch
        sums.draft_us += r.draft_us / r.batch
        sums.target_us += r.target_us / r.batch
        if self.cost is not None:
            plain, curve = (self._pass_ms(rows, r) for rows in (r.batch, r.rows))
            sums.curve_us += 1000 * curve / r.batch
            sums.plain_us += 1000 * len(r.tokens) * plain / r.batch
            if r.rows == r.batch:
                sums.undrafted += 1
                sums.undrafted_us += r.target_us / r.batch
                sums.undrafted_curve_us += 1000 * curve / r.batch
        if sums.tokens > WINDOW:
            sums.halve()
        self._active.add(route)
        if self._clock() - self._logged_at >= LOG_EVERY_S:
            self._log()

    def _pass_ms(self, rows: int, r: Round) -> float:
        """By the cost curve, of a pass like this one with so many rows. Others' contexts count as its own."""
        if self.cost is None:
            return 0.0
        share, more = divmod(rows, r.batch)
        return batch_ms(self.cost, [(share + 1, r.start, more), (share, r.start, r.batch - more)])

    def figures(self, route: str) -> RouteFigures | None:
        """None: there was no decoding round yet."""
        sums = self._sums.get(route)
        return None if sums is None else sums.figures()

    def prediction(self, route: str) -> Prediction | None:
        """For the load of late; for the planned one, before there was any."""
        predicted, figures = self._predicted.get(route), self.figures(route)
        return predicted if predicted is None or figures is None else predicted.at(figures.batch)

    def predictions(self) -> dict[str, Prediction]:
        return {route: one for route in list(self._predicted) if (one := self.prediction(route)) is not None}

    def measured(self) -> dict[str, RouteFigures]:
        return {route: sums.figures() for route, sums in list(self._sums.items())}

    def state(self, route: str, speculates: bool) -> tuple[State, str]:
        """What the route is doing, and why. speculates: its settings allow drafts."""
        figures = self.figures(route)
        if not speculates:
            return "off", "its settings leave speculation off"
        if figures is None:
            return "idle", "it has had no answer of more than one token yet"
        if figures.plain_rounds >= PLAIN_SHARE:
            load = f", with {figures.batch:.0f} outputs in a pass" if figures.batch >= 2 else ""
            return "plain", f"drafts would have cost more time than they save of late{load}"
        return "drafting", (
            f"{figures.drafted_per_pass:.1f} tokens drafted a pass, {100 * figures.acceptance:.0f} % of them "
            f"accepted: {figures.speedup:.2f} x plain"
        )

    def _log(self) -> None:
        self._logged_at = self._clock()
        for route in sorted(self._active):
            figures, predicted = self._sums[route].figures(), self.prediction(route)
            rate, speed = f"{figures.tokens_per_pass:.2f}", f"{figures.speedup:.2f}"
            if predicted is None:
                log.info("route %s: %s tokens per pass, %s x plain", route, rate, speed)
                continue
            alike = _comparable(predicted, figures.batch)
            off = abs(figures.speedup / predicted.speedup - 1) > MAX_ERROR
            wrong = self.cost is not None and alike and off and figures.tokens >= MIN_TOKENS
            other = f": predicted for {predicted.concurrency} at once, measured with {figures.batch:.1f}"
            log.log(
                logging.WARNING if wrong else logging.INFO,
                "route %s: %s tokens per pass (%.2f predicted), %s x plain (%.2f predicted)%s",
                *(route, rate, predicted.tokens_per_pass, speed, predicted.speedup),
                ": ask `paceline advise` again" if wrong else "" if alike else other,
            )
        self._active.clear()


def _comparable(predicted: Prediction, batch: float) -> bool:
    """False: it is for another load than so many outputs in a pass, so that nothing can be concluded."""
    at_once = predicted.concurrency
    return at_once is None or 1 / MAX_RATIO <= max(1.0, batch) / at_once <= MAX_RATIO
