"""paceline vllm command"""

import json
import shlex
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from paceline.cli.options import AsJson, MaxDraft, grouped
from paceline.config import SpecConfig
from paceline.errors import UnknownModel, UsageError, unknown_name

if TYPE_CHECKING:
    from paceline.advise.engine_flags import Speculation

vllm_app = typer.Typer(no_args_is_help=True, help="vLLM as the engine.")


@vllm_app.callback()
def vllm() -> None:
    """vLLM as the engine."""


@dataclass(frozen=True, slots=True)
class RouteChoice:
    """The speculation to render: of a route, or of options."""

    routes: Annotated[Path | None, typer.Option(help="A routes file, such as `paceline advise` writes.")] = (
        None
    )
    route: Annotated[str, typer.Option(help="The route's name; needed where the file has several.")] = ""
    drafters: Annotated[
        str, typer.Option(help="Without a routes file: drafters, in order; none: plain decoding.")
    ] = "suffix,ngram"
    max_draft: MaxDraft = SpecConfig().max_draft
    trained: Annotated[
        Path | None, typer.Option(help="A folder written by `paceline drafters export`, or a draft model's.")
    ] = None
    plugin: Annotated[
        bool, typer.Option(help="Run suffix and ngram by paceline's proposer, or by vLLM's own methods.")
    ] = True
    hidden_states: Annotated[
        Path | None,
        typer.Option(help="A folder for hidden states to train on (`paceline train`), in place of drafts."),
    ] = None


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """Options of `vllm serve`."""

    port: Annotated[int | None, typer.Option(help="vLLM's default: 8000.")] = None
    served_model_name: Annotated[str | None, typer.Option(help="The name that requests use.")] = None
    dtype: Annotated[str | None, typer.Option(help="auto, bfloat16, float16 or float32.")] = None
    max_model_len: Annotated[int | None, typer.Option(help="Tokens of a prompt with its answer.")] = None
    max_num_seqs: Annotated[int | None, typer.Option(help="Sequences in a pass.")] = None
    tensor_parallel_size: Annotated[int | None, typer.Option(help="GPUs that share each layer.")] = None
    pipeline_parallel_size: Annotated[int | None, typer.Option(help="GPUs that share the layers.")] = None
    data_parallel_size: Annotated[int | None, typer.Option(help="Copies of the model.")] = None


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """Settings of paceline's proposer inside vLLM."""

    default_tenant: Annotated[
        str, typer.Option(help="Tenant of requests that name none; without it they share no history.")
    ] = ""
    max_batch: Annotated[int, typer.Option(help="Sequences in a pass, beyond which nothing is drafted.")] = 64
    min_first_chance: Annotated[
        float, typer.Option(help="A draft whose first token is less likely than this is not made.")
    ] = 0.0


@vllm_app.command("command")
@grouped
def command(
    model: Annotated[str, typer.Argument(help="The model as vLLM finds it: a folder or a name on a hub.")],
    choice: RouteChoice,
    options: VllmOptions,
    plugin: PluginOptions,
    as_json: AsJson = False,
) -> None:
    """Write the call of `vllm serve` for a route."""
    from paceline.advise.engine_flags import VllmSpeculation, vllm_speculation
    from paceline.vllm.proposer import ProposerSettings
    from paceline.vllm.serve_command import ServeSettings, serve_command

    folder = choice.hidden_states
    if folder and (unused := _changed(choice, "hidden_states") + _changed(plugin)):
        raise UsageError(f"--hidden-states is in place of drafts: leave {', '.join(unused)} out")
    found = (
        VllmSpeculation(_extraction(model))
        if folder
        else vllm_speculation(_speculation(choice), choice.plugin)
    )
    proposer = ProposerSettings(**{**asdict(plugin), **found.proposer})
    served = {name: getattr(options, name) for name in VllmOptions.__slots__}
    settings = ServeSettings(
        **served, proposer=proposer, hidden_states=str(folder.absolute()) if folder else ""
    )
    words = serve_command(model, found.config, settings)
    for note in found.notes:
        print(note, file=sys.stderr)
    if as_json:
        about = {"command": words, "speculative_config": found.config, "notes": found.notes}
        print(json.dumps(about))
    else:
        print(shlex.join(words))


def _changed(options: RouteChoice | PluginOptions, *but: str) -> list[str]:
    """The options that are not at their default, as the command line has them."""
    default = type(options)()
    names = [name for name in options.__slots__ if getattr(options, name) != getattr(default, name)]
    return [
        "--no-plugin" if name == "plugin" else f"--{name.replace('_', '-')}"
        for name in names
        if name not in but
    ]


def _extraction(model: str) -> dict[str, Any]:
    """The layers that a new head reads by default, and the last."""
    from paceline import hub
    from paceline.target.weights.reader import open_checkpoint
    from paceline.train.recipe import TrainConfig
    from paceline.train.vllm_decoder import server_layers
    from paceline.vllm.serve_command import extraction_config

    layers = open_checkpoint(hub.resolve(model)).shape.layers
    return extraction_config(server_layers(layers, TrainConfig().taps))


def _speculation(choice: RouteChoice) -> "Speculation":
    """Of a route or of options; a trained drafter comes before the others of its list."""
    from paceline.advise.engine_flags import WITHOUT_MODEL, Speculation

    base = SpecConfig(tuple(choice.drafters.split(",")), max_draft=choice.max_draft)
    spec = base if choice.routes is None else _route_spec(choice, base)
    if choice.trained is not None and spec.max_draft:
        name, length = _exported(choice.trained)
        others = spec.drafters if {"--routes", "--drafters"} & set(_changed(choice)) else ()
        drafters = (name, *(other for other in others if other != name))
        return Speculation(
            drafters, min(spec.max_draft, length or spec.max_draft), {name: str(choice.trained)}
        )
    drafters = tuple(name for name in spec.drafters if name != "none")
    if drafters and spec.max_draft and not set(drafters) & set(WITHOUT_MODEL):
        raise UsageError(
            f"vLLM cannot run {', '.join(drafters)} by itself: export a trained drafter with "
            "`paceline drafters export` and name its folder with --trained, or use suffix or ngram"
        )
    return Speculation(drafters, spec.max_draft)


def _route_spec(choice: RouteChoice, base: SpecConfig) -> SpecConfig:
    from paceline.server.routes import load

    assert choice.routes is not None
    routes = {route.name: route for route in load(choice.routes).routes}
    if not choice.route and len(routes) > 1:
        raise UsageError(
            f"{choice.routes.name} has several routes: choose one of {', '.join(routes)} by --route"
        )
    if choice.route and choice.route not in routes:
        raise UsageError(unknown_name("route", choice.route, list(routes)))
    return routes[choice.route or next(iter(routes))].spec(base)


def _exported(folder: Path) -> tuple[str, int]:
    """The kind of an exported drafter and how far it drafts; 0: as far as it is asked to."""
    from paceline.convert import METHODS

    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UnknownModel(
            f"{folder} is no folder that vLLM loads ({error}): write one with `paceline drafters export`"
        ) from None
    kinds = {method: kind for kind, method in METHODS.items()}
    kind = kinds.get(config.get("speculators_model_type"))
    if kind is None:
        return "model", 0
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    return kind, int(methods[0].get("speculative_tokens", 0))
