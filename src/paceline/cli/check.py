"""paceline routes check, paceline schema check: files checked before a server or a request needs them."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import AsJson, read_schema
from paceline.errors import ConstraintError, UsageError

if TYPE_CHECKING:
    from paceline.server.routes import Route

schema_app = typer.Typer(no_args_is_help=True, help="JSON Schemas as constraints.")
routes_app = typer.Typer(no_args_is_help=True, help="Routes: which requests speculate how.")


@schema_app.callback()
def schema() -> None:
    """JSON Schemas as constraints."""


@schema_app.command("check")
def check_schema(
    file: Annotated[str, typer.Argument(help="A JSON Schema; - reads it from standard input.")],
    as_json: AsJson = False,
) -> None:
    """Say whether a schema can be enforced, and if not, why. Exit code 0: yes; 2: no."""
    reason = _objection(file)
    if as_json:
        print(json.dumps({"file": file, "supported": reason is None, "reason": reason}, ensure_ascii=False))
    else:
        print(reason if reason and reason.startswith(file) else f"{file}: {reason or 'supported'}")
    if reason is not None:
        raise typer.Exit(2)


def _objection(file: str) -> str | None:
    from paceline.constraints import Json, check

    try:
        check(Json.of(read_schema(file)))
    except ConstraintError as error:
        return str(error)
    return None


@routes_app.callback()
def routes() -> None:
    """Routes: which requests speculate how."""


@routes_app.command("check")
def check_routes(
    file: Annotated[Path, typer.Argument(help="A routes file (YAML).")],
    drafter: Annotated[
        list[str] | None, typer.Option(help="Another drafter that the server has; repeat for several.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the routes as they are understood, or everything wrong with them. Exit code 0: usable; 2: not."""
    from paceline.drafters import DRAFTERS
    from paceline.server.routes import RouteError, import_paths, load

    try:
        imported = _drafter_names(import_paths(file))
        listed = load(file, {*DRAFTERS, *(drafter or ()), *imported.values()}, imported).routes
    except (RouteError, UsageError) as error:
        problems = error.problems if isinstance(error, RouteError) else (str(error),)
        print(json.dumps({"problems": problems}, ensure_ascii=False) if as_json else "\n".join(problems))
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({"routes": [_settings(route) for route in listed]}, ensure_ascii=False))
    else:
        print("\n".join(_line(route) for route in listed))


def _drafter_names(paths: list[str]) -> dict[str, str]:
    """By import path, of drafters that are made as the server will make them."""
    if not paths:
        return {}
    from paceline.loading import import_drafters  # takes seconds

    return {path: drafter.name for path, drafter in import_drafters(paths).items()}


def _settings(route: "Route") -> dict[str, Any]:
    return route.model_dump(exclude_none=True, exclude_unset=True)


def _line(route: "Route") -> str:
    settings = _settings(route)
    name, match = settings.pop("name"), settings.pop("match", None)
    condition = _pairs(match) if match else "everything else"
    return f"{name}: {condition} -> {_pairs(settings) or 'as the server is set'}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
