from bench.control import ADAPTIVE, COLUMNS, PLAIN, Case, groups, row, ways
from bench.table import Table
from paceline import SpecConfig


def test_a_row_compares_with_plain_decoding_and_with_the_best_fixed_length() -> None:
    speeds = {PLAIN: 100.0, "fixed 3": 150.0, "fixed 5": 120.0, "fixed 8": 90.0, ADAPTIVE: 165.0}
    made = row(Case("agents", 0.0, 4), {way: [(speed, 2.0)] * 3 for way, speed in speeds.items()})
    assert made["best"] == "fixed 3"
    assert made["against_plain"][ADAPTIVE]["median"] == 1.65
    assert made["against_best"]["median"] == 1.1
    (cells,) = Table.of(COLUMNS, [made]).rows
    assert cells[-3:] == ["fixed 3: 1.50", "1.10", "2.00"]


def test_fixed_lengths_are_fixed_and_plain_decoding_drafts_nothing() -> None:
    made = ways(("suffix",))
    assert made["fixed 5"] == SpecConfig(("suffix",), 5, adaptive=False)
    assert made[PLAIN].max_draft == 0
    assert made[ADAPTIVE].adaptive


def test_every_turn_is_answered_and_the_last_group_is_full() -> None:
    assert groups([1, 2, 3], 2) == [[1, 2], [3, 1]]
    assert groups([1, 2], 1) == [[1], [2]]
