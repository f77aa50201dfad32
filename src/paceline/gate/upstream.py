"""An OpenAI-compatible server, and one request to it as a leg: streamed, timed chunk by chunk."""

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import httpx

from paceline.errors import SettingError, UsageError, one_line
from paceline.gate.leg_recorder import LegRecorder
from paceline.gate.pair import Leg

TIMEOUT_S: Final = 300.0
CONNECT_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """`extra_body` goes into every request: the speculation of this arm, for one."""

    name: str
    url: str  # ".../v1", or without
    api_key: str = field(default="", repr=False)
    model: str | None = None  # instead of the request's
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    send_tenant: bool = False  # the gate names the client's API key in `vllm_xargs`

    def __post_init__(self) -> None:
        if not self.url.startswith(("http://", "https://")):
            raise SettingError(f"{self.name} URL", self.url, "http://host:port, with or without /v1")

    def endpoint(self, path: str) -> str:
        """path: "/v1/...", as clients of the API know it."""
        return self.url.rstrip("/").removesuffix("/v1") + path

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The request for this upstream: streamed, with its usage."""
        model = {} if self.model is None else {"model": self.model}
        streamed: dict[str, Any] = {"stream": True}
        if "input" not in request:  # /v1/responses sends its usage in any case
            streamed["stream_options"] = {**(request.get("stream_options") or {}), "include_usage": True}
        return {**request, **model, **streamed, **self.extra_body}


async def run_leg(
    client: httpx.AsyncClient,
    upstream: Upstream,
    path: str,
    request: Mapping[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Leg:
    """Sends one request and records its answer. Errors are the leg's, never raised."""
    recorder = LegRecorder(upstream.name, clock)
    sent = {**(headers or {}), **upstream.headers, "content-type": "application/json"}
    content = json.dumps(upstream.body(request)).encode()
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream("POST", upstream.endpoint(path), content=content, headers=sent) as response,
        ):
            recorder.status(response.status_code)
            if response.headers.get("content-type", "").startswith("text/event-stream"):
                async for data in response.aiter_raw():
                    recorder.feed(data)
            elif response.status_code < 400:
                recorder.body(await response.aread())
    except (TimeoutError, httpx.TimeoutException):
        recorder.fail("timeout")
    except httpx.ConnectError:
        recorder.fail("connect")
    except httpx.HTTPError:
        recorder.fail("disconnect")
    return recorder.leg()


def http_client(connections: int = 100) -> httpx.AsyncClient:
    """No time-out but for connecting: `run_leg` has its own. No proxy, no compression: bytes as they come."""
    return httpx.AsyncClient(
        timeout=httpx.Timeout(None, connect=CONNECT_S),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        headers={"accept-encoding": "identity"},
        trust_env=False,
    )


async def served_models(client: httpx.AsyncClient, upstream: Upstream) -> list[dict[str, Any]]:
    """The entries of GET /v1/models. An upstream that cannot be reached is an error that names it."""
    url = upstream.endpoint("/v1/models")
    try:
        response = await client.get(url, headers=upstream.headers, timeout=CONNECT_S)
        response.raise_for_status()
        return [entry for entry in response.json()["data"] if isinstance(entry, dict)]
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the {upstream.name} cannot be used: GET {url}: {one_line(error)}") from None
