"""How a server listens and stops: sockets, open files, log lines, and a uvicorn server that drains."""

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from types import FrameType
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from paceline.errors import SettingError, UsageError
from paceline.log import OneLine
from paceline.web.connections import ConnectionLimits, Connections, LimitedWebSocket, Refused

log = logging.getLogger("paceline.server")

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
LOG_FORMAT: Final = "%(asctime)s %(levelname)s %(name)s: %(message)s"
SPARE_FILES: Final = 128  # descriptors for everything but connections


def check_listening(port: int, log_level: str) -> None:
    if not 0 <= port < 65536:
        raise SettingError("port", port, "0 to 65535")
    if log_level not in LOG_LEVELS:
        raise SettingError("log_level", log_level, f"one of {', '.join(LOG_LEVELS)}")


def log_to_stderr(level: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter((logging.Formatter if level == "debug" else OneLine)(LOG_FORMAT))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("paceline").setLevel(level.upper())


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
        raise _cannot_listen(host, port, problem) from None
    return sockets


def _cannot_listen(host: str, port: int, problem: OSError) -> UsageError:
    why = problem.strerror or problem
    return UsageError(f"cannot listen on {host}:{port} ({why}): choose another --host or --port")


def limited_uvicorn(
    app: ASGIApp,
    host: str,
    port: int,
    limits: ConnectionLimits,
    drain_s: float,
    refused: Refused,
    files: int = 1,
    max_message: int = 0,
) -> uvicorn.Config:
    """uvicorn with limited connections and no log of its own.

    files: open files that a connection needs. max_message: bytes of a WebSocket's; 0: there are none.
    """
    return uvicorn.Config(
        app,
        host,
        port,
        http=Connections(_within_files(limits, files), refused).protocol,  # type: ignore[arg-type]  # called alike
        ws=LimitedWebSocket if max_message else "none",
        ws_max_size=max_message,
        ws_per_message_deflate=False,  # messages are small, and their lengths would tell what they hold
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=int(drain_s) + 10,
    )


def _within_files(limits: ConnectionLimits, files: int) -> ConnectionLimits:
    """Raises this process's limit of open files to what the connections need, or lowers their number."""
    if os.name != "posix":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = limits.max_connections * files + SPARE_FILES
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return limits
    if hard == resource.RLIM_INFINITY or hard >= needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
        return limits
    fewer = max(1, (hard - SPARE_FILES) // files)
    log.warning("open files are limited to %d: at most %d connections, see ulimit -n", hard, fewer)
    return replace(limits, max_connections=fewer)


class DrainingServer(uvicorn.Server):
    """Drains running requests at a stop, and ends them with an error when that takes too long.

    drain: called at once, may run in a signal handler. stop: ends what still runs, in the event loop.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        drain: Callable[[], None],
        stop: Callable[[], object],
        drain_s: float,
        greeting: str,
    ) -> None:
        super().__init__(config)
        self._greeting = greeting
        self._drain, self._stop = drain, stop
        self._drain_s = drain_s
        self._signal: int | None = None  # the first that asked for a stop
        self._loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        for one in sockets or ():
            try:
                one.listen(self.config.backlog)  # uvloop tells nobody if another server was faster
            except OSError as problem:
                host, port, *_ = one.getsockname()
                raise _cannot_listen(host, port, problem) from None
        await super().startup(sockets)
        if self.started:
            print(self._greeting, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        log.info("stopped%s", "" if self._signal is None else f" by {signal.Signals(self._signal).name}")

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's, which raises the signal again in the end: a clean stop would look like a crash."""
        again, self.should_exit = self.should_exit, True
        self._signal = self._signal or sig
        if again and sig == signal.SIGINT:
            self.force_exit = self._drain_s == 0  # a third one: whatever still holds a connection is cut
            self._drain_s = 0
        self._drain()
        if self._loop is not None:  # no thread: there may be no memory for one
            self._loop.call_soon_threadsafe(self._stop_after, self._drain_s, again)

    def _stop_after(self, seconds: float, again: bool) -> None:
        """In the event loop, which may log: a signal can come while a line is being written."""
        assert self._loop is not None
        requests = len(self.server_state.tasks)
        if requests and not again:
            count = f"{requests} request{'s' if requests > 1 else ''}"
            log.info("stopping: waiting up to %g s for %s; Ctrl-C again stops at once", seconds, count)
        self._loop.call_later(seconds, self._stop)
