"""paceline train and paceline drafters, and the drafter they name in use."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.cli.train import AnswerOptions, ScheduleOptions
from paceline.drafters import DRAFTERS, TARGET_DRAFTERS, model_free
from paceline.heads import versions
from paceline.heads.head_checkpoint import WEIGHTS, read_card, save_card
from paceline.heads.registry import HEAD_TYPES
from paceline.loading import find_heads
from paceline.paths import home
from paceline.server.launch import ServerSettings
from paceline.train.data.held_out import is_held_out
from support.clients import fails, run
from support.heads import save_untrained

TALKS = [f"Name {count} colours." for count in ("two", "three", "four", "five", "six", "seven")]


@pytest.fixture
def own_home(tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place of its own for drafters, and none from elsewhere; models are those of the machine."""
    for kept in home().iterdir():
        if kept.name in ("models", "packed", "native", "cost.json"):
            (tmp_path / kept.name).symlink_to(kept)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr("paceline.heads.local_heads.SHIPPED", tmp_path / "none")
    return tmp_path


def test_every_drafter_is_listed() -> None:
    assert set(DRAFTERS) == {*model_free(), "model", *TARGET_DRAFTERS, *HEAD_TYPES}


@pytest.mark.model
def test_train_makes_a_drafter_that_generate_takes(
    capsys: pytest.CaptureFixture[str], own_home: Path, tmp_path: Path
) -> None:
    talks = [{"messages": [{"role": "user", "content": text}]} for text in TALKS]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    made = ["train", "--traces", str(tmp_path / "talks.jsonl"), "--out", "tiny", "--kind", "medusa"]
    code, out, _ = run(capsys, *made, "--steps", "1", "--max-new", "8", "--device", "cpu", "--json")
    assert code == 0
    card = json.loads(out)
    assert (card["kind"], card["target"]) == ("medusa", "smollm2-135m")
    assert card["data"]["answers"] == len(TALKS)
    asked = [
        "generate",
        "--prompt",
        "One, two,",
        "--max-tokens",
        "12",
        "--seed",
        "1",
        "--no-adaptive",
        "--json",
    ]
    code, out, _ = run(capsys, *asked, "--trained", "tiny")
    assert code == 0
    fast = json.loads(out)
    assert fast["token_ids"] == json.loads(run(capsys, *asked, "--drafters", "none")[1])["token_ids"]
    code, out, _ = run(capsys, *asked, "--trained", "tiny", "--drafters", "medusa")
    assert json.loads(out)["drafted"] > 10
    assert (own_home / "drafters" / "tiny" / "drafter.json").exists()


@pytest.mark.model
def test_a_training_with_nothing_held_out_says_so(
    capsys: pytest.CaptureFixture[str], own_home: Path, tmp_path: Path
) -> None:
    assert not is_held_out("colours")
    talks = [{"messages": [{"role": "user", "content": text}], "group": "colours"} for text in TALKS[:2]]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    made = ["train", "--traces", str(tmp_path / "talks.jsonl"), "--out", "tiny", "--kind", "medusa"]
    code, out, _ = run(capsys, *made, "--steps", "1", "--max-new", "4", "--device", "cpu")
    assert code == 0
    assert "nothing was measured" in out
    assert "with 2 prompts it was none; give 50 or more" in out
    assert "%" not in out
    card = read_card(own_home / "drafters" / "tiny")
    assert card.acceptance == card.tokens_per_pass == ()


@pytest.mark.model
def test_drafters_lists_those_that_can_be_used(
    capsys: pytest.CaptureFixture[str], own_home: Path, smollm2_path: Path
) -> None:
    save_untrained(own_home / "drafters" / "ours", smollm2_path, "eagle")
    (own_home / "drafters" / "broken").mkdir()
    (own_home / "drafters" / "broken" / "drafter.json").write_text("{")
    code, out, _ = run(capsys, "drafters", "--json")
    assert code == 0
    found = json.loads(out)
    rows = {row["name"]: row for row in found["drafters"]}
    assert set(rows) == set(DRAFTERS)
    assert (rows["eagle"]["usable"], rows["eagle"]["given"]) == (True, ["ours"])
    assert not rows["block"]["usable"]
    assert rows["suffix"]["usable"]
    assert rows["suffix"]["guesses"] == rows["suffix"]["drafts"] != ""  # the name before 0.2
    broken, ours = found["trained"]
    assert "not JSON" in broken["problem"]
    assert (ours["kind"], ours["target"], ours["suits"]) == ("eagle", smollm2_path.name, True)
    assert (ours["acceptance"], ours["tokens_per_pass"]) == ([0.5, 0.25], [1.5, 1.6])
    code, out, _ = run(capsys, "drafters")
    assert code == 0
    assert "with ours" in out
    assert "50% 25%" in out


@pytest.mark.model
def test_rollback_goes_back(capsys: pytest.CaptureFixture[str], own_home: Path, smollm2_path: Path) -> None:
    root = save_untrained(own_home / "drafters" / "ours", smollm2_path)
    for source in (0, 1):
        with versions.making(root) as folder:
            shutil.copy(root / WEIGHTS, folder)
            learned = {"learned": {"from": source}}
            save_card(
                folder, replace(read_card(root), data=learned, acceptance=(0.75,), tokens_per_pass=(1.9,))
            )
            versions.use(root, versions.add(root, folder))
    (ours,) = json.loads(run(capsys, "drafters", "--json")[1])["trained"]
    assert (ours["version"], ours["versions"], ours["acceptance"]) == (2, [0, 1, 2], [0.75])
    assert run(capsys, "drafters", "rollback", "ours")[:2] == (0, "ours serves version 1 from now on\n")
    assert versions.current(root).number == 1
    assert find_heads(["ours"])[0].version.folder == root / "versions" / "0001"
    assert "as it was trained" in run(capsys, "drafters", "rollback", "ours")[1]
    (ours,) = json.loads(run(capsys, "drafters", "--json")[1])["trained"]
    assert (ours["version"], ours["acceptance"]) == (0, [0.5, 0.25])
    assert "no version before that" in fails(capsys, "drafters", "rollback", "ours")
    assert run(capsys, "drafters", "rollback", "ours", "2")[0] == 0
    assert versions.current(root).number == 2
    assert "no version 9: expected one of 0, 1, 2" in fails(capsys, "drafters", "rollback", "ours", "9")
    assert "no trained drafter 'nobody'" in fails(capsys, "drafters", "rollback", "nobody")


@pytest.mark.parametrize("option", ["--online-training", "--learn"])
def test_online_training_needs_a_trained_drafter(capsys: pytest.CaptureFixture[str], option: str) -> None:
    assert "--online-training needs a trained drafter" in fails(capsys, "serve", "absent", option)


@pytest.mark.parametrize(
    ("option", "now", "trains", "remembers"),
    [("--learn", "--online-training", True, True), ("--no-learn", "--no-memory", False, False)],
)
def test_old_names_of_options_work_and_say_what_is_new(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    option: str,
    now: str,
    trains: bool,
    remembers: bool,
) -> None:
    seen: list[ServerSettings] = []
    monkeypatch.setattr("paceline.server.launch.run", lambda settings, extend: seen.append(settings))
    for given in (option, now):
        with pytest.raises(SystemExit):
            main(["serve", "absent", "--trained", "mine", given])
    assert [(s.online_training is not None, s.remember) for s in seen] == [(trains, remembers)] * 2
    assert [record.getMessage() for record in caplog.records] == [
        f"{option} is now called {now}; the old name will be removed"
    ]


def test_old_names_of_synthetic_requests_work_and_say_what_is_new(caplog: pytest.LogCaptureFixture) -> None:
    old = AnswerOptions(traces=[], made_up=3, made_up_chats=4).config(ScheduleOptions())
    assert [record.getMessage() for record in caplog.records] == [
        "--made-up is now called --synthetic; the old name will be removed",
        "--made-up-chats is now called --synthetic-chats; the old name will be removed",
    ]
    assert old == AnswerOptions(traces=[], synthetic=3, synthetic_chats=4).config(ScheduleOptions())
    assert len(caplog.records) == 2


@pytest.mark.gemma
def test_drafters_of_another_model_are_not_usable(
    capsys: pytest.CaptureFixture[str], own_home: Path, smollm2_path: Path, gemma_path: Path
) -> None:
    save_untrained(own_home / "drafters" / "ours", smollm2_path)
    found = json.loads(run(capsys, "drafters", "--model", "gemma3-270m", "--json")[1])
    assert [row["usable"] for row in found["drafters"] if row["name"] == "block"] == [False]
    assert not found["trained"][0]["suits"]


def test_an_unknown_kind_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "talks.jsonl").write_text("{}")
    message = fails(capsys, "train", "--traces", str(tmp_path / "talks.jsonl"), "--kind", "oracle")
    assert "kind='oracle'" in message
    assert "block" in message


@pytest.mark.model
def test_a_trained_drafter_that_is_not_there(capsys: pytest.CaptureFixture[str], own_home: Path) -> None:
    assert "no trained drafter 'nobody'" in fails(capsys, "generate", "--prompt", "x", "--trained", "nobody")


@pytest.mark.model
def test_a_drafter_goes_out_and_comes_back(
    capsys: pytest.CaptureFixture[str], own_home: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    save_untrained(own_home / "drafters" / "ours", smollm2_path, "eagle")
    code, out, _ = run(capsys, "drafters", "export", "ours", str(tmp_path / "out"), "--verifier", "somewhere")
    assert code == 0
    assert "vllm serve somewhere --speculative-config" in out
    assert '"method": "eagle3"' in out
    taken = ["drafters", "import", str(tmp_path / "out"), "--target", "smollm2-135m"]
    assert run(capsys, *taken, "--out", "back")[0] == 0
    trained = json.loads(run(capsys, "drafters", "--json")[1])["trained"]
    assert {(one["name"], one["kind"], one["suits"]) for one in trained} == {
        ("ours", "eagle", True),
        ("back", "eagle", True),
    }
    assert {one["target"] for one in trained if one["name"] == "back"} == {"smollm2-135m"}
    assert "is there already" in fails(capsys, *taken, "--out", "back")
    assert "'onnx'" in fails(capsys, "drafters", "export", "ours", str(tmp_path / "more"), "--format", "onnx")


@pytest.mark.model
def test_train_makes_a_draft_model_that_is_known_by_its_name(
    capsys: pytest.CaptureFixture[str], own_home: Path, tmp_path: Path
) -> None:
    talks = [{"messages": [{"role": "user", "content": text}]} for text in TALKS]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    made = ["train", "--traces", str(tmp_path / "talks.jsonl"), "--kind", "model", "--draft", "smollm2-135m"]
    made += ["--out", "echo", "--lora", "2", "--steps", "1", "--max-new", "8", "--device", "cpu"]
    code, out, _ = run(capsys, *made, "--json")
    assert code == 0
    card = json.loads(out)
    assert (card["draft"], card["target"], card["lora"]) == ("smollm2-135m", "smollm2-135m", 2)
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        path.name for path in (own_home / "drafters" / "echo").iterdir()
    }
    found = json.loads(run(capsys, "drafters", "--json")[1])
    assert "echo" in next(row for row in found["drafters"] if row["name"] == "model")["given"]
    assert [(k["kind"], k["suits"]) for k in found["trained"]] == [("model", True)]
    asked = ["generate", "--prompt", "One, two,", "--max-tokens", "12", "--seed", "1", "--json"]
    fast = json.loads(run(capsys, *asked, "--no-adaptive", "--draft-model", "echo", "--drafters", "model")[1])
    assert fast["token_ids"] == json.loads(run(capsys, *asked, "--drafters", "none")[1])["token_ids"]
    assert fast["accepted"] > 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--kind", "model"], "needs --draft"),
        (["--kind", "model", "--draft", "nobody"], "nobody"),
        (["--kind", "model", "--draft", "smollm2-135m", "--start", "mine"], "leave --start out"),
        (["--kind", "model", "--draft", "smollm2-135m", "--lora", "-1"], "lora=-1"),
        (["--kind", "model", "--draft", "smollm2-135m", "--distill", "2"], "distill=2.0"),
        (["--kind", "block", "--draft", "smollm2-135m"], "are for kind model"),
        (["--start", "smollm2-135m-block", "--draft-vocab", "4096"], "leave --draft-vocab out"),
    ],
)
def test_what_a_training_cannot_do(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, smollm2_path: Path, given: list[str], message: str
) -> None:
    (tmp_path / "talks.jsonl").write_text("{}")
    out = ["--out", str(tmp_path / "new"), "--device", "cpu"]
    assert message in fails(capsys, "train", "--traces", str(tmp_path / "talks.jsonl"), *out, *given)
    assert not (tmp_path / "new").exists()
