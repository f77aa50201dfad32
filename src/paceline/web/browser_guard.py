"""Browsers: a page of another site may not use a server on this machine or in this network.

Two ways there are closed: requests with a foreign `Origin` (cross-site requests), and on a loopback address
those with a foreign `Host` (DNS rebinding, where the page's own name is made to point here). A `Host` that is
an IP address cannot be rebound. Programs send no `Origin`, and the name or address they connect to as `Host`.
"""

from collections.abc import Collection
from ipaddress import ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from paceline.web.api_errors import FORBIDDEN, ApiError

ANY = "*"


class BrowserGuard:
    """Middleware that refuses them with a 403. origins, hosts: those allowed; `*` is all of them."""

    def __init__(
        self, app: ASGIApp, origins: Collection[str] = (), hosts: Collection[str] = (), loopback: bool = True
    ) -> None:
        self._app = app
        self._origins = frozenset(map(normal_origin, origins))
        self._hosts = frozenset(host.lower() for host in hosts)
        self._checks_host = (loopback or bool(hosts)) and ANY not in self._hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket")
        error = self._problem(Headers(scope=scope)) if guarded else None
        if error is None:
            await self._app(scope, receive, send)
        else:
            scope.setdefault("state", {})["error"] = error
            await error.response()(scope, receive, send)

    def _problem(self, headers: Headers) -> ApiError | None:
        host, origin = headers.get("host"), headers.get("origin")
        name = None if host is None else host_name(host)
        if self._checks_host and name is not None and not self._may_be_host(name):
            return _forbidden("Host", "a name of this server", "allowed-host NAME")
        if origin is None or self._may_ask(origin.lower(), host, name):
            return None
        return _forbidden("Origin", "an allowed origin, or none", "allowed-origin ORIGIN")

    def _may_be_host(self, name: str) -> bool:
        return name in self._hosts or is_local_name(name) or is_address(name)

    def _may_ask(self, origin: str, host: str | None, name: str | None) -> bool:
        """An allowed origin, or a page that this server itself has sent."""
        if origin in self._origins or ANY in self._origins:
            return True
        own = host is not None and origin in (f"http://{host.lower()}", f"https://{host.lower()}")
        return own and name is not None and self._may_be_host(name)


def _forbidden(header: str, expected: str, option: str) -> ApiError:
    return ApiError(
        403,
        f"the header {header} is not allowed: expected {expected}; the server's option --{option} allows it",
        "permission_error",
        code=f"{header.lower()}_not_allowed",
        refusal=FORBIDDEN,
    )


def normal_origin(origin: str) -> str:
    """As browsers write it."""
    origin = origin.lower()
    return origin if origin.endswith("://") else origin.removesuffix("/")


def host_name(host: str) -> str:
    """Without the port: localhost:8000, 127.0.0.1:8000, [::1]:8000."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().removesuffix(".")


def is_local_name(name: str) -> bool:
    return name == "localhost" or name.endswith(".localhost")


def is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """For the address that a server listens on."""
    return is_local_name(host) or (is_address(host) and ip_address(host).is_loopback)
