"""The planner's figures against published ones, against each other, and against a simulation of the link."""

from dataclasses import dataclass, field
from heapq import heappop, heappush
from random import Random

import pytest

from paceline.errors import SettingError
from paceline.split.planner import (
    MODES,
    SplitCosts,
    break_even,
    commit_bytes,
    draft_bytes,
    overtakes_after,
    plan,
)

EXAMPLE = SplitCosts(rtt_ms=100, target_ms=20, draft_ms=5, acceptance=0.8, verify_ms=22)


def test_the_worked_example_of_the_literature_comes_out() -> None:
    """A simulation of the same costs, made independently: 20, 37.4 and 17.8 ms a token."""
    made = plan(EXAMPLE)
    assert made.mode("streaming").ms_per_token == 20
    assert made.mode("synchronous").ms_per_token == pytest.approx(37.4, abs=0.05)
    assert made.mode("opportunistic").ms_per_token == pytest.approx(17.8, abs=0.1)
    assert made.mode("opportunistic").passes_per_token == pytest.approx(0.88, abs=0.005)


@pytest.mark.parametrize(("rtt", "ms", "passes"), [(10, 11.2, 0.53), (30, 13.6, 0.66), (60, 15.9, 0.78)])
def test_a_server_that_never_waits_gains_less_the_longer_the_round_trip(
    rtt: float, ms: float, passes: float
) -> None:
    rates = MODES["opportunistic"](EXAMPLE.at(rtt))
    assert rates.ms == pytest.approx(ms, abs=0.1)
    assert rates.passes == pytest.approx(passes, abs=0.005)


@pytest.mark.parametrize(
    ("target_ms", "draft_ms", "acceptance", "expected"),
    [(20, 5, 0.8, 27), (20, 2, 0.9, 116), (40, 5, 0.6, 28), (40, 10, 0.8, 54), (20, 20, 0.9, 0)],
)
def test_the_best_synchronous_break_even_is_that_of_the_literature(
    target_ms: float, draft_ms: float, acceptance: float, expected: float
) -> None:
    """By the best draft length; 0 where a drafted token costs as much as one of the target."""
    values = []
    for length in range(1, 33):
        costs = SplitCosts(0, target_ms, draft_ms, acceptance, max_draft=length)
        values.append(break_even("synchronous", costs) or 0.0)
        tokens = costs.tokens(length)
        exact = tokens * target_ms - costs.verify_ms - length * draft_ms
        assert values[-1] == pytest.approx(max(0.0, exact), abs=1e-6)
    assert max(values) == pytest.approx(expected, abs=0.5)


@dataclass
class Link:
    """Edge and cloud as two processes that exchange messages, each of which takes half a round trip.

    The edge drafts tokens one by one as long as its window allows, and sends `message` of them at a time. The
    cloud makes passes; `patient`: it waits for tokens to verify. A run is a number: the drafted tokens that
    are right before one that is wrong.
    """

    costs: SplitCosts
    message: int
    patient: bool
    rng: Random
    queue: list[tuple[float, int, str, int, int]] = field(default_factory=list)
    tokens: int = 0
    passes: int = 0
    drafted: int = 0
    run: int = 0  # number of the run that the cloud is in
    right: int = 0  # drafted tokens of it that are right
    committed: int = 0  # of the run
    arrived: int = 0
    waiting: bool = False
    edge_run: int = -1
    edge_drafted: int = 0
    edge_known: int = 0
    edge_busy: bool = False

    def simulate(self, tokens: int) -> tuple[float, float, float]:
        """ms, passes and drafted tokens, per committed token."""
        self._begin_run()
        self._push(0.0, "commit", 0, 0)
        self._next_pass(0.0)
        now = 0.0
        while self.tokens < tokens:
            now, _, kind, run, count = heappop(self.queue)
            getattr(self, f"_{kind}")(now, run, count)
        return now / self.tokens, self.passes / self.tokens, self.drafted / self.tokens

    def _push(self, at: float, kind: str, run: int, count: int) -> None:
        order = 1 if kind == "pass_end" else 0  # what arrives as a pass ends can be used in the next
        heappush(self.queue, (at, order, kind, run, count))

    def _begin_run(self) -> None:
        self.right = self.committed = self.arrived = 0
        while self.rng.random() < self.costs.acceptance:
            self.right += 1

    def _next_pass(self, now: float) -> None:
        usable = min(self.arrived - self.committed, self.costs.max_draft)
        if usable <= 0 and self.patient:
            self.waiting = True
            return
        verifies = usable > 0
        self.passes += 1
        took = self.costs.verify_ms if verifies else self.costs.target_ms
        self._push(now + took, "pass_end", self.run, usable if verifies else 0)

    def _pass_end(self, now: float, run: int, usable: int) -> None:
        accepted = min(usable, self.right - self.committed)
        self.committed += accepted + 1
        self.tokens += accepted + 1
        if self.committed > self.right:
            self.run += 1
            self._begin_run()
        self._push(now + self.costs.rtt_ms / 2, "commit", self.run, self.committed)
        self._next_pass(now)

    def _commit(self, now: float, run: int, count: int) -> None:
        if run > self.edge_run:
            self.edge_run, self.edge_drafted, self.edge_busy = run, 0, False
        self.edge_known = count
        self._draft_on(now)

    def _draft_on(self, now: float) -> None:
        if not self.edge_busy and self.edge_drafted < self.edge_known + self.costs.window:
            self.edge_busy = True
            self._push(now + self.costs.draft_ms, "drafted", self.edge_run, self.edge_drafted + 1)

    def _drafted(self, now: float, run: int, count: int) -> None:
        if run != self.edge_run:
            return
        self.edge_drafted, self.edge_busy = count, False
        self.drafted += 1
        if count % self.message == 0:
            self._push(now + self.costs.rtt_ms / 2, "arrive", run, count)
        self._draft_on(now)

    def _arrive(self, now: float, run: int, count: int) -> None:
        if run != self.run:
            return
        self.arrived = count
        if self.waiting:
            self.waiting = False
            self._next_pass(now)


# Times that no sum of others meets: what arrives just as a pass ends would otherwise hang on rounding.
CASES = [
    SplitCosts(101.3, 20.17, 5.03, 0.8, 22.11),
    SplitCosts(11.9, 20.17, 5.03, 0.6, 22.11, max_draft=4),
    SplitCosts(43.1, 37.7, 0.31, 0.9, 41.3),
    SplitCosts(0.7, 9.13, 6.01, 0.7, 9.9, max_draft=3, window=5),
    SplitCosts(57.3, 20.17, 0.57, 0.95, 22.11, message=3, window=16),
]


@pytest.mark.parametrize("costs", CASES, ids=lambda c: f"{c.rtt_ms:g}-{c.acceptance:g}")
@pytest.mark.parametrize("mode", ["opportunistic", "patient"])
def test_the_formulas_agree_with_a_simulation(costs: SplitCosts, mode: str) -> None:
    patient = mode == "patient"
    message = costs.max_draft if patient else costs.message
    ms, passes, drafted = Link(costs, message, patient, Random(7)).simulate(20_000)
    rates = MODES[mode](costs)
    assert rates.ms == pytest.approx(ms, rel=0.03)
    assert rates.passes == pytest.approx(passes, rel=0.03)
    assert rates.drafted == pytest.approx(drafted, rel=0.03)


@pytest.mark.parametrize("rtt", [0, 20, 80, 200, 5000])
@pytest.mark.parametrize(
    ("acceptance", "verify_ms"), [(0.0, 22), (0.3, 30), (0.9, 22), (0.9, 60), (0.05, 25)]
)
def test_a_server_that_never_waits_is_never_slower_than_streaming(
    rtt: float, acceptance: float, verify_ms: float
) -> None:
    costs = SplitCosts(rtt, 20, 1, acceptance, verify_ms)
    assert MODES["opportunistic"](costs).ms <= 20 * (1 + 1e-12)
    assert break_even("opportunistic", costs) is None


def test_drafts_that_are_slower_than_the_target_are_never_in_time() -> None:
    slow = SplitCosts(10, 20, 20, 0.9)
    assert overtakes_after(slow) is None
    assert MODES["opportunistic"](slow).passes == pytest.approx(1.0)
    assert break_even("patient", slow) == pytest.approx(0.0, abs=1e-6)
    assert overtakes_after(EXAMPLE) == 7  # R / (p - d)


def test_waiting_costs_a_round_trip_for_each_rejection() -> None:
    near, far = (MODES["patient"](EXAMPLE.at(rtt)).ms for rtt in (50, 150))
    assert far - near == pytest.approx((1 - EXAMPLE.acceptance) * 100)
    longest = break_even("patient", EXAMPLE)
    assert longest is not None
    assert MODES["patient"](EXAMPLE.at(longest)).ms == pytest.approx(20)
    assert plan(EXAMPLE).fastest.mode == "opportunistic"


def test_a_draft_that_comes_with_the_request_does_not_depend_on_the_round_trip() -> None:
    one = plan(EXAMPLE).mode("one-shot")
    assert one.ms_per_token == pytest.approx(22 / EXAMPLE.tokens(8))
    assert one.break_even_rtt_ms is None
    useless = SplitCosts(100, 20, 5, 0.0)
    assert MODES["one-shot"](useless).ms == 20


def test_bytes_are_those_of_the_messages() -> None:
    made = plan(SplitCosts(100, 20, 5, 0.8, message=4))
    assert draft_bytes(10) == 48 + 6
    assert draft_bytes(40) == 144 + 8  # 126 bytes and more have a longer header
    assert commit_bytes(1) == commit_bytes(10) == 52 + 2
    one, patient, opportunistic = (made.mode(m) for m in ("one-shot", "patient", "opportunistic"))
    assert one.bytes_up == 3
    assert patient.bytes_down == pytest.approx(54 * patient.passes_per_token)
    assert patient.bytes_up == pytest.approx(54 * patient.drafted_per_token / 8)
    assert opportunistic.bytes_up == pytest.approx(54 * opportunistic.drafted_per_token / 4)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("acceptance", 1.0),
        ("acceptance", -0.1),
        ("target_ms", 0),
        ("rtt_ms", -1),
        ("max_draft", 0),
        ("max_draft", 2.5),
        ("window", 4),
    ],
)
def test_a_wrong_setting_is_named(setting: str, value: float) -> None:
    given = {"rtt_ms": 40, "target_ms": 20, "draft_ms": 5, "acceptance": 0.8}
    with pytest.raises(SettingError, match=setting):
        SplitCosts(**{**given, setting: value})  # type: ignore[arg-type]
