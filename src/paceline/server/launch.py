"""Builds a server from its settings and runs it."""

import logging
import signal
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from paceline import hub
from paceline.config import EngineConfig, SpecConfig
from paceline.drafters import DRAFTERS
from paceline.engine.engine_thread import EngineThread
from paceline.errors import UsageError
from paceline.llm import LLM
from paceline.loading import copy_to_store
from paceline.server.admission import Admission
from paceline.server.app import App
from paceline.server.async_engine import AsyncEngine
from paceline.server.estimates_saver import EstimatesSaver
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.online.process import check_platform
from paceline.server.openai.serving import KEEP_ALIVE_S, MAX_BODY
from paceline.server.request_log import RequestLog
from paceline.server.routes import RouteError, RouteFile
from paceline.server.routes import load as load_routes
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.otel import spans_from_environment
from paceline.server.telemetry.route_accounting import RouteAccounting
from paceline.server.tool_prediction import PredictorFiles
from paceline.server.warm_prompts import WarmPrompt, route_prompts, warm
from paceline.target.hardware import limit_heap_arenas
from paceline.target.kv.disk_cache import cache_folder
from paceline.trace.online import OnlineTrainingConfig
from paceline.trace.recorder import Recorder
from paceline.web.access_log import log_unparsed
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import ApiKeys
from paceline.web.browser_guard import BrowserGuard, is_loopback, normal_origin
from paceline.web.connections import ConnectionLimits
from paceline.web.listen import DrainingServer, bound, check_listening, limited_uvicorn, log_to_stderr
from paceline.web.request_id import HEADER as REQUEST_ID

if TYPE_CHECKING:
    from paceline.trace.store import Store

log = logging.getLogger("paceline.server")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """The settings of `paceline serve`."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    draft_model: str | None = None
    trained: tuple[str, ...] | None = None  # heads of `paceline train`, by name or folder; None: the default
    drafters: tuple[str, ...] | None = None  # None: the default ones
    max_draft: int = 8  # drafted tokens in one pass at most, where neither request nor route says
    chat_template: str | None = None  # a Jinja template or its file; None: the model's own
    tool_format: str | None = None  # how the model writes tool calls; None: as its template shows
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_waiting=256))
    keys: str | None = None  # a file made by `paceline keys new`
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # without limits, beside those of the file
    served_model_name: tuple[str, ...] = ()  # the model's id, then other names; default: its own
    routes: str | None = None  # a file of routes
    advice: str | None = None  # a report of `paceline advise --json`, for the page
    store: str | None = None  # of traces; "none": none; None: the default one
    trace_text: bool = False
    remember: bool = True  # drafters may remember finished requests
    save_estimates: bool = True  # what the controller learned about drafters outlives the server
    single_user: bool = False  # requests without a key and a name are one user's, not strangers'
    online_training: OnlineTrainingConfig | None = None  # trains drafters on served text; None: off
    allowed_origins: tuple[str, ...] = ()  # whose pages may send requests; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names this server is reached by, besides localhost and addresses
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    log_level: str = "info"
    max_body: int = MAX_BODY  # bytes
    drain_s: float = 30.0  # for running requests to end when the server stops
    max_message: int = 0  # bytes of a WebSocket's message, for endpoints that `extend` adds; 0: none
    keep_alive_s: float = KEEP_ALIVE_S  # a comment after so long without an event of a stream; 0: none

    # The names of `remember`, `online_training` and `allowed_origins` before 0.2.
    learn: InitVar[bool | None] = None
    refresh: InitVar[OnlineTrainingConfig | None] = None
    cors: InitVar[tuple[str, ...] | None] = None

    def __post_init__(
        self, learn: bool | None, refresh: OnlineTrainingConfig | None, cors: tuple[str, ...] | None
    ) -> None:
        renamed = (
            ("learn", learn, "remember"),
            ("refresh", refresh, "online_training"),
            ("cors", cors, "allowed_origins"),
        )
        for old, value, new in renamed:
            if value is not None:
                log.warning("the setting %s is now called %s; the old name will be removed", old, new)
                object.__setattr__(self, new, value)
        SpecConfig(max_draft=self.max_draft)  # an error if it is not usable
        check_listening(self.port, self.log_level)
        if not all(self.api_keys):
            raise UsageError("--api-key is empty: give a key, or leave it out")
        if not all(self.served_model_name):
            raise UsageError("--served-model-name is empty: give a name, or leave it out")
        if self.online_training is not None:
            check_platform()
            if not self.trained:
                raise UsageError("--online-training needs a trained drafter: give one with --trained")
            if not self.remember:
                raise UsageError(
                    "online_training needs remember=True: without it there is no text to train on"
                )
        if not is_loopback(self.host) and self.keys is None and not self.api_keys:
            log.warning(
                "%s can be reached from outside without a key: consider --api-key or --keys", self.host
            )

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call the model; the first is its id."""
        return self.served_model_name or (default_name(self.model),)


def default_name(model: str) -> str:
    """The stem of a file and the name of a folder: their paths are nobody's business."""
    path = Path(model).expanduser()
    if model in hub.CATALOGUE or not path.exists():
        return model
    return path.resolve().name if path.is_dir() else path.stem


def build(settings: ServerSettings) -> App:
    """Loads the model and everything around it."""
    if settings.routes:
        _check_routes(settings.routes)
    warm_prompts = _warm_prompts(settings.routes) if settings.routes else []
    keys = ApiKeys(settings.api_keys, settings.keys) if settings.keys or settings.api_keys else None
    store = _store(settings)
    recorder = None if store is None else Recorder(store, with_text=settings.trace_text)
    spec = None if settings.drafters is None else SpecConfig(settings.drafters)
    llm = LLM(
        settings.model,
        draft_model=settings.draft_model,
        trained=settings.trained,
        chat_template=settings.chat_template,
        tool_format=settings.tool_format,
        spec=spec,
        config=settings.engine,
    )
    llm.name, *aliases = settings.names
    llm.spec = replace(llm.spec, max_draft=settings.max_draft)
    routes = RouteFile(settings.routes, tuple(llm.drafters)) if settings.routes else None
    llm.constraints.load()
    thread = EngineThread(llm.engine)
    saver = None
    if settings.save_estimates:
        llm.saved_estimates.load()
        saver = EstimatesSaver(llm.saved_estimates, thread)
    metrics = Metrics(
        llm.name,
        tuple(llm.drafters),
        running=lambda: thread.running,
        waiting=lambda: thread.waiting,
        cache_use=lambda: llm.target.cache_stats.live / llm.target.cache_stats.blocks,
        lost=None if recorder is None else recorder.lost,
        accounting=RouteAccounting(llm.cost or None),
        disk=lambda: llm.target.cache_stats.disk,
    )
    for sink in (metrics, recorder):
        if sink is not None:
            llm.engine.listen(sink)
    trainer, spans = _trainer(settings, llm, thread, metrics), spans_from_environment()
    if warm_prompts:
        warm(llm, thread, warm_prompts, keys.current().keys if keys else (), settings.single_user)
    local = is_loopback(settings.host) and not settings.allowed_hosts  # else it may be behind a proxy
    terms = (settings.remember, trainer, aliases, settings.single_user, local)
    admission = Admission(llm.name, metrics, keys, routes, spans, *terms)
    engine, files = settings.engine, None
    if engine.cache_disk_mb and settings.remember:
        files = PredictorFiles(cache_folder(engine.cache_dir), llm.name)
    close_store = store.close if store else None
    request_log = RequestLog(llm.name, metrics, recorder, spans, trainer, close_store, files)
    parallel = min(engine.max_batch, engine.max_waiting or engine.max_batch)
    return App(
        AsyncEngine(llm, thread, metrics, saver),
        admission,
        request_log,
        settings.max_body,
        parallel,
        settings.keep_alive_s,
        settings.connections.body_timeout_s,
        store,
        settings.advice,
    )


def _warm_prompts(file: str) -> list[WarmPrompt]:
    return route_prompts(load_routes(file).routes, Path(file).parent)


def _check_routes(file: str) -> None:
    """As `paceline routes check`: a broken file shows before the weights are read."""
    try:
        load_routes(file, DRAFTERS)
    except RouteError as error:
        name = Path(file).name
        named = (problem if name in problem else f"{name}: {problem}" for problem in error.problems)
        raise RouteError(*named) from None


def _trainer(
    settings: ServerSettings, llm: LLM, thread: EngineThread, metrics: Metrics
) -> OnlineTrainer | None:
    for one in llm.heads:
        metrics.drafter_version(one.kind, one.version.number)
    if settings.online_training is None:
        return None
    model = hub.resolve(settings.model)
    roots = [copy_to_store(one) for one in llm.heads]
    return OnlineTrainer(llm, thread, roots, model, metrics, settings.engine, settings.online_training)


def _store(settings: ServerSettings) -> "Store | None":
    if settings.store == "none":
        return None
    from paceline.trace.store import Store

    return Store.open(settings.store)


def asgi(app: App, settings: ServerSettings) -> ASGIApp:
    application = app.asgi()
    application.user_middleware.append(
        Middleware(
            BrowserGuard,
            origins=settings.allowed_origins,
            hosts=settings.allowed_hosts,
            loopback=is_loopback(settings.host),
        )
    )
    if settings.allowed_origins:
        application.user_middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=[normal_origin(origin) for origin in settings.allowed_origins],
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID, "retry-after"],
            )
        )
    return application


def uvicorn_config(app: App, settings: ServerSettings, port: int | None = None) -> uvicorn.Config:
    """port: another one than that of the settings."""

    def refused(error: ApiError) -> None:
        app.log.refused(error)
        log_unparsed(error)

    return limited_uvicorn(
        asgi(app, settings),
        settings.host,
        settings.port if port is None else port,
        settings.connections,
        settings.drain_s,
        refused,
        max_message=settings.max_message,
    )


def draining_server(
    config: uvicorn.Config, app: App, settings: ServerSettings, greeting: str
) -> DrainingServer:
    def stop() -> None:
        app.engine.thread.stop(0.0)

    return DrainingServer(config, app.drain, stop, settings.drain_s, greeting)


def run(settings: ServerSettings, extend: Callable[[App], object] | None = None) -> None:
    """Until SIGTERM or Ctrl-C. extend: adds endpoints of other parts of the package."""
    log_to_stderr(settings.log_level)
    sockets = bound(settings.host, settings.port)  # a port in use shows before the weights are read
    limit_heap_arenas()
    app = build(settings)
    if extend is not None:
        extend(app)
    config = uvicorn_config(app, settings)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    if not (settings.single_user or settings.keys or settings.api_keys):
        log.info(
            "requests without a `user` share no drafters' memory: --single-user, if only you use this server"
        )
    where = f"http://{settings.host}:{sockets[0].getsockname()[1]}"
    greeting = f"serving {settings.names[0]} on {where}/v1, and a page on {where}"
    draining_server(config, app, settings, greeting).run(sockets)
