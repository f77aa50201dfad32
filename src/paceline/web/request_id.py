"""Request ids: the header x-request-id, the response's `id`, and the id in the traces are one."""

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_USABLE: Final = re.compile(r"[!-~]{1,64}")
_KEY: Final = "paceline.request_id"


def new_request_id(scope: Scope, prefix: str, length: int = 12) -> str:
    """A new id for a response. It ends with the client's own id, if it sent one.

    length: of the random part, in bytes. A client's id alone could be that of another request.
    """
    client_id = Headers(scope=scope).get(HEADER, "")
    ending = f"-{client_id}" if _USABLE.fullmatch(client_id) else ""
    scope[_KEY] = new = f"{prefix}{secrets.token_hex(length)}{ending}"
    return new


def request_id(scope: Scope) -> str:
    """The id of the response; "-" if it has none."""
    return str(scope.get(_KEY, "-"))


class RequestIds:
    """Middleware that adds the id to every response, errors included."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        new_request_id(scope, "req-")

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = scope[_KEY]
            await send(message)

        await self._app(scope, receive, send_with_id)
