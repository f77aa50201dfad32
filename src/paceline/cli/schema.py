"""paceline schema check"""

import json
from typing import Annotated

import typer

from paceline.cli.options import read_schema
from paceline.constraints import Json, check
from paceline.errors import ConstraintError

schema_app = typer.Typer(no_args_is_help=True, help="JSON Schemas as constraints.")


@schema_app.callback()
def schema() -> None:
    """JSON Schemas as constraints."""


@schema_app.command("check")
def check_schema(
    file: Annotated[str, typer.Argument(help="A JSON Schema; - reads it from standard input.")],
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Say whether a schema can be enforced, and why not. Exit code 0: yes; 2: no."""
    reason = _refused(file)
    if as_json:
        print(json.dumps({"file": file, "supported": reason is None, "reason": reason}, ensure_ascii=False))
    else:
        print(f"{file}: {reason or 'supported'}" if not (reason or "").startswith(file) else reason)
    if reason is not None:
        raise typer.Exit(2)


def _refused(file: str) -> str | None:
    try:
        check(Json.of(read_schema(file)))
    except ConstraintError as error:
        return str(error)
    return None
