from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from paceline.config import SpecConfig
from paceline.engine.control import IDLE_PASSES, OWN_FURTHER, Bank, Rate, _by_chance
from paceline.engine.engine import Engine
from paceline.engine.estimates import Acceptance, CostCurve, DraftTime, Gain
from paceline.target.cost import CostTable
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, Round, Seq

LIST = ("d",)


def seq(name: str = "s", drafters: tuple[str, ...] = LIST, tokens: int = 1, **spec: object) -> Seq:
    """It has its first token."""
    return Seq(name, [1] * tokens, 0, spec=SpecConfig(drafters, **spec))  # type: ignore[arg-type]


def at_first(name: str = "new", tokens: int = 40, **spec: object) -> Seq:
    """Its next pass gives the first token."""
    return replace(seq(name, tokens=tokens, **spec), prompt_len=tokens)  # type: ignore[arg-type]


def priced(slope: float) -> Rate:
    """A pass of one row costs 1000 us, each further row that share of it."""
    return Rate(lambda rows, context: 1 + slope * (rows - 1))


def sure(*scores: float, parents: tuple[int, ...] | None = None, source: str = "d") -> Draft:
    return Draft(tuple(range(len(scores))), parents, (source,) * len(scores), scores)


def trimmed(rate: Rate, seqs: list[Seq], drafts: list[Draft]) -> list[int]:
    rate.plan(seqs, len(seqs))
    return rate.trim(seqs, drafts, len(seqs))


def run(
    rate: Rate, s: Seq, draft: Draft, right: int, rounds: int = 1, draft_us: int = 0, slope: float = 0.1
) -> None:
    """Passes in which one drafter makes this draft, of which so many nodes are right."""
    for _ in range(rounds):
        budget = rate.plan([s], 1)[0]
        nodes, asked = 0, False
        if budget and (wanted := rate.budget("d", s, budget)):
            rate.drafted("d", [Ask(s, wanted)], [draft])
            (nodes,), asked = rate.trim([s], [draft], 1), True
        accepted = min(nodes, right)
        tokens = (*draft.tokens[:accepted], draft.tokens[accepted] if accepted < right else 999)
        us = {"d": draft_us} if asked else {}
        cost = int(1000 * (1 + slope * nodes))
        first, path = draft.first(nodes), tuple(range(accepted))
        total = sum(us.values())
        r = Round(s.id, 1, LIST, first, path, tokens, budget, 1, 1 + nodes, total, cost, draft_us_by=us)
        rate.learn([replace(r, uncut=draft, asked=LIST) if asked else r])


def test_fixed_length_on_request() -> None:
    rate, fixed = priced(1.0), seq(adaptive=False, max_draft=5)
    run(rate, seq("other"), sure(0.9), 0, rounds=60)
    assert rate.plan([fixed], 1) == [5]
    assert rate.budget("d", fixed, 5) == 5
    assert rate.budget("d", fixed, 5, reach=0.01) == 5  # after another drafter in the same draft, too
    assert rate.trim([fixed], [sure(0.01, 0.01)], 1) == [2]


@pytest.mark.parametrize("accept", ["match", "residual"])
@pytest.mark.parametrize(("prompt", "nodes"), [(40, 0), (50, 1), (200, 4), (2000, 8)])
def test_a_first_token_waits_for_no_more_rows_than_its_share_of_the_pass(
    prompt: int, nodes: int, accept: str
) -> None:
    """A pass of n rows takes as long as n + 9 of its rows: 2 % of it are (n + 9) / 50 rows."""
    rate, draft = Rate(lambda rows, context: 9 + rows), sure(*[0.99] * 8)
    run(rate, seq(), draft, 8, rounds=20)
    new = at_first(tokens=prompt, accept=accept)
    rate.plan([new], prompt)
    assert rate.budget("d", new, 8) == nodes
    assert rate.trim([new], [draft.first(nodes)], prompt) == [nodes]
    if accept == "match":  # whatever else was drafted
        assert rate.trim([new], [draft], prompt) == [nodes]


def test_first_tokens_of_one_pass_share_what_they_wait_for() -> None:
    rate, draft = Rate(lambda rows, context: 9 + rows), sure(*[0.99] * 8)
    run(rate, seq(), draft, 8, rounds=20)
    new = [at_first(name, 100) for name in ("a", "b")]
    rate.plan(new, 200)
    assert rate.trim(new, [draft, draft], 200) == [2, 2]


@pytest.mark.parametrize(("prompt", "nodes"), [(40, 50), (2000, 64)])
def test_a_draft_that_begins_with_forced_tokens_may_delay_the_first_one_longer(
    prompt: int, nodes: int
) -> None:
    """By 5 ms or 5 %, where a row takes 0.1 ms. Another one waits, as ever."""
    rate = Rate(lambda rows, context: 9 + rows)
    run(rate, seq(), sure(*[1.0] * 8), 8, rounds=20)
    new, opens, follows = at_first(tokens=prompt), sure(*[1.0] * 60), sure(*[1.0] * 60, *[0.99] * 60)
    rate.plan([new], prompt)
    alone = rate.budget("d", new, 120)
    assert alone < 45
    assert rate.trim([new], [sure(0.99, *[1.0] * 120)], prompt)[0] <= alone + 1
    assert rate.budget("d", new, 120, forced=60) == pytest.approx(nodes, abs=1)
    rate.drafted("d", [Ask(new, 60)], [opens])
    assert rate.budget("d", new, 120) == pytest.approx(nodes, abs=1)
    assert rate.trim([new], [follows], prompt) == [pytest.approx(nodes, abs=1)]


def test_the_time_of_drafting_counts_where_forced_tokens_delay_a_first_one() -> None:
    rate = Rate(lambda rows, context: 9 + rows)
    run(rate, seq(), sure(*[1.0] * 8), 8, rounds=20, draft_us=500)
    rate.estimates.real_us = rate.estimates.plain_us
    new = at_first()
    rate.plan([new], 40)
    assert rate.budget("d", new, 100, forced=60) == pytest.approx(45, abs=1)


def test_how_texts_begin_is_learned_apart_from_how_they_go_on() -> None:
    """Every text begins with tokens that the grammar forces, and has none of them later."""
    rate, draft = Rate(lambda rows, context: 9 + rows), sure(*[1.0] * 8)
    run(rate, seq(), draft, 8, rounds=20)
    for text in range(12):
        new = at_first(f"{text}")
        for found in (draft, *[NO_DRAFT] * 20):
            rate.plan([new], 1)
            if rate.budget("d", new, 8, forced=8):
                rate.drafted("d", [Ask(new, 8)], [found])
            new.tokens.append(7)
        rate.end(new)
    of = {route: gain(0.1) for (route, _), gain in rate.estimates.gains.items()}
    assert of[" greedy, first"] > 4
    assert of[" greedy"] < 1


def test_what_is_forced_at_the_beginning_is_expected_until_it_was_asked_for() -> None:
    """Where many texts begin in one pass, it fits into the next one."""
    rate, draft = Rate(lambda rows, context: 1 + 0.02 * rows), sure(*[1.0] * 8)
    run(rate, seq(), draft, 8, rounds=20)
    for text in range(40):
        new = at_first(f"{text}")
        for found in (draft, *[NO_DRAFT] * 20):
            rate.plan([new], 1)
            rate.drafted("d", [Ask(new, 8)], [found] if rate.budget("d", new, 8, forced=8) else [NO_DRAFT])
            new.tokens.append(7)
        rate.end(new)
    texts = [at_first(f"together {i}") for i in range(400)]
    rate.plan(texts, 400)
    assert not rate.budget("d", texts[0], 8, forced=8)
    texts[0].tokens.append(7)
    rate.plan(texts[:1], 1)
    assert rate.budget("d", texts[0], 8, forced=8) == 8
    texts[0].tokens.append(7)
    rate.plan(texts[:1], 1)
    assert not rate.value("d", texts[0]) > 0
    resumed = at_first("resumed")
    resumed.tokens += [7] * 20
    rate.plan([resumed], 1)
    rate.budget("d", resumed, 8, forced=8)
    assert not rate.value("d", resumed) > 0


@pytest.mark.parametrize(("draft_us", "asked"), [(0, True), (400, True), (900, False)])
def test_a_first_token_does_not_wait_for_a_slow_draft(draft_us: int, asked: bool) -> None:
    """A pass of 40 rows or more takes 40 ms: a draft may take 0.8 ms."""
    rate, draft = Rate(lambda rows, context: 40.0 if rows >= 40 else 1.0), sure(*[1.0] * 8)
    run(rate, seq(), draft, 8, rounds=20, draft_us=draft_us, slope=0.0)
    for s, drafts in ((at_first(), asked), (seq("later"), True)):
        rate.plan([s], 40)
        assert bool(rate.budget("d", s, 8)) == drafts


def test_a_first_token_does_not_wait_for_a_drafter_of_unknown_time() -> None:
    rate = priced(0.0)
    for s, nodes in ((at_first(), 0), (seq(), 8)):
        rate.plan([s], 40)
        assert rate.budget("d", s, 8, forced=8) == nodes


def test_nothing_is_drafted_for_a_first_token_and_all_the_more_for_the_second() -> None:
    rate, draft, new = priced(0.1), sure(0.9, 0.9), at_first(tokens=1)
    run(rate, seq(), draft, 2, rounds=20)
    run(rate, new, draft, 2)
    new.tokens.append(7)
    assert rate.plan([new], 1) == [8]
    assert rate.budget("d", new, 8) == 8


def test_passes_that_give_first_tokens_do_not_make_plain_ones_look_slow() -> None:
    """Sixteen answers at once begin, time and again; between, all passes are drafted ones."""
    rate, us = Rate(lambda rows, context: 9 + rows), 100

    def learn(seqs: list[Seq], nodes: int, took: int) -> None:
        rate.plan(seqs, len(seqs))
        one = Round(
            seqs[0].id, 40, LIST, sure(*[0.5] * nodes), (), (5,), 8, len(seqs), len(seqs) + nodes, 0, took
        )
        rate.learn([one, *(replace(one, request=s.id, draft=NO_DRAFT) for s in seqs[1:])])

    for lap in range(20):
        learn([at_first(f"{lap} {i}") for i in range(16)], 0, 300 * us)
        for nodes in range(20, 40):
            learn([seq(f"{lap} {i}") for i in range(16)], nodes, (25 + nodes) * us)
    assert rate.cost(16, 40) == pytest.approx(25 * us, rel=0.2)


def test_plain_decoding_is_never_planned_for() -> None:
    assert priced(0.0).plan([seq(max_draft=0), seq("t", ())], 2) == [0, 0]


def test_cost_is_interpolated() -> None:
    cost = CostCurve()
    cost.learn(1, 100)
    cost.learn(9, 180)
    assert cost(5) == pytest.approx(140, rel=0.03)
    assert cost(20) > cost(9)


@pytest.mark.parametrize("rows", [2, 9])  # decoding alone, and beside a prompt
def test_a_pass_that_took_no_time_or_has_no_price_is_no_division_by_zero(rows: int) -> None:
    rate, s, draft = Rate(lambda rows, context: 0.0), seq(), sure(0.9)
    for _ in range(3):
        budget = rate.plan([s], 1)[0]
        rate.drafted("d", [Ask(s, budget)], [draft])
        rate.trim([s], [draft], 1)
        rate.learn([Round("s", 1, LIST, draft, (0,), (0, 9), budget, 1, rows, 0, 0, uncut=draft, asked=LIST)])
    assert rate.plan([s], 1) == [8]


def test_one_hiccup_hardly_counts_and_a_slower_machine_is_noticed() -> None:
    cost = CostCurve()
    cost.learn(1, 100)
    cost.learn(9, 180)
    cost.learn(1, 100_000)
    assert cost(1) < 200
    for _ in range(20):
        cost.learn(1, 100)
        cost.learn(9, 180)
    for _ in range(40):
        cost.learn(1, 1000)
    assert cost(1) == pytest.approx(1000, rel=0.05)
    assert cost(9) > 1000  # never measured since, but it is the same machine


def test_a_row_count_is_not_dear_or_cheap_for_one_pass_that_was() -> None:
    """Its first pass took a third longer; those of its neighbours took what the curve says."""
    table = CostTable({256: {1: 4.0, 8: 7.5, 16: 12.0}})
    for factor in (2 / 3, 4 / 3):
        cost = CostCurve(table)
        for _ in range(10):
            for rows in (4, 7):
                cost.learn(rows, 1000 * table(rows, 0))
        cost.learn(5, factor * 1000 * table(5, 0))
        assert cost(5) / cost(4) == pytest.approx(table(5, 0) / table(4, 0), rel=0.1)


def test_a_row_count_that_is_always_dearer_than_the_curve_says_is_known_for_it() -> None:
    table = CostTable({256: {1: 4.0, 8: 7.5, 16: 12.0}})
    cost = CostCurve(table)
    for _ in range(20):
        for rows, factor in ((4, 1.0), (5, 1.4)):
            cost.learn(rows, factor * 1000 * table(rows, 0))
    assert cost(5) / cost(4) == pytest.approx(1.4 * table(5, 0) / table(4, 0), rel=0.06)


def test_what_is_added_to_all_passes_makes_no_row_dearer() -> None:
    """Masks of 16 answers, say: passes take 5 ms longer than the curve says."""
    table = CostTable({256: {1: 4.0, 8: 7.5, 16: 12.0}})
    cost = CostCurve(table)
    for _ in range(100):
        cost.learn(1, 4000)
        cost.learn(16, 17_000)
    assert cost(16) == pytest.approx(17_000, rel=0.05)
    added = 1000 * (table(64, 0) - table(16, 0))
    assert 0.95 * added < cost(64) - cost(16) < 1.2 * added  # in proportion it would be 1.4
    for _ in range(100):
        cost.learn(16, 9000)  # where larger passes are cheaper than the curve says, so are those beyond
        cost.learn(1, 4000)
    assert cost(64) == pytest.approx(0.75 * 1000 * table(64, 0), rel=0.05)


def test_a_draft_is_cut_where_it_gets_unsure() -> None:
    assert trimmed(priced(0.1), [seq()], [sure(0.9, 0.9, 0.05, 0.9)]) == [2]
    assert trimmed(priced(0.0), [seq()], [sure(0.9, 0.9, 0.05, 0.9)]) == [4]
    assert trimmed(priced(0.5), [seq()], [sure(0.1, 0.9)]) == [0]


def test_the_gain_of_a_tree_is_that_of_its_nodes() -> None:
    tree = sure(0.6, 0.35, 0.9, parents=(-1, -1, 0))
    assert trimmed(priced(0.1), [seq()], [tree]) == [3]
    assert trimmed(priced(0.4), [seq()], [tree]) == [1]


def test_no_node_is_taken_before_an_earlier_one_of_its_tree() -> None:
    taken = [(-0.5, 1, 0), (-0.3, 0, 0), (-0.3, 0, 1)]
    assert _by_chance({0: [0.3, 0.9], 1: [0.5]}) == taken


def test_sequences_share_the_rows_by_how_sure_their_drafts_are() -> None:
    drafts = [sure(0.95, 0.95, 0.95), sure(0.2, 0.2, 0.2), sure(0.9)]
    lengths = trimmed(priced(0.3), [seq("a"), seq("b"), seq("c")], drafts)
    assert lengths[0] > lengths[1]
    assert lengths[2] == 1


def test_the_same_draft_is_verified_alone_and_not_where_rows_are_dear() -> None:
    """Rows are free up to eight, as where a pass is bound by memory; beyond they cost what they bring."""

    def cost(rows: int, context: int) -> float:
        return 1 + max(0, rows - 8) / 8

    draft = sure(0.8, 0.8)
    assert trimmed(Rate(cost), [seq()], [draft]) == [2]
    many = [seq(str(i)) for i in range(16)]
    assert sum(trimmed(Rate(cost), many, [draft] * 16)) == 0


def test_those_who_wait_make_time_dearer() -> None:
    draft, s = sure(0.7, 0.7, 0.7), seq()
    alone, awaited = priced(0.2), priced(0.2)
    alone.plan([s], 1)
    awaited.plan([s], 1, waiting=8)
    assert alone.trim([s], [draft], 1)[0] > awaited.trim([s], [draft], 1)[0]


def test_a_longer_context_makes_rows_dearer() -> None:
    rate = Rate(lambda rows, context: 1 + rows * context / 10000)
    draft = sure(*[0.7] * 8)
    short, long = seq(), seq("long", tokens=4000)
    assert trimmed(rate, [short], [draft])[0] > trimmed(rate, [long], [draft])[0]


def test_sampled_tokens_are_not_cut_for_their_value() -> None:
    assert trimmed(priced(0.9), [seq(accept="residual")], [sure(0.1, 0.1)]) == [2]
    assert trimmed(priced(0.9), [seq(adaptive=False)], [sure(0.1, 0.1)]) == [2]


def test_a_boaster_is_believed_less_and_earns_it_back() -> None:
    rate, s, draft = priced(0.3), seq(), sure(0.9, 0.9)
    assert trimmed(rate, [s], [draft]) == [2]
    run(rate, s, draft, 0, rounds=80)
    assert trimmed(rate, [s], [draft]) == [0]
    run(rate, s, draft, 2, rounds=200)  # seen in the shadow at first: nothing of it is verified
    assert trimmed(rate, [s], [draft]) == [2]


@pytest.mark.parametrize("private", [True, False])
def test_a_client_that_lies_costs_others_nothing_where_drafts_are_private(private: bool) -> None:
    rate, draft = Rate(lambda rows, context: 1 + 0.3 * (rows - 1), LIST if private else ()), sure(0.9, 0.9)
    run(rate, seq("liar"), draft, 0, rounds=80)
    assert trimmed(rate, [seq("honest")], [draft]) == ([2] if private else [0])
    assert bool(rate.estimates.acceptance or rate.estimates.gains) is not private


def test_a_draft_that_was_cut_is_compared_with_the_text_that_comes() -> None:
    """Two tokens that no pass verified, right and right, then wrong and right."""
    learned = []
    for right in (True, False):
        rate, s, draft = priced(0.0), seq(), sure(0.5, 0.5)
        for _ in range(30):
            rate.plan([s], 1)
            rate.drafted("d", [Ask(s, 8)], [draft])
            rate.trim([s], [draft], 1)
            for at, token in enumerate(draft.tokens if right else (7, 1), 1):
                r = Round("s", at, LIST, NO_DRAFT, (), (token,), 8, 1, 1, 0, 1000)
                rate.learn([replace(r, uncut=draft) if token != 1 else r])
        learned.append(rate.chances(s, sure(0.5, 0.5)))
    assert learned[0][1] > 0.8
    assert learned[1][0] < 0.2


def test_nodes_that_no_token_has_reached_are_not_counted() -> None:
    acceptance = Acceptance()
    before = acceptance.chances([0.8] * 4)
    for _ in range(50):
        acceptance.learn([0.8], 0, 1)
    after = acceptance.chances([0.8] * 4)
    assert after[0] > before[0]
    assert after[3] >= before[3]  # only by what the drafter's scores are good for in all


def test_the_end_of_an_output_says_nothing_of_the_nodes_beyond_it() -> None:
    rate, s, draft = priced(0.0), seq(), sure(0.8, 0.8)
    before = rate.chances(s, draft)[0]
    for _ in range(30):
        rate.plan([s], 1)
        rate.trim([s], [draft], 1)
        rate.learn([Round("s", 1, LIST, draft, (0,), (0,), 8, 1, 3, 0, 1000, finish="stop", uncut=draft)])
    assert rate.chances(s, sure(0.8, 0.8))[0] > before


def test_a_drafter_without_scores_is_known_by_depth() -> None:
    rate, s = priced(0.1), seq()
    draft = Draft((0, 1, 2, 3), None, ("d",) * 4)
    run(rate, s, draft, 2, rounds=80)
    assert trimmed(rate, [s], [draft]) == [2]


def test_drafts_that_do_not_pay_are_seldom_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same drafts, at a tenth of a pass and at two passes; one node of them is right."""
    asks = []
    for us in (100, 2000):
        rate, s, draft = priced(0.02), seq(), sure(0.5, 0.2)
        run(rate, s, draft, 1, rounds=60, draft_us=us)
        with monkeypatch.context() as patch:
            counted: list[str] = []
            drafted = rate.drafted
            patch.setattr(rate, "drafted", lambda *a, f=drafted, c=counted: (c.append("ask"), f(*a)))
            run(rate, s, draft, 1, rounds=100, draft_us=us)
        asks.append(len(counted))
    assert asks[0] == 100
    assert asks[1] <= 1


def test_a_draft_dear_by_the_node_is_made_as_long_as_its_nodes_pay() -> None:
    rate, s = priced(0.0), seq()
    lengths = []
    for i in range(200):
        rate.plan([s], 1)
        wanted = rate.budget("d", s, 8)
        lengths.append(wanted)
        draft = sure(*[0.7] * wanted)
        if wanted:
            rate.drafted("d", [Ask(s, wanted)], [draft])
            rate.trim([s], [draft], 1)
        right = min(wanted, (0, 1, 2, 2, 3, 4, 8)[i % 7])
        tokens = (*range(right), 999)
        us = {"d": 150 * wanted} if wanted else {}
        r = Round("s", 1, LIST, draft, tuple(range(right)), tokens, 8, 1, 1 + wanted, 150 * wanted, 1000)
        rate.learn([replace(r, draft_us_by=us, uncut=draft, asked=LIST if wanted else ())])
    assert 2 < sum(lengths[-20:]) / 20 < 6.5


@pytest.mark.parametrize("spell", [1, 2, 5, 8])  # passes
def test_a_slow_spell_of_the_machine_is_forgotten(spell: int) -> None:
    """While it lasts, the lengths it hits look dear; afterwards the best one is found again."""
    table = CostTable({256: {1: 5.3, 2: 5.6, 4: 6.6, 8: 10.0, 16: 20.0}})
    rate, s, at = Rate(table), seq(), 0
    for i in range(300):
        count = min(8, 1 + i // 8)
        draft = Draft(tuple(range(at, at + count)), None, LIST * count, (0.97,) * count)
        rate.plan([s], 1)
        (nodes,) = rate.trim([s], [draft], 1)
        us = 1000 * table(1 + nodes, 256) * (4 if 100 <= i < 100 + spell else 1)
        tokens, path = tuple(range(at, at + nodes + 1)), tuple(range(nodes))
        r = Round("s", 1, LIST, draft.first(nodes), path, tokens, 8, 1, 1 + nodes, 0, int(us), uncut=draft)
        rate.learn([r])
        at += nodes + 1
    speeds = [(1 + k) / table(1 + k, 256) for k in range(9)]
    assert speeds[nodes] > 0.97 * max(speeds)


def test_short_drafts_that_come_true_get_longer() -> None:
    """Nodes beyond those asked for are never seen: their number is no evidence against more."""
    rate, s = Rate(lambda rows, context: 1 + 0.02 * rows), seq()
    asked = []
    for _ in range(40):
        budget = rate.plan([s], 1)[0]
        nodes = rate.budget("d", s, budget)
        draft = sure(*[0.95] * nodes)
        rate.drafted("d", [Ask(s, nodes)], [draft])
        us = {"d": 100 * nodes}
        r = Round("s", 1, LIST, draft, tuple(range(nodes)), (*draft.tokens, 9), budget, 1, 1 + nodes, 0, 1000)
        rate.learn([replace(r, draft_us=100 * nodes, draft_us_by=us, uncut=draft, asked=LIST)])
        asked.append(nodes)
    assert asked[-1] == 8


def test_a_draft_that_costs_the_same_at_any_length_is_known_for_it() -> None:
    fixed, each = DraftTime(), DraftTime()
    for i in range(60):
        nodes = (2, 4, 8)[i % 3]
        fixed.learn(nodes, 600)
        each.learn(nodes, 100 * nodes)
    assert fixed(1) == pytest.approx(600, rel=0.1)
    assert fixed(8) == pytest.approx(600, rel=0.1)
    assert each(2) == pytest.approx(200, rel=0.15)
    assert each(8) == pytest.approx(800, rel=0.15)


def test_drafts_of_one_length_leave_the_time_of_a_node_as_it_was_known() -> None:
    """A head is asked for whole blocks until a node of it is known to cost something: then, too."""
    time = DraftTime()
    for nodes in (2, 8) * 4 + (8,) * 200:
        time.learn(nodes, 400 + 20 * nodes)
    assert time.node_us == pytest.approx(20, rel=0.15)
    assert time(8) == pytest.approx(560, rel=0.01)


def test_the_time_of_a_node_is_learned_anew_where_first_drafts_were_slow() -> None:
    time = DraftTime()
    for nodes in (2, 8):
        time.learn(nodes, 20_000 * nodes, 1000, steady=True)
    for _ in range(4):
        time.learn(8, 500, 1000, steady=True)
    assert time.node_us == 0
    assert time(2) == pytest.approx(500, rel=0.01)


def test_gain_is_that_of_the_nodes_above_the_price() -> None:
    gain = Gain()
    for i in range(300):
        gain.learn((0.9, 0.81) if i % 2 else ())
    assert gain(0.5) == pytest.approx((0.4 + 0.31) / 2, rel=0.1)
    assert gain(0.95) == pytest.approx(0, abs=0.01)


def test_a_text_is_like_its_route_until_it_shows_otherwise() -> None:
    route = Gain()
    for _ in range(200):
        route.learn((0.9, 0.8))
    text, on_route = Gain(route), route(0.1)
    assert text(0.1) == pytest.approx(on_route)
    for _ in range(20):
        text.learn(())
    assert text(0.1) < 0.3 * on_route


def test_a_route_forgets_by_the_passes_however_many_texts_are_in_them() -> None:
    """16 texts begin together: for some passes none of them finds anything."""
    left = []
    for texts in (1, 16):
        route = Gain()
        for _ in range(100):
            for found in ((0.9, 0.8), (0.9, 0.8), ()):
                Gain(route).learn(found, texts)
        before = route(0.1)
        for _ in range(5 * 16):
            Gain(route).learn((), texts)
        left.append(route(0.1) / before)
    assert left[0] < 0.1
    assert left[1] > 0.6
    Gain.of_state(route.state())


def test_what_a_text_has_shown_gets_old_while_nobody_is_asked() -> None:
    route = Gain()
    for _ in range(200):
        route.learn((0.9, 0.8))
    text, on_route = Gain(route), route(0.1)
    for _ in range(20):
        text.learn((), 1000)  # which the route hardly notices
    shown = text(0.1)
    text.age(5)
    assert 1.2 * shown < text(0.1) < on_route
    text.age(2000)
    assert text(0.1) == pytest.approx(route(0.1), rel=0.01)


def test_a_bank_in_debt_stops_drafts_for_longer_each_time() -> None:
    bank, stops = Bank(), list[int]()
    for _ in range(2000):
        bank.tokens += 1
        if bank.plain:
            bank.plain -= 1
            continue
        bank.add(0, 1.5)
        if bank.plain:
            stops.append(bank.plain)
    assert stops[0] == 16
    assert stops[:6] == sorted(stops[:6])
    assert max(stops) == 512
    assert -bank.saved < 0.02 * 2000 + 15


def test_one_sequence_alone_may_lose_twice_as_much_as_each_of_several() -> None:
    """Of several all may be in debt, and their throughput is what counts."""

    def lost(users: int) -> float:
        rate, s, wrong = priced(0.5), seq(), sure(0.9, 0.9)
        others = [seq(f"{i}") for i in range(users - 1)]
        bank = rate._text(s).bank
        while not bank.plain:
            rate.plan([s, *others], users)
            asked = Round(
                "s", 1, LIST, wrong, (), (7,), 8, users, users + 2, 0, 2000, uncut=wrong, asked=LIST
            )
            rest = [Round(o.id, 1, LIST, NO_DRAFT, (), (7,), 0, users, users + 2, 0, 2000) for o in others]
            rate.learn([asked, *rest])
        return -bank.saved

    alone, of_many = lost(1), lost(8)
    assert 4 < alone < 6
    assert 2 < of_many < 0.8 * alone


def test_a_profitable_draft_shortens_the_next_stop() -> None:
    bank = Bank(cool_down=128)
    bank.add(3, 0.5)
    assert bank.cool_down == 64


def test_a_sequence_in_debt_is_asked_for_and_verifies_nothing_until_it_has_cooled_down() -> None:
    rate, s, draft = priced(0.01), seq(), sure(0.99, 0.99)
    run(rate, s, draft, 2, rounds=20)
    rate._text(s).bank.plain = 2
    assert trimmed(rate, [s], [draft]) == [0]
    assert rate.value("d", s) == 0
    rate.learn([Round("s", 1, LIST, NO_DRAFT, (), (7,), 8, 1, 1, 0, 1000) for _ in range(2)])
    assert trimmed(rate, [s], [draft]) == [2]
    assert rate.value("d", s) > 0


class Modest(Drafter):
    name = "d"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [NO_DRAFT for _ in asks]


def test_a_new_drafter_does_not_pay_for_the_one_whose_name_it_has() -> None:
    rate, s = priced(0.3), seq()
    run(rate, s, sure(0.9, 0.9), 0, rounds=80, draft_us=10)
    assert trimmed(rate, [s], [sure(0.9, 0.9)]) == [0]
    Engine(ToyTarget(), {"d": Modest()}, rate).replace_drafter(Modest())
    fresh = seq("fresh")
    assert rate.plan([fresh], 1) == [8]
    assert rate.budget("d", fresh, 8) > 0
    assert rate.trim([fresh], [sure(0.9, 0.9)], 1) == [2]


def test_the_reading_of_a_new_head_is_not_priced_by_the_old_one() -> None:
    def reads(after: bool) -> bool:
        rate, s = priced(0.3), seq()
        rate.plan([s], 1)
        took = {"d": 10**7}
        rate.learn(
            [Round("s", 1, LIST, NO_DRAFT, (), (1,), 0, 1, 1, 10**7, 1000, draft_us_by=took, readers=("d",))]
        )
        if after:
            rate.forget("d")
        rate.plan([fresh := seq("fresh")], 1)
        return rate.reads("d", fresh)

    assert not reads(after=False)  # it takes seconds
    assert reads(after=True)


def test_what_the_old_head_added_to_passes_is_forgotten_with_it() -> None:
    rate = priced(0.3)

    def passes(count: int, read: bool) -> None:
        for _ in range(count):
            r = Round("s", 1, LIST, NO_DRAFT, (), (1,), 0, 1, 1, 0, 1100 if read else 1000)
            rate.learn([replace(r, readers=LIST if read else ())])

    for _ in range(40):
        passes(3, read=True)
        passes(3, read=False)
    assert rate.estimates.slowdown["d"].read_us > 40
    rate.forget("d")
    assert not rate.estimates.slowdown
    assert not any(means.counts for means in rate._slowdown_fit._means.values())


def test_whether_a_prompt_is_read_depends_on_the_price_of_rows_after_it() -> None:
    """Rows are dear in the pass of a prompt, and where all who wait would be in one pass."""
    rate, s = Rate(lambda rows, context: 1 + 0.01 * rows + 0.5 * max(0, rows - 8)), at_first(tokens=40)

    def value(rows: int, reading: bool, waiting: int = 0) -> float:
        rate.plan([s], rows, waiting)
        return rate._value(rate._text(s), "d", 1.0, 0.0, reading)

    decoding = value(1, reading=True)
    assert value(40, reading=True) == pytest.approx(decoding)
    assert value(40, reading=False) < decoding - 0.5
    rate.plan([s], 1, waiting=50)
    assert rate._later_row_price == rate._row_price


def test_a_cut_draft_of_the_old_drafter_says_nothing_of_the_new_one() -> None:
    rate, s = priced(9.0), seq()
    run(rate, s, sure(0.9, 0.9, 0.9), 3)  # nothing of it is verified
    rate.forget("d")
    for token in (1, 2):
        rate.learn([Round("s", 1, LIST, NO_DRAFT, (), (token,), 0, 1, 1, 0, 1000)])
    assert not rate._acceptance


def test_routes_are_known_apart() -> None:
    rate, s = priced(0.3), replace(seq(), route="a")
    run(rate, s, sure(0.9, 0.9), 0, rounds=80)
    here, there = (replace(seq(name), route=name) for name in "ab")
    assert trimmed(rate, [here], [sure(0.9, 0.9)]) == [0]
    assert trimmed(rate, [there], [sure(0.9, 0.9)]) == [2]


def test_others_of_its_list_are_trusted_as_before() -> None:
    rate, s = priced(0.3), seq(drafters=("d", "other"))
    for _ in range(80):  # the other one is wrong
        draft = Draft((0, 1), None, ("d", "other"), (0.9, 0.9))
        rate.plan([s], 1)
        rate.trim([s], [draft], 1)
        rate.learn([Round("s", 1, ("d", "other"), draft, (0,), (0, 2), 2, 1, 3, 0, 1600, uncut=draft)])
    rate.forget("d")
    pair = seq("pair", ("d", "other"))
    assert trimmed(rate, [pair], [sure(0.9, source="other")]) == [0]
    assert trimmed(rate, [pair], [sure(0.9)]) == [1]


def test_the_state_of_a_sequence_ends_with_it() -> None:
    rate, s = priced(0.1), seq()
    run(rate, s, sure(0.9), 1)
    rate.end(s)
    assert not rate._texts


class Counted(Rate):
    """Counts the sequences that are considered, and those that are learned from one by one."""

    considered = learned = questions = 0

    def worth_asking(self, drafters: Sequence[str], seq: Seq) -> bool:
        self.questions += 1
        return super().worth_asking(drafters, seq)

    def budget(
        self, drafter: str, seq: Seq, nodes: int, reach: float = 1.0, gain: float = 0.0, forced: int = 0
    ) -> int:
        self.considered += 1
        return super().budget(drafter, seq, nodes, reach, gain, forced)

    def _learn_text(self, *of_round: Any) -> None:
        self.learned += 1
        super()._learn_text(*of_round)


def hopeless(rate: Rate, seqs: Sequence[Seq], passes: int, beforehand: bool = False) -> list[int]:
    """Passes whose drafter has nothing to say; the sequences that had a budget in each.

    beforehand: the controller is asked whether any drafter would be asked.
    """
    planned = []
    for _ in range(passes):
        budgets, asked, count = rate.plan(seqs, len(seqs)), [], len(seqs)
        if beforehand:
            budgets = [b and rate.worth_asking(LIST, s) * b for s, b in zip(seqs, budgets, strict=True)]
        for s, budget in zip(seqs, budgets, strict=True):
            asked.append(bool(budget) and rate.budget("d", s, budget) > 0)
        asks = [Ask(s, 8) for s, was in zip(seqs, asked, strict=True) if was]
        rate.drafted("d", asks, [NO_DRAFT] * len(asks))
        us = {"d": 300 * len(asks)} if asks else {}
        rounds = []
        for s, budget, was in zip(seqs, budgets, asked, strict=True):
            r = Round(s.id, len(s.tokens), LIST, NO_DRAFT, (), (5,), budget, count, count, 0, 1000)
            spent = replace(r, draft_us=sum(us.values()), draft_us_by=us)
            rounds.append(replace(spent, asked=LIST) if was else spent)
            s.tokens.append(5)
        rate.learn(rounds)
        planned.append(sum(map(bool, budgets)))
    return planned


def test_sequences_that_do_not_draft_are_considered_in_the_same_passes() -> None:
    """So most passes of a batch ask nobody, though each sequence began in a pass of its own."""
    rate, seqs = Rate(lambda rows, context: 1 + 0.5 * rows), [seq(f"{i}") for i in range(4)]
    for n in (1, 2, 3, 4):
        hopeless(rate, seqs[:n], 30)
    planned = [i for i, number in enumerate(hopeless(rate, seqs, 200)) if number]
    assert planned
    assert {(i - planned[0]) % (IDLE_PASSES + 1) for i in planned} == {0}


def test_texts_under_a_grammar_are_considered_again_after_a_few_passes() -> None:
    """What it leaves open and what it forces come by turns."""
    free, bound = [seq("free")], [replace(seq("bound"), cursor=ToyCursor(lambda _: {1}))]
    planned = [sum(hopeless(Rate(lambda rows, context: 1.5), seqs, 400)) for seqs in (free, bound)]
    assert planned[1] > 1.4 * planned[0]


def drafts(rate: Rate, seqs: Sequence[Seq], draft: Draft, passes: int) -> None:
    """All of them have the same one in each pass."""
    for _ in range(passes):
        rate.plan(seqs, len(seqs))
        rate.drafted("d", [Ask(s, 8) for s in seqs], [draft] * len(seqs))


def test_a_few_passes_of_many_texts_do_not_outweigh_all_before() -> None:
    left = []
    for texts, passes in ((16, 3), (1, 48)):
        rate, seqs = priced(0.1), [seq(f"{i}") for i in range(texts)]
        drafts(rate, seqs, sure(0.9, 0.9), 100)
        route = rate.estimates.gains[" greedy", "d"]
        before = route(0.1)
        drafts(rate, seqs, NO_DRAFT, passes)
        left.append(route(0.1) / before)
    assert left[0] > 0.6 > 0.4 > left[1]


def test_a_text_that_was_idle_is_more_like_its_route_again() -> None:
    rate, s = priced(0.1), seq()
    drafts(rate, [seq("before")], sure(0.9, 0.9), 100)
    drafts(rate, [s], NO_DRAFT, 10)
    before = rate.value("d", s)
    rate._text(s).idled = 10
    rate.plan([s], 1)
    assert rate.value("d", s) > before + 0.1


def test_a_pass_in_which_nobody_may_draft_is_learned_from_as_a_whole() -> None:
    rate, seqs = Counted(lambda rows, context: 1 + 0.5 * rows), [seq(f"{i}") for i in range(4)]
    hopeless(rate, seqs, 100)
    rate.considered = rate.learned = 0
    planned = hopeless(rate, seqs, 100)
    assert rate.considered == rate.learned == sum(planned) < 0.2 * 4 * 100
    rate.plan(seqs, 4)
    texts = [rate._text(s) for s in seqs]
    assert all(text.bank.tokens + text.idled in (200, 201) for text in texts)  # none is lost


def test_an_idle_sequence_for_whom_nobody_would_be_asked_stays_idle() -> None:
    """As many asks as without that question, and no token is lost."""
    asked, considered = [], []
    for beforehand in (False, True):
        rate, seqs = Counted(lambda rows, context: 1 + 0.5 * rows), [seq(f"{i}") for i in range(4)]
        hopeless(rate, seqs, 2000, beforehand)
        asked.append([rate._text(s).explored["d"] for s in seqs])
        considered.append(rate.considered)
        rate.plan(seqs, 4)
        texts = [rate._text(s) for s in seqs]
        assert all(text.bank.tokens + text.idled in (2000, 2001) for text in texts)
        assert rate.questions < 0.25 * 4 * 2000
    assert asked[0] == pytest.approx(asked[1])
    assert considered[1] < considered[0] / 2, considered


def test_only_who_had_no_draft_in_the_pass_before_is_looked_at_beforehand() -> None:
    """And nobody under a grammar, who was not idle: what it forces is known only once a drafter was asked."""
    rate = Rate(lambda rows, context: 1 + 0.5 * rows)
    hopeless(rate, [seq("other")], 500)
    free, asked = seq("free"), seq("asked")
    bound = replace(seq("bound"), cursor=ToyCursor(lambda _: {1}))
    rate.plan([free, asked, bound], 3)
    rate.drafted("d", [Ask(asked, 8)], [NO_DRAFT])
    rate.plan([free, asked, bound], 3)
    assert not rate.worth_asking(LIST, free)
    assert rate.worth_asking(LIST, asked)
    assert rate.worth_asking(LIST, bound)


def test_a_pass_that_is_planned_while_the_first_one_runs_is_no_first_one() -> None:
    """The first token is not in the sequence yet, but the next draft need not wait for it."""
    rate, new = Rate(lambda rows, context: 9 + rows), at_first()
    run(rate, seq(), sure(*[0.99] * 8), 8, rounds=20)
    rate.plan([new, *[at_first(f"{i}") for i in range(50)]], 51)
    assert not rate.worth_asking(LIST, new)
    rate.plan([new], 1)
    assert rate.worth_asking(LIST, new)
    new.tokens.append(7)
    assert rate.budget("d", new, 8) == 8


def test_a_text_may_explore_as_much_whether_it_was_looked_at_beforehand_or_not() -> None:
    spent = []
    for beforehand in (False, True):
        rate, s = Rate(lambda rows, context: 1 + 0.5 * rows), at_first()
        hopeless(rate, [seq("other")], 500)
        hopeless(rate, [s], 3, beforehand)
        rate._text(s).idle = 0
        rate.plan([s], 1)
        spent.append(rate._text(s).to_explore)
    assert spent[0] == pytest.approx(spent[1])
    assert spent[0] > 0


def test_drafters_are_considered_at_once_when_rows_get_cheaper() -> None:
    rate, seqs = Rate(lambda rows, context: 1 + 0.5 * rows), [seq(f"{i}") for i in range(8)]
    while not all(rate._text(s).idle > 2 for s in seqs):
        hopeless(rate, seqs, 1)
    assert rate.plan(seqs[:7], 7) == [0] * 7  # one has left
    assert rate.plan(seqs[:5], 5) == [8] * 5


def beside_drafts(rate: Rate, s: Seq, asked: tuple[str, ...], us: int, rounds: int) -> None:
    """Passes in which these drafters are asked, find nothing, and so much time goes by beside them."""
    for _ in range(rounds):
        budget = rate.plan([s], 1)[0]
        for name in asked:
            rate.drafted(name, [Ask(s, budget)], [NO_DRAFT])
        by = dict.fromkeys(asked, 0)
        r = Round(s.id, 1, LIST, NO_DRAFT, (), (1,), budget, 1, 1, us, 1000, draft_us_by=by, asked=asked)
        rate.learn([r])
        rate._texts[s.id].idle = 0


def test_only_the_first_ask_for_a_sequence_pays_for_the_time_beside_drafts() -> None:
    rate, s = priced(0.1), seq("new")
    beside_drafts(rate, seq(), ("d",), 300, rounds=60)
    rate.plan([s], 1)
    before = rate.value("other", s)
    rate.drafted("d", [Ask(s, 8)], [NO_DRAFT])
    assert rate.value("other", s) - before == pytest.approx((1 - OWN_FURTHER) * 0.3, rel=0.1)
    rate.plan([s], 1)  # the next pass has its own
    assert rate.value("other", s) == pytest.approx(before)


def test_an_ask_is_no_dearer_where_few_are_asked() -> None:
    """Most of the time beside drafts is that of a pass. Else few asks would make each of them dearer."""
    alone, many = priced(0.1), priced(0.1)
    beside_drafts(alone, seq(), ("d",), 200, rounds=60)
    beside_drafts(many, seq(), ("d", "e", "d"), round(200 * (1 + 2 * OWN_FURTHER)), rounds=60)
    assert many.estimates.own_us == pytest.approx(alone.estimates.own_us, rel=0.05)


def test_a_shadow_that_has_missed_a_token_is_compared_with_nothing_more() -> None:
    rate, s, draft = priced(0.0), seq(), sure(0.5, 0.5, 0.5)
    rate.plan([s], 1)
    first = Round("s", 1, LIST, NO_DRAFT, (), (0,), 8, 1, 1, 0, 1000, uncut=draft)
    rate.learn([first])
    before = rate.chances(s, draft)
    rate.learn([replace(first, start=3, tokens=(2,), uncut=NO_DRAFT)])
    assert rate.chances(s, draft) == before
    rate.learn([replace(first, start=4, tokens=(1,), uncut=NO_DRAFT)])
    assert rate.chances(s, draft) == before


def test_a_drafter_that_mostly_finds_nothing_is_not_cut_short_when_it_finds_something() -> None:
    """Two of three asks are empty: the mean over all of them says nothing of the third's length."""
    gain = Gain(Gain())
    for _ in range(60):
        for chances in ((), (), (0.95,) * 4):
            gain.learn(chances)
    assert gain.nodes_above(0.2) > 3.5


@pytest.mark.parametrize(("node_us", "nodes"), [(1, 8), (15, 3), (60, 2)])
def test_spare_nodes_of_a_draft_are_as_many_as_their_time_is_small(node_us: int, nodes: int) -> None:
    """A pass takes 1000 us, and drafts of one node were all that was seen."""
    rate, s = priced(0.0), seq()
    rate.plan([s], 1)
    rate._draft_us["d"] = time = DraftTime()
    for length in (1, 8) * 10:
        time.learn(length, 10 + node_us * length)
    for _ in range(60):
        rate._gain(s_text := rate._text(s), "d").learn((0.9,))
    assert s_text.gains["d"].nodes_above(0.1) < 1.5
    assert rate.budget("d", s, 8) == nodes
