"""Paths for those who watch the server; no key is asked for."""

from collections.abc import Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline import __version__
from paceline.server.async_engine import AsyncEngine
from paceline.server.openai.openapi import document
from paceline.server.reception import Reception
from paceline.web.plumbing import Handler


def watched(
    service: AsyncEngine, reception: Reception, ready: Callable[[], bool]
) -> list[tuple[str, Handler, str]]:
    """Path, handler and method of each."""

    async def health(request: Request) -> Response:
        alive = service.worker.alive
        return JSONResponse({"status": "ok" if alive else "the engine has stopped"}, 200 if alive else 503)

    async def is_ready(request: Request) -> Response:
        return JSONResponse({"ready": ready()}, 200 if ready() else 503)

    async def metrics(request: Request) -> Response:
        body, kind = reception.metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": kind})

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def openapi(request: Request) -> Response:
        return JSONResponse(document(service.llm.name))

    found = {
        "/health": health,
        "/ready": is_ready,
        "/metrics": metrics,
        "/version": version,
        "/openapi.json": openapi,
    }
    return [(path, handler, "GET") for path, handler in found.items()]
