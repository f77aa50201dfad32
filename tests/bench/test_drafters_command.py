"""The table of drafters: which lines it has, who answers what and when, and what is there when time is up."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from bench.drafters import rows as drafter_rows
from bench.drafters import turns as recorded
from bench.drafters.arms import PLAIN, Arm, Stock, arms, heads, select
from bench.drafters.command import NO_PREDICTION, measurable
from bench.drafters.runs import Outcome, Runs, Sample, Settings
from bench.drafters.turns import AGENTS, CHAT, Turn, files, gather, never_taught
from bench.workload import ROOT, Prompt
from paceline import SpecConfig
from paceline.constraints import Compiler
from paceline.drafters.draft_model import ModelDrafter
from paceline.engine.verify import verify
from paceline.errors import UsageError
from paceline.heads.versions import Version
from paceline.loading import TrainedHead
from paceline.testing import ToyTarget
from paceline.text import Tokenizer
from paceline.train.data.conversations import Conversation
from paceline.train.data.held_out import held_out, is_held_out
from paceline.types import Verdict

HEAVY = "pydantic starlette typer rich llguidance gguf platformdirs jsonschema sqlalchemy prometheus_client"
LINES = (Arm(PLAIN, (PLAIN,)), Arm("suffix", ("suffix",)), Arm("model", ("model",)))
SETTINGS = Settings(max_tokens=12, repeats=2)


class Clock:
    """A second goes by with every answer."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def answer(self) -> None:
        self.now += 1


def turns(clock: Clock, count: int = 6) -> list[Turn]:
    """Turns of agents and of chats, alternating."""
    names = ("agent", "chat")
    return [Turn(Prompt(names[i % 2], str(i), (i, i + 1, i + 2, 3)), clock.answer) for i in range(count)]


def run(
    limit: float = float("inf"),
    lines: Sequence[Arm] = LINES,
    settings: Settings = SETTINGS,
    kept: Callable[[Outcome], None] = lambda outcome: None,
) -> Outcome:
    clock, target = Clock(), ToyTarget()
    stock = Stock({"model": ModelDrafter(ToyTarget(blur=0.3), target.vocab_size)})
    return Runs(target, stock, settings, clock=clock).run(lines, turns(clock), kept, limit)


def test_plain_never_drafts_and_only_trees_are_wide() -> None:
    plain = Arm(PLAIN, (PLAIN,)).spec(5, 8, 4, planned=False)
    assert (plain.drafters, plain.max_draft) == ((PLAIN,), 0)
    chain, tree = Arm("suffix", ("suffix",)), Arm("suffix, trees of 16", ("suffix",), rows=16)
    specs = [arm.spec(5, 8, 4, planned) for arm in (chain, tree) for planned in (False, True)]
    shapes = [(spec.max_draft, spec.tree_width, spec.adaptive) for spec in specs]
    assert shapes == [(5, 1, False), (8, 1, True), (16, 4, False), (16, 4, True)]


def test_the_table_has_every_drafter_alone_and_joined() -> None:
    stock = Stock(mb={"ngram": 1.0, "suffix": 2.0, "self": 0.0, "block": 100.0})
    found = {arm.name: arm for arm in arms(stock.mb, ["block"], trees=[16])}
    alone, joined = ("ngram", "suffix", "self", "block"), ("suffix+block", "default", "default+block")
    wide = (f"{name}, trees of 16" for name in ("suffix", "block", "suffix+block"))
    assert list(found) == [PLAIN, "grammar", *alone, *joined, *wide]
    assert [name for name, arm in found.items() if arm.bound] == ["grammar"]
    assert found["default+block"].drafters == (*found["default"].drafters, "block")
    assert stock.memory(found["suffix+block"]) == 102.0


def test_a_row_is_selected_by_its_name_or_its_drafters() -> None:
    every = arms(["suffix", "model by tokens", "model by text", "block by a"], ["block by a"], trees=[16])

    def asked(*names: str) -> list[str]:
        return [arm.name for arm in select(every, names)]

    assert select(every, None) == every
    assert asked("model") == [PLAIN, "model by tokens", "model by text"]
    assert asked("model by text") == [PLAIN, "model by text"]
    assert asked("suffix") == [PLAIN, "suffix", "suffix, trees of 16"]
    assert asked("+".join(SpecConfig().drafters)) == asked("default") == [PLAIN, "default"]
    assert asked(PLAIN) == [PLAIN]


@pytest.mark.parametrize("names", [["sufix"], ["suffix", "model"], ["block"], []])
def test_a_name_that_no_line_goes_by_is_refused(names: list[str]) -> None:
    every = arms(["suffix", "block by a"], ["block by a"], trees=[16])
    told = f"no {names[-1]!r}, but none" if names else "no name, but none"
    with pytest.raises(SystemExit, match=rf"{told}, grammar, suffix, .*default\+block by a; "):
        select(every, names)


def test_a_table_of_nothing_is_refused() -> None:
    plain, quantized = Arm(PLAIN, (PLAIN,)), Arm("quantized", ("quantized",))
    grammar = Arm("grammar", ("grammar",), bound=True)
    stock = Stock(left_out=[NO_PREDICTION, "quantized: no room"])
    with pytest.raises(SystemExit, match=r"^nothing to measure: quantized: no room$"):
        measurable([plain, quantized], stock, bound=True)
    with pytest.raises(SystemExit, match="no turn has a grammar"):
        measurable([plain, grammar], Stock(), bound=False)
    assert measurable([plain, quantized, grammar], stock, bound=True) == [plain, grammar]
    assert measurable([plain], Stock(), bound=False) == [plain]


def test_trained_drafters_go_by_their_kind_or_by_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find(names: Sequence[str]) -> list[TrainedHead]:
        kind, _, name = names[0].partition(":")
        return [TrainedHead(name, kind, tmp_path, Version(0, tmp_path))]

    monkeypatch.setattr("bench.drafters.arms.find_heads", find)
    assert list(heads(["block:a", "eagle:b"])) == ["block", "eagle"]
    assert list(heads(["block:a", "block:b", "eagle:b"])) == ["block a", "block b", "eagle"]
    with pytest.raises(SystemExit, match="same name"):
        heads(["block:a", "block:a"])


@pytest.mark.slow
def test_what_cannot_be_made_is_left_out_with_its_reason() -> None:
    stock, used = Stock(), list[str]()

    def refuse() -> ModelDrafter:
        raise UsageError("no such thing here")

    target = ToyTarget()
    stock.add("quantized", refuse, lambda drafters, name: used.append(name), gpu=False)
    stock.add("model", lambda: ModelDrafter(target, 24), lambda drafters, name: used.append(name), gpu=False)
    assert stock.left_out == ["quantized: no such thing here"]
    assert used == list(stock.drafters) == list(stock.mb) == ["model"]


def by_lane(outcome: Outcome) -> dict[object, list[tuple[int, str]]]:
    found: dict[object, list[tuple[int, str]]] = {}
    for sample in outcome.samples:
        found.setdefault(sample.lane, []).append((sample.repeat, sample.turn))
    return found


def test_every_lane_answers_every_turn_once_in_each_repeat_in_changing_order() -> None:
    outcome = run()
    lanes = by_lane(outcome)
    assert len(lanes) == len(LINES) * 2 * 2
    (met,) = {tuple(moments) for moments in lanes.values()}
    assert len(set(met)) == len(met) == 6 * 2
    size = len(lanes)
    orders = [[s.lane for s in outcome.samples[i : i + size]] for i in range(0, len(outcome.samples), size)]
    assert all(len(set(order)) == size for order in orders)
    assert len({tuple(map(repr, order)) for order in orders}) > 1


def test_texts_are_those_of_plain_decoding() -> None:
    found = drafter_rows.rows(run(), LINES, Stock(), SETTINGS.temperatures)
    assert len(found) == len(LINES) * 2 * 2
    assert all(row["equal"] == row["compared"] == 3 * 2 * 2 for row in found)
    guessed = [row["tokens_per_pass"] for row in found if row["drafters"] == "model"]
    assert min(guessed) > 1.2
    assert {row["tokens_per_pass"] for row in found if row["drafters"] == PLAIN} == {1.0}


def test_a_text_that_is_not_plain_decodings_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def gullible(seq, draft, rows, masks):  # type: ignore[no-untyped-def]
        verdict = verify(seq, draft, rows, masks)
        return Verdict((0, *verdict.path[1:]), verdict.token) if len(draft) == 1 else verdict

    monkeypatch.setattr("paceline.engine.engine.verify", gullible)
    outcome = run(settings=Settings((0.0,), length=1, max_tokens=12, repeats=1))
    found = drafter_rows.rows(outcome, LINES, Stock(), [0.0])
    wrong = [row for row in found if row["drafters"] == "model"]
    assert all(row["equal"] < row["compared"] for row in wrong)
    assert drafter_rows.cells(wrong[0])[-1].startswith("NO: ")


def test_the_grammar_drafter_sits_out_free_turns() -> None:
    outcome = run(lines=(*LINES, Arm("grammar", ("grammar",), bound=True)))
    assert {sample.lane.arm.name for sample in outcome.samples} == {arm.name for arm in LINES}


@pytest.mark.slow
def test_turns_are_left_out_rather_than_repeats() -> None:
    """A turn takes twelve seconds, one for each lane."""
    whole, tight = run(limit=12 * 12 / 0.9), run(limit=12 * 12 / 0.9 - 1)
    assert (len(whole.turns), whole.repeats) == (6, 2)
    assert (len(tight.turns), tight.repeats) == (5, 2)
    least = run(limit=60)
    assert [turn.kind for turn in least.turns] == [AGENTS, CHAT]
    assert (least.repeats, least.seconds) == (2, 48)


def test_what_is_there_when_time_is_up_is_complete() -> None:
    told: list[int] = []
    cut = run(limit=40, kept=lambda outcome: told.append(outcome.repeats))
    assert (cut.repeats, told) == (1, [1])
    assert {len(moments) for moments in by_lane(cut).values()} == {len(cut.turns)} == {2}


def test_memory_of_texts_is_new_in_each_repeat() -> None:
    """Else `suffix` would have the greedy answers of the first repeat by heart in the second."""
    settings = Settings((0.0,), max_tokens=12, repeats=2)
    samples = [s for s in run(settings=settings).samples if s.lane.arm.name == "suffix"]

    def passes(repeat: int) -> list[tuple[str, int]]:
        of: list[Sample] = [s for s in samples if s.repeat == repeat and not s.lane.planned]
        return [(s.turn, s.figures.passes) for s in of]

    assert passes(0) == passes(1)


def test_files_are_the_projects_own_and_those_of_the_folder(tmp_path: Path) -> None:
    assert set(files(None)) == {"agent", "chat"}
    with pytest.raises(SystemExit, match="has no workload"):
        files(tmp_path)
    (tmp_path / "specbench").mkdir()
    (tmp_path / "specbench" / "question.jsonl").write_text("{}\n")
    assert set(files(tmp_path)) == {"agent", "chat", "spec-bench"}
    assert set(files(tmp_path, ["spec-bench", "agent"])) == {"agent", "spec-bench"}
    for names, said in ((["spec-bench", "tau"], "there is no 'tau'"), ([], "names nothing")):
        with pytest.raises(SystemExit, match=f"--workload {said}: expected some of agent, chat, spec-bench;"):
            files(tmp_path, names)


@pytest.mark.model
def test_a_call_is_required_where_one_was_recorded(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    found, refused = gather(files(None), tokenizer, compiler, 6, 2000, seed=2)
    assert refused == []
    assert {turn.bound for turn in found if turn.kind == AGENTS} == {True, False}
    assert all(turn.bound == (turn.prompt.calls > 0) for turn in found)
    for turn in found:
        assert (turn.cursor() is not None) == turn.bound
    monkeypatch.setitem(sys.modules, "llguidance", None)
    found, refused = gather(files(None), tokenizer, Compiler(tokenizer, tokenizer.vocab_size), 6, 2000)
    assert not any(turn.bound for turn in found)
    assert all("llguidance" in reason for reason in refused)
    assert recorded.CHAT in {turn.kind for turn in found}


@pytest.mark.model
def test_it_runs_where_nothing_but_torch_and_a_tokenizer_is_installed(
    smollm2_path: Path, tmp_path: Path
) -> None:
    blocked = f"import sys; sys.modules.update(dict.fromkeys({HEAVY.split()!r}))"
    code = f"{blocked}; from bench.drafters.command import main; main()"
    out = tmp_path / "found.json"
    asked = f"--model {smollm2_path} --device cpu --limit 1 --max-prompt 600 --max-tokens 6 --repeats 1"
    done = subprocess.run(
        [sys.executable, "-c", code, *asked.split(), "--drafters", "suffix", "--out", str(out)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = out.read_text()
    assert str(tmp_path) not in found
    assert json.loads(found)["command"].endswith("--repeats 1 --drafters suffix --out found.json")
    assert "chat" in done.stdout
    assert "answered without a grammar" in done.stdout


def test_turns_are_of_conversations_that_no_training_takes() -> None:
    groups = [f"g{i}" for i in range(300)]
    kept = [group for group in groups if never_taught({"group": group, "messages": []})]
    talks = [Conversation(({"role": "user", "content": "?"},), (), group) for group in groups]
    assert kept == [talk.group for talk, out in zip(talks, held_out(talks), strict=True) if out]
    assert 10 < len(kept) < 60
    assert never_taught({"messages": []})  # of the project's own, which nobody trains on
    asked = [{"question_id": i} for i in range(300)]
    assert sum(map(never_taught, asked)) == sum(is_held_out(f"specbench:{i}") for i in range(300)) < 60
