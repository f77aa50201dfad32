"""Every answer has a name: the header x-request-id, the answer's `id`, and its name in the traces."""

import re
import secrets
from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER: Final = "x-request-id"
_USABLE: Final = re.compile(r"[!-~]{1,64}")
_KEY: Final = "paceline.request_id"


def new_request_id(scope: Scope, prefix: str, length: int = 12) -> str:
    """A new name for the answer to a request; it ends with the client's own, if that gave one.

    `length`: of its random part, in bytes. A client's name alone could be that of another request.
    """
    given = Headers(scope=scope).get(HEADER, "")
    ending = f"-{given}" if _USABLE.fullmatch(given) else ""
    scope[_KEY] = name = f"{prefix}{secrets.token_hex(length)}{ending}"
    return name


class RequestIds:
    """Puts the name on whatever is answered, errors among it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        new_request_id(scope, "req-")

        async def named_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = scope[_KEY]
            await send(message)

        await self._app(scope, receive, named_send)
