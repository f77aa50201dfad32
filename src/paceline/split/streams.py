"""Answers in progress and their commit logs, which outlive connections; tickets for browsers.

A stream runs by itself: a connection only reads its log from some position on, and posts drafts. So a cut
loses nothing, and a client that resumes gets every token once. Memory is bounded: a stream holds its tokens
with a hash each, detached streams end after a while, and there is a bound on streams in all.
"""

import asyncio
import hashlib
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from paceline.drafters.mailbox import NO_PATIENCE, Patience
from paceline.output import RequestOutput
from paceline.server.admission import RequestContext
from paceline.split.wire import HASH_START, MAX_IDS, SECRET_BYTES, Commit, extend_hash
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import Key

MAX_TICKETS: Final = 4096
MAX_TICKETS_OF_KEY: Final = 64  # so that nobody's tickets push out those of others
TICKET_S: Final = 60.0


@dataclass(slots=True, eq=False)
class Stream:
    """One answer: its tokens, the hash after each, and who reads them now."""

    context: RequestContext
    output: RequestOutput
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(SECRET_BYTES))
    hashes: list[int] = field(default_factory=list)  # after the prompt, then after each token
    draft: int = 0  # the number of the last draft that was read
    dropped: int = 0  # drafts that were not on the text, came twice or too late
    error: ApiError | None = None
    ended: bool = False
    patience: Patience = NO_PATIENCE  # for drafts, while somebody is connected
    reader: object | None = None  # the connection
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    task: "asyncio.Task[None] | None" = None

    def __post_init__(self) -> None:
        seq = self.output.seq
        self.hashes.append(extend_hash(HASH_START, seq.tokens[: seq.prompt_len]))

    @property
    def tokens(self) -> list[int]:
        return self.output.token_ids

    def advance(self) -> None:
        """After the output has taken a round."""
        for token in self.tokens[len(self.hashes) - 1 :]:
            self.hashes.append(extend_hash(self.hashes[-1], (token,)))
        self.changed.set()

    def end(self, error: ApiError | None = None) -> None:
        self.error, self.ended = error, True
        self.changed.set()

    def cancel(self) -> None:
        """Not before the task's first step: a task that is cancelled before it never runs, nor cleans up."""
        if self.task is not None and not self.ended:
            asyncio.get_running_loop().call_soon(self.task.cancel)

    def is_at(self, position: int, value: int) -> bool:
        """True if the text has this hash after so many tokens of the answer."""
        return position < len(self.hashes) and self.hashes[position] == value

    def commit(self, start: int, source: str, max_draft: int) -> Commit:
        """The tokens from `start` on, as many as one message holds. source: the client's drafts."""
        stop = min(len(self.hashes) - 1, start + MAX_IDS)
        accepted = self.output.sources[start:stop].count(source)
        return Commit(
            start,
            tuple(self.tokens[start:stop]),
            self.hashes[stop],
            self.draft,
            self.output.passes,
            accepted,
            max_draft,
        )


class Streams:
    """All streams of a server, by their secrets.

    detached_s: that a stream runs, and a finished one is kept, while nobody reads it.
    """

    def __init__(self, max_streams: int, detached_s: float) -> None:
        self._max_streams, self._detached_s = max_streams, detached_s
        self._streams: dict[bytes, Stream] = {}  # those that are read longest ago first
        self._timers: dict[bytes, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(tuple(self._streams.values()))

    def add(self, stream: Stream) -> None:
        """At the bound, a stream goes that nobody has read for long, a complete one if there is any."""
        if len(self._streams) >= self._max_streams:
            unread = (old for old in self._streams.values() if old.reader is None)
            detached = min(unread, key=lambda old: not old.ended, default=None)
            if detached is None:
                raise ApiError(
                    429,
                    "too many split streams: try again later",
                    "rate_limit_error",
                    code="server_busy",
                    retry_after=1,
                    refusal="queue_full",
                )
            self.remove(detached)
        self._streams[_name(stream.secret)] = stream

    def find(self, secret: bytes) -> Stream | None:
        return self._streams.get(_name(secret))

    def attach(self, stream: Stream, reader: object) -> None:
        """Another reader takes over."""
        name = _name(stream.secret)
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        stream.reader = reader
        self._streams[name] = self._streams.pop(name, stream)
        stream.changed.set()

    def detach(self, stream: Stream, reader: object) -> bool:
        """False: another reader has taken over."""
        name = _name(stream.secret)
        if stream.reader is not reader or name not in self._streams:
            return False
        stream.reader = None
        loop = asyncio.get_running_loop()
        self._timers[name] = loop.call_later(self._detached_s, self.remove, stream)
        return True

    def remove(self, stream: Stream) -> None:
        """Ends it, if it runs; it cannot be resumed any more."""
        name = _name(stream.secret)
        self._streams.pop(name, None)
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        stream.cancel()

    def close(self) -> None:
        for stream in self:
            self.remove(stream)


class Tickets:
    """Single-use tickets instead of keys, which a browser cannot send with a WebSocket."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tickets: dict[bytes, tuple[float, Key | None, str]] = {}  # oldest first
        self._of_key: dict[str, dict[bytes, None]] = {}  # by the key's name, oldest first

    def __len__(self) -> int:
        return len(self._tickets)

    def issue(self, key: Key | None, origin: str) -> str:
        self._expire()
        own = self._of_key.get(_owner(key), {})
        if len(own) >= MAX_TICKETS_OF_KEY:
            self._take(next(iter(own)))
        elif len(self._tickets) >= MAX_TICKETS:
            self._take(next(iter(self._tickets)))
        ticket = secrets.token_urlsafe(24)
        name = _name(ticket.encode())
        self._tickets[name] = (self._clock() + TICKET_S, key, origin)
        self._of_key.setdefault(_owner(key), {})[name] = None
        return ticket

    def redeem(self, ticket: str, origin: str) -> Key | None:
        """The key that the ticket was issued for."""
        self._expire()
        found = self._take(_name(ticket.encode()))
        if found is None or found[2] != origin:
            raise ApiError(
                401,
                "the ticket is unknown, used, expired or another page's: get one from POST /v1/split/tickets",
                "authentication_error",
                code="invalid_ticket",
                refusal="unauthorized",
            )
        return found[1]

    def _take(self, name: bytes) -> tuple[float, Key | None, str] | None:
        found = self._tickets.pop(name, None)
        if found is not None:
            own = self._of_key[_owner(found[1])]
            del own[name]
            if not own:
                del self._of_key[_owner(found[1])]
        return found

    def _expire(self) -> None:
        now = self._clock()
        while self._tickets and self._tickets[oldest := next(iter(self._tickets))][0] < now:
            self._take(oldest)


def _owner(key: Key | None) -> str:
    return "" if key is None else key.name


def _name(secret: bytes) -> bytes:
    """What a secret is found by: a look-up by the secret itself would leak it through its time."""
    return hashlib.sha256(secret).digest()
