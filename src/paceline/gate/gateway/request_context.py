"""One request of a client: its body, its route, the attempts to answer it, and how it ended."""

import asyncio
import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from paceline.gate.gateway.config import Route
from paceline.gate.leg_recorder import LegRecorder
from paceline.gate.pair import Arm
from paceline.gate.upstream import Upstream
from paceline.web.api_keys import Key
from paceline.web.rate_limit import Ticket
from paceline.web.request_body import INLINE_BYTES

CHUNKED: Final = frozenset({"/v1/chat/completions", "/v1/completions"})  # their streams end with [DONE]
GENERATING: Final = CHUNKED | {"/v1/responses"}
TENANT: Final = "tenant"  # in vllm_xargs, for paceline's proposer
PATHS: Final = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/embeddings",
    "/tokenize",
    "/detokenize",
)


@dataclass(slots=True, kw_only=True)
class RequestContext:
    id: str
    path: str
    route: Route
    key: Key | None
    headers: list[tuple[str, str]]  # those that are passed on
    raw: bytes  # the body as sent
    body: dict[str, Any]
    conversation: str  # a hash
    deadline: float | None = None  # by the event loop's clock
    tickets: tuple[Ticket, ...] = ()
    added: dict[str, Any] = field(default_factory=dict)  # fields of the body that the gate sets
    hides_usage: bool = False  # the gate asked for the usage of a stream, the client did not
    counts_tokens: bool = False  # a limit needs them
    cohort: str = ""
    pair_id: str = ""  # of the pair that it becomes; empty: not mirrored
    recorder: LegRecorder | None = None  # of the leg that the user gets
    response_id: str = ""  # the upstream's
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)  # unix seconds
    tried: list[str] = field(default_factory=list)  # upstreams, in order
    status: int | None = None
    tokens: int = 0
    first_byte_s: float | None = None
    complete: bool = False  # the client was sent the last event
    error: str | None = None  # a code

    @property
    def streams(self) -> bool:
        return self.body.get("stream") is True

    @property
    def arm(self) -> Arm:
        """Who was to answer the user."""
        return self._arm(self.tried[0] if self.tried else "")

    @property
    def answered_by(self) -> Arm:
        """Who did: the baseline, where it took over."""
        return self._arm(self.upstream)

    def _arm(self, upstream: str) -> Arm:
        mirror = self.route.mirror
        is_candidate = mirror is not None and upstream == mirror.candidate and not self.route.is_aa
        return "candidate" if is_candidate else "baseline"

    @property
    def upstream(self) -> str:
        """The last one tried."""
        return self.tried[-1] if self.tried else ""

    async def body_for(self, upstream: Upstream) -> bytes:
        """The body as sent, byte for byte, unless the upstream or the gate changes a field."""
        changed = self.changes_for(upstream)
        if not changed:
            return self.raw
        return await self.encoded({**self.body, **changed})

    async def encoded(self, body: Mapping[str, Any]) -> bytes:
        """As JSON; beside the event loop, if the body is large."""
        if len(self.raw) <= INLINE_BYTES:
            return _encoded(body)
        return await asyncio.to_thread(_encoded, body)

    def changes_for(self, upstream: Upstream) -> dict[str, Any]:
        """Fields that an upstream gets in place of the client's."""
        changed = dict(upstream.extra_body) | self.added
        if upstream.model is not None:
            changed["model"] = upstream.model
        if upstream.send_tenant and self.path in GENERATING:
            changed["vllm_xargs"] = self._tenant_args({**self.body, **changed}.get("vllm_xargs"))
        return changed

    def _tenant_args(self, given: object) -> dict[str, Any]:
        """A client cannot name its tenant: another's memory would show in its own latency."""
        args = dict(given) if isinstance(given, Mapping) else {}
        args.pop(TENANT, None)
        return args if self.key is None else {**args, TENANT: self.key.name}


def _encoded(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def point(conversation: str, purpose: str) -> float:
    """A number in [0, 1) that is uniform over conversations and independent between purposes."""
    digest = hashlib.blake2b(f"{purpose}:{conversation}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) / 2**64


def choose(weights: Mapping[str, float], at: float) -> str:
    """The upstream of a point: weights divide [0, 1) in their order."""
    left = at * sum(weights.values())
    for name, weight in weights.items():
        left -= weight
        if left < 0:
            return name
    return [name for name, weight in weights.items() if weight][-1]


def request_usage(context: RequestContext) -> None:
    """Has the upstream send the usage of a stream; the client does not see it unless it requested it."""
    if not context.streams or context.path not in CHUNKED:
        return
    options = context.body.get("stream_options")
    options = options if isinstance(options, dict) else {}
    if options.get("include_usage") is not True:
        context.added["stream_options"] = {**options, "include_usage": True}
        context.hides_usage = True
