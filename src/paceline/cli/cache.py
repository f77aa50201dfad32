"""paceline cache ls, clear, warm"""

import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.table import Table

from paceline import hub
from paceline.cli import completion
from paceline.cli.models import fingerprint_of
from paceline.cli.options import MODEL_HELP, AsJson, CacheDir, ServerEngineOptions, TemplateOptions, grouped
from paceline.config import SpecConfig
from paceline.errors import SettingError, UsageError, unknown_name

if TYPE_CHECKING:
    from paceline.target.kv.disk_cache import StoredModel

cache_app = typer.Typer(no_args_is_help=True, help="The KV cache on the disk.")
FLUSH_S: Final = 60.0  # for the pages of one prompt
out = Console(highlight=False, soft_wrap=True)


@cache_app.command("ls")
def list_models(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List the models whose prefixes are on the disk."""
    from paceline.target.kv.disk_cache import cache_folder, stored_models

    models = _with_known_names(stored_models(cache_folder(cache_dir)))
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
    model: Annotated[
        str | None,
        typer.Option(help="Only of this model: its name or file.", autocompletion=completion.models),
    ] = None,
) -> None:
    """Remove cached prefixes and, without --model, what is kept beside them. Servers may run meanwhile."""
    from paceline.server import recent_outputs
    from paceline.server.tool_prediction.predictor_files import clear as clear_predictors
    from paceline.target.kv.disk_cache import cache_folder, clear, stored_models

    folder = cache_folder(cache_dir)
    weights = fingerprint_of(model) if model is not None else None
    stored = stored_models(folder)
    if model is not None and weights is None:
        _require_stored(model, stored)
    named = {weights} if weights else {one.weights for one in stored if one.model == model}
    recent_outputs.clear(folder, None if model is None else named)
    print(f"{clear(folder, weights=weights) if weights else clear(folder, model):,} pages removed")
    if model is None:
        rmtree(folder / "grammars", ignore_errors=True)
    if model is None and (removed := clear_predictors(folder)):
        print(f"tool predictions of {removed:,} tenants removed")


def _with_known_names(models: "list[StoredModel]") -> "list[StoredModel]":
    """Pages carry the name of the file that was loaded: a model that is here goes by its own name."""
    if not models:
        return []
    names = {fingerprint_of(each.name): each.name for each in hub.installed() if each.pulled}
    return [replace(model, model=names.get(model.weights, model.model)) for model in models]


def _require_stored(name: str, models: "list[StoredModel]") -> None:
    """Pages may outlive the model whose file they are named for."""
    if not models:
        raise UsageError(f"no pages of {name}: nothing is cached on the disk")
    if name not in {model.model for model in models}:
        known = {model.model: None for model in _with_known_names(models)}
        raise UsageError(unknown_name("model", name, known))


@cache_app.command("warm")
@grouped
def warm(
    model: Annotated[str, typer.Argument(help=MODEL_HELP, autocompletion=completion.models)],
    engine: ServerEngineOptions,
    template: TemplateOptions,
    file: Annotated[
        list[Path] | None,
        typer.Argument(help="The body of a chat request (.json), or the text of a system prompt."),
    ] = None,
    routes: Annotated[
        Path | None, typer.Option(help="A routes file: what its routes have as `warm`.")
    ] = None,
    keys: Annotated[str | None, typer.Option(help="A file of API keys: for each of them.")] = None,
    single_user: Annotated[
        bool, typer.Option("--single-user", help="For a server that has this option.")
    ] = False,
) -> None:
    """Read prompts and keep them on the disk, for servers with the same model, keys and folder."""
    if not file and routes is None:
        raise UsageError("nothing to read: give a file, or --routes")
    if not engine.cache_disk_mb:
        raise SettingError("cache_disk_mb", 0, "more than 0")
    from paceline.llm import LLM
    from paceline.server.routes import load
    from paceline.server.warm_prompts import prepared, read_warm_prompt, route_prompts
    from paceline.web import api_keys

    prompts = [read_warm_prompt(path) for path in file or ()]
    if routes is not None:
        prompts += route_prompts(load(routes).routes, routes.parent)
    holders = api_keys.load(keys).keys if keys else ()
    llm = LLM(
        model,
        config=engine.config(),
        chat_template=template.chat_template,
        tool_format=template.tool_format,
        spec=SpecConfig(("none",), max_draft=0),
    )
    if llm.target.cache_stats.disk is None:
        raise UsageError(
            f"{model} has no cache on the disk here: it needs the native CPU engine, and a folder"
        )
    for prompt in prompts:
        for output in prepared(llm, prompt, holders, single_user):
            seq = output.seq
            llm.engine.submit(seq)
            while llm.engine.busy:
                if error := next((r.error for r in llm.engine.step() if r.error), None):
                    raise error
            if not llm.target.flush(FLUSH_S):
                raise UsageError(f"the disk is too slow: {prompt.file} was not written in {FLUSH_S:.0f} s")
            print(f"{prompt.file}: {seq.prompt_len} tokens, {seq.cached} of them were cached")
