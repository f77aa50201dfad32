import pytest

from bench.control import (
    ADAPTIVE,
    COLUMNS,
    FLIPS,
    MIXED,
    PLAIN,
    UNTRAINED,
    WRONG,
    Adversary,
    Case,
    Timing,
    answered,
    bound,
    chosen_turns,
    groups,
    row,
    ways,
)
from bench.table import Table
from paceline import SamplingParams, SpecConfig
from paceline.drafters.none import NoDrafter
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.testing import ToyTarget
from paceline.types import Ask, Seq


def timing(speed: float) -> Timing:
    """Two tokens a pass, for 10 seconds."""
    return Timing(int(10 * speed), int(5 * speed), 10.0)


def test_a_row_compares_with_plain_decoding_and_with_the_best_fixed_length() -> None:
    speeds = {PLAIN: 100.0, "fixed 3": 150.0, "fixed 5": 120.0, "fixed 8": 90.0, ADAPTIVE: 165.0}
    made = row(Case("agents", 0.0, 4), {way: [timing(speed)] * 3 for way, speed in speeds.items()})
    assert made["best"] == "fixed 3"
    assert made["against_plain"][ADAPTIVE]["median"] == 1.65
    assert made["against_best"]["median"] == 1.1
    (cells,) = Table.of(COLUMNS, [made]).rows
    assert cells[-4:] == ["fixed 3: 1.50", "1.10", "-", "2.00"]


def test_the_list_with_a_trained_drafter_is_compared_with_the_list_without_it() -> None:
    speeds = {PLAIN: 100.0, ADAPTIVE: 132.0, UNTRAINED: 120.0}
    made = row(Case("chat", 0.0, 1), {way: [timing(speed)] * 3 for way, speed in speeds.items()})
    assert made["best"] == PLAIN
    assert made["against_untrained"]["median"] == 1.1
    (cells,) = Table.of(COLUMNS, [made]).rows
    assert cells[-2:] == ["1.10 (1.10 to 1.10)", "2.00"]


def test_fixed_lengths_are_fixed_and_plain_decoding_drafts_nothing() -> None:
    made = ways(("suffix",))
    assert made["fixed 5"] == SpecConfig(("suffix",), 5, adaptive=False)
    assert made[PLAIN].max_draft == 0
    assert made[ADAPTIVE].adaptive
    assert UNTRAINED not in made
    trained = ways(("suffix",), ("block",))
    assert trained["fixed 5"].drafters == trained[ADAPTIVE].drafters == ("suffix", "block")
    assert trained[UNTRAINED].drafters == ("suffix",)


def test_every_turn_is_answered_and_the_last_group_is_full() -> None:
    assert groups([1, 2, 3], 2) == [[1, 2], [3, 1]]
    assert groups([1, 2], 1) == [[1], [2]]


def test_tokens_count_from_the_first_to_the_last() -> None:
    engine = Engine(ToyTarget(), {"none": NoDrafter()}, Rate())
    params, spec = SamplingParams(max_tokens=5), SpecConfig(("none",), max_draft=0)
    timing = answered(engine, [Seq(str(i), [i + 1], 1, params, spec) for i in range(3)])
    assert (timing.tokens, timing.rounds) == (3 * 5, 3 * 5)
    assert timing.seconds > 0


@pytest.mark.parametrize(
    ("load", "speed", "holds"),
    [(1, 96.7, "yes, 0.966"), (1, 96.4, "no, 0.966"), (4, 99.1, "yes, 0.990"), (4, 98.9, "no, 0.990")],
)
def test_a_row_says_whether_the_bound_holds(load: int, speed: float, holds: str) -> None:
    """1,000 tokens of one agent: 1.02 times their time and that of 15 of them."""
    made = row(Case("chat", 0.0, load), {PLAIN: [timing(100.0)], ADAPTIVE: [timing(speed)]})
    (cells,) = Table.of(COLUMNS, [made]).rows
    assert cells[8] == holds
    assert bound(Case("chat", 0.0, 1), 10) == pytest.approx(1 / 2.52)


def test_mixed_turns_alternate() -> None:
    turns = {"agents": ["a", "b", "c"], "chat": ["x", "y"]}
    assert chosen_turns(turns, MIXED, 3) == ["a", "x", "b"]
    assert chosen_turns(turns, WRONG, 3) == ["x", "y"]


def test_an_adversary_is_sure_of_right_and_of_wrong_tokens() -> None:
    answer = list(range(10, 110))
    seq = Seq("s", [1, 2], 2)
    for name, right in ((WRONG, 0), (FLIPS, 40)):
        drafter = Adversary(name, right)
        drafter.answers = {(1, 2): answer}
        drafter.begin(seq)
        (draft,) = drafter.draft([Ask(seq, 100)])
        assert set(draft.scores) == {0.9}
        found = [a == b for a, b in zip(draft.tokens, answer, strict=True)]
        assert found == [bool(right) and not 40 <= i < 80 for i in range(100)]
