"""The access log: one line for each request, with its status, tokens, passes and times; refusals included.

No line has a prompt, an answer, a key or a query string.
"""

import logging
import time
from collections.abc import Iterator
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.errors import short
from paceline.server.admission import RequestContext
from paceline.server.request_log import finish_of
from paceline.web.api_errors import ApiError, api_error, error_code
from paceline.web.request_id import request_id

log = logging.getLogger("paceline.access")

PROBES: Final = frozenset(
    {"/health", "/ready", "/metrics", "/version", "/openapi.json"}
)  # at the debug level


class AccessLog:
    """Middleware that logs a request when its last byte is sent, or its client has left."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

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
            level = logging.DEBUG if scope["path"] in PROBES and status == 200 else logging.INFO
            if log.isEnabledFor(level):
                log.log(level, "%s", " ".join(_parts(scope, status, time.perf_counter() - started)))


def log_unparsed(error: ApiError) -> None:
    """A request that ended before its headers were read."""
    log.info("- - %d error=%s", error.status, error_code(error))


def _parts(scope: Scope, status: int, seconds: float) -> Iterator[str]:
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
        yield from _figures(context)
    elif (error := state.get("error")) is not None:
        if (refusal := api_error(error).refusal) is not None:
            yield f"refused={refusal}"
        yield f"error={error_code(error)}"


def _figures(context: RequestContext) -> Iterator[str]:
    """The sums over all outputs; each prompt counts once. Times are seconds from the arrival."""
    outputs = context.outputs
    prompts = [output.seq for output in outputs if output.seq.params.choice == 0]
    stats = [output.stats() for output in outputs]
    yield f"route={context.route.name}"
    yield f"prompt={sum(seq.prompt_len for seq in prompts)}"
    yield f"cached={sum(seq.cached for seq in prompts)}"
    yield f"output={sum(s.output_tokens for s in stats)}"
    yield f"passes={sum(s.passes for s in stats)}"
    if stats:
        yield f"queue={min(s.queue_s for s in stats):.3f}"
        firsts = [s.first_token_s for s in stats if s.first_token_s is not None]
        yield f"first={min(firsts):.3f}" if firsts else "first=-"
        yield f"finish={','.join(sorted({finish_of(output) for output in outputs}))}"
    if context.refusal is not None:
        yield f"refused={context.refusal}"
    if context.error is not None:
        yield f"error={context.error}"
