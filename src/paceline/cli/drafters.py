"""paceline drafters"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline import models
from paceline.cli.about import DRAFTERS, NEEDS, About
from paceline.errors import PacelineError


@dataclass(frozen=True, slots=True)
class _Kept:
    """A folder among the trained drafters."""

    name: str
    kind: str
    target: str
    suits: bool  # the model asked about
    acceptance: tuple[float, ...]
    tokens_per_pass: tuple[float, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    guesses: str
    needs: str
    usable: bool
    given: list[str]  # what could be given for what it needs


def drafters(
    model: Annotated[str, typer.Option(help="The model they would guess for.")] = models.DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Who can guess for a model, what each needs, and which were trained here."""
    kept = _kept(models.resolve(model))
    rows = [_row(name, about, model, kept) for name, about in DRAFTERS.items()]
    if as_json:
        found = {
            "model": model,
            "drafters": [asdict(row) for row in rows],
            "trained": [asdict(k) for k in kept],
        }
        print(json.dumps(found, ensure_ascii=False))
        return
    out = Console(highlight=False)
    table = Table("name", "guesses", "needs", f"usable for {model}")
    for row in rows:
        table.add_row(row.name, row.guesses, row.needs, _usable(row))
    out.print(table)
    if kept:
        out.print(_trained_table(kept))


def _row(name: str, about: About, model: str, kept: list[_Kept]) -> _Row:
    if about.needs == "draft model":
        given = [m.name for m in models.installed() if m.pulled and m.name != model]
        given += [k.name for k in kept if k.kind == "model" and k.suits]
    else:
        given = [k.name for k in kept if k.kind == name and k.suits]
    usable = bool(given) or about.needs not in ("draft model", "trained")
    return _Row(name, about.guesses, NEEDS[about.needs], usable, given)


def _usable(row: _Row) -> str:
    if not row.usable:
        return "no"
    return f"with {', '.join(row.given)}" if row.given else "yes"


def _kept(model: Path) -> list[_Kept]:
    from paceline.heads.shelf import draft_models_here, kept_here
    from paceline.target.load import open_checkpoint, placed_tensors
    from paceline.target.stored import fingerprint

    folders, draft_models = kept_here(), draft_models_here()
    if not folders and not draft_models:
        return []
    checkpoint = open_checkpoint(model)
    mark = fingerprint(checkpoint.identity, placed_tensors(checkpoint))
    return [*(_told(folder, mark) for folder in folders), *(_told_model(f, mark) for f in draft_models)]


def _told(folder: Path, fingerprint: str) -> _Kept:
    from paceline.heads.folder import read_card

    try:
        card = read_card(folder)
    except PacelineError as error:
        return _Kept(folder.name, "", "", False, (), (), str(error))
    suits = card.fingerprint == fingerprint
    return _Kept(folder.name, card.kind, card.target, suits, card.acceptance, card.tokens_per_pass)


def _told_model(folder: Path, fingerprint: str) -> _Kept:
    from paceline.train.draft_card import read_draft_card

    try:
        card = read_draft_card(folder)
    except PacelineError as error:
        return _Kept(folder.name, "", "", False, (), (), str(error))
    suits, found = card.fingerprint == fingerprint, card.after
    return _Kept(folder.name, "model", card.target, suits, found.by_place, found.tokens_per_pass)


def _trained_table(kept: list[_Kept]) -> Table:
    table = Table(
        "trained", "kind", "for", "guesses right, by place", "tokens per pass with 1, 2, ... guesses"
    )
    for k in kept:
        if k.problem:
            table.add_row(k.name, "-", "-", k.problem, "-")
            continue
        right = " ".join(f"{share:.0%}" for share in k.acceptance)
        rates = " ".join(f"{rate:.2f}" for rate in k.tokens_per_pass)
        table.add_row(k.name, k.kind, k.target if k.suits else f"{k.target}, not this model", right, rates)
    return table
