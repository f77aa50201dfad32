"""The access log: one line for each request, with its status, time, key, and what its application adds.

No line has a prompt, an answer, a key or a query string.
"""

import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import short
from paceline.web.api_errors import ApiError, api_error, error_code
from paceline.web.request_id import request_id

log = logging.getLogger("paceline.access")

# At the debug level: what monitors, and the page, ask for again and again.
PROBES: Final = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/openapi.json"})
PAGE: Final = ("/assets/", "/page/")


class AccessLog:
    """Middleware that logs a request when its last byte is sent, or its client has left.

    figures: the parts of a line for the `context` that the application has put into the request's state.
    """

    def __init__(self, app: ASGIApp, figures: Callable[[Any], Iterator[str]]) -> None:
        self._app, self._figures = app, figures

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status = time.perf_counter(), 0

        async def send_noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        finally:
            probe = scope["path"] in PROBES or scope["path"].startswith(PAGE)
            level = logging.DEBUG if probe and status in (200, 304) else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", " ".join(self._parts(scope, status, time.perf_counter() - started)))

    def _parts(self, scope: Scope, status: int, seconds: float) -> Iterator[str]:
        state = scope.get("state", {})
        path = scope["path"]
        yield scope["method"]
        yield path if path.isascii() and path.isprintable() and " " not in path else short(path)
        yield str(status)
        yield f"{seconds:.3f}s"
        yield f"id={request_id(scope)}"
        if (key := state.get("key")) is not None:
            yield f"key={key.name}"
        if (context := state.get("context")) is not None:
            yield from self._figures(context)
        elif (error := state.get("error")) is not None:
            if (refusal := api_error(error).refusal) is not None:
                yield f"refused={refusal}"
            yield f"error={error_code(error)}"


def log_unparsed(error: ApiError) -> None:
    """A request that ended before its headers were read."""
    log.info("- - %d error=%s", error.status, error_code(error))
