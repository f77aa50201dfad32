"""Builds a gate from its settings and runs it."""

import gc
import logging
import signal
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import uvicorn
from starlette.middleware import Middleware

from paceline.errors import UsageError
from paceline.gate.gateway.app import MAX_BODY, Changed, GateApp, Plans
from paceline.gate.gateway.config import GateConfigError, GateFile
from paceline.gate.promotion import Promoter
from paceline.gate.store import GateStore
from paceline.web.access_log import log_unparsed
from paceline.web.api_errors import ApiError, Handler
from paceline.web.api_keys import ApiKeys
from paceline.web.browser_guard import BrowserGuard, is_loopback
from paceline.web.connections import ConnectionLimits
from paceline.web.listen import DrainingServer, bound, check_listening, limited_uvicorn, log_to_stderr
from paceline.web.otel import exporter_from_environment

log = logging.getLogger("paceline.gate")


@dataclass(frozen=True, slots=True)
class GateSettings:
    """The settings of `paceline gate serve`; upstreams and routes are in the file `config`."""

    config: str
    host: str = "127.0.0.1"
    port: int = 8080
    keys: str | None = None  # a file made by `paceline keys new`
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    allowed_hosts: tuple[str, ...] = ()  # names this gate is reached by, besides localhost and addresses
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    store: str | None = None  # of pairs, feedback and rollouts; "none": none; None: the default one
    log_level: str = "info"
    max_body: int = MAX_BODY  # bytes
    drain_s: float = 30.0  # for running requests to end when the gate stops

    def __post_init__(self) -> None:
        check_listening(self.port, self.log_level)
        if not all(self.api_keys):
            raise UsageError("--api-key is empty: give a key, or leave it out")
        if not is_loopback(self.host) and self.keys is None and not self.api_keys:
            log.warning(
                "%s can be reached from outside without a key: consider --api-key or --keys", self.host
            )


def build(settings: GateSettings, files: Mapping[str, Handler] | None = None) -> GateApp:
    """files: of the page, by path."""
    try:
        file = GateFile(settings.config)
    except GateConfigError as error:
        name = Path(settings.config).name
        raise GateConfigError(*(p if name in p else f"{name}: {p}" for p in error.problems)) from None
    keys = ApiKeys(settings.api_keys, settings.keys) if settings.keys or settings.api_keys else None
    store = None if settings.store == "none" else GateStore.open(settings.store)
    if store is None and any(route.mirror is not None for route in file.current().routes):
        raise UsageError("a route has a mirror, and there is no store for its pairs: leave out --store none")
    return GateApp(
        file,
        keys,
        exporter_from_environment(),
        store=store,
        promoter=partial(_promoter, settings.store),
        max_body=settings.max_body,
        body_timeout_s=settings.connections.body_timeout_s,
        store_url=settings.store,
        local=is_loopback(settings.host) and not settings.allowed_hosts,  # else it may be behind a proxy
        files=files,
    )


def _promoter(url: str | None, store: GateStore, plans: Plans, changed: Changed) -> Promoter:
    """Verdicts are computed in a process of their own: seconds of arithmetic would hold requests up."""
    executor = ProcessPoolExecutor(
        1, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN)
    )  # Ctrl-C is for the gate, which ends it
    return Promoter(store, url, plans, changed, executor)


def uvicorn_config(app: GateApp, settings: GateSettings, port: int | None = None) -> uvicorn.Config:
    """port: another one than that of the settings."""
    application = app.asgi()
    application.user_middleware.append(
        Middleware(BrowserGuard, hosts=settings.allowed_hosts, loopback=is_loopback(settings.host))
    )

    def refused(error: ApiError) -> None:
        app.refused(error)
        log_unparsed(error)

    chosen = settings.port if port is None else port
    return limited_uvicorn(
        application, settings.host, chosen, settings.connections, settings.drain_s, refused, files=2
    )


def run(settings: GateSettings, files: Mapping[str, Handler] | None = None) -> None:
    """Until SIGTERM or Ctrl-C. files: of the page, by path."""
    log_to_stderr(settings.log_level)
    sockets = bound(settings.host, settings.port)
    app = build(settings, files)
    config = uvicorn_config(app, settings)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # modules are no garbage: a pass over them would hold up every stream
    where = f"http://{settings.host}:{sockets[0].getsockname()[1]}"
    greeting = f"the gate is on {where}/v1" + (f", and its page on {where}" if files else "")
    DrainingServer(config, app.drain, app.stop, settings.drain_s, greeting).run(sockets)
