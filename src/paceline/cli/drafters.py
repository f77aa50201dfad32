"""paceline drafters, drafters rollback, drafters export, drafters import; paceline layers"""

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from paceline import hub
from paceline.cli import completion
from paceline.cli.options import MODEL_HELP, AsJson, EngineOptions, grouped
from paceline.errors import PacelineError, UnknownModel, UsageError

if TYPE_CHECKING:
    from paceline.drafters import DrafterInfo
    from paceline.text import Tokenizer

drafters_app = typer.Typer(invoke_without_command=True, no_args_is_help=False)


@dataclass(frozen=True, slots=True)
class TrainedRow:
    """A trained drafter on this machine."""

    name: str
    kind: str
    target: str
    suits: bool  # it was trained for the model in question
    acceptance: tuple[float, ...]  # by position
    tokens_per_pass: tuple[float, ...]  # with drafts of 1, 2, ... tokens
    version: int = 0  # the one in use; 0: as it was trained
    versions: tuple[int, ...] = (0,)
    problem: str | None = None
    counts: tuple[int, ...] = ()  # tokens that each share of `acceptance` is of; () if it is not known


@dataclass(frozen=True, slots=True)
class DrafterRow:
    """One drafter, and if a model can use it."""

    name: str
    drafts: str
    needs: str
    usable: bool
    given: list[str]  # names of models or trained drafters that satisfy what it needs
    reason: str | None = None  # why the model cannot use it, whatever is given


@drafters_app.callback()
def drafters(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="The model they would draft for.", autocompletion=completion.models)
    ] = hub.DEFAULT_MODEL,
    as_json: AsJson = False,
) -> None:
    """List the drafters, what each needs, and which were trained here."""
    if context.invoked_subcommand is not None:
        return
    from paceline.drafters import DRAFTERS

    trained = trained_rows(_fingerprint(model))
    rows = [_row(name, info, model, trained) for name, info in DRAFTERS.items()]
    if as_json:
        listed = {
            "model": model,
            "drafters": [asdict(row) | {"guesses": row.drafts} for row in rows],  # old name
            "trained": [asdict(row) for row in trained],
        }
        print(json.dumps(listed, ensure_ascii=False))
        return
    out = Console(highlight=False)
    out.print(drafters_table(rows, model))
    for reason in (f"{row.name}: {row.reason}" for row in rows if row.reason):
        out.print(reason, markup=False, soft_wrap=True)
    for row in trained:
        out.print(_trained_lines(row), markup=False, soft_wrap=True)


def _row(name: str, info: "DrafterInfo", model: str, trained: list[TrainedRow]) -> DrafterRow:
    from paceline.drafters import NEEDS
    from paceline.loading import unusable

    path = hub.resolve(model)
    given = [row.name for row in trained if row.kind == name and row.suits]
    reason = unusable(name, path)
    if info.needs == "draft model":
        others = [m for m in hub.installed() if m.pulled and m.path != path]
        against = {m.name: unusable(name, path, draft_model=m.path) for m in others}
        given = [other for other, why in against.items() if why is None] + given
        if not given:
            reason = next((why for why in against.values() if why), None)
    missing = not given and info.needs in ("draft model", "trained")
    return DrafterRow(name, info.about, NEEDS[info.needs], not missing and reason is None, given, reason)


def drafters_table(rows: list[DrafterRow], model: str) -> Table:
    table = Table()
    table.add_column("name", no_wrap=True)
    table.add_column("drafts")
    table.add_column("needs")
    table.add_column(f"for {model}", no_wrap=True)
    for row in rows:
        table.add_row(row.name, row.drafts, row.needs, _usable(row))
    return table


def _usable(row: DrafterRow) -> str:
    if not row.usable:
        return "no"
    return "\n".join(f"with {name}" for name in row.given) or "yes"


def _trained_lines(row: TrainedRow) -> str:
    from paceline.heads.calibration import wilson_interval

    if row.problem:
        return f"{row.name}: {row.problem}"
    target = row.target if row.suits else f"{row.target}, not this model"
    lines = [f"{row.name}: {row.kind}, version {row.version}, trained for {target}"]
    if row.acceptance:
        lines.append(f"    accepted, by position       {' '.join(f'{x:.0%}' for x in row.acceptance)}")
        if row.counts:
            intervals = map(wilson_interval, row.acceptance, row.counts)
            lines.append(
                f"    95 % interval               {' '.join(f'{a:.0%}-{b:.0%}' for a, b in intervals)}"
            )
            lines.append(f"    of tokens                   n {' '.join(map(str, row.counts))}")
        lines.append(f"    tokens per pass, by length  {' '.join(f'{x:.2f}' for x in row.tokens_per_pass)}")
    return "\n".join(lines)


def _fingerprint(model: str) -> str:
    from paceline.loading import model_fingerprint

    return model_fingerprint(hub.resolve(model))


def trained_rows(fingerprint: str) -> list[TrainedRow]:
    """All that are here, whether they suit the model of this fingerprint or not."""
    from paceline.heads.local_heads import available_heads, local_draft_models

    heads = [_head_row(folder, fingerprint) for folder in available_heads()]
    return heads + [_draft_model_row(folder, fingerprint) for folder in local_draft_models()]


def _head_row(folder: Path, fingerprint: str) -> TrainedRow:
    from paceline.heads.head_checkpoint import read_card
    from paceline.heads.versions import current, numbers

    try:
        version = current(folder)
        card = read_card(version.folder)
    except PacelineError as error:
        return TrainedRow(folder.name, "", "", False, (), (), problem=str(error))
    return TrainedRow(
        folder.name,
        card.kind,
        card.target,
        card.fingerprint == fingerprint,
        card.acceptance,
        card.tokens_per_pass,
        version.number,
        tuple(numbers(folder)),
        counts=card.counts,
    )


def _draft_model_row(folder: Path, fingerprint: str) -> TrainedRow:
    from paceline.train.draft_model.card import read_draft_card

    try:
        card = read_draft_card(folder)
    except PacelineError as error:
        return TrainedRow(folder.name, "", "", False, (), (), problem=str(error))
    suits, after = card.fingerprint == fingerprint, card.after
    figures = after.by_position, after.tokens_per_pass
    return TrainedRow(folder.name, "model", card.target, suits, *figures, counts=after.counts)


@drafters_app.command()
def rollback(
    name: Annotated[str, typer.Argument(help="A trained drafter's name or folder.")],
    version: Annotated[
        int | None, typer.Argument(help="0: as it was trained. Without one: the one before the current one.")
    ] = None,
) -> None:
    """Return to an earlier version of a drafter. A server with --online-training takes it over."""
    from paceline.heads import versions
    from paceline.heads.head_checkpoint import read_card
    from paceline.heads.local_heads import drafter_path

    root = drafter_path(name)
    if not root.exists():
        raise UnknownModel(f"no trained drafter {root.name!r}: `paceline drafters` lists those that are here")
    read_card(root)
    chosen = versions.before(root) if version is None else version
    versions.use(root, chosen)
    shown = f"version {chosen}" if chosen else "as it was trained"
    Console(highlight=False).print(f"{root.name} serves {shown} from now on", markup=False)


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
    """Write a trained drafter in a format that other engines load."""
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
    print(f"{name} is at {out}. To serve it with vLLM:")
    print(f"vllm serve {verifier or model} --speculative-config '{json.dumps(spec)}'")


@drafters_app.command("import")
def import_drafter(
    checkpoint: Annotated[Path, typer.Argument(help="A folder with config.json and weights.")],
    target: Annotated[str, typer.Option(help="The model it was made for.")],
    out: Annotated[str, typer.Option(help="Its name here, or a new folder.")],
    weights: Annotated[str, typer.Option(help="float32, or int8, which rounds them.")] = "float32",
) -> None:
    """Import a checkpoint: EAGLE-3, Medusa, or speculators of type eagle3 or dspark."""
    from paceline.convert import import_
    from paceline.heads.local_heads import output_path

    folder, model, name = output_path(out), hub.resolve(target), Path(target).name
    card = import_(checkpoint, model, folder, weights, name=name)  # type: ignore[arg-type]  # checked there
    print(f"{checkpoint.name} is at {folder}, a drafter of kind {card.kind}: use it with --trained {out}")


@grouped
def layers(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)],
    engine: EngineOptions,
    text: Annotated[
        Path | None, typer.Option(help="Recorded text: plain, or a file of `paceline trace export`.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the layers that the drafter `self` can skip, and remember them."""
    config = engine.config()
    from paceline.drafters.draft_model.calibration_text import SAMPLES
    from paceline.drafters.draft_model.layer_search import find_layers
    from paceline.target.load import load_target
    from paceline.text import Tokenizer

    path = hub.resolve(model)
    tokenizer = Tokenizer.load(path)
    texts = [tokenizer.encode(sample) for sample in SAMPLES] if text is None else _recorded(text, tokenizer)
    target = load_target(path, config)
    best = find_layers(target, target.fingerprint, texts, _show_progress)
    if as_json:
        facts = {"layers": best.layers, "of": target.layers}
        print(json.dumps({**facts, "agreement": best.agreement, "expected_speed": best.speed}))
        return
    print(f"layers to run      {', '.join(map(str, best.layers))} ({len(best.layers)} of {target.layers})")
    print(f"same token         {100 * best.agreement:.0f} % of the time")
    print(f"expected speed     {best.speed:.2f} times plain decoding, at best")


def _show_progress(done: int, total: int) -> None:
    end = "\n" if done == total else ""
    print(f"\r{done} of {total} sets of layers tried", end=end, file=sys.stderr, flush=True)


def _recorded(path: Path, tokenizer: "Tokenizer") -> list[list[int]]:
    """A text for each request of an export; any other file is one text."""
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name} cannot be read as text: {error}") from None
    try:
        requests = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError:
        return [tokenizer.encode(text)]
    if not requests or not all(isinstance(request, dict) for request in requests):
        return [tokenizer.encode(text)]
    return [_tokens(request, tokenizer) for request in requests]


def _tokens(request: dict[str, Any], tokenizer: "Tokenizer") -> list[int]:
    ids = [*(request.get("prompt_ids") or ()), *(request.get("output_ids") or ())]
    if all(isinstance(token, int) and 0 <= token < tokenizer.vocab_size for token in ids) and ids:
        return ids
    return tokenizer.encode(f"{request.get('prompt') or ''}{request.get('output') or ''}")
