"""paceline serve"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli import completion
from paceline.cli.models import require_models
from paceline.cli.options import (
    MODEL_HELP,
    DrafterOptions,
    MaxDraft,
    Pull,
    ServerEngineOptions,
    TemplateOptions,
    grouped,
    in_config_file,
)
from paceline.errors import SettingError, UsageError

if TYPE_CHECKING:
    from paceline.server.app import App
    from paceline.server.launch import ModelSettings

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class ListenOptions:
    """Address, access and load of the server."""

    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000
    keys: Annotated[str | None, typer.Option(help="A file of API keys; only their holders are served.")] = (
        None
    )
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="PACELINE_API_KEY", help="One key, without limits; a command line can be seen by others."
        ),
    ] = None
    served_model_name: Annotated[
        list[str] | None,
        typer.Option(help="The model's id for clients; repeat for further names it answers to."),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        typer.Option("--allowed-origin", "--cors", help="An origin that browsers may call from; *: all."),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        typer.Option(help="A name that the server is reached by, besides localhost; *: any."),
    ] = None
    max_batch: Annotated[int, typer.Option(help="Most requests in one pass.")] = 16
    max_waiting: Annotated[int, typer.Option(help="Most requests that wait; further ones get a 429.")] = 256
    drain: Annotated[float, typer.Option(help="Seconds that running requests get on SIGTERM.")] = 30.0
    lenient: Annotated[
        bool,
        typer.Option("--lenient", help="Ignore unknown parameters of requests, instead of refusing them."),
    ] = False
    keep_alive: Annotated[
        float, typer.Option(min=0, help="Seconds of silence before a stream gets a comment; 0: none.")
    ] = 5.0


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """Bounds on slow and silent clients."""

    max_connections: Annotated[int, typer.Option(help="Most open connections.")] = 1000
    header_timeout: Annotated[float, typer.Option(help="Seconds for the headers of a request.")] = 20.0
    body_timeout: Annotated[float, typer.Option(help="Seconds for the body of a request.")] = 60.0
    idle_timeout: Annotated[float, typer.Option(help="Seconds between two requests.")] = 15.0
    write_timeout: Annotated[float, typer.Option(help="Seconds for a client that does not read.")] = 60.0
    log_level: Annotated[
        str, typer.Option(help="debug, info (a line for each request), warning, error or critical.")
    ] = "info"


@dataclass(frozen=True, slots=True)
class MemoryOptions:
    """Data that the server keeps of requests."""

    store: Annotated[str | None, typer.Option(help="Where traces go: a file, a URL, or none.")] = None
    trace_text: Annotated[bool, typer.Option(help="Keep prompts and answers in the traces too.")] = False
    online_training: Annotated[
        bool,
        typer.Option("--online-training", help="Train the drafters of --trained on traffic while idle."),
    ] = False
    no_memory: Annotated[
        bool, typer.Option("--no-memory", help="Drafters remember nothing of finished requests.")
    ] = False
    save_estimates: Annotated[
        bool,
        typer.Option(help="Keep what was learned about drafters for the next start; it holds no text."),
    ] = True
    preload: Annotated[
        bool,
        typer.Option(help="Load what was used last from --cache-dir at the start, and compile its tools."),
    ] = True
    single_user: Annotated[
        bool,
        typer.Option("--single-user", help="Requests without key and user share caches and memories fully."),
    ] = False
    learn: Annotated[bool | None, typer.Option("--learn/--no-learn", hidden=True)] = None  # before 0.2

    @property
    def trains(self) -> bool:
        return self.online_training or self._old(True, "--online-training")

    @property
    def remembers(self) -> bool:
        return not (self.no_memory or self._old(False, "--no-memory"))

    def _old(self, value: bool, new: str) -> bool:
        if self.learn is value:
            log.warning(
                "%s is now called %s; the old name will be removed", "--learn" if value else "--no-learn", new
            )
        return self.learn is value


@dataclass(frozen=True, slots=True)
class ModelsOptions:
    """Several models in one server."""

    models: Annotated[
        str | None, typer.Option(help="A file of models with settings of their own, instead of MODEL.")
    ] = None
    max_loaded: Annotated[
        int, typer.Option(min=0, help="Most models in memory at once; 0: as many as fit.")
    ] = 0
    models_memory_mb: Annotated[
        int, typer.Option(min=0, help="Memory of all models with their caches; 0: most of what is free.")
    ] = 0

    def read(self, names: Sequence[str], defaults: "ModelSettings") -> "list[ModelSettings]":
        """The first is the default. defaults: options that are for every model, or for the only one."""
        if bool(names) == bool(self.models):
            raise UsageError("give a model, or several, or --models with a file of them")
        if self.models:
            from paceline.server.models_file import read_models

            if defaults.served_model_name:
                raise UsageError("--served-model-name is for one model: the file of --models has names")
            return read_models(self.models, defaults)
        of_one = ("draft_model", "trained", "chat_template", "tool_format", "served_model_name")
        given = [option for option in of_one if getattr(defaults, option)]
        if given and len(names) > 1:
            option = given[0].replace("_", "-")
            raise UsageError(f"--{option} is for one model: name it in a file, for --models")
        return [replace(defaults, model=name) for name in names]


@grouped
def serve(
    context: typer.Context,
    listen: ListenOptions,
    several: ModelsOptions,
    drafter: DrafterOptions,
    memory: MemoryOptions,
    engine: ServerEngineOptions,
    template: TemplateOptions,
    connection: ConnectionOptions,
    model: Annotated[
        list[str] | None,
        typer.Argument(help=f"{MODEL_HELP} Several: loaded on demand.", autocompletion=completion.models),
    ] = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option("--model", help="The same as MODEL.", autocompletion=completion.models),
    ] = None,
    max_draft: MaxDraft = 8,
    pull: Pull = False,
    routes: Annotated[str | None, typer.Option(help="A file: which requests speculate how.")] = None,
    split: Annotated[
        bool,
        typer.Option(
            "--split", help="Verify drafts of clients too: a WebSocket at /v1/split, a page at /edge."
        ),
    ] = False,
    edge_onnx: Annotated[
        Path | None,
        typer.Option(help="With --split: a file of `export --onnx`, for drafts on the GPU of a browser."),
    ] = None,
    advice: Annotated[
        str | None, typer.Option(help="A report of `paceline advise --json`, for the page.")
    ] = None,
) -> None:
    """Serve one model or several to any OpenAI client."""
    if model_option:  # the command line's, whatever paceline.toml has
        if model and not in_config_file(context, "model"):
            raise UsageError("models by their place and by --model: give all of them one way")
        model = model_option
    if model and several.models:  # the command line wins over paceline.toml
        typed = [name for name in ("model", "models") if not in_config_file(context, name)]
        if typed == ["models"]:
            model = None
        elif typed == ["model"]:
            several = replace(several, models=None)
    config = engine.config(max_batch=listen.max_batch, max_waiting=listen.max_waiting)
    if edge_onnx is not None and not (split and edge_onnx.is_file()):
        raise SettingError("edge_onnx", str(edge_onnx), "a file, together with --split")
    from paceline.server.launch import ModelSettings, ServerSettings, run
    from paceline.split.wire import MAX_OPEN_BYTES
    from paceline.trace.online import OnlineTrainingConfig
    from paceline.web.connections import ConnectionLimits

    first, *further = several.read(
        model or (),
        ModelSettings(
            "",
            tuple(listen.served_model_name or ()),
            drafter.draft_model,
            tuple(drafter.trained) if drafter.trained else None,
            drafter.names,
            max_draft,
            template.chat_template,
            template.tool_format,
            config,
        ),
    )
    if split and further:
        raise UsageError("--split is for a server of one model: serve the others elsewhere")
    for each in (first, *further):
        require_models(pull, each.model, each.draft_model)
    settings = ServerSettings(
        **{field.name: getattr(first, field.name) for field in fields(first)},
        further_models=tuple(further),
        max_loaded=several.max_loaded,
        models_memory_mb=several.models_memory_mb,
        host=listen.host,
        port=listen.port,
        keys=listen.keys,
        routes=routes,
        advice=advice,
        store=memory.store,
        trace_text=memory.trace_text,
        remember=memory.remembers,
        save_estimates=memory.save_estimates,
        preload=memory.preload,
        single_user=memory.single_user,
        online_training=OnlineTrainingConfig() if memory.trains else None,
        api_keys=tuple(listen.api_key or ()),
        allowed_origins=tuple(listen.allowed_origin or ()),
        allowed_hosts=tuple(listen.allowed_host or ()),
        connections=ConnectionLimits(
            max_connections=connection.max_connections,
            header_timeout_s=connection.header_timeout,
            body_timeout_s=connection.body_timeout,
            idle_timeout_s=connection.idle_timeout,
            write_timeout_s=connection.write_timeout,
        ),
        log_level=connection.log_level,
        drain_s=listen.drain,
        lenient=listen.lenient,
        keep_alive_s=listen.keep_alive,
        max_message=MAX_OPEN_BYTES if split else 0,
    )
    run(settings, partial(_mount_split, model=first.model, onnx=edge_onnx) if split else None)


def _mount_split(app: "App", model: str, onnx: Path | None) -> None:
    from paceline import hub
    from paceline.split.cloud import mount
    from paceline.split.edge_page import browser_model, mount_page

    mount(app)
    mount_page(app, browser_model(hub.resolve(model)), onnx)
