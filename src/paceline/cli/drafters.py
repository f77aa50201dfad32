"""paceline drafters, paceline drafters export, paceline drafters import"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from paceline import hub
from paceline.cli.about import DRAFTERS, NEEDS, About
from paceline.errors import PacelineError, UnknownModel

drafters_app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A folder among the trained drafters."""

    name: str
    kind: str
    target: str
    suits: bool  # the model asked about
    acceptance: tuple[float, ...]
    tokens_per_pass: tuple[float, ...]
    version: int = 0  # the one that serves; 0: as it was trained
    versions: tuple[int, ...] = (0,)  # that are there
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    guesses: str
    needs: str
    usable: bool
    given: list[str]  # what could be given for what it needs


@drafters_app.callback()
def drafters(
    context: typer.Context,
    model: Annotated[str, typer.Option(help="The model they would guess for.")] = hub.DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Who can guess for a model, what each needs, and which were trained here."""
    if context.invoked_subcommand is not None:
        return
    kept = _kept(hub.resolve(model))
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


@drafters_app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="A trained drafter's name or folder.")],
    version: Annotated[
        int | None, typer.Argument(help="0: as it was trained. Without one: that before the current.")
    ] = None,
) -> None:
    """Go back to an earlier version of a drafter that learned. A server with --learn follows."""
    from paceline.heads import versions
    from paceline.heads.head_checkpoint import read_card
    from paceline.heads.local_heads import drafter_path

    root = drafter_path(name)
    if not root.exists():
        raise UnknownModel(f"no trained drafter {root.name!r}: `paceline drafters` lists those that are here")
    read_card(root)
    chosen = versions.before(root) if version is None else version
    versions.use(root, chosen)
    told = f"version {chosen}" if chosen else "as it was trained"
    Console(highlight=False).print(f"{root.name} serves {told} from now on", markup=False)


def _row(name: str, about: About, model: str, kept: list[_Kept]) -> _Row:
    if about.needs == "draft model":
        given = [m.name for m in hub.installed() if m.pulled and m.name != model]
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
    from paceline.heads.local_heads import draft_models_here, kept_here
    from paceline.loading import fingerprint_of

    mark = fingerprint_of(model)
    heads = [_told(folder, mark) for folder in kept_here()]
    return heads + [_told_model(folder, mark) for folder in draft_models_here()]


def _told(folder: Path, fingerprint: str) -> _Kept:
    from paceline.heads.head_checkpoint import read_card
    from paceline.heads.versions import current, numbers

    try:
        version = current(folder)
        card = read_card(version.folder)
    except PacelineError as error:
        return _Kept(folder.name, "", "", False, (), (), problem=str(error))
    suits = card.fingerprint == fingerprint
    there = tuple(numbers(folder))
    figures = card.acceptance, card.tokens_per_pass
    return _Kept(folder.name, card.kind, card.target, suits, *figures, version.number, there)


def _told_model(folder: Path, fingerprint: str) -> _Kept:
    from paceline.train.draft_model.card import read_draft_card

    try:
        card = read_draft_card(folder)
    except PacelineError as error:
        return _Kept(folder.name, "", "", False, (), (), problem=str(error))
    suits, found = card.fingerprint == fingerprint, card.after
    return _Kept(folder.name, "model", card.target, suits, found.by_place, found.tokens_per_pass)


def _trained_table(kept: list[_Kept]) -> Table:
    table = Table(
        "trained",
        "version",
        "kind",
        "for",
        "guesses right, by place",
        "tokens per pass with 1, 2, ... guesses",
    )
    for k in kept:
        if k.problem:
            table.add_row(k.name, "-", "-", "-", k.problem, "-")
            continue
        right = " ".join(f"{share:.0%}" for share in k.acceptance)
        rates = " ".join(f"{rate:.2f}" for rate in k.tokens_per_pass)
        target = k.target if k.suits else f"{k.target}, not this model"
        table.add_row(k.name, str(k.version), k.kind, target, right, rates)
    return table


@drafters_app.command("export")
def export_drafter(
    name: Annotated[str, typer.Argument(help="A trained drafter's name or folder.")],
    out: Annotated[Path, typer.Argument(help="A new folder.")],
    model: Annotated[str, typer.Option(help="The model it was trained for.")] = hub.DEFAULT_MODEL,
    format: Annotated[str, typer.Option(help="speculators.")] = "speculators",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    verifier: Annotated[str, typer.Option(help="Where the other engine finds the model.")] = "",
    model_out: Annotated[
        Path | None, typer.Option(help="Also write the model, as a Hugging Face folder, there.")
    ] = None,
) -> None:
    """Write a trained drafter so that other engines load it."""
    from paceline.convert import METHODS, export, export_model
    from paceline.heads.head_checkpoint import read_card
    from paceline.heads.local_heads import drafter_path
    from paceline.heads.versions import current

    folder, path = current(drafter_path(name)).folder, hub.resolve(model)
    card = read_card(folder)
    if model_out is not None:
        verifier = verifier or str(model_out.resolve())
    export(folder, path, out, format, dtype=dtype, verifier=verifier)  # type: ignore[arg-type]  # checked there
    if model_out is not None:
        export_model(path, model_out, dtype=dtype)  # type: ignore[arg-type]  # checked there
    spec = {"model": str(out), "method": METHODS[card.kind], "num_speculative_tokens": card.shape.block}
    print(f"{name} is at {out}. vLLM serves it so:")
    print(f"vllm serve {verifier or model} --speculative-config '{json.dumps(spec)}'")


@drafters_app.command("import")
def import_drafter(
    checkpoint: Annotated[Path, typer.Argument(help="A folder with config.json and weights.")],
    target: Annotated[str, typer.Option(help="The model it was made for.")],
    out: Annotated[str, typer.Option(help="What it is to be called here, or a new folder.")],
    weights: Annotated[str, typer.Option(help="float32, or int8, which rounds them.")] = "float32",
) -> None:
    """Make a drafter of a checkpoint: EAGLE-3, Medusa, or speculators of type eagle3 or dspark."""
    from paceline.convert import import_
    from paceline.heads.local_heads import new_path

    folder, model, name = new_path(out), hub.resolve(target), Path(target).name
    card = import_(checkpoint, model, folder, weights, name=name)  # type: ignore[arg-type]  # checked there
    print(f"{checkpoint.name} is at {folder}, a drafter of kind {card.kind}: use it with --trained {out}")
