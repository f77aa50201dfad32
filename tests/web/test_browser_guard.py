"""Which requests a page in a browser may send, by Origin and Host."""

import asyncio
from collections.abc import Sequence

import httpx
import pytest
from starlette.responses import PlainTextResponse

from paceline.web.browser_guard import BrowserGuard, host_name, is_loopback


def status(
    host: str | None = "localhost:8000",
    origin: str | None = None,
    origins: Sequence[str] = (),
    hosts: Sequence[str] = (),
    loopback: bool = True,
) -> int:
    guard = BrowserGuard(PlainTextResponse("ok"), origins, hosts, loopback)
    headers = {name: value for name, value in (("host", host), ("origin", origin)) if value is not None}

    async def ask() -> int:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(guard)) as client:
            request = client.build_request("GET", "http://x/", headers=headers)
            if host is None:
                del request.headers["host"]
            return (await client.send(request)).status_code

    return asyncio.run(ask())


def test_programs_may_ask() -> None:
    assert status() == status(None) == status("127.0.0.1:1") == status("a.localhost") == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://localhost:3000", "file://"])
def test_other_origins_may_not(origin: str) -> None:
    assert status(origin=origin) == 403
    assert status(origin=origin, loopback=False) == 403
    assert status(origin=origin, origins=[origin]) == 200
    assert status(origin=origin.upper(), origins=[f"{origin}/"]) == 200
    assert status(origin=origin, origins=["*"]) == 200
    assert status(origin=origin, origins=["https://other.example"]) == 403


def test_a_page_of_the_server_itself_may() -> None:
    assert status("localhost:8000", "http://localhost:8000") == 200
    assert status("[::1]:8000", "https://[::1]:8000") == 200
    assert status("localhost:8000", "http://localhost:8001") == 403


def test_foreign_names_are_refused_on_a_loopback_address() -> None:
    assert status("evil.example") == 403
    assert status("evil.example", loopback=False) == 200
    assert status("here.example:80", hosts=["Here.example"]) == 200
    assert status("evil.example", hosts=["here.example"], loopback=False) == 403
    assert status("evil.example", hosts=["*"]) == 200


def test_a_rebound_name_is_no_origin_of_the_servers_own() -> None:
    """Where names are not checked, a page's own name is still not trusted as one of the server."""
    assert status("evil.example:8000", "http://evil.example:8000", loopback=False) == 403
    assert status("here.example", "http://here.example", hosts=["here.example"]) == 200


@pytest.mark.parametrize(
    ("host", "name"), [("a:1", "a"), ("A", "a"), ("[::1]:8", "::1"), ("[::1]", "::1"), ("a.", "a"), ("", "")]
)
def test_the_name_in_a_host_header(host: str, name: str) -> None:
    assert host_name(host) == name


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.8.8.8", "::1", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "example.com")))
