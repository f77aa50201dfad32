"""The table of the split benchmark: ratios to plain streaming of the same prompts, and equal texts."""

from bench.split import COLUMNS, PLAIN_WAY, SERVER_WAY, WAYS, Sample, rows
from bench.table import Table


def samples(text: str = "a") -> list[Sample]:
    plain = Sample(PLAIN_WAY, "a", 2.0, 0.1, 10, 10)
    others = [Sample(way, text, 1.0, 0.2, 5, 10, up=100, down=200) for way in (SERVER_WAY, *WAYS)]
    return [plain, *others]


def test_ratios_are_to_plain_streaming() -> None:
    plain, *others = rows([samples(), samples()], 20)
    assert (plain["passes_saved"], plain["total_time"]) == (1, 1)
    for row in others:
        assert (row["passes_saved"], row["time"], row["total_time"]) == (2, 0.5, 0.5)
        assert (row["bytes_up"], row["bytes_down"], row["equal"]) == (10, 20, True)


def test_a_text_that_differs_shows() -> None:
    found = list(rows([samples("b")], 0))
    assert [row["equal"] for row in found] == [True, False, False, False, False]
    assert "NO" in Table.of(COLUMNS, found).rows[-1]
