"""paceline routes check, paceline schema check: files checked before a server or a request needs them."""

import json
from collections.abc import Sequence
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

    try:  # import paths are tried when a server starts: checking a file runs no code
        listed = load(file, {*DRAFTERS, *(drafter or ()), *import_paths(file)}).routes
        problems = _unreadable_prompts(listed, file.parent)
    except RouteError as error:
        problems = list(error.problems)
    if problems:
        print(json.dumps({"problems": problems}, ensure_ascii=False) if as_json else "\n".join(problems))
        raise typer.Exit(2)
    if as_json:
        print(json.dumps({"routes": [_settings(route) for route in listed]}, ensure_ascii=False))
    else:
        print("\n".join(_line(route) for route in listed))


def _unreadable_prompts(routes: "Sequence[Route]", folder: Path) -> list[str]:
    """Routes whose `warm` names no file with the beginning of a request."""
    problems = []
    for i, route in enumerate(routes):
        if route.warm is not None:
            from paceline.server.warm_prompts import read_warm_prompt

            try:
                read_warm_prompt(folder / route.warm)
            except UsageError as error:
                problems.append(f"routes[{i}].warm: {error}")
    return problems


def _settings(route: "Route") -> dict[str, Any]:
    return route.model_dump(exclude_none=True, exclude_unset=True)


def _line(route: "Route") -> str:
    settings = _settings(route)
    name, match = settings.pop("name"), settings.pop("match", None)
    condition = _pairs(match) if match else "everything else"
    return f"{name}: {condition} -> {_pairs(settings) or 'as the server is set'}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
