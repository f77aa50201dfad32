"""paceline.toml: the options of every command under their own names; command line and environment win."""

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from paceline.cli import config
from paceline.cli.config import NAME, VARIABLE, ConfigFile, read_config
from paceline.cli.main import app, main
from paceline.errors import UsageError
from paceline.server import launch
from paceline.server.launch import ServerSettings


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current one, and no file of the user."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    monkeypatch.delenv(VARIABLE)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "user"))
    return here


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """The settings that `serve` would start with."""
    seen: list[ServerSettings] = []
    monkeypatch.setattr(launch, "run", lambda settings, mount: seen.append(settings))
    return seen


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return int(end.value.code or 0)


def read(text: str) -> ConfigFile:
    Path(NAME).write_text(text)
    command: Any = get_command(app)
    return read_config(None, typer.Context(command))


def problems(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(text)
    return str(caught.value)


def test_options_come_from_the_file(served: list[ServerSettings]) -> None:
    Path(NAME).write_text(
        '[serve]\nmodel = "m"\nport = 9000\nkeep-alive = 1.5\nsingle-user = true\nsave-estimates = false\n'
        'allowed-host = ["a", "b"]\nnum-speculative-tokens = 3\ncache_mb = 64\n'
    )
    assert run("serve") == 0
    (settings,) = served
    assert (settings.model, settings.port, settings.keep_alive_s) == ("m", 9000, 1.5)
    assert settings.single_user
    assert not settings.save_estimates
    assert settings.allowed_hosts == ("a", "b")
    assert settings.max_draft == 3  # by its other name
    assert settings.engine.cache_mb == 64
    assert settings.host == "127.0.0.1"  # not in the file


def test_the_command_line_wins_over_the_environment_and_that_over_the_file(
    served: list[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(NAME).write_text('[serve]\nmodel = "m"\napi-key = ["file"]\nport = 9000\nadvice = "a"\n')
    assert run("serve") == 0
    monkeypatch.setenv("PACELINE_API_KEY", "environment")
    assert run("serve") == 0
    assert run("serve", "other", "--api-key", "typed", "--port", "1") == 0
    assert [settings.api_keys for settings in served] == [("file",), ("environment",), ("typed",)]
    assert [(s.model, s.port, s.advice) for s in served] == [("m", 9000, "a")] * 2 + [("other", 1, "a")]


@pytest.mark.parametrize(
    ("in_file", "typed", "models"),
    [
        ('model = "m"', ("--models", "models.yaml"), ["a", "b"]),
        ('models = "models.yaml"', ("m",), ["m"]),
        ('models = "models.yaml"', (), ["a", "b"]),
    ],
)
def test_a_model_that_is_typed_wins_over_models_in_the_file_and_the_reverse(
    served: list[ServerSettings], in_file: str, typed: tuple[str, ...], models: list[str]
) -> None:
    Path("models.yaml").write_text("models: [{model: a}, {model: b}]")
    Path(NAME).write_text(f"[serve]\n{in_file}\n")
    assert run("serve", *typed) == 0
    assert [one.model for one in served[0].models] == models


def test_a_model_beside_a_file_of_models_is_an_error_where_one_place_has_both(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "give a model, or several, or --models with a file of them"
    assert run("serve", "m", "--models", "models.yaml") == 2
    assert said in capsys.readouterr().err
    Path(NAME).write_text('[serve]\nmodel = "m"\nmodels = "models.yaml"\n')
    assert run("serve") == 2
    assert said in capsys.readouterr().err


def test_a_flag_of_the_file_can_be_taken_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert read("[generate]\nadaptive = false\n").default_map == {"generate": {"adaptive": False}}


def test_the_file_named_then_here_then_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    users = tmp_path / "user" / "paceline" / NAME
    users.parent.mkdir(parents=True)
    named, variable, here = tmp_path / "named.toml", tmp_path / "variable.toml", Path(NAME).absolute()

    def shown(*options: str) -> str | None:
        assert run(*options, "config", "show", "--json") == 0
        found: str | None = json.loads(capsys.readouterr().out)["file"]
        return found

    assert shown() is None
    for path in (users, here, named, variable):
        path.write_text("[serve]\n")
    assert shown() == str(here)
    assert shown("--config", str(named)) == str(named)
    assert shown("--config", "none") is None
    here.unlink()
    assert shown() == str(users)
    with pytest.MonkeyPatch.context() as m:
        m.setenv(VARIABLE, str(variable))
        assert shown() == str(variable)
        assert shown("--config", str(named)) == str(named)


def test_a_file_that_cannot_be_read_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--config", "gone.toml", "models") == 2
    assert capsys.readouterr().err == "paceline: cannot read gone.toml: No such file or directory\n"
    assert "is not TOML" in problems("[serve\n")
    Path(NAME).write_bytes(b"\xff")
    assert run("models") == 2
    assert "is not TOML" in capsys.readouterr().err


def test_every_problem_is_said_at_once_with_its_place() -> None:
    lines = problems(
        "[serve]\nprot = 1\nport = 'x'\nkeep-alive = -1\nsingle-user = 1\n"
        "[generate]\nstop = {}\nseed = [1]\nthreads = true\nmax-draft = 2\nmax_draft = 2\n"
        "[serv]\n[gate]\nserve = 1\n"
    ).splitlines()
    path = Path(NAME).absolute()
    assert [line.removeprefix(f"{path}: ").partition(":")[0] for line in lines] == [
        "[serve] unknown key 'prot'; did you mean 'port'? Known",
        "[serve] port",
        "[serve] keep-alive",
        "[serve] single-user",
        "[generate] stop",
        "[generate] seed",
        "[generate] threads",
        "[generate] max_draft",
        "unknown command 'serv'; did you mean 'serve'? Known",
        "[gate] serve",
    ]
    assert all(line.startswith(f"{path}: ") for line in lines)
    assert ", port, " in lines[0]
    assert "learn" not in lines[0]  # hidden
    assert lines[0].count("max-draft") == 1
    assert "num-speculative-tokens" not in lines[0]  # its second name


def test_a_key_outside_of_a_table_is_an_error() -> None:
    assert "port: options stand under a command, such as `[serve]`" in problems("port = 1\n")
    assert "expected a table of options: [serve]" in problems("serve = 1\n")
    assert "version: options stand under a command" in problems("version = true\n")
    assert "unknown command 'portt'" in problems("[portt]\n")


def test_every_option_of_every_command_can_be_in_the_file() -> None:
    """No second list: a key is whatever the command takes."""
    lines: list[str] = []

    def expected(command: Any, at: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines.extend([f"[{'.'.join(at)}]"] if at else [])
        for parameter in command.params if at else ():
            if parameter.name == "model_option":  # the same as MODEL, which has the key
                continue
            key = parameter.opts[0].removeprefix("--")
            several = parameter.nargs == -1 or getattr(parameter, "multiple", False)
            least = max(1, getattr(parameter, "min", None) or 0)
            value: Any = True if getattr(parameter, "is_flag", False) else str(least)
            values[parameter.name] = [value] if several else value
            lines.append(f"{key} = {json.dumps(values[parameter.name])}")
        for name, below in getattr(command, "commands", {}).items():
            values[name] = expected(below, (*at, name))
        return values

    wanted = expected(get_command(app), ())
    assert read("\n".join(lines)).default_map == wanted
    assert len(lines) > 200


def test_commands_below_commands_and_those_with_options_of_their_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    made = read('[drafters]\njson = true\n[drafters.rollback]\nname = "d"\n[gate.serve]\nconfig = "g.yaml"\n')
    assert made.default_map == {
        "drafters": {"as_json": True, "rollback": {"name": "d"}},
        "gate": {"serve": {"config": "g.yaml"}},
    }
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    Path(NAME).write_text("[models]\njson = true\n")
    assert run("models") == 0
    assert json.loads(capsys.readouterr().out)


def test_show_tells_what_is_read_and_hides_secrets(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path(NAME).write_text(
        '[serve]\nport = 9000\napi-key = ["s3cret"]\nstore = "postgresql://me:s3cret@s3cret@host/db"\n'
        "[gate.serve]\nport = 1\n"
    )
    monkeypatch.setenv("PACELINE_API_KEY", "k")
    assert run("config", "show") == 0
    assert capsys.readouterr().out.splitlines() == [
        f"config file: {Path(NAME).absolute()}",
        "[serve] port = 9000",
        '[serve] api-key = "..."  # but $PACELINE_API_KEY is set, and wins',
        '[serve] store = "postgresql://...@host/db"',
        "[gate.serve] port = 1",
    ]
    assert run("config", "show", "--json") == 0
    assert "s3cret" not in capsys.readouterr().out


def test_show_without_a_file_says_where_it_looked(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show") == 0
    out = capsys.readouterr().out
    assert all(str(place) in out for place in config.places())
    assert out.startswith("config file: none: neither ")
    assert run("--config", "none", "config", "show") == 0
    assert capsys.readouterr().out == "config file: none\n"


def test_help_shows_the_values_of_the_file_but_secrets(capsys: pytest.CaptureFixture[str]) -> None:
    Path(NAME).write_text(
        '[serve]\nport = 61234\napi-key = "s3cret"\nstore = "postgresql://me:s3cret@host/db"\n'
        '[edge]\napi-key = "s3cret"\n'
    )
    assert run("serve", "--help") == 0
    out = capsys.readouterr().out
    assert "61234" in out
    assert run("edge", "--help") == 0
    assert "s3cret" not in out + capsys.readouterr().out


CODE = ('[serve]\nmodel = "m"\ndrafters = "suffix, mine:Echo"\n', '[generate]\ndrafters = "mine:Echo"\n')


@pytest.mark.parametrize("text", CODE)
def test_a_file_that_is_only_found_runs_no_code(text: str, folder: Path, tmp_path: Path) -> None:
    assert "drafters names code to run (mine:Echo)" in problems(text)
    command: Any = get_command(app)
    assert read_config(NAME, typer.Context(command)).path == Path(NAME)  # named: trusted
    own = tmp_path / "user" / "paceline"
    own.mkdir(parents=True)
    (folder / NAME).rename(own / NAME)
    assert read_config(None, typer.Context(command)).path == own / NAME  # the user's own folder


@pytest.mark.parametrize("key", ["routes", "models"])
def test_nor_do_the_files_that_it_names(key: str) -> None:
    Path("more.yaml").write_text(f"{key}:\n  - model: m\n    drafters: [suffix, 'mine:Echo']\n")
    assert f"{key} names code to run (mine:Echo)" in problems(f'[serve]\n{key} = "more.yaml"\n')
    Path("more.yaml").write_text(f"{key}:\n  - model: m\n    drafters: [suffix]\n")
    assert read(f'[serve]\n{key} = "more.yaml"\n').path is not None
    assert read(f'[serve]\n{key} = "missing.yaml"\n').path is not None  # serve says that it is not there


def test_code_is_refused_before_anything_is_imported(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    Path(NAME).write_text('[serve]\nmodel = "m"\ndrafters = "mine:Echo"\n')
    assert run("serve") == 2
    assert "names code to run" in capsys.readouterr().err
    assert not Path("ran").exists()


@pytest.mark.parametrize("command", ["generate", "chat", "serve"])
def test_a_model_is_named_by_its_place_or_by_its_option(
    command: str, served: list[ServerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(model: str, *_: object) -> None:
        loaded.append(model)
        raise UsageError("enough")

    monkeypatch.setattr("paceline.cli.generate._load", load)
    more = ("--prompt", "x") if command == "generate" else ()
    given: tuple[str, ...]
    for given in (("a",), ("--model", "a")):
        run(command, *given, *more)
    Path(NAME).write_text(f'[{command}]\nmodel = "file"\n')
    for given in ((), ("typed",), ("--model", "typed")):
        run(command, *given, *more)
    loaded += [settings.model for settings in served]
    assert loaded == ["a", "a", "file", "typed", "typed"]
    assert run(command, "one", "--model", "other", *more) == 2
    assert len(loaded) == 5
