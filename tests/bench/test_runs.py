"""Whole runs: which conversations, what each server is sent, how rounds become ratios and equal texts."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import results_folder
from bench.pages import numbers, readme, results_page
from bench.runs import command, conversations, effects, rounds
from bench.runs import rows as run_rows
from bench.runs.arms import NO_DRAFTS, NO_TRANSFORMERS, OURS, PLAIN, USER, Arm, FloatServer
from bench.runs.conversations import Conversation
from bench.runs.replay import Run, Turn, message_of, replay
from bench.runs.rounds import COLD, SEEN, Plan, Rounds
from bench.serve.http_client import Reading, Refused
from bench.serve.servers import RunningServer
from bench.vllm.server import MISSING
from paceline.text import Tokenizer
from paceline.text.own_turns import shared_tokens
from support.servers import TEMPLATE
from support.tokenizers import byte_level_facts, write_gguf

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Help."},
    {"role": "user", "content": "One."},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "name": "f", "content": "1"},
    {"role": "assistant", "content": "Done."},
    {"role": "user", "content": "Two."},
    {"role": "assistant", "content": "Again."},
]
RECORD = {"id": "r1", "messages": MESSAGES, "tools": [TOOL]}


def tokenizer(folder: Path, template: str = TEMPLATE) -> Tokenizer:
    return Tokenizer.load(write_gguf(folder / "t.gguf", byte_level_facts("smollm"), template=template))


def a_conversation(name: str = "a", tokens: int = 10) -> Conversation:
    return Conversation(
        "api-bank", name, tuple(MESSAGES), (TOOL,), (2, 4, 6), (tokens, tokens + 5, tokens + 9)
    )


def test_absent_data_is_an_error_that_names_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(SystemExit, match="PACELINE_DATA"):
        conversations.files(["api-bank"])
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match=r"apibank.*--sources"):
        conversations.files(["api-bank"])


def test_a_conversation_ends_before_its_prompts_are_too_long(tmp_path: Path) -> None:
    text = tokenizer(tmp_path)
    whole = conversations.conversation("s", RECORD, text, 9, 10_000)
    assert whole is not None
    assert whole.turns == (2, 4, 6)
    assert list(whole.prompt_tokens) == sorted(whole.prompt_tokens)
    cut = conversations.conversation("s", RECORD, text, 9, whole.prompt_tokens[1])
    assert cut is not None
    assert cut.turns == (2, 4)
    assert conversations.conversation("s", RECORD, text, 9, whole.prompt_tokens[0]) is None
    assert whole.head[0] == [MESSAGES[0], conversations.GREETING]


def test_where_the_template_knows_no_tools_every_server_gets_them_as_text(tmp_path: Path) -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    made = conversations.conversation("s", RECORD, tokenizer(tmp_path, template), 9, 10_000)
    assert made is not None
    assert made.tools == ()
    assert '"name": "f"' in made.messages[0]["content"]
    assert {m["role"] for m in made.messages} == {"system", "user", "assistant"}


def test_sources_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "traces").mkdir()
    monkeypatch.setenv("PACELINE_DATA", str(tmp_path))
    monkeypatch.setattr(conversations, "FILES", {"x": "traces/x.jsonl", "y": "traces/y.jsonl"})
    for name in "xy":
        lines = [json.dumps({**RECORD, "id": f"{name}{i}"}) for i in range(3)]
        (tmp_path / "traces" / f"{name}.jsonl").write_text("\n".join(lines))
    chosen = conversations.choose(tokenizer(tmp_path), ["x", "y"], 3, 2, 10_000)
    assert [one.source for one in chosen] == ["x", "y", "x"]
    assert all(len(one.turns) == 2 for one in chosen)


def test_history_is_recorded_unless_it_is_each_servers_own() -> None:
    bodies: list[Mapping[str, Any]] = []

    def send(port: int, path: str, body: Mapping[str, Any]) -> Reading:
        bodies.append(json.loads(json.dumps(body)))
        return Reading(0.1, 0.2, 3, "", {0: ["f", '{"x":1}']}, "tool_calls", 3, 20, 12, 0.3)

    turns = replay(1, a_conversation(), 8, {"user": "u"}, send=send)
    assert [len(body["messages"]) for body in bodies] == [2, 4, 6]
    assert bodies[1]["messages"][2] == MESSAGES[2]
    assert bodies[0]["tools"] == [TOOL]
    assert (bodies[0]["user"], bodies[0]["max_tokens"], bodies[0]["temperature"]) == ("u", 8, 0.0)
    assert (turns[0].first_s, turns[0].end_s, turns[0].cached_tokens) == (0.1, 0.3, 12)
    bodies.clear()
    replay(1, a_conversation(), 8, {}, "own", send)
    assert bodies[1]["messages"][2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert message_of(Reading()) == {"role": "assistant", "content": ""}


@dataclass
class FakeServer:
    """Answers without HTTP: `Rounds` is given a `replay` that looks the seconds up here."""

    name: str
    log: list[str] = field(default_factory=list)

    def start(self, folder: Path) -> RunningServer:
        self.log.append(f"start {sorted(p.name for p in folder.iterdir())}")
        (folder / "pages").touch()
        process = SimpleNamespace(args=["/bin/server", "--port", "1"])
        return SimpleNamespace(port=self, process=process, close=lambda: self.log.append("close"))  # type: ignore[return-value]

    def save(self, served: RunningServer, head: str) -> None:
        self.log.append("save")

    def restore(self, served: RunningServer, head: str) -> None:
        self.log.append("restore")


SECONDS = {OURS: 1.0, PLAIN: 2.0, "llama.cpp plain": 3.0}


@contextmanager
def faked(
    monkeypatch: pytest.MonkeyPatch, clock: list[float], texts: Mapping[str, str]
) -> Iterator[list[str]]:
    order: list[str] = []

    def fake(port: FakeServer, one: Conversation, limit: int, own: Mapping[str, Any], history: str) -> Any:
        arm = own["arm"]
        order.append(f"{one.id} {arm}")
        if texts.get(one.id) == "refused" and arm != OURS:
            raise Refused(500, "cannot parse")
        clock[0] += SECONDS[arm]
        answer = texts.get(one.id, "same") if arm == OURS else "same"
        half = Turn(0.25, 0.5, SECONDS[arm] / 2, 3, 10, 5, answer)
        return (half, half)

    monkeypatch.setattr(rounds, "replay", fake)
    monkeypatch.setattr(rounds, "read", lambda *_: Reading())
    yield order


def arms() -> list[Arm]:
    ours, peer = FakeServer(OURS), FakeServer("llama.cpp plain")
    return [
        Arm(OURS, ours, {"arm": OURS}),
        Arm(PLAIN, ours, {"arm": PLAIN}),
        Arm("llama.cpp plain", peer, {"arm": "llama.cpp plain"}),
    ]


def run(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, texts: Mapping[str, str] | None = None
) -> tuple[rounds.Outcome, list[str]]:
    clock = [0.0]
    with faked(monkeypatch, clock, texts or {}) as order:
        return Rounds(plan, lambda _: None, lambda: clock[0]).run(), order


def test_rounds_replay_the_same_runs_cold_and_seen_and_plain_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(arms(), [a_conversation("a"), a_conversation("b")], 2)
    outcome, order = run(monkeypatch, plan)
    counts = Counter((r.state, r.arm) for r in outcome.runs)
    assert counts == {
        (COLD, OURS): 4,
        (COLD, PLAIN): 2,
        (COLD, "llama.cpp plain"): 4,
        (SEEN, OURS): 4,
        (SEEN, "llama.cpp plain"): 4,
    }
    assert len(set(order)) == 6
    log = plan.arms[2].server.log  # type: ignore[attr-defined]
    fresh, left = "start []", "start ['pages']"
    seen = [left, "restore", "restore", "close"]
    assert log == [fresh, "close", fresh, "save", "close", *seen, fresh, "close", *seen]
    assert outcome.commands["llama.cpp plain"] == "server --port 1"


def test_time_limits_conversations_in_the_first_round_and_rounds_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    many = [a_conversation(str(i)) for i in range(9)]
    outcome, _ = run(monkeypatch, Plan(arms(), many, 3, (COLD,), limit_s=45.0))
    assert len(outcome.conversations) == 3  # 6 s each, and 19 s for the first round
    assert outcome.rounds == 3
    outcome, _ = run(monkeypatch, Plan(arms(), many[:2], 3, (COLD,), limit_s=13.0))
    assert (len(outcome.conversations), outcome.rounds) == (1, 2)


def test_a_conversation_that_one_server_refuses_counts_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(arms(), [a_conversation("a"), a_conversation("b")], 1, (COLD,))
    outcome, _ = run(monkeypatch, plan, {"b": "refused"})
    assert {r.conversation for r in outcome.runs} == {"api-bank a"}
    assert "cannot parse" in outcome.failed["api-bank b"]


def test_ratios_are_by_round_and_texts_by_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(arms(), [a_conversation("a"), a_conversation("b")], 2)
    outcome, _ = run(monkeypatch, plan, {"b": "other"})
    ratio = next(
        r for r in run_rows.ratios(outcome.runs) if r["arm"].startswith("llama") and r["state"] == COLD
    )
    assert (ratio["median"], ratio["worst"], ratio["rounds"]) == (3.0, 3.0, 2)
    texts = run_rows.texts(outcome.runs)
    assert (texts["compared"], texts["equal"]) == (16, 8)
    assert texts["differing"][0] == "api-bank b, turn 1, round 1, cold"
    row = next(r for r in run_rows.rows(outcome.runs) if r["arm"] == OURS and r["state"] == COLD)
    assert row["run_s"]["median"] == 2.0
    assert (row["first_turn_ms"], row["turns"], row["prompt_tokens"], row["cached_tokens"]) == (
        250,
        4,
        40,
        20,
    )
    assert row["ms_per_token"] == 125.0


def test_the_fastest_setting_takes_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with faked(monkeypatch, [0.0], {}):
        plan = Plan([], [a_conversation()], 1)
        best, seconds = rounds.fastest(plan, arms()[::2], lambda _: None)
    assert best.name == OURS
    assert seconds == {OURS: 1.0, "llama.cpp plain": 3.0}


def test_restoring_a_slot_is_part_of_the_first_turn() -> None:
    turn = Turn(1.0, 2.0, 2.5, 2, 1, 0, "")
    one = Run("llama.cpp plain", SEEN, 0, "a", (turn, turn), setup_s=0.5)
    assert one.seconds == 5.5
    assert run_rows.rows([one])[0]["first_turn_ms"] == 1500


def test_drafts_and_plain_decoding_are_two_tenants() -> None:
    assert USER["user"] != NO_DRAFTS["user"]
    assert NO_DRAFTS["speculative_config"] == {"disabled": True}


class FakeClient(effects.Client):
    """Counts the tokens, here messages and tools, that no earlier request of the user began with."""

    def __init__(self) -> None:
        super().__init__(0, "m")
        self._seen: list[tuple[str, list[str]]] = []

    def first_ms(self, messages: Any, tools: Any, user: str = "agent") -> float:
        parts = [json.dumps(part) for part in (messages[0], *tools, *messages[1:])]
        shared = [shared_tokens(parts, old) for name, old in self._seen if name == user]
        self._seen.append((user, parts))
        self.prompt_tokens = len(parts)
        return float(len(parts) - max(shared, default=0))

    def prefill(self, messages: Any, tools: Any, user: str = "agent") -> None:
        self.first_ms(messages, tools, user)


def test_every_habit_leaves_less_to_read() -> None:
    rows = effects.measure(FakeClient(), 2, lambda _: None)
    assert len(rows) == len(effects.EFFECTS)
    for row in rows:
        assert row["with_ms"]["median"] < row["without_ms"]["median"], row["habit"]


@pytest.mark.parametrize("option", ["--systems", "--states", "--llama", "--sources"])
def test_an_unknown_name_is_an_error_that_lists_the_known(option: str) -> None:
    with pytest.raises(SystemExit, match=f"{option}: 'nothing' is none of "):
        command.main([option, "nothing"])


def named(*systems: str) -> Any:
    return command.parser().parse_args(["--systems", ",".join(systems)])


def test_servers_in_float32_are_left_out_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    plan, path = Plan([], [a_conversation()], 1), tmp_path / "m.gguf"
    for name in ("vllm_python", "transformers_python"):
        monkeypatch.setattr(command, name, lambda: None)
    assert command.in_float32(plan, path, tmp_path, named("vllm", "transformers"), reports.append) == []
    assert reports == [f"left out: vllm: {MISSING}", f"left out: transformers: {NO_TRANSFORMERS}"]
    monkeypatch.setattr(command, "vllm_python", lambda: Path("python"))
    monkeypatch.setattr(command, "export_model", lambda model, folder: folder.mkdir())

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("vllm did not start (exit 1)")

    monkeypatch.setattr("bench.vllm.server.started", fails)
    assert command.in_float32(plan, path, tmp_path, named("vllm"), reports.append) == []
    assert reports[2] == "left out: vllm: vllm did not start (exit 1)"
    assert command.in_float32(plan, path, tmp_path, named(OURS), reports.append) == []
    assert len(reports) == 4


def test_servers_in_float32_run_as_they_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def start(system: str, command: list[str], port: int, *_: Any) -> Any:
        commands.append(command)
        return SimpleNamespace(port=port)

    for module in ("bench.vllm.server", "bench.runs.arms"):
        monkeypatch.setattr(f"{module}.start", start)
    monkeypatch.setattr("bench.vllm.server.vllm_python", lambda: Path("python"))
    monkeypatch.setattr("bench.runs.arms.transformers_python", lambda: Path("python"))
    monkeypatch.setattr("bench.runs.arms.read", lambda *_: None)
    for name in ("vllm", "transformers"):
        FloatServer(tmp_path, name, 2, 900).start(tmp_path)
    vllm, transformers = (" ".join(words) for words in commands)
    assert "--max-model-len 900" in vllm
    assert "--dtype float32" in vllm
    assert "--enable-auto-tool-choice --tool-call-parser hermes" in vllm
    assert f"transformers serve {tmp_path} --device cpu --dtype float32" in transformers


def test_results_have_their_sections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(arms(), [a_conversation("a")], 2)
    outcome, _ = run(monkeypatch, plan)
    result = command.result_of(plan, outcome, {"llama.cpp plain": 3.0})
    machine = {"model": "m", "date": "2026-01-02", "commit": "abc", "cpu": "a cpu", "cores": 2}
    options = vars(command.parser().parse_args([]))
    stored = {"machine": machine, "command": "python -m bench runs", "settings": options, **result}
    monkeypatch.setattr(results_folder, "FOLDER", tmp_path)
    (tmp_path / "runs-m.json").write_text(json.dumps(stored))
    page = "\n".join(results_page.sections())
    assert "| cold | paceline | 1.0 | 250 | 250 | 0.5 | 125.0 | 6 | 20 | 50 % | 2 |" in page
    assert "Text equal to plain decoding: 8 of 8 turns." in page
    assert "| seen | llama.cpp plain | 3.00 (3.00 to 3.00) | 3.00 to 3.00 | 2 |" in page
    table = "\n".join(numbers.whole_runs())
    assert "(else: 3.0 times longer)" in table
    assert table.count("| llama.cpp plain: 3.0") == 2
    lines = readme.whole_runs(stored)
    assert lines[0][1:] == ["**1.0**", "2.0", "3.0 (llama.cpp plain), 3.0 times"]
    assert lines[1][2] == "-"


def test_pieces_are_joined_into_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    def piece(*names: str, rounds: int = 2) -> dict[str, Any]:
        plan = Plan(arms(), [a_conversation(name) for name in names], rounds)
        outcome, _ = run(monkeypatch, plan)
        return command.result_of(plan, outcome, {})

    monkeypatch.setattr(rounds, "timed", lambda call: 0.0)
    first, second = piece("a", "b"), piece("c")
    stored = json.loads(json.dumps(first))
    whole, at_once = command.joined(stored, second), piece("a", "b", "c")
    for name in ("opening", "rows", "ratios", "texts", "conversations", "rounds"):
        assert whole[name] == at_once[name], name
    again = command.joined(json.loads(json.dumps(whole)), piece("b"))  # measured anew
    assert again["ratios"] == at_once["ratios"]
    assert len(again["runs"]) == len(whole["runs"])
    shorter = command.joined(stored, piece("c", rounds=1))
    assert shorter["rounds"] == 1
    assert {run["round"] for run in shorter["runs"]} == {0}
