"""Option groups: a command takes dataclasses, its command line has their fields."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import EngineOptions, SamplingOptions, SpecOptions, as_option, grouped
from paceline.errors import SettingError


@dataclass(frozen=True)
class Size:
    name: Annotated[str, typer.Option()]
    width: Annotated[int, typer.Option(help="In columns.")] = 80


def test_a_command_gets_its_groups_filled() -> None:
    app, calls = typer.Typer(), list[tuple[str, Size, bool]]()

    @app.command()
    @grouped
    def draw(shape: Annotated[str, typer.Argument()], size: Size, fill: bool = False) -> None:
        calls.append((shape, size, fill))

    run = CliRunner()
    assert run.invoke(app, ["box", "--name", "a", "--width", "7", "--fill"]).exit_code == 0
    assert run.invoke(app, ["box", "--name", "b"]).exit_code == 0
    assert calls == [("box", Size("a", 7), True), ("box", Size("b"), False)]
    assert run.invoke(app, ["box"]).exit_code == 2  # a field without a default is required
    assert "In columns." in run.invoke(app, ["--help"]).stdout


def test_defaults_are_those_of_the_settings() -> None:
    params = SamplingOptions(seed=3).params()
    assert (params.seed, params.max_tokens, params.min_tokens, params.stop) == (3, 256, 0, ())
    assert SamplingOptions(min_tokens=9).params().min_tokens == 9
    assert SpecOptions().config(("suffix",)).max_draft == 8
    assert EngineOptions(threads=1).config(max_batch=3).max_batch == 3


@pytest.mark.parametrize("name", ["--max-draft", "--num-speculative-tokens"])
def test_both_names_of_the_draft_length(name: str) -> None:
    app, lengths = typer.Typer(), list[int]()

    @app.command()
    @grouped
    def show(spec: SpecOptions) -> None:
        lengths.append(spec.config().max_draft)

    assert CliRunner().invoke(app, [name, "3"]).exit_code == 0
    assert lengths == [3]


def test_a_setting_is_named_as_the_option_that_was_given() -> None:
    error = SettingError("draft_length", 0, "1 to 64")
    for given in (["--draft-length", "0"], ["--draft-length=0"]):
        assert str(as_option(error, given)).startswith("--draft-length=0 is not usable")
    for other in ([], ["--draft", "0"], ["--", "--draft-length"]):
        assert as_option(error, other) is error
