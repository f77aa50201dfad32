from collections.abc import Sequence
from dataclasses import replace

import pytest

from paceline.config import SpecConfig
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.engine.estimates import CostCurve
from paceline.target.cost import CostTable
from paceline.testing import ToyTarget
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Round, Seq


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


def sure(*scores: float, parents: tuple[int, ...] | None = None) -> Draft:
    return Draft(tuple(range(len(scores))), parents, ("d",) * len(scores), scores)


def priced(slope: float) -> Rate:
    """A pass of one row costs 1000 us, each further row that share of it."""
    return Rate(lambda rows, context: 1 + slope * (rows - 1))


def test_a_draft_is_cut_where_it_gets_unsure() -> None:
    assert priced(0.1).trim([seq()], [sure(0.9, 0.9, 0.05, 0.9)], 1) == [2]
    assert priced(0.0).trim([seq()], [sure(0.9, 0.9, 0.05, 0.9)], 1) == [4]
    assert priced(0.5).trim([seq()], [sure(0.1, 0.9)], 1) == [0]


def test_the_gain_of_a_tree_is_that_of_its_nodes() -> None:
    tree = sure(0.6, 0.35, 0.9, parents=(-1, -1, 0))
    assert priced(0.1).trim([seq()], [tree], 1) == [3]
    assert priced(0.4).trim([seq()], [tree], 1) == [1]


def test_sequences_share_the_rows_by_how_sure_their_drafts_are() -> None:
    drafts = [sure(0.95, 0.95, 0.95), sure(0.2, 0.2, 0.2), sure(0.9)]
    keep = priced(0.3).trim([seq()] * 3, drafts, 3)
    assert keep[0] > keep[1]
    assert keep[2] == 1


def test_a_longer_context_makes_rows_dearer() -> None:
    rate = Rate(lambda rows, context: 1 + rows * context / 1000)
    short, long = seq(), Seq("s", [1] * 2000, 1, spec=SpecConfig(("d",)))
    draft = sure(*[0.7] * 8)
    assert rate.trim([short], [draft], 1)[0] > rate.trim([long], [draft], 1)[0]


def test_sampled_tokens_are_not_cut_for_their_value() -> None:
    assert priced(0.9).trim([seq(accept="residual")], [sure(0.1, 0.1)], 1) == [2]
    assert priced(0.9).trim([seq(adaptive=False)], [sure(0.1, 0.1)], 1) == [2]


def scored_round(scores: tuple[float, ...], accepted: int) -> Round:
    tokens = tuple(range(accepted + 1))
    draft = sure(*scores)
    return Round(
        "s", 1, ("d",), draft, tuple(range(accepted)), tokens, len(draft), 1, 1 + len(draft), 0, 1000
    )


def test_a_boaster_is_believed_less_and_earns_it_back() -> None:
    rate = priced(0.3)
    draft = sure(0.9, 0.9)
    assert rate.trim([seq()], [draft], 1) == [2]
    for _ in range(80):
        rate.learn([scored_round((0.9, 0.9), 0)])
    plans = [rate.trim([seq()], [draft], 1)[0] for _ in range(64)]
    assert sorted(plans)[-3:] == [0, 2, 2]  # a probe now and then
    for _ in range(80):
        rate.learn([scored_round((0.9, 0.9), 2)])
    assert rate.trim([seq()], [draft], 1) == [2]


def test_cheap_drafts_are_made_long_once_drafters_say_how_sure_they_are() -> None:
    rate = taught(0.0, 0.5)
    assert rate.plan([seq()], 1) == [0]
    rate.learn([scored_round((0.5,), 0)])
    assert rate.plan([seq()], 1) == [8]


def timed_round(drafted: int, draft_us: int, budget: int = 8, rows: int | None = None) -> Round:
    """All guesses were right; each row of a pass is free."""
    draft = sure(*[0.9] * drafted)
    tokens, path = tuple(range(drafted + 1)), tuple(range(drafted))
    rows = 1 + drafted if rows is None else rows
    return Round("s", 1, ("d",), draft, path, tokens, budget, 1, rows, draft_us, 1000, drafted=drafted)


def test_the_cost_of_a_draft_counts_its_tokens_not_its_budget() -> None:
    """A drafter that stops after one guess of eight, each as dear as a pass."""
    rate = priced(0.0)
    for _ in range(40):
        rate.learn([timed_round(1, 1100)])
    assert rate.plan([seq()], 1) == [0]


def test_drafters_that_take_turns_cost_their_mean() -> None:
    dear, mixed = priced(0.0), priced(0.0)
    for i in range(80):
        dear.learn([timed_round(1, 1100)])
        mixed.learn([timed_round(1, 1100 if i % 4 == 0 else 1)])
    assert dear.plan([seq()], 1) == [0]
    assert mixed.plan([seq()], 1)[0] > 0
    assert mixed._lists[("d",)].draft_us(1) == pytest.approx(1100 / 4, rel=0.4)


def test_what_is_drafted_while_a_prompt_is_read_tells_nothing_of_the_cost() -> None:
    rate = priced(0.0)
    rate.learn([timed_round(8, 10**6, rows=300)])
    for _ in range(20):
        rate.learn([timed_round(8, 800)])
    assert rate.plan([seq()], 1) == [8]


@pytest.mark.parametrize("spell", [1, 2, 5, 8])  # passes
def test_a_slow_spell_of_the_machine_is_forgotten(spell: int) -> None:
    """While it lasts, the lengths it hits look dear; afterwards the best one is found again."""
    table = CostTable({256: {1: 5.3, 2: 5.6, 4: 6.6, 8: 10.0, 16: 20.0}})
    rate = Rate(table)
    for i in range(300):
        drafted = min(8, 1 + i // 8)
        kept = rate.trim([seq()], [sure(*[0.97] * drafted)], 1)[0]
        us = 1000 * table(1 + kept, 256) * (4 if 100 <= i < 100 + spell else 1)
        rate.learn([replace(scored_round((0.97,) * kept, kept), target_us=int(us))])
    speeds = [(1 + k) / table(1 + k, 256) for k in range(9)]
    assert speeds[kept] > 0.98 * max(speeds)


def block_rounds(rate: Rate, lengths: tuple[int, ...], us: int, accepted: int, rounds: int = 40) -> None:
    """Drafts that cost the same whatever their length, of which so many guesses come true."""
    for i in range(rounds):
        nodes = lengths[i % len(lengths)]
        right = min(accepted, nodes)
        r = replace(timed_round(nodes, us), path=tuple(range(right)), tokens=tuple(range(right + 1)))
        rate.learn([r])


def test_a_draft_that_costs_the_same_at_any_length_is_known_for_it() -> None:
    fixed, each = priced(0.0), priced(0.0)
    block_rounds(fixed, (2, 4, 8), 600, 2)
    for i in range(40):
        each.learn([timed_round((2, 4, 8)[i % 3], 100 * (2, 4, 8)[i % 3])])
    assert fixed._lists[("d",)].draft_us(1) == pytest.approx(600, rel=0.1)
    assert fixed._lists[("d",)].draft_us(8) == pytest.approx(600, rel=0.1)
    assert each._lists[("d",)].draft_us(2) == pytest.approx(200, rel=0.1)
    assert each._lists[("d",)].draft_us(8) == pytest.approx(800, rel=0.1)


def test_drafts_that_do_not_pay_are_not_made() -> None:
    """The same drafts, at a tenth of a pass and at two passes; one guess of them comes true."""
    cheap, dear = priced(0.02), priced(0.02)
    block_rounds(cheap, (2, 4, 8), 100, 1)
    block_rounds(dear, (2, 4, 8), 2000, 1)
    assert cheap.plan([seq()], 1)[0] > 0
    assert [dear.plan([seq()], 1)[0] for _ in range(31)] == [0] * 31
    assert dear.plan([seq()], 1)[0] > 0  # a probe


def test_drafts_of_which_nothing_is_checked_cost_all_the_same() -> None:
    rate = priced(0.02)
    block_rounds(rate, (4,), 500, 4, rounds=10)
    assert rate.plan([seq()], 1)[0] > 0
    idle = replace(timed_round(0, 500, rows=1), drafted=4)
    for _ in range(40):
        rate.learn([idle])
    assert rate.plan([seq()], 1) == [0]


def test_a_probe_that_was_drafted_for_is_checked() -> None:
    rate = priced(0.02)
    block_rounds(rate, (4,), 500, 0, rounds=40)  # nothing comes true
    unsure = Draft((1, 2, 3), None, ("d",) * 3, (0.1, 0.1, 0.1))
    probes = 0
    for _ in range(128):
        if rate.plan([seq()], 1)[0]:
            probes += 1
            assert rate.trim([seq()], [unsure], 1)[0] > 0
    assert probes == 4


class Modest(Drafter):
    name = "d"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [NO_DRAFT for _ in asks]


def test_a_new_drafter_does_not_pay_for_the_one_whose_name_it_has() -> None:
    useless, boaster = taught(0.0, 0.1), priced(0.3)
    for _ in range(80):
        boaster.learn([scored_round((0.9, 0.9), 0)])
    assert useless.plan([seq()], 1) == boaster.trim([seq()], [sure(0.9, 0.9)], 1) == [0]
    for rate in (useless, boaster):
        Engine(ToyTarget(), {"d": Modest()}, rate).replace_drafter(Modest())
    assert useless.plan([seq()], 1)[0] > 2  # no probe
    assert boaster.trim([seq()], [sure(0.9, 0.9)], 1) == [2]


def test_others_of_its_list_are_trusted_as_before() -> None:
    rate, both = priced(0.3), ("d", "other")
    draft = Draft((0, 1), None, both, (0.9, 0.9))
    for _ in range(80):
        rate.learn([Round("s", 1, both, draft, (0,), (0, 1), 2, 1, 3, 0, 1000)])  # the other is wrong
    rate.forget("d")
    pair = Seq("s", [1], 1, spec=SpecConfig(both))
    assert rate.trim([pair], [replace(sure(0.9), sources=("other",))], 1) == [0]
    assert rate.trim([pair], [sure(0.9)], 1) == [1]


def test_the_cost_of_a_head_is_learned_beside_prompts_too() -> None:
    """Its time counts in every pass; that of the target only where all sequences decode."""
    rate, decoding = Rate(), timed_round(0, 0)
    rate.learn([replace(decoding, target_us=1000, draft_us_by={"block": 100})])
    for _ in range(200):
        rate.learn([replace(decoding, rows=500, target_us=90000, draft_us_by={"block": 300})])
    assert rate.estimates(decoding.drafters).cost("block") == pytest.approx(0.3)
