"""paceline routes check"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from paceline.server.routes import Route

routes_app = typer.Typer(no_args_is_help=True, help="Routes: which requests speculate how.")


@routes_app.callback()
def routes() -> None:
    """Routes: which requests speculate how."""


@routes_app.command("check")
def check_routes(
    file: Annotated[Path, typer.Argument(help="A routes file (YAML).")],
    drafter: Annotated[
        list[str] | None, typer.Option(help="A further drafter the server has; give several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """List the routes as understood, or what is wrong with them. Exit code 0: usable; 2: not."""
    from paceline.cli.about import DRAFTERS
    from paceline.server.routes import RouteError, load

    try:
        found = load(file, {*DRAFTERS, *(drafter or ())}).routes
    except RouteError as error:
        _print_problems(error.problems, as_json)
        raise typer.Exit(2) from None
    if as_json:
        print(json.dumps({"routes": [_understood(route) for route in found]}, ensure_ascii=False))
    else:
        print("\n".join(_line(route) for route in found))


def _print_problems(problems: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"problems": problems}, ensure_ascii=False))
    else:
        print("\n".join(problems))


def _understood(route: "Route") -> dict[str, Any]:
    return route.model_dump(exclude_none=True, exclude_unset=True)


def _line(route: "Route") -> str:
    set_here = _understood(route)
    name, match = set_here.pop("name"), set_here.pop("match", None)
    taken = _pairs(match) if match else "everything else"
    return f"{name}: {taken} -> {_pairs(set_here) or 'as the server is set'}"


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items())
