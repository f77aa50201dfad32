"""paceline cache ls, clear"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline.cli.options import AsJson, CacheDir

cache_app = typer.Typer(no_args_is_help=True, help="The KV cache on the disk.")
out = Console(highlight=False, soft_wrap=True)


def _folder(cache_dir: str | None) -> Path:
    from paceline.target.kv.disk_cache import default_folder

    return Path(cache_dir).expanduser() if cache_dir else default_folder()


@cache_app.command("ls")
def list_models(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the models whose prefixes are on the disk."""
    from paceline.target.kv.disk_cache import stored_models

    models = stored_models(_folder(cache_dir))
    if as_json:
        print(json.dumps([asdict(model) for model in models]))
        return
    table = Table("model", "pages", "size", "last used")
    for model in models:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(model.used))
        table.add_row(model.model, f"{model.pages:,}", f"{model.bytes / 1e6:,.1f} MB", used)
    out.print(table if models else "nothing is cached on the disk")


@cache_app.command("clear")
def clear_pages(
    cache_dir: CacheDir = None,
    model: Annotated[str | None, typer.Option(help="Only of this model, as `ls` names it.")] = None,
) -> None:
    """Remove cached prefixes. Servers may run meanwhile."""
    from paceline.target.kv.disk_cache import clear

    print(f"{clear(_folder(cache_dir), model):,} pages removed")
