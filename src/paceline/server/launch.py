"""Builds a server from its settings and runs it."""

import gc
import logging
import signal
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from paceline import hub
from paceline.config import EngineConfig, SpecConfig
from paceline.drafters import DRAFTERS
from paceline.drafters.imported import is_import_path
from paceline.engine.engine_thread import EngineThread, PassTurns
from paceline.errors import UsageError
from paceline.limits import available_memory
from paceline.llm import LLM
from paceline.loading import copy_to_store, draft_model_path, import_drafters
from paceline.server.admission import Admission
from paceline.server.app import IGNORED_HEADER, App
from paceline.server.async_engine import AsyncEngine
from paceline.server.estimates_saver import EstimatesSaver
from paceline.server.model_pool import ModelPool, PoolLimits, ServedModel
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.online.process import check_platform
from paceline.server.openai.serving import KEEP_ALIVE_S, MAX_BODY
from paceline.server.preload import preload
from paceline.server.recent_outputs import RecentOutputs
from paceline.server.request_log import RequestLog
from paceline.server.routes import RouteError, RouteFile, import_paths
from paceline.server.routes import load as load_routes
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.otel import spans_from_environment
from paceline.server.tool_prediction import PredictorFiles
from paceline.server.warm_prompts import WarmPrompt, route_prompts, warm
from paceline.target.hardware import limit_heap_arenas
from paceline.target.kv.disk_cache import cache_folder
from paceline.target.load import plan_load
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

FREE_SHARE: Final = 0.8  # of the free memory that several models may have, where no bound is given


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """One model of a server."""

    model: str
    served_model_name: tuple[str, ...] = ()  # the model's id, then other names; default: its own
    draft_model: str | None = None
    trained: tuple[str, ...] | None = None  # heads of `paceline train`, by name or folder; None: the default
    drafters: tuple[str, ...] | None = None  # None: the default ones
    max_draft: int = 8  # drafted tokens in one pass at most, where neither request nor route says
    chat_template: str | None = None  # a Jinja template or its file; None: the model's own
    tool_format: str | None = None  # how the model writes tool calls; None: as its template shows
    engine: EngineConfig = field(default_factory=lambda: EngineConfig(max_waiting=256))

    def check(self) -> None:
        SpecConfig(max_draft=self.max_draft)  # an error if it is not usable
        if not all(self.served_model_name):
            raise UsageError("--served-model-name is empty: give a name, or leave it out")

    def __post_init__(self) -> None:
        self.check()

    @property
    def names(self) -> tuple[str, ...]:
        """What clients call the model; the first name is its id."""
        return self.served_model_name or (default_name(self.model),)


@dataclass(frozen=True, slots=True)
class ServerSettings(ModelSettings):
    """The settings of `paceline serve`: those of its first model, and those of the server."""

    further_models: tuple[ModelSettings, ...] = ()  # loaded when a request names them
    max_loaded: int = 0  # models in memory at once; 0: as many as the memory holds
    models_memory_mb: int = 0  # of all of them; 0: most of what is free at the start
    host: str = "127.0.0.1"
    port: int = 8000
    keys: str | None = None  # a file made by `paceline keys new`
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # without limits, beside those of the file
    routes: str | None = None  # a file of routes
    advice: str | None = None  # a report of `paceline advise --json`, for the page
    store: str | None = None  # of traces; "none": none; None: the default one
    trace_text: bool = False
    remember: bool = True  # drafters may remember finished requests
    save_estimates: bool = True  # what the controller learned about drafters outlives the server
    preload: bool = True  # what was used last before the end is made ready again at the start
    single_user: bool = False  # requests without a key and a name are one user's, not strangers'
    online_training: OnlineTrainingConfig | None = None  # trains drafters on served text; None: off
    allowed_origins: tuple[str, ...] = ()  # whose pages may send requests; "*": all
    allowed_hosts: tuple[str, ...] = ()  # names this server is reached by, besides localhost and addresses
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    log_level: str = "info"
    lenient: bool = False  # unknown parameters of requests are ignored, not refused
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
        self.check()
        check_listening(self.port, self.log_level)
        if not all(self.api_keys):
            raise UsageError("--api-key is empty: give a key, or leave it out")
        if self.online_training is not None:
            check_platform()
            if not self.trained:
                raise UsageError("--online-training needs a trained drafter: give one with --trained")
            if not self.remember:
                raise UsageError(
                    "online_training needs remember=True: without it there is no text to train on"
                )
        if self.further_models and self.online_training is not None:
            raise UsageError("--online-training is for a server of one model: serve the others elsewhere")
        if not is_loopback(self.host) and self.keys is None and not self.api_keys:
            log.warning(
                "%s can be reached from outside without a key: consider --api-key or --keys", self.host
            )

    @property
    def models(self) -> tuple[ModelSettings, ...]:
        """The first is the default, and loaded at the start."""
        return self, *self.further_models


def default_name(model: str) -> str:
    """The stem of a file and the name of a folder: their paths are nobody's business."""
    path = Path(model).expanduser()
    if model in hub.CATALOGUE or not path.exists():
        return model
    return path.resolve().name if path.is_dir() else path.stem


def build(settings: ServerSettings) -> App:
    """Loads the first model, and everything around all of them."""
    imported = _imported(settings)
    if settings.routes:
        _check_routes(settings.routes, imported)
    keys = ApiKeys(settings.api_keys, settings.keys) if settings.keys or settings.api_keys else None
    loader = _ModelLoader(settings, keys, imported)
    models = ModelPool(
        [loader.served(one) for one in settings.models], loader.load, _limits(settings), loader.size
    )
    llm, thread = models.load_default()
    # Which drafters a model has is known once it is loaded: of several, not each has those of all routes.
    drafters = (*DRAFTERS, *imported.values()) if settings.further_models else tuple(llm.drafters)
    routes = RouteFile(settings.routes, drafters, imported) if settings.routes else None
    trainer, spans = _trainer(settings, llm, thread, models.default.metrics), spans_from_environment()
    local = is_loopback(settings.host) and not settings.allowed_hosts  # else it may be behind a proxy
    terms = (settings.remember, trainer, settings.single_user, local)
    admission = Admission(models, keys, routes, spans, *terms)
    engine, store, files = settings.engine, loader.store, None
    if engine.cache_disk_mb and settings.remember:
        files = PredictorFiles(cache_folder(engine.cache_dir), models.default.name)
    close_store = store.close if store else None
    request_log = RequestLog(models, loader.recorder, spans, trainer, close_store, files)
    parallel = min(engine.max_batch, engine.max_waiting or engine.max_batch)
    return App(
        models,
        admission,
        request_log,
        settings.max_body,
        parallel,
        settings.keep_alive_s,
        settings.connections.body_timeout_s,
        store,
        settings.advice,
        settings.lenient,
    )


class _ModelLoader:
    """Loads the models of a server, each with what is around its engine."""

    def __init__(self, settings: ServerSettings, keys: ApiKeys | None, imported: Mapping[str, str]) -> None:
        """imported: names of drafters by import path; every model gets its own of each."""
        self._settings, self._keys, self._imported = settings, keys, imported
        self._by_name = {one.names[0]: one for one in settings.models}
        self._warm_prompts = _warm_prompts(settings.routes) if settings.routes else []
        self._turns = PassTurns() if len(settings.models) > 1 else None
        self.store = _store(settings)
        self.recorder = None if self.store is None else Recorder(self.store, with_text=settings.trace_text)

    def served(self, settings: ModelSettings) -> ServedModel:
        """The model before it is loaded. Of several, the files of each are looked at."""
        metrics = Metrics(
            settings.names[0],
            (),
            running=lambda: served.running,
            waiting=lambda: served.queued,
            cache_use=lambda: served.cache.live / served.cache.blocks if served.cache else 0.0,
            lost=None if self.recorder is None else self.recorder.lost,
            disk=lambda: served.cache.disk if served.cache else None,
        )
        served = ServedModel(settings.names, metrics)
        if len(self._settings.models) > 1:
            served.nbytes = self.size(served)
        return served

    def size(self, model: ServedModel) -> int:
        return _memory_bytes(self._by_name[model.name])

    def _default_drafters(self, llm: LLM, settings: ModelSettings) -> tuple[str, ...]:
        """Without those that are imported for other models or for routes only."""
        own = {self._imported[name] for name in settings.drafters or () if name in self._imported}
        others = set(self._imported.values()) - own - set(settings.drafters or ())
        return tuple(name for name in llm.spec.drafters if name not in others)

    def load(self, model: ServedModel) -> AsyncEngine:
        server, settings = self._settings, self._by_name[model.name]
        llm = LLM(
            settings.model,
            draft_model=settings.draft_model,
            drafters=tuple(self._imported),
            trained=settings.trained,
            chat_template=settings.chat_template,
            tool_format=settings.tool_format,
            spec=None if settings.drafters is None else SpecConfig(settings.drafters),
            config=settings.engine,
        )
        llm.name = model.name
        llm.spec = replace(
            llm.spec, max_draft=settings.max_draft, drafters=self._default_drafters(llm, settings)
        )
        llm.constraints.load()
        _ = llm.tokenizer.longest_piece  # else the first long prompt waits for it
        thread, saver = EngineThread(llm.engine, self._turns), None
        if server.save_estimates:
            llm.saved_estimates.load()
            saver = EstimatesSaver(llm.saved_estimates, thread)
        model.metrics.set_model(tuple(llm.drafters), llm.cost or None)
        for head in llm.heads:
            model.metrics.drafter_version(head.kind, head.version.number)
        for sink in (model.metrics, self.recorder):
            if sink is not None:
                llm.engine.listen(sink)
        prompts = [one for one in self._warm_prompts if one.request.model in (None, *model.names)]
        keys = self._keys.current().keys if self._keys and prompts else ()
        warm(llm, thread, prompts, keys, server.single_user)
        compiled, engine = None, settings.engine
        if engine.cache_disk_mb and llm.target.cache_stats.disk is not None:
            recent = RecentOutputs(cache_folder(engine.cache_dir), llm.target.fingerprint)
            compiled = recent.note
            if server.preload:
                preload(llm, thread, recent)
        return AsyncEngine(llm, thread, model.metrics, saver, compiled)


def _memory_bytes(settings: ModelSettings) -> int:
    """As the backend that would run it holds them: weights and caches, those of a draft model too."""
    paths = [hub.resolve(settings.model)]
    if settings.draft_model:
        paths.append(draft_model_path(settings.draft_model))
    return sum(plan_load(path, settings.engine).total for path in paths)


def _limits(settings: ServerSettings) -> PoolLimits:
    """Of several models, those without a bound get most of the memory that is free now."""
    memory_mb = settings.models_memory_mb
    if len(settings.models) > 1 and not memory_mb and not settings.max_loaded:
        memory_mb = int(FREE_SHARE * (available_memory() or 0)) >> 20
    return PoolLimits(settings.max_loaded, memory_mb, settings.engine.max_waiting)


def _warm_prompts(file: str) -> list[WarmPrompt]:
    return route_prompts(load_routes(file).routes, Path(file).parent)


def _imported(settings: ServerSettings) -> dict[str, str]:
    """Names of drafters by import path, of models and routes: a wrong one shows before weights are read."""
    named = [name for model in settings.models for name in model.drafters or ()]
    paths = [name for name in named if is_import_path(name)]
    paths += import_paths(settings.routes) if settings.routes else []
    return {path: drafter.name for path, drafter in import_drafters(paths).items()}


def _check_routes(file: str, imported: Mapping[str, str]) -> None:
    """As `paceline routes check`: a broken file shows before the weights are read."""
    try:
        load_routes(file, {*DRAFTERS, *imported.values()}, imported)
    except RouteError as error:
        name = Path(file).name
        named = (problem if name in problem else f"{name}: {problem}" for problem in error.problems)
        raise RouteError(*named) from None


def _trainer(
    settings: ServerSettings, llm: LLM, thread: EngineThread, metrics: Metrics
) -> OnlineTrainer | None:
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
                expose_headers=[REQUEST_ID, "retry-after", IGNORED_HEADER],
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
    return DrainingServer(config, app.drain, app.models.end_requests, settings.drain_s, greeting)


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
    if not settings.further_models:
        gc.collect()
        gc.freeze()  # modules and the one model are no garbage: a pass over them would hold up every stream
    if not (settings.single_user or settings.keys or settings.api_keys):
        log.info(
            "requests without a `user` share no drafters' memory: --single-user, if only you use this server"
        )
    where = f"http://{settings.host}:{sockets[0].getsockname()[1]}"
    served = ", ".join(one.names[0] for one in settings.models)
    greeting = f"serving {served} on {where}/v1, and a page on {where}"
    draining_server(config, app, settings, greeting).run(sockets)
