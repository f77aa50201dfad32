"""paceline pull, models, rm; and the pull of a model that a command needs"""

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from paceline import hub
from paceline.cli import completion
from paceline.cli.options import AsJson
from paceline.errors import PacelineError, UnknownModel, UsageError

PULL_HELP = "A name from `paceline models`, or owner/name[@REVISION][:QUANTISATION] on a hub."
out = Console(highlight=False, soft_wrap=True)


def pull(
    name: Annotated[str, typer.Argument(help=PULL_HELP, autocompletion=completion.models)],
    as_json: AsJson = False,
) -> None:
    """Download a model and check it. An interrupted pull is resumed."""
    path = _pull_showing_progress(name)
    if as_json:
        print(json.dumps({"name": name, "path": str(path)}))
    else:
        out.print(f"{name} is at {path}", markup=False)


def require_models(pull_missing: bool, model: str, draft_model: str | None = None) -> None:
    """Pulls models that are not here: told to, or after asking on a terminal.

    A name that no pull can bring is left to whoever loads it, after the other settings are checked.
    """
    for name in [model] if draft_model is None or _is_trained_here(draft_model) else [model, draft_model]:
        try:
            hub.resolve(name)
        except UnknownModel as missing:
            if hub.can_be_pulled(name):
                _pull_missing(name, pull_missing, missing)


def _is_trained_here(name: str) -> bool:
    from paceline.heads.local_heads import DRAFT_CARD, drafter_path

    return name not in hub.CATALOGUE and (drafter_path(name) / DRAFT_CARD).is_file()


def _pull_missing(name: str, told: bool, missing: UnknownModel) -> None:
    if not told:
        if not _on_terminal():
            raise UnknownModel(f"{missing}; or give --pull")
        offered = hub.offer(name)
        if not typer.confirm(
            f"{offered.name} is not here. Pull {_mb(offered.size)}?", default=True, err=True
        ):
            raise missing
    _pull_showing_progress(name)


def _pull_showing_progress(name: str) -> Path:
    from paceline.cli.render import bar

    with bar() as progress:
        return hub.pull(name, progress)


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def list_models(as_json: AsJson = False) -> None:
    """List the models that can be pulled, and those that are here."""
    listed = hub.installed()
    if as_json:
        print(json.dumps([{**asdict(m), "path": str(m.path)} for m in listed]))
        return
    whole = (Column(name, no_wrap=True) for name in ("name", "size", "pulled"))
    table = Table(*whole, "licence", box=SIMPLE_HEAD)
    for m in listed:
        pulled = "yes" if m.pulled else _mb(m.arrived) if m.arrived else "no"
        table.add_row(m.name, _mb(m.size), pulled, escape(m.licence))
    out.print(table)


@dataclass(frozen=True, slots=True)
class Derived:
    """Something that was made of a model, which nothing else uses."""

    what: str
    size: int  # bytes
    remove: Callable[[], object]


def rm(
    name: Annotated[
        str, typer.Argument(help="A name from `paceline models`.", autocompletion=completion.models)
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    drafters: Annotated[
        bool, typer.Option("--drafters", help="Also remove the drafters that were trained for it here.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Remove a model that was pulled, and what was made of it: packed weights, cached prefixes, timings."""
    removal = hub.removal(name)
    fingerprint = fingerprint_of(removal.name)
    trained = _trained_here(fingerprint) if fingerprint else []
    derived = _derived(fingerprint) if fingerprint else []
    if drafters:
        derived += [_folder(f"drafter {folder.name}", folder) for folder in trained]
    kept = [] if drafters else [folder.name for folder in trained]
    sizes = {removal.name: removal.size} | {each.what: each.size for each in derived}
    if not yes:
        _confirm(sizes, kept)
    removal.run()
    for each in derived:
        each.remove()
    if fingerprint:
        _forget(fingerprint)
    total = sum(sizes.values())
    if as_json:
        print(json.dumps({"name": removal.name, "removed": sizes, "bytes": total, "kept_drafters": kept}))
    else:
        out.print(f"{removal.name} is removed: {_mb(total)} are free again", markup=False)


def _confirm(sizes: dict[str, int], kept: list[str]) -> None:
    if not _on_terminal():
        raise UsageError("rm asks first, and there is no terminal to ask on: give --yes")
    for what, size in sizes.items():
        print(f"{what}: {_mb(size)}", file=sys.stderr)
    if kept:
        print(f"kept, unless --drafters is given: {', '.join(kept)}", file=sys.stderr)
    typer.confirm(f"Remove {_mb(sum(sizes.values()))}?", abort=True, err=True)


def fingerprint_of(name: str) -> str | None:
    """None for a model that is not here, not whole or not readable: what was made of it cannot be found."""
    from paceline.loading import model_fingerprint

    try:
        return model_fingerprint(hub.resolve(name))
    except PacelineError:
        return None


def _derived(fingerprint: str) -> list[Derived]:
    from paceline.target.kv.disk_cache import cache_folder, clear, stored_models
    from paceline.target.native.packed_file import packed_files

    packed, pages = packed_files(fingerprint), cache_folder()
    cached = sum(model.bytes for model in stored_models(pages) if model.weights == fingerprint)
    size = sum(file.stat().st_size for file in packed)
    found = [
        Derived("packed weights", size, lambda: _unlink(packed)),
        Derived("cached prefixes", cached, lambda: clear(pages, weights=fingerprint)),
    ]
    return [each for each in found if each.size]


def _unlink(files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)


def _forget(fingerprint: str) -> None:
    """Drops the times of its passes, the layers that drafts skip, the estimates of its drafters."""
    from paceline.drafters.draft_model import layer_search
    from paceline.engine.saved_estimates import estimates_path
    from paceline.target import cost

    layer_search.forget(fingerprint)
    for key in cost.forget(fingerprint):
        estimates_path(key).unlink(missing_ok=True)


def _trained_here(fingerprint: str) -> list[Path]:
    """Folders of the drafters in the local store that were trained for the model."""
    from paceline.cli.drafters import trained_rows
    from paceline.heads.local_heads import store_folder

    suiting = (store_folder() / row.name for row in trained_rows(fingerprint) if row.suits)
    return [folder for folder in suiting if folder.is_dir()]


def _folder(what: str, folder: Path) -> Derived:
    return Derived(what, hub.bytes_under(folder), lambda: shutil.rmtree(folder))


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"
