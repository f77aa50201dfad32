"""Runs as time lines: which turns belong together, where their time went, and how two runs compare."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from paceline.trace import timeline
from paceline.trace.record import RequestRecord, RoundRecord
from paceline.trace.store import Store
from support.traces import NOW, a_request, a_round


def a_turn(number: int, run: str = "r", at: float = 0.0, **given: Any) -> RequestRecord:
    """Turns begin 2 s apart and take 0.4 s."""
    values: dict[str, Any] = {
        "created": NOW + at + 2 * number,
        "conversation": "c",
        "prompt_tokens": 100 + 50 * number,
        "cached_tokens": 40 * number,
        "finish": "tool_calls",
        **given,
    }
    return a_request(f"{run}{number}", **values)


def rounds(*shapes: tuple[int, int, int, int]) -> list[RoundRecord]:
    return [
        a_round("r", i, committed=committed, rows=rows, draft_us=draft, target_us=target)
        for i, (committed, rows, draft, target) in enumerate(shapes)
    ]


def test_turns_of_a_conversation_make_a_run_and_a_second_run_begins_with_a_shorter_prompt() -> None:
    first, again = [a_turn(i) for i in range(3)], [a_turn(i, "s", at=10) for i in range(3)]
    found = timeline.runs([*again, *first])
    assert [[record.id for record in run] for run in found] == [["s0", "s1", "s2"], ["r0", "r1", "r2"]]


@pytest.mark.parametrize("other", [{"drafters": ()}, {"conversation": "d"}, {"client": "bo"}, {"model": "m"}])
def test_runs_side_by_side_are_told_apart(other: dict[str, Any]) -> None:
    mixed = [a_turn(i) for i in range(3)] + [a_turn(i, "s", at=0.7, **other) for i in range(3)]
    assert [len(run) for run in timeline.runs(mixed)] == [3, 3]


def test_a_turn_that_begins_before_the_last_one_ended_is_another_run() -> None:
    assert [len(run) for run in timeline.runs([a_turn(0, seconds=3.0), a_turn(1)])] == [1, 1]


def test_requests_without_a_conversation_stay_alone() -> None:
    assert len(timeline.runs([a_turn(i, conversation="") for i in range(3)])) == 3


def test_reading_ahead_belongs_to_the_turn_it_reads_for() -> None:
    ahead = a_turn(0, output_tokens=0, passes=1)
    (run,) = timeline.runs([ahead, a_turn(1, prompt_tokens=ahead.prompt_tokens)])
    assert len(run) == 2


def test_the_phases_of_a_turn_add_up_to_its_time() -> None:
    record = a_turn(0, queue_s=0.01, first_token_s=0.11, seconds=0.4)
    own = timeline.phases(
        record, rounds((0, 64, 0, 50_000), (1, 40, 0, 40_000), *[(3, 6, 5_000, 45_000)] * 4)
    )
    assert [own.queue, own.prefill] == pytest.approx([0.01, 0.1])
    assert [own.draft, own.verify] == pytest.approx([0.02, 0.18])
    assert own.queue + own.prefill + own.draft + own.verify + own.other == pytest.approx(0.4)


def test_passes_that_claim_more_than_the_turn_took_are_scaled_down() -> None:
    record = a_turn(0, queue_s=0.0, first_token_s=0.1, seconds=0.2)
    own = timeline.phases(record, rounds((1, 40, 0, 100_000), (3, 6, 100_000, 300_000)))
    assert [own.draft, own.verify, own.other] == pytest.approx([0.025, 0.075, 0.0])


def test_a_turn_without_a_token_is_reading_to_its_end() -> None:
    own = timeline.phases(a_turn(0, queue_s=0.1, first_token_s=None, seconds=0.4), [])
    assert own == timeline.Phases(0.1, pytest.approx(0.3))  # type: ignore[arg-type]


def test_rounds_lie_in_order_within_their_turn() -> None:
    record = a_turn(0, queue_s=0.01, first_token_s=0.11, seconds=0.4)
    made = rounds((0, 64, 0, 50_000), (1, 40, 0, 40_000), *[(3, 6, 5_000, 45_000)] * 4)
    starts = timeline.round_starts(record, made)
    assert starts[0] == pytest.approx(0.01)
    assert starts[2] == pytest.approx(0.11)
    ends = [at + (r.draft_us + r.target_us) / 1e6 for at, r in zip(starts, made, strict=True)]
    assert all(end <= after + 1e-9 for end, after in zip(ends, [*starts[1:], 0.4], strict=True))


def test_a_run_has_the_time_of_tools_and_what_prefix_reuse_saved_at_least() -> None:
    reads = rounds((0, 64, 0, 64_000), (1, 36, 0, 72_000), (3, 6, 0, 20_000))  # 1 and 2 ms a token
    made = timeline.run([(a_turn(i), reads) for i in range(3)])
    assert made.tools_s == pytest.approx(3.2)  # twice 2 s less 0.4 s
    assert [turn.pause_s for turn in made.turns][-1] is None
    assert [turn.saved_s for turn in made.turns] == pytest.approx([0.0, 0.04, 0.08])
    assert made.saved_s == pytest.approx(0.12)
    assert made.summary.acceptance == pytest.approx(16 / 40)
    assert made.summary.seconds == pytest.approx(4.4)


def test_no_pass_that_read_enough_tokens_tells_nothing_about_savings() -> None:
    few = rounds((1, timeline.MIN_READ_ROWS - 1, 0, 10_000), (1, 64, 0, 10))  # the second one reads no prompt
    assert timeline.run([(a_turn(1), few)]).saved_s is None


def test_two_runs_compare_turn_by_turn() -> None:
    plain = [a_turn(i, seconds=0.8, output="same", drafters=()) for i in range(3)]
    drafted = [a_turn(0, output="same"), a_turn(1, output="other"), a_turn(2, output=None)]
    found = timeline.compare(plain, drafted)
    assert found.speedup == pytest.approx(2.0)
    assert [turn.same for turn in found.turns] == [True, False, None]
    assert (found.same, found.differing, found.unknown) == (1, 1, 1)


def test_turns_that_only_one_run_has_are_not_compared() -> None:
    assert len(timeline.compare([a_turn(0)], [a_turn(0), a_turn(1)]).turns) == 1
    assert timeline.compare([], []).speedup is None


def test_predicted_calls_are_added_up() -> None:
    outcomes = [{"right": 1}, {"right": 1, "wrong": 2}, {}]
    made = timeline.run([(a_turn(i, predicted_calls=o), []) for i, o in enumerate(outcomes)])
    assert made.summary.predicted_calls == {"right": 2, "wrong": 2}


def test_the_store_has_a_conversation_without_prompts_and_with_its_rounds(tmp_path: Path) -> None:
    with closing(Store.open(str(tmp_path / "traces.db"))) as store:
        for i in range(4):
            record = a_turn(i, output=f"answer {i}", messages=[{"role": "user", "content": "secret"}])
            store.save(record, rounds((1, 64, 0, 1000), (3, 6, i, 2000)))
        store.save(a_turn(9, conversation="d"), ())
        found = store.conversation("c", limit=3)
    assert [record.id for record, _ in found] == ["r1", "r2", "r3"]
    assert [record.output for record, _ in found] == ["answer 1", "answer 2", "answer 3"]
    assert all(record.messages is None for record, _ in found)
    assert [timing[1] for _, timing in found] == [(3, 6, i, 2000) for i in (1, 2, 3)]
