"""The command line as a user meets it: what it prints, and one line with exit code 2 if anything is wrong."""

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from paceline import hub
from paceline.cli.drafters import DrafterRow, drafters_table
from paceline.cli.generate import _command_line
from paceline.cli.render import COLOURS, OWN, Terminal
from paceline.drafters import DRAFTERS
from paceline.output import Piece
from support.clients import fails, run
from support.servers import toy_chat_model

REPEATING = "one two three four, one two three four, one two three four, one two"
GENERATE = ["generate", "--model", "smollm2-135m", "--max-tokens", "24"]


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 0
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.model
def test_same_seed_same_tokens_fewer_passes(capsys: pytest.CaptureFixture[str], smollm2_path: Path) -> None:
    command = [*GENERATE, "--prompt", REPEATING, "--seed", "7", "--temperature", "0.8"]
    fast = as_json(capsys, *command, "--drafters", "suffix,ngram", "--no-adaptive")
    plain = as_json(capsys, *command, "--drafters", "none")
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["text"] == plain["text"]
    assert fast["passes"] < plain["passes"]
    assert fast["accepted"] > 0
    assert plain["drafted"] == 0
    assert sum(fast["tokens_by_source"].values()) == len(fast["token_ids"])
    assert {"seconds", "finish", "seed", "prompt_tokens", "tokens_per_pass"} <= fast.keys()


@pytest.mark.model
def test_show_names_the_drafter_of_each_token(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    code, out, err = run(capsys, *GENERATE, "--prompt", REPEATING, "--show", "--no-adaptive")
    assert code == 0
    assert "\033[32m" in out
    assert "drafted by:" in err
    assert "per pass" in err


@pytest.mark.model
def test_output_is_the_text_and_nothing_else(capsys: pytest.CaptureFixture[str], smollm2_path: Path) -> None:
    command = [*GENERATE, "--prompt", "def f():\n\treturn 1\ndef g():\n\treturn", "--seed", "1"]
    wanted = as_json(capsys, *command)["text"]
    assert run(capsys, *command)[1] == wanted + "\n"


@pytest.mark.model
def test_chat_answers_until_the_line_is_empty(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = iter(["Say hello.", "Again.", ""])
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    code, _, err = run(capsys, "chat", "--max-tokens", "5")
    assert code == 0
    assert err.count("per pass") == 2


def test_models_and_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "models", "--json")
    assert code == 0
    assert {m["name"] for m in json.loads(out)} >= {"smollm2-135m", "qwen2.5-coder-1.5b", "gemma3-270m"}
    code, out, _ = run(capsys, "doctor", "--json")
    assert code == 0
    facts = json.loads(out)
    assert facts["torch"]
    assert any("amx" in key.lower() for key in facts)
    assert facts["config file"] == "none"
    assert facts["native engine"].endswith("; compiled here") or facts["native engine"].startswith("not")
    assert facts["disk cache"].startswith("not used: " if facts["native engine"].startswith("not") else "in ")


def test_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert "smollm2-135m" in fails(capsys, "generate", "--model", "smolm2-135m", "--prompt", "x")


def test_unknown_model_to_pull(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing" in fails(capsys, "pull", "nothing")


def test_model_not_pulled_yet(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert "paceline pull gemma3-270m" in fails(capsys, "generate", "--model", "gemma3-270m", "--prompt", "x")


@pytest.mark.parametrize(
    ("option", "value", "word"),
    [
        ("--temperature", "-1", "temperature"),
        ("--top-p", "0", "--top-p=0"),
        ("--max-draft", "99", "--max-draft=99"),
        ("--accept", "lossless", "accept"),
        ("--dtype", "int3", "dtype"),
        ("--device", "tpu9", "device"),
        ("--drafters", "sufix", "sufix"),
    ],
)
@pytest.mark.model
def test_setting_out_of_range(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, option: str, value: str, word: str
) -> None:
    assert word in fails(capsys, *GENERATE, "--prompt", "x", option, value)


def test_truncated_model_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUF\x03\x00\x00\x00 and then nothing")
    assert "bad.gguf" in fails(capsys, "generate", "--model", str(bad), "--prompt", "x")


class PanicException(BaseException):
    """As libraries written in Rust raise it."""


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        (PermissionError(13, "Permission denied", "weights.gguf"), "weights.gguf: Permission denied"),
        (PanicException("index out of bounds"), "index out of bounds"),
    ],
)
def test_a_model_file_that_cannot_be_read_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, problem: BaseException, said: str
) -> None:
    def fail(_: str) -> Path:
        raise problem

    monkeypatch.setattr(hub, "resolve", fail)
    assert said in fails(capsys, "generate", "--prompt", "x")


@pytest.mark.model
def test_a_request_is_compared_with_plain_and_drawn_as_svg(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "picture.svg"
    shown = ["--show", "--compare", "--svg", str(picture)]
    code, _, err = run(capsys, *GENERATE, "--prompt", REPEATING, *shown)
    assert code == 0
    assert "identical to plain: yes" in err
    assert "identical&#160;to&#160;plain:&#160;yes" in picture.read_text()


@pytest.mark.parametrize("option", [["--svg", "a.svg"], ["--svg=a.svg"], []])
def test_the_picture_shows_the_command_without_its_own_option(
    monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["paceline", "generate", *option, "--prompt", "a b"])
    assert _command_line() == "paceline generate --prompt 'a b'"


class OneDraft(nullcontext[None]):
    """A stream of one token that was drafted."""

    result = None

    def __iter__(self) -> Iterator[Piece]:
        yield Piece("word", 1, "suffix")


@pytest.mark.parametrize(("forced", "refused"), [(False, False), (True, False), (True, True)])
def test_colours_are_for_terminals_and_pictures(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    forced: bool,
    refused: bool,
) -> None:
    for name, value in (("FORCE_COLOR", forced), ("NO_COLOR", refused)):
        monkeypatch.setenv(name, "1" if value else "")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("paceline.cli.render.summary", lambda result: "1 token")
    terminal = Terminal(show=True)
    terminal.write(OneDraft())  # type: ignore[arg-type]
    out, err = capsys.readouterr()
    assert (out == "word\n", err == "drafted by: suffix\n1 token\n") == 2 * (not forced or refused,)
    assert ("\033[32m" in out, "\033[32m" in err) == 2 * (forced and not refused,)
    terminal.save_picture(tmp_path / "picture.svg", "paceline generate")
    assert re.search(r'class="terminal-r(\d+)"[^>]*>word<', (tmp_path / "picture.svg").read_text())


def test_every_drafter_has_a_colour_of_its_own() -> None:
    colours = [COLOURS[name] for name in DRAFTERS if name != "none"]
    assert len({*colours, OWN, ""}) == len(colours) + 2


def test_names_of_drafters_are_not_cut(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = [DrafterRow("quantized", "guesses " * 9, "needs " * 9, True, ["a-model-with-a-long-name-1.5b"])]
    Console().print(drafters_table(rows, "smollm2-135m"))
    out = capsys.readouterr().out
    assert "quantized" in out
    assert "with a-model-with-a-long-name-1.5b" in out


@pytest.mark.large
def test_no_larger_model_is_offered_as_a_draft_model(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, qwen_path: Path
) -> None:
    def offered(model: str) -> list[str]:
        rows = as_json(capsys, "drafters", "--model", model)["drafters"]
        return next(list(row["given"]) for row in rows if row["name"] == "model")

    assert "smollm2-135m" in offered("qwen2.5-coder-1.5b")
    assert "qwen2.5-coder-1.5b" not in offered("smollm2-135m")


def test_num_speculative_tokens_is_max_draft(capsys: pytest.CaptureFixture[str]) -> None:
    said = fails(capsys, "generate", "--prompt", "x", "--num-speculative-tokens", "99")
    assert "max_draft=99" in said


@pytest.mark.model
def test_model_file_cut_in_the_weights(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, tmp_path: Path
) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copy(smollm2_path, cut)
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    assert "cut.gguf" in fails(capsys, "generate", "--model", str(cut), "--prompt", "x")


@pytest.mark.model
def test_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str], smollm2_path: Path) -> None:
    assert "8192" in fails(capsys, *GENERATE, "--prompt", "word " * 9000)


@pytest.mark.large
def test_draft_model_with_another_tokenizer(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, qwen_path: Path
) -> None:
    command = [
        "generate",
        "--model",
        "qwen2.5-coder-1.5b",
        "--prompt",
        "def add(a, b):",
        "--max-tokens",
        "24",
    ]
    fast = as_json(capsys, *command, "--draft-model", "smollm2-135m", "--drafters", "model", "--no-adaptive")
    plain = as_json(capsys, *command, "--drafters", "none")
    assert fast["text"] == plain["text"]
    assert fast["passes"] < plain["passes"]
    assert fast["tokens_by_source"]["model"] > 0


def test_home_is_where_the_variable_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert hub.home() == tmp_path


def test_a_comparison_is_part_of_the_json(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    model = str(toy_chat_model(tmp_path))
    options = ["generate", "--model", model, "--prompt", REPEATING, "--max-tokens", "8", "--cache-mb", "64"]
    facts = as_json(capsys, *options, "--compare")
    assert facts["plain"]["identical"] is True
    assert facts["plain"]["passes"] >= facts["passes"]
    assert "plain" not in as_json(capsys, *options)
