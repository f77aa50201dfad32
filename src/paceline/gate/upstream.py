"""An OpenAI-compatible server, and one request to it as a leg: streamed, timed chunk by chunk.

The HTTP client is aiohttp, whose parser is in C: a chunk costs a third of the CPU time that it costs with
httpx, and the clock of a leg should not measure its client.
"""

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from paceline.errors import SettingError, UsageError, one_line
from paceline.gate.leg_recorder import TOO_LARGE, LegRecorder
from paceline.gate.pair import Leg
from paceline.gate.upstream_metrics import UpstreamCounters, read_counters
from paceline.web.streaming import MEDIA_TYPE

TIMEOUT_S: Final = 300.0
CONNECT_S: Final = 10.0
POOLED_S: Final = 4.0  # uvicorn closes an idle connection after 5 s: a request must not race with that
MAX_ANSWER: Final = 64 * 2**20  # bytes of an answer that is not streamed
MAX_METRICS: Final = 8 * 2**20  # bytes of a page of metrics
JSON: Final = {"content-type": "application/json"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """`extra_body` goes into every request: the speculation of this arm, for one."""

    name: str
    url: str  # ".../v1", or without
    api_key: str = field(default="", repr=False)
    model: str | None = None  # instead of the request's
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    send_tenant: bool = False  # the gate names the client's API key in `vllm_xargs`
    counts_chunks: bool = False  # it takes `continuous_usage_stats`: the tokens of each chunk

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
            counts = {"continuous_usage_stats": True} if self.counts_chunks else {}
            options = {**(request.get("stream_options") or {}), "include_usage": True, **counts}
            streamed["stream_options"] = options
        return {**request, **model, **streamed, **self.extra_body}


def http_session() -> aiohttp.ClientSession:
    """Bytes as they come: no proxy, no cookies, and no compression, which would hold events back."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=POOLED_S),
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        skip_auto_headers=("user-agent", "accept", "accept-encoding", "content-type"),
        headers={"accept-encoding": "identity"},
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        trust_env=False,
    )


class AnswerTooLarge(aiohttp.ClientError):
    pass


def failure_code(error: Exception) -> str:
    """Of an error of the session."""
    if isinstance(error, TimeoutError):  # aiohttp's own are TimeoutErrors too
        return "timeout"
    if isinstance(error, aiohttp.ClientConnectorError):
        return "connect"
    return TOO_LARGE if isinstance(error, AnswerTooLarge) else "disconnect"


async def read_whole(response: aiohttp.ClientResponse, limit: int = MAX_ANSWER) -> bytes:
    """limit: bytes, beyond which it is an aiohttp.ClientError."""
    parts, size = [], 0
    async for data in response.content.iter_any():
        parts.append(data)
        size += len(data)
        if size > limit:
            raise AnswerTooLarge
    return b"".join(parts)


async def run_leg(
    session: aiohttp.ClientSession,
    upstream: Upstream,
    path: str,
    request: Mapping[str, Any],
    *,
    timeout_s: float = TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Leg:
    """Sends one request and records its answer. Errors are the leg's, never raised."""
    content = json.dumps(upstream.body(request)).encode()
    sent = {**(headers or {}), **upstream.headers, **JSON}
    recorder = LegRecorder(upstream.name, clock)
    try:
        async with (
            asyncio.timeout(timeout_s),
            session.post(
                upstream.endpoint(path), data=content, headers=sent, allow_redirects=False
            ) as response,
        ):
            recorder.status(response.status)
            if response.content_type == MEDIA_TYPE:
                async for data in response.content.iter_any():
                    if not recorder.feed(data):
                        break
            elif response.status < 400:
                recorder.body(await read_whole(response))
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        recorder.fail(failure_code(error))
    return recorder.leg()


async def post_json(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str],
    timeout_s: float,
) -> Any:
    """The answer's JSON. A status of failure is an aiohttp.ClientError, what is no JSON a ValueError."""
    async with (
        asyncio.timeout(timeout_s),
        session.post(
            url, data=json.dumps(body).encode(), headers={**headers, **JSON}, allow_redirects=False
        ) as response,
    ):
        response.raise_for_status()
        return json.loads(await read_whole(response))


async def served_models(session: aiohttp.ClientSession, upstream: Upstream) -> list[dict[str, Any]]:
    """The entries of GET /v1/models. An upstream that cannot be reached is an error that names it."""
    url = upstream.endpoint("/v1/models")
    try:
        async with (
            asyncio.timeout(CONNECT_S),
            session.get(url, headers=upstream.headers, allow_redirects=False) as response,
        ):
            response.raise_for_status()
            listed = json.loads(await read_whole(response))["data"]
        return [entry for entry in listed if isinstance(entry, dict)]
    except (TimeoutError, aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"the {upstream.name} cannot be used: GET {url}: {one_line(error)}") from None


async def read_metrics(
    session: aiohttp.ClientSession, upstream: Upstream, further: Iterable[str] = ()
) -> UpstreamCounters | None:
    """Its counters as they are now, of `/metrics` and further pages; None: it does not tell."""
    pages = [await _page(session, upstream.endpoint("/metrics"), upstream.headers)]
    pages += [await _page(session, url, {}) for url in further]
    texts = [page for page in pages if page is not None]
    try:
        return read_counters("\n".join(texts)) if texts else None
    except (ValueError, KeyError, OverflowError):  # no Prometheus text
        return None


async def _page(session: aiohttp.ClientSession, url: str, headers: Mapping[str, str]) -> str | None:
    try:
        async with (
            asyncio.timeout(CONNECT_S),
            session.get(url, headers=headers, allow_redirects=False) as response,
        ):
            if response.status != 200:
                return None
            return (await read_whole(response, MAX_METRICS)).decode("utf-8", "replace")
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None
