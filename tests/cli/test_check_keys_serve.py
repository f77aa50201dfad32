"""paceline routes and paceline keys, as an operator meets them."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.cli import main
from paceline.server import launch
from paceline.web.api_keys import load
from paceline.web.connections import ConnectionLimits

ROUTES = """
routes:
  - name: edits
    match: {path: /v1/*, tools: [edit_file]}
    drafters: [prediction, suffix]
    priority: 5
  - name: rest
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_routes_check_lists_what_was_understood(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(ROUTES)
    assert run(capsys, "routes", "check", file) == (
        0,
        'edits: path="/v1/*", tools=["edit_file"] -> drafters=["prediction", "suffix"], priority=5\n'
        "rest: everything else -> as the server is set\n",
        "",
    )
    code, out, _ = run(capsys, "routes", "check", file, "--json")
    assert code == 0
    assert json.loads(out)["routes"][0]["match"] == {"path": "/v1/*", "tools": ["edit_file"]}


def test_routes_check_imports_nothing(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(ROUTES.replace("[prediction, suffix]", "['absent_module:Echo']"))
    code, out, _ = run(capsys, "routes", "check", file)
    assert (code, 'drafters=["absent_module:Echo"]' in out) == (0, True)


def test_serve_takes_several_models_or_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seen: list[launch.ServerSettings] = []
    monkeypatch.setattr(launch, "run", lambda settings, extend: seen.append(settings))
    several = (
        "serve",
        "a",
        "b",
        "--max-loaded",
        "1",
        "--models-memory-mb",
        "900",
        "--max-draft",
        "3",
        "--lenient",
    )
    assert run(capsys, *several)[0] == 0
    assert [(one.model, one.names, one.max_draft) for one in seen[0].models] == [
        ("a", ("a",), 3),
        ("b", ("b",), 3),
    ]
    assert (seen[0].max_loaded, seen[0].models_memory_mb, seen[0].lenient) == (1, 900, True)
    file = tmp_path / "models.yaml"
    file.write_text("models: [{model: a, name: x, tool_format: hermes}, {model: b, cache_mb: 77}]")
    assert run(capsys, "serve", "--models", file, "--cache-mb", "55")[0] == 0
    found = [(one.names, one.tool_format, one.engine.cache_mb) for one in seen[1].models]
    assert found == [(("x",), "hermes", 55), (("b",), None, 77)]
    for wrong, problem in (
        (("serve",), "give a model, or several, or --models"),
        (("serve", "a", "--models", file), "give a model, or several, or --models"),
        (("serve", "a", "b", "--served-model-name", "c"), "--served-model-name is for one model"),
        (("serve", "a", "b", "--draft-model", "c"), "--draft-model is for one model"),
        (("serve", "a", "b", "--split"), "--split is for a server of one model"),
    ):
        code, _, err = run(capsys, *wrong)
        assert code == 2
        assert problem in " ".join(err.split())


def test_serve_lists_the_problems_of_its_routes_as_the_check_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("routes: [{name: a, drafters: [sufix]}, {name: a}]")
    checked = run(capsys, "routes", "check", file)[1].splitlines()
    code, out, err = run(capsys, "serve", "no-such-model", "--port", "0", "--routes", file)
    assert (code, out) == (2, "")
    assert err.splitlines() == [f"paceline: routes.yaml: {problem}" for problem in checked]


def test_routes_check_lists_problems(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("routes: [{name: a, drafters: [sufix]}, {name: a}]")
    code, out, err = run(capsys, "routes", "check", file)
    assert (code, err) == (2, "")
    assert [line.partition(":")[0] for line in out.splitlines()] == [
        "routes[0]",
        "routes[1].name",
        "routes[0].drafters[0]",
    ]
    code, shown, _ = run(capsys, "routes", "check", file, "--json")
    assert code == 2
    assert json.loads(shown)["problems"] == out.splitlines()
    assert run(capsys, "routes", "check", tmp_path / "no")[:2] == (
        2,
        "cannot read no: No such file or directory\n",
    )


def test_routes_check_reads_the_prompts_that_are_read_ahead(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("routes: [{name: a, match: {model: m}, warm: a.json}, {name: b, warm: b.txt}]")
    (tmp_path / "a.json").write_text('{"messages": 3}')
    code, out, _ = run(capsys, "routes", "check", file)
    first, second = out.splitlines()
    assert code == 2
    assert first.startswith("routes[0].warm: a.json is no chat request: messages:")
    assert second == f"routes[1].warm: cannot read {tmp_path / 'b.txt'}: No such file or directory"
    code, shown, _ = run(capsys, "routes", "check", file, "--json")
    assert (code, json.loads(shown)) == (2, {"problems": [first, second]})
    (tmp_path / "a.json").write_text('{"messages": [{"role": "system", "content": "You help."}]}')
    (tmp_path / "b.txt").write_text("You help.")
    assert run(capsys, "routes", "check", file)[0] == 0


def test_routes_check_accepts_declared_drafters(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("routes: [{name: a, drafters: [grammar, suffix, ngram, prediction, model, none, mine]}]")
    assert run(capsys, "routes", "check", file)[0] == 2
    assert run(capsys, "routes", "check", file, "--drafter", "mine")[0] == 0


def test_keys_are_made_listed_and_removed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    file = tmp_path / "keys.json"
    code, made, _ = run(capsys, "keys", "new", "alice", "--requests-per-minute", "60")
    assert code == 0
    found = load(file).check(f"Bearer {made.strip()}")
    assert found
    assert found.name == "alice"
    assert run(capsys, "keys", "new", "bob", "--operator", "--file", file)[0] == 0
    assert run(capsys, "keys", "ls") == (0, "alice: requests_per_minute=60\nbob: no limits, operator\n", "")
    code, out, _ = run(capsys, "keys", "ls", "--json")
    assert json.loads(out) == [
        {"name": "alice", "limits": {"requests_per_minute": 60}, "operator": False},
        {"name": "bob", "limits": {}, "operator": True},
    ]
    assert run(capsys, "keys", "rm", "alice") == (0, "alice is removed\n", "")
    assert [key.name for key in load(file).keys] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["new", "a b"], "1 to 64 letters"),
        (["new", "a", "--concurrent", "0"], "concurrent: 0 is not usable"),
        (["rm", "nobody"], "cannot read keys.json"),
        (["ls"], "cannot read keys.json"),
    ],
)
def test_a_mistake_is_one_line(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    code, out, err = run(capsys, "keys", *arguments)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_neither_needs_torch(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text(ROUTES)
    code = (
        "import sys; from paceline.cli import main\n"
        "for command in (['routes', 'check', sys.argv[1]], ['keys', 'new', 'a', '--file', sys.argv[2]]):\n"
        "    try: main(command)\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(file), str(tmp_path / "keys.json")]
    assert subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode == 0


def test_a_port_that_is_taken_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "serve", "absent", "--port", str(port))
    assert (code, out) == (2, "")
    assert err.startswith(f"paceline: cannot listen on 127.0.0.1:{port} (")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [("serve", "absent", "--port", "0", "--store", "none"), ("generate", "--prompt", "x")]
)
def test_a_wrong_template_or_tool_format_shows_before_the_model_is_looked_for(
    capsys: pytest.CaptureFixture[str], command: tuple[str, ...]
) -> None:
    more = () if command[0] == "serve" else ("--model", "absent")
    code, _, err = run(capsys, *command, *more, "--tool-format", "qwen")
    assert code == 2
    assert "expected one of harmony, hermes, llama3, mistral, smollm2" in " ".join(err.split())
    code, _, err = run(capsys, *command, *more, "--chat-template", "{% for m in messages %}")
    assert code == 2
    assert "the chat template cannot be read" in " ".join(err.split())


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("", "give a model, or several, or --models with a file"),
        ("m --models FILE", "give a model, or several, or --models with a file"),
        ("m n --served-model-name a", "--served-model-name is for one model"),
        ("m n --draft-model d", "--draft-model is for one model"),
        ("--models FILE --served-model-name a", "--served-model-name is for one model"),
        ("m n --split", "--split is for a server of one model"),
    ],
)
def test_options_of_one_model_are_refused_for_several(
    given: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "models.yaml"
    file.write_text("models:\n  - model: m\n")
    code, _, err = run(capsys, "serve", *given.replace("FILE", str(file)).split())
    assert code == 2
    assert problem in " ".join(err.split())


def test_serve_passes_its_options_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[launch.ServerSettings] = []
    monkeypatch.setattr(launch, "run", lambda settings, extend: seen.append(settings))
    monkeypatch.setenv("PACELINE_API_KEY", "from-the-environment")
    options = "--served-model-name a --served-model-name b --max-model-len 512 --log-level warning"
    browser = "--allowed-origin https://a.example --cors https://b.example --allowed-host a.example"
    limits = "--max-connections 7 --header-timeout 1 --body-timeout 2 --idle-timeout 3 --write-timeout 4"
    assert run(capsys, "serve", "m", *options.split(), *browser.split(), *limits.split())[0] == 0
    (settings,) = seen
    assert settings.names == ("a", "b")
    assert settings.engine.max_model_len == 512
    assert settings.log_level == "warning"
    assert settings.allowed_origins == ("https://a.example", "https://b.example")
    assert settings.allowed_hosts == ("a.example",)
    assert settings.connections == ConnectionLimits(7, 1.0, 2.0, 3.0, 4.0)
    assert settings.api_keys == ("from-the-environment",)
    assert run(capsys, "serve", "m", "--api-key", "given")[0] == 0
    assert seen[-1].api_keys == ("given",)
