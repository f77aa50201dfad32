"""paceline edge against a server of a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.clients import fails, run
from support.servers import toy_chat_model, toy_running
from support.split_server import LONG_MS, SplitServer

PROMPT = ("--prompt", "one two three one two three one", "--max-tokens", "60", "--seed", "7")
PATIENT = ("--mode", "patient", "--wait-ms", str(LONG_MS))
BODY: dict[str, Any] = {"prompt": PROMPT[1], "max_tokens": 60, "seed": 7, "temperature": 0.8}


def edge(capsys: pytest.CaptureFixture[str], server: SplitServer, *more: str) -> tuple[str, str]:
    code, out, err = run(capsys, "edge", server.url, *PROMPT, "--temperature", "0.8", *more)
    assert code == 0, err
    return out, err


@pytest.mark.parametrize("mode", ["one-shot", "opportunistic", "patient"])
def test_the_tokens_are_those_of_generate_in_fewer_passes(
    mode: str, split_server: SplitServer, capsys: pytest.CaptureFixture[str]
) -> None:
    out, _ = edge(capsys, split_server, "--mode", mode, "--json")
    facts = json.loads(out)
    plain = split_server.tokens(BODY)
    assert facts["token_ids"] == list(plain)
    assert facts["passes"] < len(plain)
    assert facts["seed"] == 7


def test_text_and_figures_are_printed(split_server: SplitServer, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = edge(capsys, split_server)
    assert out.rstrip("\n") == split_server.llm.tokenizer.decode(split_server.tokens(BODY), skip_special=True)
    assert "passes" in err
    shown, _ = edge(capsys, split_server, "--show", "--only-edge")
    assert "\033[90m" in shown


def test_answers_are_remembered_in_a_file(
    tmp_path: Path, split_server: SplitServer, capsys: pytest.CaptureFixture[str]
) -> None:
    history = ("--history", str(tmp_path / "h"), "--drafter", "suffix", "--only-edge", *PATIENT)
    first = json.loads(edge(capsys, split_server, "--json", *history)[0])
    second = json.loads(edge(capsys, split_server, "--json", *history)[0])
    assert second["token_ids"] == first["token_ids"]
    assert second["accepted_tokens"] > first["accepted_tokens"]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_a_model_drafts_here(
    temperature: str, tmp_path: Path, split_server: SplitServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's own model: with its noise, what it drafts is what the server chooses."""
    model = ("--drafter", "model", "--draft-model", str(toy_chat_model(tmp_path)))
    options = (*model, "--only-edge", *PATIENT, "--json", "--temperature", temperature)
    facts = json.loads(edge(capsys, split_server, *options)[0])
    plain = split_server.tokens({**BODY, "temperature": float(temperature)})
    assert facts["token_ids"] == list(plain)
    assert facts["passes"] <= len(plain) / 3


def test_wrong_options_are_one_line(split_server: SplitServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "one-shot" in fails(capsys, "edge", split_server.url, "--prompt", "a", "--mode", "m1")
    assert "ngram" in fails(capsys, "edge", split_server.url, "--prompt", "a", "--drafter", "n-gram")
    assert "--draft-model" in fails(capsys, "edge", split_server.url, "--prompt", "a", "--drafter", "model")
    assert "cannot be reached" in fails(capsys, "edge", "http://127.0.0.1:9", "--prompt", "a")
    assert "http://HOST:PORT" in fails(capsys, "edge", "localhost", "--prompt", "a")


def test_a_server_without_split_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with toy_running(tmp_path) as running:
        assert "paceline serve --split" in fails(capsys, "edge", running.url, "--prompt", "a")
