"""The command line: every command of `paceline`, and doctor itself."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from paceline import __version__
from paceline.cli.advise import advise
from paceline.cli.cache import cache_app
from paceline.cli.check import routes_app, schema_app
from paceline.cli.config import HELP, VARIABLE, config_app, read_config
from paceline.cli.doctor import model_report, report
from paceline.cli.drafters import drafters_app, layers
from paceline.cli.edge import edge
from paceline.cli.estimate import estimate
from paceline.cli.export import export
from paceline.cli.gate import gate_app
from paceline.cli.generate import chat, generate
from paceline.cli.keys import keys_app
from paceline.cli.models import list_models, pull, rm
from paceline.cli.options import AsJson, ModelChoice, as_option, grouped
from paceline.cli.serve import serve
from paceline.cli.show import show
from paceline.cli.split import split_app
from paceline.cli.trace import trace_app
from paceline.cli.train import train
from paceline.cli.vllm import vllm_app
from paceline.errors import PacelineError, SettingError

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
for command in (pull, show, rm, generate, chat, serve, edge, train, layers, estimate, advise, export):
    app.command()(command)
app.command("models")(list_models)
for other_name in ("ls", "list"):
    app.command(other_name, hidden=True)(list_models)
app.add_typer(drafters_app, name="drafters")
app.add_typer(schema_app, name="schema")
app.add_typer(routes_app, name="routes")
app.add_typer(keys_app, name="keys")
app.add_typer(cache_app, name="cache")
app.add_typer(trace_app, name="trace")
app.add_typer(gate_app, name="gate")
app.add_typer(vllm_app, name="vllm")
app.add_typer(split_app, name="split")
app.add_typer(config_app, name="config")
out = Console(highlight=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs a command. A PacelineError, and a file that cannot be read, become one line and exit code 2."""
    try:
        app(args=None if argv is None else list(argv), prog_name="paceline")
    except SettingError as error:
        _fail(str(as_option(error, sys.argv[1:] if argv is None else argv)))
    except PacelineError as error:
        _fail(str(error))
    except OSError as error:
        if error.filename is None:  # not about a file: a fault of ours
            raise
        _fail(f"cannot use {error.filename}: {error.strerror or error}")
    except KeyboardInterrupt:
        sys.exit(130)
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of a library written in Rust: tokenizers, llguidance
            raise
        _fail(f"a model or grammar file is damaged: {error}")


def _fail(message: str) -> NoReturn:
    lines = "\n".join(f"paceline: {line}" for line in message.splitlines())
    Console(stderr=True, highlight=False, soft_wrap=True).print(lines, markup=False)
    sys.exit(2)


def _version(requested: bool) -> None:
    if requested:
        print(f"paceline {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    config: Annotated[str | None, typer.Option(envvar=VARIABLE, metavar="FILE", help=HELP)] = None,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Lossless speculative decoding for agents."""
    context.obj = read_config(config, context)
    context.default_map = context.obj.default_map


@app.command()
@grouped
def doctor(context: typer.Context, model: ModelChoice, as_json: AsJson = False) -> None:
    """Describe this machine and how paceline uses it. With a model: also load it and time its passes."""
    name = model.given(context)
    facts = report() | {"config file": str(context.obj)} | (model_report(name) if name else {})
    if as_json:
        print(json.dumps(facts))
        return
    for name, value in facts.items():
        if name == "cost_curve":  # cost_by_context has it too
            continue
        if not isinstance(value, dict):
            out.print(f"{name:<16} {value}")
            continue
        if name == "own_turns":
            for kind, what in value.items():
                out.print(f"{'own turns':<16} {kind}: {what}", markup=False)
            continue
        for tokens, row in value.items():
            times = ", ".join(
                f"{rows} {'row' if int(rows) == 1 else 'rows'} {ms} ms" for rows, ms in row.items()
            )
            out.print(f"{'cost of a pass':<16} after {tokens} tokens: {times}")
