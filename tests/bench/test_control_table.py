from math import inf
from random import Random
from typing import Any

import pytest

from bench import control
from bench.control import (
    ADAPTIVE,
    COLUMNS,
    FLIPS,
    MIXED,
    PLAIN,
    TIMED,
    UNTRAINED,
    WRONG,
    Adversary,
    Case,
    Timing,
    answer,
    bound,
    chosen_turns,
    earlier_runs,
    groups,
    merged,
    row,
    side_by_side,
    title,
    ways,
)
from bench.drafters.turns import Turn
from bench.pages import numbers
from bench.table import Table
from bench.workload import Prompt
from paceline import SamplingParams, SpecConfig
from paceline.drafters.none import NoDrafter
from paceline.engine.control import Rate
from paceline.engine.engine import Engine
from paceline.testing import ToyTarget
from paceline.types import Ask, Round, Seq


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
    assert cells[-4:] == ["-", "-", "1.10 (1.10 to 1.10)", "2.00"]


@pytest.mark.parametrize(
    ("about", "words"),
    [
        ({"drafters": list(SpecConfig().drafters)}, "rises"),
        ({"drafters": [*SpecConfig().drafters, "block"], "device": "cpu"}, "rises, with block"),
        ({"drafters": [*SpecConfig().drafters, "block"], "device": "cuda"}, "rises on a GPU, with block"),
    ],
)
def test_a_table_is_named_by_its_device_and_trained_drafters(about: dict[str, Any], words: str) -> None:
    assert title(about) == f"the controller as load {words}"


def test_fixed_lengths_are_fixed_and_plain_decoding_drafts_nothing() -> None:
    made = ways(("suffix",))
    assert made["fixed 5"] == SpecConfig(("suffix",), 5, adaptive=False)
    assert made[PLAIN].max_draft == 0
    assert made[ADAPTIVE].adaptive
    assert UNTRAINED not in made
    trained = ways(("suffix",), ("block",))
    assert trained["fixed 5"].drafters == trained[ADAPTIVE].drafters == ("suffix", "block")
    assert trained[UNTRAINED].drafters == ("suffix",)


def test_every_turn_is_answered_and_several_agents_have_two_each_or_more() -> None:
    turns = [Turn(Prompt("w", str(i), (i,))) for i in range(3)]
    assert groups(turns, 1) == [[turn] for turn in turns]
    (two,) = groups(turns[:1], 2)
    assert [(turn.name, turn.tenant) for turn in two] == [
        ("w 0", ""),
        ("w 0", "1"),
        ("w 0", "2"),
        ("w 0", "3"),
    ]
    (one,) = groups(turns * 2, 3)
    assert one == turns * 2  # there are enough


class Watched(Engine):
    """The sequences of each pass."""

    batches: list[int]

    def step(self) -> list[Round]:
        rounds = super().step()
        self.batches.append(len(rounds))
        return rounds


def test_agents_are_timed_while_all_of_them_are_at_work() -> None:
    """Answers of 2, 8, 2 and 2 tokens for two agents: the third and fourth follow the first at once."""
    engine, spec = Watched(ToyTarget(), {"none": NoDrafter()}, Rate()), SpecConfig(("none",), max_draft=0)
    engine.batches = []
    seqs = [
        Seq(str(i), [i + 1], 1, SamplingParams(max_tokens=tokens, ignore_eos=True), spec)
        for i, tokens in enumerate((2, 8, 2, 2))
    ]
    (timing,) = side_by_side({PLAIN: answer(engine, seqs, 2, inf)}, Random(0)).values()
    assert engine.batches == [2] * 6 + [1] * 2  # all are answered
    assert (timing.tokens, timing.rounds) == (12, 12)  # up to the end of the fourth
    assert timing.seconds > 0


def test_one_agent_is_timed_to_its_last_token() -> None:
    engine = Engine(ToyTarget(), {"none": NoDrafter()}, Rate())
    params, spec = SamplingParams(max_tokens=5, ignore_eos=True), SpecConfig(("none",), max_draft=0)
    seqs = [Seq(str(i), [i + 1], 1, params, spec) for i in range(3)]
    (timing,) = side_by_side({PLAIN: answer(engine, seqs, 1, inf)}, Random(0)).values()
    assert (timing.tokens, timing.rounds) == (3 * 5, 3 * 5)


def test_nothing_to_answer_takes_no_time() -> None:
    """Answers that are known are not made again."""
    engine = Engine(ToyTarget(), {"none": NoDrafter()}, Rate())
    assert side_by_side({PLAIN: answer(engine, [], 4, inf)}, Random(0)) == {PLAIN: Timing()}


def test_all_ways_answer_by_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a slow moment of the machine hits all of them. Each counts its own time alone."""
    monkeypatch.setattr(control, "perf_counter", iter(range(1000)).__next__)  # a second for each look
    order, answering = [], {}
    for way in "ab":

        class Logged(Engine):
            name = way

            def step(self) -> list[Round]:
                order.append(self.name)
                return super().step()

        engine = Logged(ToyTarget(), {"none": NoDrafter()}, Rate())
        params = SamplingParams(max_tokens=5, ignore_eos=True)
        seq = Seq("s", [1], 1, params, SpecConfig(("none",), max_draft=0))
        answering[way] = answer(engine, [seq], 1, turn_s=0.5)
    done = side_by_side(answering, Random(0))
    assert [{*pair} for pair in zip(order[::2], order[1::2], strict=True)] == [{"a", "b"}] * 5
    assert [timing.seconds for timing in done.values()] == [5 * 2, 5 * 2]


def result(command: str, *cases: Case, drafters: str = "suffix") -> dict[str, Any]:
    speeds = {PLAIN: 100.0, ADAPTIVE: 132.0}
    rows = [row(case, {way: [timing(speed)] for way, speed in speeds.items()}) for case in cases]
    about = {"drafters": [drafters], "where": "here", "date": "2026-11-18", "commit": command}
    return {"machine": about, "command": command, "timed": TIMED, "rows": rows}


def test_rows_that_were_not_measured_again_stay_with_the_command_of_their_run() -> None:
    """A run of one workload or load adds to what is stored; its own rows replace those of before."""
    agents, chat, wrong = Case("agents", 0.0, 16), Case("chat", 0.0, 4), Case(WRONG, 1.5, 16)
    once = merged(result("first", agents, chat), result("second", wrong, chat))
    assert [(r["workload"], "run" in r) for r in once["rows"]] == [
        ("agents", True),
        ("chat", False),
        (WRONG, False),
    ]
    twice = merged(once, result("third", chat))
    shown = numbers.under_load([{**twice, "machine": {**twice["machine"], "model": "a model"}}])
    assert "16 answers at once" in shown[0]
    # Not the bad case, nor the chats of a lower load.
    assert shown[0].endswith(": CPU 1.32 on agents' turns.")
    assert [r.get("run", {}).get("command") for r in twice["rows"]] == ["first", None, "second"]
    assert earlier_runs(twice["rows"]) == [
        "Some rows: `first`, 2026-11-18, commit first.",
        "Some rows: `second`, 2026-11-18, commit second.",
    ]
    other = result("fourth", chat, drafters="ngram")
    assert merged(twice, other) == other  # another list of drafters says nothing about this one
    assert merged({**twice, "timed": "otherwise"}, once) == once


def test_full_passes_are_told_by_the_range_of_their_gains() -> None:
    one = result("first", Case("agents", 0.0, 16), Case("agents", 1.0, 16), Case("chat", 0.0, 16))
    for found, gain in zip(one["rows"], (1.1, 1.25, 0.99), strict=True):
        found["against_plain"]["adaptive"]["median"] = gain
    cpu = {**one, "machine": {**one["machine"], "model": "a model"}}
    gpu = {**cpu, "machine": {**cpu["machine"], "device": "cuda", "gpu": "a GPU"}}
    line, advice = numbers.under_load([cpu, gpu])
    gains = "1.10 to 1.25 on agents' turns, 0.99 on chats"
    assert line.endswith(f": CPU {gains}; a GPU {gains}.")
    assert "The fuller a pass" in advice
    assert not numbers.under_load([])


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


@pytest.mark.parametrize(
    ("option", "value"), [("loads", "0"), ("loads", "1,64"), ("loads", "x"), ("repeats", "0"), ("turns", "0")]
)
def test_what_cannot_be_measured_is_refused(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        control.main([f"--{option}", value])
    assert f"--{option}" in capsys.readouterr().err


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
