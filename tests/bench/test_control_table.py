from bench.control import ADAPTIVE, COLUMNS, PLAIN, UNTRAINED, Case, answered, groups, row, ways
from bench.table import Table
from paceline import SamplingParams, SpecConfig
from paceline.drafters.none import NoDrafter
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.testing import ToyTarget
from paceline.types import Seq


def test_a_row_compares_with_plain_decoding_and_with_the_best_fixed_length() -> None:
    speeds = {PLAIN: 100.0, "fixed 3": 150.0, "fixed 5": 120.0, "fixed 8": 90.0, ADAPTIVE: 165.0}
    made = row(Case("agents", 0.0, 4), {way: [(speed, 2.0)] * 3 for way, speed in speeds.items()})
    assert made["best"] == "fixed 3"
    assert made["against_plain"][ADAPTIVE]["median"] == 1.65
    assert made["against_best"]["median"] == 1.1
    (cells,) = Table.of(COLUMNS, [made]).rows
    assert cells[-4:] == ["fixed 3: 1.50", "1.10", "-", "2.00"]


def test_the_list_with_a_trained_drafter_is_compared_with_the_list_without_it() -> None:
    speeds = {PLAIN: 100.0, ADAPTIVE: 132.0, UNTRAINED: 120.0}
    made = row(Case("chat", 0.0, 1), {way: [(speed, 2.0)] * 3 for way, speed in speeds.items()})
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


def test_tokens_count_once_every_agent_has_its_first() -> None:
    engine = Engine(ToyTarget(), {"none": NoDrafter()}, Rate())
    params, spec = SamplingParams(max_tokens=5), SpecConfig(("none",), max_draft=0)
    timing = answered(engine, [Seq(str(i), [i + 1], 1, params, spec) for i in range(3)])
    assert (timing.tokens, timing.rounds) == (3 * 4, 3 * 4)
    assert timing.seconds > 0
