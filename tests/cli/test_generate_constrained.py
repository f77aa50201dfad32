"""Constraints from the command line: what they make, and one line with exit code 2 if one cannot be meant."""

import io
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from support.clients import fails, run

ASK = ["generate", "--model", "smollm2-135m", "--max-tokens", "40", "--seed", "1", "--prompt", "Oslo is"]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 8}, "size": {"enum": ["large", "small"]}},
    "required": ["city", "size"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"where": {"enum": ["here", "there"]}},
            "required": ["where"],
        },
    },
}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, err = run(capsys, *ASK, *arguments, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    """A file of each kind, by name."""
    texts = {
        "schema": json.dumps(SCHEMA),
        "unsupported": json.dumps({"type": "array", "uniqueItems": True}),
        "tools": json.dumps([TOOL]),
        "wrapped": json.dumps({"tools": [TOOL]}),
        "no tools": "[]",
        "broken": "{",
        "number": "3",
        "lark": 'start: ("ab" | "cd")+ "."',
        "bad lark": "start: (",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    return {name: str(tmp_path / name) for name in [*texts, "binary", "missing"]}


@pytest.mark.model
def test_a_schema(capsys: pytest.CaptureFixture[str], smollm2_path: Path, files: dict[str, str]) -> None:
    fast = answer(capsys, "--schema", files["schema"], "--no-adaptive")
    plain = answer(capsys, "--schema", files["schema"], "--drafters", "none")
    jsonschema.validate(json.loads(fast["text"]), SCHEMA)
    assert fast["token_ids"] == plain["token_ids"]
    assert fast["passes"] < plain["passes"]
    assert fast["accepted_by_source"]["grammar"] > 0
    compact = answer(capsys, "--schema", files["schema"], "--whitespace", "compact")
    assert '":"' in compact["text"]


@pytest.mark.model
def test_patterns_grammars_and_choices(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, files: dict[str, str]
) -> None:
    assert answer(capsys, "--regex", "[A-Z]{3}-[0-9]{2}")["text"][3] == "-"
    assert answer(capsys, "--choice", "warm", "--choice", "cold")["text"] in ("warm", "cold")
    assert set(answer(capsys, "--lark", files["lark"])["text"]) <= set("abcd.")


@pytest.mark.model
@pytest.mark.parametrize("file", ["tools", "wrapped"])
def test_tools(
    capsys: pytest.CaptureFixture[str], smollm2_path: Path, files: dict[str, str], file: str
) -> None:
    for choice in ("required", "look_up"):
        made = answer(capsys, "--tools", files[file], "--tool-choice", choice)
        assert made["finish"] == "length" or made["tool_calls"][0]["name"] == "look_up"
        assert made["text"].startswith("<tool_call>")
    none = answer(capsys, "--tools", files[file], "--tool-choice", "none")
    assert none["tool_calls"] == []


@pytest.mark.model
@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--schema", "missing"], "missing: No such file"),
        (["--schema", "broken"], "is not JSON"),
        (["--schema", "binary"], "not UTF-8"),
        (["--schema", "number"], "an object, true or false"),
        (["--schema", "unsupported"], "uniqueItems"),
        (["--lark", "missing"], "missing: No such file"),
        (["--lark", "bad lark"], "cannot be enforced"),
        (["--regex", "("], "cannot be enforced"),
        (["--choice", ""], "not a choice"),
        (["--regex", "a", "--choice", "b"], "exclude one another"),
        (["--schema", "schema", "--lark", "lark"], "exclude one another"),
        (["--tools", "no tools"], "holds no tools"),
        (["--tools", "number"], "holds no tools"),
        (["--tools", "broken"], "is not JSON"),
        (["--tools", "tools", "--tool-choice", "nobody"], "look_up"),
        (["--tool-choice", "required"], "needs tools"),
        (["--schema", "schema", "--whitespace", "loose"], "fixed, compact, flexible"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_what_cannot_be_meant(
    capsys: pytest.CaptureFixture[str],
    smollm2_path: Path,
    files: dict[str, str],
    arguments: list[str],
    word: str,
) -> None:
    assert word in fails(capsys, *ASK, *(files.get(argument, argument) for argument in arguments))


def test_a_schema_that_can_be_enforced(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    code, out, err = run(capsys, "schema", "check", files["schema"])
    assert (code, err) == (0, "")
    assert out == f"{files['schema']}: supported\n"
    code, out, _ = run(capsys, "schema", "check", files["schema"], "--json")
    assert code == 0
    assert json.loads(out) == {"file": files["schema"], "supported": True, "reason": None}


@pytest.mark.parametrize("file", ["unsupported", "broken", "number"])
def test_a_schema_that_cannot(capsys: pytest.CaptureFixture[str], files: dict[str, str], file: str) -> None:
    code, out, _ = run(capsys, "schema", "check", files[file])
    assert code == 2
    assert len(out.splitlines()) == 1
    code, out, _ = run(capsys, "schema", "check", files[file], "--json")
    assert code == 2
    found = json.loads(out)
    assert found["supported"] is False
    assert found["reason"]
    assert file != "unsupported" or "uniqueItems at #/uniqueItems" in found["reason"]


def test_a_schema_that_is_not_there(capsys: pytest.CaptureFixture[str], files: dict[str, str]) -> None:
    assert "No such file" in fails(capsys, "schema", "check", files["missing"])


def test_a_schema_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"type": "null"}'))
    assert run(capsys, "schema", "check", "-")[:2] == (0, "-: supported\n")
