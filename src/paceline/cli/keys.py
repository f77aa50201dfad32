"""paceline keys new, ls, rm"""

import json
from pathlib import Path
from typing import Annotated

import typer

keys_app = typer.Typer(no_args_is_help=True, help="API keys of the server.")

Name = Annotated[str, typer.Argument(help="Whose key it is.")]
File = Annotated[Path | None, typer.Option(help="The keys file; without it, the user's own.")]
PerMinute = Annotated[int | None, typer.Option(help="Without it, no limit.")]


@keys_app.command("new")
def new(
    name: Name,
    file: File = None,
    requests_per_minute: PerMinute = None,
    tokens_per_minute: PerMinute = None,
    concurrent: Annotated[int | None, typer.Option(help="Requests at once; without it, no limit.")] = None,
    max_priority: Annotated[
        int | None, typer.Option(help="Highest priority; without it, 0 and that of the route.")
    ] = None,
    operator: Annotated[bool, typer.Option("--operator", help="May see the requests of all keys.")] = False,
) -> None:
    """Make a key and print it once: only its hash is stored."""
    from paceline.web import api_keys

    limits = {
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent": concurrent,
        "max_priority": max_priority,
    }
    chosen = {limit: value for limit, value in limits.items() if value is not None}
    print(api_keys.add(file or api_keys.default_file(), name, chosen, operator))


@keys_app.command("ls")
def list_keys(file: File = None, as_json: Annotated[bool, typer.Option("--json")] = False) -> None:
    """Names and limits of the keys."""
    from paceline.web import api_keys

    stored = api_keys.load(file or api_keys.default_file()).keys
    listed = [(key, key.limits.model_dump(exclude_none=True)) for key in stored]
    if as_json:
        about = [{"name": key.name, "limits": limits, "operator": key.operator} for key, limits in listed]
        print(json.dumps(about))
        return
    for key, limits in listed:
        shown = ", ".join(f"{limit}={value}" for limit, value in limits.items()) or "no limits"
        print(f"{key.name}: {shown}{', operator' if key.operator else ''}")


@keys_app.command("rm")
def rm(name: Name, file: File = None) -> None:
    """Remove a key. Servers reject it within a second."""
    from paceline.web import api_keys

    api_keys.remove(file or api_keys.default_file(), name)
    print(f"{name} is removed")
