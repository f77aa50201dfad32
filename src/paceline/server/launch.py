"""Builds a server from its settings and runs it."""

import logging
import signal
import socket
import threading
from dataclasses import InitVar, dataclass, field, replace
from types import FrameType

import uvicorn
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from paceline import hub
from paceline.config import EngineConfig, SpecConfig
from paceline.errors import SettingError, UsageError
from paceline.llm import LLM
from paceline.loading import copy_to_store
from paceline.server.admission import Admission
from paceline.server.app import App
from paceline.server.async_engine import AsyncEngine, EngineThread
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.online.process import check_platform
from paceline.server.openai.serving import KEEP_ALIVE_S, MAX_BODY
from paceline.server.request_log import RequestLog
from paceline.server.routes import RouteFile
from paceline.server.routes import load as load_routes
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.otel import spans_from_environment
from paceline.target.hardware import limit_heap_arenas
from paceline.trace.online import OnlineTrainingConfig
from paceline.trace.recorder import Recorder
from paceline.web.api_keys import KeyFile

log = logging.getLogger("paceline.server")

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
    routes: str | None = None  # a file of routes
    store: str | None = None  # of traces; "none": none; None: the default one
    trace_text: bool = False
    remember: bool = True  # drafters may remember finished requests
    online_training: OnlineTrainingConfig | None = None  # trains drafters on served text; None: off
    cors: tuple[str, ...] = ()  # origins whose pages may send requests
    max_body: int = MAX_BODY  # bytes
    drain_s: float = 30.0  # for running requests to end when the server stops
    keep_alive_s: float = KEEP_ALIVE_S  # a comment after so long without an event of a stream; 0: none

    learn: InitVar[bool | None] = None  # the names of `remember` and `online_training` before 0.2
    refresh: InitVar[OnlineTrainingConfig | None] = None

    def __post_init__(self, learn: bool | None, refresh: OnlineTrainingConfig | None) -> None:
        for old, value, new in (("learn", learn, "remember"), ("refresh", refresh, "online_training")):
            if value is not None:
                log.warning("the setting %s is now called %s; the old name will be removed", old, new)
                object.__setattr__(self, new, value)
        SpecConfig(max_draft=self.max_draft)  # an error if it is not usable
        if not 0 <= self.port < 65536:
            raise SettingError("port", self.port, "0 to 65535")
        if self.online_training is not None:
            check_platform()
            if not self.trained:
                raise UsageError("--online-training needs a trained drafter: give one with --trained")
            if not self.remember:
                raise UsageError(
                    "online_training needs remember=True: without it there is no text to train on"
                )
        if self.host not in LOOPBACK and self.keys is None:
            log.warning("%s can be reached from outside without a key: consider --keys", self.host)


def build(settings: ServerSettings) -> App:
    """Loads the model and everything around it."""
    if settings.routes:
        load_routes(settings.routes)  # a broken file shows before the weights are read
    keys = KeyFile(settings.keys) if settings.keys else None
    recorder = _recorder(settings)
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
    llm.spec = replace(llm.spec, max_draft=settings.max_draft)
    routes = RouteFile(settings.routes, tuple(llm.drafters)) if settings.routes else None
    thread = EngineThread(llm.engine)
    metrics = Metrics(
        llm.name,
        tuple(llm.drafters),
        running=lambda: thread.running,
        waiting=lambda: thread.waiting,
        cache_use=lambda: llm.target.cache_stats.live / llm.target.cache_stats.blocks,
    )
    for sink in (metrics, recorder):
        if sink is not None:
            llm.engine.listen(sink)
    trainer, spans = _trainer(settings, llm, thread, metrics), spans_from_environment()
    admission = Admission(llm.name, metrics, keys, routes, spans, settings.remember, trainer)
    request_log = RequestLog(llm.name, metrics, recorder, spans, trainer)
    engine = settings.engine
    parallel = min(engine.max_batch, engine.max_waiting or engine.max_batch)
    return App(
        AsyncEngine(llm, thread, metrics),
        admission,
        request_log,
        settings.max_body,
        parallel,
        settings.keep_alive_s,
    )


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


def _recorder(settings: ServerSettings) -> Recorder | None:
    if settings.store == "none":
        return None
    from paceline.trace.store import Store

    return Recorder(Store.open(settings.store), with_text=settings.trace_text)


def asgi(app: App, settings: ServerSettings) -> ASGIApp:
    application = app.asgi()
    if settings.cors:
        application.user_middleware.append(
            Middleware(
                CORSMiddleware, allow_origins=list(settings.cors), allow_methods=["*"], allow_headers=["*"]
            )
        )
    return application


class _Server(uvicorn.Server):
    """Drains running requests at a stop, and ends them with an error when that takes too long."""

    def __init__(self, config: uvicorn.Config, app: App, drain_s: float, greeting: str) -> None:
        super().__init__(config)
        self._greeting = greeting
        self._app = app
        self._drain_s = drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            log.info(self._greeting)
            print(self._greeting, flush=True)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's, which raises the signal again in the end: a clean stop would look like a crash."""
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
        self.should_exit = True
        self._app.drain()
        late = threading.Timer(self._drain_s, self._app.engine.thread.stop, args=(5.0,))
        late.daemon = True
        late.start()


def bound(host: str, port: int) -> list[socket.socket]:
    """A socket for each address of the host. Nobody can connect until the server listens."""
    sockets: list[socket.socket] = []
    try:
        for family, kind, proto, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            sockets.append(one := socket.socket(family, kind, proto))
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            one.bind(address)
    except OSError as problem:
        for one in sockets:
            one.close()
        why = problem.strerror or problem
        raise UsageError(f"cannot listen on {host}:{port} ({why}): choose another --host or --port") from None
    return sockets


def run(settings: ServerSettings) -> None:
    """Until SIGTERM or Ctrl-C."""
    sockets = bound(settings.host, settings.port)  # a port in use shows before the weights are read
    limit_heap_arenas()
    app = build(settings)
    config = uvicorn.Config(
        asgi(app, settings),
        settings.host,
        settings.port,
        log_level="warning",
        timeout_graceful_shutdown=int(settings.drain_s) + 10,
    )
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    where = f"http://{settings.host}:{sockets[0].getsockname()[1]}/v1"
    _Server(config, app, settings.drain_s, f"serving {settings.model} on {where}").run(sockets)
