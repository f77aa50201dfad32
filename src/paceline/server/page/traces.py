"""GET /page/runs and /page/traces: stored requests as agent runs, on one clock.

A key sees the requests it sent, an operator those of all. A request of somebody else is as one that is not
there.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import StoreError, short
from paceline.server.admission import Admission
from paceline.server.request_log import REFUSED
from paceline.trace import timeline
from paceline.trace.record import RequestRecord, RoundTiming, as_dict, write_json
from paceline.web.api_errors import FORBIDDEN, ApiError

if TYPE_CHECKING:  # a server without traces starts without a database
    from paceline.trace.store import Store

MAX_LISTED: Final = 1000  # requests that the list of runs is made of

T = TypeVar("T")
Turns = list[tuple[RequestRecord, Sequence[RoundTiming]]]


class TraceServing:
    """store: None: traces are off."""

    def __init__(self, admission: Admission, store: "Store | None") -> None:
        self._admission, self._store = admission, store
        self._reading = asyncio.Lock()  # one reader at a time: answers come first

    async def runs(self, http: Request) -> Response:
        """The latest runs, newest first."""
        client = self._client(http)

        def read(store: "Store") -> dict[str, Any]:
            listed = store.list(MAX_LISTED, client=client)
            made = timeline.runs(record for record in listed if record.finish != REFUSED)
            return {"runs": [asdict(timeline.summary(run)) for run in made], "requests": len(listed)}

        return await self._read(read, {"runs": [], "requests": 0})

    async def run(self, http: Request) -> Response:
        """The run that a request is part of, and the other runs of its conversation."""
        client, id = self._client(http), http.path_params["id"]

        def read(store: "Store") -> dict[str, Any]:
            turns = _turns(store, id, client)
            mine, *others = _split(turns, id)
            return {
                "run": timeline.run(mine).as_dict(),
                "others": [asdict(timeline.summary([record for record, _ in other])) for other in others],
            }

        return await self._read(read)

    async def compare(self, http: Request) -> Response:
        """Two runs on one clock: each starts at 0."""
        client = self._client(http)
        ids = (http.path_params["baseline"], http.path_params["candidate"])

        def read(store: "Store") -> dict[str, Any]:
            baseline, candidate = (_split(_turns(store, id, client), id)[0] for id in ids)
            found = timeline.compare([r for r, _ in baseline], [r for r, _ in candidate])
            return {
                "baseline": timeline.run(baseline).as_dict(),
                "candidate": timeline.run(candidate).as_dict(),
                "comparison": asdict(found),
            }

        return await self._read(read)

    async def trace(self, http: Request) -> Response:
        """One request with its rounds, as `paceline trace show --json` prints it, and when each round ran."""
        client, id = self._client(http), http.path_params["id"]

        def read(store: "Store") -> dict[str, Any]:
            stored = store.get(id, exact=True)
            if stored is None or not _visible(stored[0], client):
                raise _missing(id)
            starts = timeline.round_starts(*stored)
            kinds = timeline.phases_of(stored[1])
            whole = as_dict(*stored)
            del whole["prompt_ids"], whole["output_ids"]
            for r, at, kind in zip(whole["rounds"], starts, kinds, strict=True):
                r |= {"at_s": at, "phase": kind}
            return {**whole, "phases": asdict(timeline.phases(*stored))}

        return await self._read(read)

    def _client(self, http: Request) -> str | None:
        """The key whose requests are shown; None: those of all."""
        key = http.state.key
        if self._admission.is_operator(key):
            return None
        if key is None:
            raise ApiError(
                403,
                "traces are shown where nobody else can reach the server, or to those with an API key: "
                "see --single-user and `paceline keys new`",
                "permission_error",
                code="traces_not_shown",
                refusal=FORBIDDEN,
            )
        return str(key.name)

    async def _read(self, read: "Callable[[Store], Any]", absent: Any = None) -> Response:
        store = self._store
        if store is None and absent is None:
            raise ApiError(404, "this server keeps no traces: it was started with --store none")

        def encoded() -> bytes:
            found = absent if store is None else read(store)
            return write_json(found | {"stored": store is not None}).encode()

        async with self._reading:
            try:
                return Response(await asyncio.to_thread(encoded), media_type="application/json")
            except StoreError:
                raise ApiError(
                    503, "the trace store cannot be read now", "server_error", retry_after=5, refusal=None
                ) from None


def _turns(store: "Store", id: str, client: str | None) -> Turns:
    """All requests of the conversation that a request is part of."""
    stored = store.get(id, exact=True)
    if stored is None or not _visible(stored[0], client):
        raise _missing(id)
    record, rounds = stored
    if not record.conversation:
        return [(record, [RoundTiming(r.committed, r.rows, r.draft_us, r.target_us) for r in rounds])]
    turns = [turn for turn in store.conversation(record.conversation) if _visible(turn[0], client)]
    return [turn for turn in turns if turn[0].finish != REFUSED or turn[0].id == id]


def _split(turns: Turns, id: str) -> list[Turns]:
    """The runs of a conversation: first the one with the request, then the others, newest first."""
    rounds = {record.id: timings for record, timings in turns}
    made = timeline.runs(record for record, _ in turns)
    made.sort(key=lambda run: all(record.id != id for record in run))
    return [[(record, rounds[record.id]) for record in run] for run in made]


def _visible(record: RequestRecord, client: str | None) -> bool:
    return client is None or record.client == client


def _missing(id: str) -> ApiError:
    return ApiError(404, f"there is no trace {short(id)}", param="id", code="trace_not_found")
