import pytest

from paceline.config import SpecConfig
from paceline.engine.control import CostCurve, Rate
from paceline.types import Draft, Round, Seq


def seq(**spec: object) -> Seq:
    return Seq("s", [1], 1, spec=SpecConfig(("d",), **spec))  # type: ignore[arg-type]


def a_round(drafted: int, accepted: int, rows: int, us: int) -> Round:
    draft = Draft(tuple(range(drafted)), None, ("d",) * drafted)
    tokens = tuple(range(accepted + 1))
    return Round("s", 1, ("d",), draft, tuple(range(accepted)), tokens, drafted, 1, rows, 0, us)


def taught(share: float, slope: float, rounds: int = 80, k: int = 8) -> Rate:
    """A controller that has seen this share of each draft accepted, at this cost per further row."""
    rate = Rate()
    rate.plan([seq()], 1)
    for _ in range(rounds):
        rate.learn([a_round(k, int(share * k), 1 + k, int(1000 * (1 + slope * k)))])
        rate.learn([a_round(0, 0, 1, 1000)])
    return rate


def test_drafts_long_where_all_is_accepted_and_rows_are_free() -> None:
    assert taught(1.0, 0.01).plan([seq()], 1) == [8]


def test_drafts_nothing_where_nothing_is_accepted() -> None:
    rate = taught(0.0, 0.1)
    plans = [rate.plan([seq()], 1)[0] for _ in range(31)]
    assert plans == [0] * 31


def test_probes_now_and_then_and_recovers() -> None:
    rate = taught(0.0, 0.1)
    plans = [rate.plan([seq()], 1)[0] for _ in range(64)]
    assert sorted(plans)[-2:] == [2, 2]
    for _ in range(60):
        rate.learn([a_round(2, 2, 3, 1200)])
    assert rate.plan([seq()], 1)[0] > 0


def test_drafts_short_where_rows_are_dear() -> None:
    assert 0 < taught(0.5, 0.0).plan([seq()], 1)[0] <= 8
    assert taught(0.5, 0.9).plan([seq()], 1)[0] < taught(0.5, 0.0).plan([seq()], 1)[0]


def test_fixed_length_on_request() -> None:
    assert taught(0.0, 1.0).plan([seq(adaptive=False, max_draft=5)], 1) == [5]


def test_cost_is_interpolated() -> None:
    cost = CostCurve()
    cost.learn(1, 100)
    cost.learn(9, 180)
    assert cost(5) == pytest.approx(140, rel=0.03)
    assert cost(20) > cost(9)


def test_one_hiccup_hardly_counts_and_a_slower_machine_is_noticed() -> None:
    cost = CostCurve()
    cost.learn(1, 100)
    cost.learn(9, 180)
    cost.learn(1, 100_000)
    assert cost(1) < 200
    for _ in range(40):
        cost.learn(1, 1000)
    assert cost(1) == pytest.approx(1000, rel=0.05)
    assert cost(9) > 1000  # never measured since, but it is the same machine
