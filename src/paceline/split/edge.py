"""The client's side: drafts on this device, and takes the text from the server's commits.

A draft is longer than one pass verifies: while a verify is in flight the server already has what may follow,
and this side drafts again only where a commit contradicts it, or little of it is left. A patient server is
answered for every position at which it waits. Drafts speak the ids of the server's vocabulary, so that
drafters which copy (n-gram, suffix) need no tokenizer here. One connection serves all answers of an Edge.

Nothing is lost by a cut: the client resumes from the tokens it has. If the server no longer knows the stream
(it was restarted), the client opens the request again with the same seed and its own tokens as prediction:
the same text follows in few passes, and is compared with what was there before.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import aiohttp

from paceline import __version__
from paceline.config import SamplingParams, SpecConfig, require_min
from paceline.drafters.drafter_list import DrafterList
from paceline.errors import PacelineError, UsageError, WireError
from paceline.split.wire import (
    MAX_IDS,
    MAX_OPEN_BYTES,
    MAX_TAIL,
    Cancel,
    ClientMessage,
    Commit,
    DraftMessage,
    End,
    Error,
    Finish,
    Hello,
    Mode,
    Open,
    Opened,
    Ping,
    Pong,
    Reading,
    Resume,
    ServerMessage,
    Welcome,
    decode_server,
    decode_vocabulary,
    encode,
    extend_hash,
    fingerprint,
)
from paceline.types import Ask, Drafter, Seq

PATH: Final = "/v1/split"
CLIENT: Final = f"paceline {__version__}"
FIRST_DRAFT: Final = 10  # tokens: one block
DRAFT_S: Final = 0.15  # that drafted tokens may wait for further ones
MIN_CHANCE: Final = 0.2  # of the first token of a draft, where the drafter knows: one less likely is not sent
RETRY_S: Final = (0.05, 2.0)  # before the first reconnection, and at most; doubled each time
PROBE_TOKENS: Final = 16  # between two drafts while the server wants none
_SMALL_FRAME: Final = 125  # bytes: a larger one has two more of length

T = TypeVar("T")
Update = Callable[[tuple[int, ...], tuple[int, ...]], None]  # committed and provisional tokens


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    mode: Mode = Mode.OPPORTUNISTIC
    wait_ms: int = 2000  # that the server waits for a draft at most, where the mode is patient
    prompt_tail: int = 2048  # last tokens of the prompt to draft from
    reconnect_s: float = 60.0  # that a cut may last

    def __post_init__(self) -> None:
        require_min(self, wait_ms=0, prompt_tail=0, reconnect_s=0)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The server's tokens as bytes."""

    pieces: Sequence[bytes]
    control: frozenset[int]  # never part of a text
    fingerprint: bytes

    @classmethod
    def of(cls, data: bytes) -> "Vocabulary":
        pieces, control = decode_vocabulary(data)
        return cls(pieces, control, fingerprint(pieces))

    def hello(self) -> Hello:
        """Of a client whose drafters speak these tokens."""
        return Hello(self.fingerprint, client=CLIENT)

    def text(self, tokens: Sequence[int]) -> str:
        shown = (self.pieces[t] for t in tokens if t < len(self.pieces) and t not in self.control)
        return b"".join(shown).decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class EdgeResult:
    """An answer and what it took. Bytes are those of WebSocket messages with their headers."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    report: Mapping[str, Any]  # the server's: passes, drafted and accepted tokens, usage
    drafts: int  # messages
    bytes_up: int
    bytes_down: int
    opening_bytes_up: int  # of them, before the first draft: the prompt is part of it
    opening_bytes_down: int  # of them, before the first commit
    reconnects: int
    rtt_ms: float
    first_token_s: float
    seconds: float

    @property
    def passes(self) -> int:
        return int(self.report.get("passes", 0))

    def as_json(self) -> dict[str, Any]:
        tokens = max(1, len(self.token_ids))
        return {
            "text": self.text,
            "token_ids": list(self.token_ids),
            "finish_reason": self.finish_reason,
            "passes": self.passes,
            "tokens_per_pass": round(len(self.token_ids) / max(1, self.passes), 3),
            "drafted_tokens": self.report.get("drafted_tokens", 0),
            "accepted_tokens": self.report.get("accepted_tokens", 0),
            "seed": self.report.get("seed"),
            "drafts": self.drafts,
            "bytes_up_per_token": round((self.bytes_up - self.opening_bytes_up) / tokens, 1),
            "bytes_down_per_token": round((self.bytes_down - self.opening_bytes_down) / tokens, 1),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "reconnects": self.reconnects,
            "rtt_ms": round(self.rtt_ms, 2),
            "first_token_s": round(self.first_token_s, 4),
            "seconds": round(self.seconds, 4),
            "usage": self.report.get("usage", {}),
        }


class ServerError(PacelineError):
    """The server's own words. status: HTTP's."""

    def __init__(self, error: Error) -> None:
        super().__init__(error.message)
        self.status, self.code = error.status, error.name


class _Cut(Exception):
    """The connection ended before the answer did."""


class _Connection:
    """A WebSocket to the server, after its Hello. It outlives answers; a cut one is replaced."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url, self._headers = f"{url}{PATH}", headers
        self._session: aiohttp.ClientSession | None = None
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self._received: asyncio.Queue[bytes | None] = asyncio.Queue()  # None: there is no more
        self.welcome: Welcome | None = None
        self.up = self.down = 0  # bytes of messages with their headers

    @property
    def is_open(self) -> bool:
        return self._ws is not None and not self._ws.closed

    @property
    def takes_drafts(self) -> bool:
        return self.welcome is not None and self.welcome.drafts

    @property
    def credits(self) -> int:
        return 0 if self.welcome is None else self.welcome.credits

    @property
    def has_more(self) -> bool:
        """True if a message is here already."""
        return not self._received.empty()

    async def open(self, hello: Hello) -> None:
        await self.close()
        try:
            self._session = aiohttp.ClientSession(headers=self._headers)
            self._ws = await self._session.ws_connect(
                self._url, compress=0, max_msg_size=MAX_OPEN_BYTES, heartbeat=20.0
            )
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403, 404):
                raise PacelineError(f"{self._url} refuses a connection: status {error.status}") from None
            raise _Cut(f"status {error.status}") from None
        except (aiohttp.ClientError, OSError) as error:
            raise _Cut(str(error) or type(error).__name__) from None
        self._received, self.welcome = asyncio.Queue(), None
        self._reader = asyncio.create_task(self._read(self._ws, self._received))
        await self.send(hello)

    async def _read(self, ws: aiohttp.ClientWebSocketResponse, into: "asyncio.Queue[bytes | None]") -> None:
        """Beside the drafter, which is slow: so it sees the newest text."""
        try:
            async for message in ws:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    break
                into.put_nowait(message.data)
        finally:
            into.put_nowait(None)

    async def send(self, message: ClientMessage) -> None:
        data = encode(message)
        self.up += len(data) + (6 if len(data) <= _SMALL_FRAME else 8)
        try:
            if self._ws is None:
                raise _Cut("the connection was closed")
            await self._ws.send_bytes(data)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            raise _Cut(str(error)) from None

    async def receive(self) -> ServerMessage:
        data = await self._received.get()
        if data is None:
            self._received.put_nowait(None)
            raise _Cut("the connection was closed")
        self.down += len(data) + (2 if len(data) <= _SMALL_FRAME else 4)
        try:
            message = decode_server(data)
        except WireError as error:
            raise _Cut(str(error)) from None
        if isinstance(message, Welcome):
            self.welcome = message
        return message

    async def close(self) -> None:
        reader, ws, session = self._reader, self._ws, self._session
        self._reader = self._ws = self._session = None
        if reader is not None:
            reader.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reader
        if ws is not None:
            await ws.close()
        if session is not None:
            await session.close()


@dataclass(slots=True)
class _Answer:
    """The text so far, and the draft that is on its way."""

    seq: Seq  # the tail of the prompt, then the answer
    secret: bytes = b""
    base_hash: int | None = None  # after the prompt
    hash: int = 0  # after all tokens
    draft: DraftMessage | None = None  # the last one
    expected: tuple[int, ...] = ()  # the rest of the last draft that no commit has contradicted
    length: int = FIRST_DRAFT  # of the next draft
    wanted: int = FIRST_DRAFT  # by the server, in a pass
    silent: int = 0  # tokens since the last draft, while the server wants none
    ended: End | None = None
    overlap: list[int] = field(default_factory=list)  # tokens to come again after a restart

    @property
    def tokens(self) -> list[int]:
        return self.seq.output

    @property
    def have(self) -> int:
        return len(self.seq.tokens) - self.seq.prompt_len

    @property
    def in_stream(self) -> tuple[int, int]:
        """How many tokens the server's stream has sent, and the hash after them: fewer after a restart."""
        sent = self.have - len(self.overlap)
        return sent, extend_hash(self.base_hash or 0, self.tokens[:sent])


class Edge:
    """A client of one server. Answers come one after the other; drafters remember them.

    As a context manager it keeps its connection from answer to answer, which saves two round trips each.
    url: of the server, http or https. drafters: in their order; they draft in the ids of the server's
    vocabulary. vocabulary: the server's, where it is known already.
    """

    def __init__(
        self,
        url: str,
        drafters: Sequence[Drafter],
        settings: EdgeSettings | None = None,
        api_key: str | None = None,
        vocabulary: Vocabulary | None = None,
    ) -> None:
        self.settings = settings or EdgeSettings()
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r} is no address of a server: expected http://HOST:PORT")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._drafting = _Drafting(drafters)
        self._vocabulary = vocabulary
        self._connection: _Connection | None = None  # within the context

    async def __aenter__(self) -> "Edge":
        self._connection = _Connection(self._url, self._headers)
        return self

    async def __aexit__(self, *error: object) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def vocabulary(self) -> Vocabulary:
        """That of the server; fetched once."""
        if self._vocabulary is None:
            async with aiohttp.ClientSession(headers=self._headers) as session:
                self._vocabulary = await self._fetch_vocabulary(session)
        return self._vocabulary

    async def _fetch_vocabulary(self, session: aiohttp.ClientSession) -> Vocabulary:
        try:
            async with session.get(f"{self._url}{PATH}/vocabulary") as response:
                if response.status == 404:
                    raise UsageError(f"{self._url} has no {PATH}: start it with paceline serve --split")
                if response.status != 200:
                    raise PacelineError(f"{self._url}{PATH}/vocabulary: {await _message(response)}")
                return Vocabulary.of(await response.read())
        except (aiohttp.ClientError, OSError) as error:
            raise PacelineError(f"{self._url} cannot be reached: {error}") from None

    async def generate(
        self, body: Mapping[str, Any], update: Update | None = None, prediction: Sequence[int] = ()
    ) -> EdgeResult:
        """Answers a request: a body of /v1/chat/completions or /v1/completions.

        update: called with the committed and the provisional tokens whenever they change. prediction: a draft
        of the whole answer, sent with the request.
        """
        if self._connection is None:
            async with self:
                return await self.generate(body, update, prediction)
        seeded = {**body, "seed": secrets.randbits(32) if body.get("seed") is None else body["seed"]}
        vocabulary = await self.vocabulary()
        run = _Run(self._connection, self._drafting, self.settings, vocabulary, seeded, update, prediction)
        return await run.finish()

    async def round_trips_s(self, count: int) -> list[float]:
        """Of so many messages that are answered at once, one after the other."""
        if self._connection is None:
            async with self:
                return await self.round_trips_s(count)
        vocabulary = await self.vocabulary()
        try:
            if not self._connection.is_open:
                await self._connection.open(vocabulary.hello())
            return [await self._round_trip_s(self._connection, number) for number in range(count)]
        except _Cut as cut:
            raise PacelineError(f"{self._url} cannot be reached: {cut}") from None

    async def _round_trip_s(self, connection: _Connection, number: int) -> float:
        begun = time.perf_counter()
        await connection.send(Ping(number))
        while not isinstance(message := await connection.receive(), Pong):
            if isinstance(message, Error):
                raise ServerError(message)
        return time.perf_counter() - begun


class _Drafting:
    """The drafters in a thread of their own: a model takes its time, and the connection is read meanwhile."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = DrafterList(list(drafters)) if drafters else None
        self._thread = ThreadPoolExecutor(1, "paceline-edge-drafts")
        self._token_s = 0.0  # of a drafted token, of late

    @property
    def has_drafters(self) -> bool:
        return self._drafters is not None

    async def _run(self, call: Callable[..., T], *given: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call, *given)

    async def begin(self, seq: Seq) -> None:
        if self._drafters is not None:
            await self._run(self._drafters.begin, seq)

    async def end(self, seq: Seq) -> None:
        if self._drafters is not None:
            await self._run(self._drafters.end, seq)

    async def draft(self, seq: Seq, length: int) -> tuple[int, ...]:
        """As many tokens as a slow drafter makes within DRAFT_S, one at least."""
        if self._drafters is None:
            return ()
        if self._token_s:
            length = max(1, min(length, int(DRAFT_S / self._token_s)))
        begun = time.perf_counter()
        (draft,) = await self._run(self._drafters.draft, [Ask(seq, length)])
        if draft:
            self._token_s = (time.perf_counter() - begun) / len(draft)
        unlikely = bool(draft.scores) and draft.scores[0] < MIN_CHANCE
        return () if unlikely else draft.tokens[:length]


class _Run:
    """One answer, over as many connections as it takes."""

    def __init__(
        self,
        connection: _Connection,
        drafting: _Drafting,
        settings: EdgeSettings,
        vocabulary: Vocabulary,
        body: Mapping[str, Any],
        update: Update | None,
        prediction: Sequence[int],
    ) -> None:
        self._connection, self._drafting, self._settings = connection, drafting, settings
        # Nobody is to wait for drafts that never come.
        impatient = settings.mode is Mode.PATIENT and not drafting.has_drafters
        self._mode = Mode.OPPORTUNISTIC if impatient else settings.mode
        self._vocabulary, self._update = vocabulary, update
        self._body, self._prediction = json.dumps(body).encode(), tuple(prediction)
        self._started = time.perf_counter()
        self._up, self._down = connection.up, connection.down  # before this answer
        self._opening = (0, 0)  # bytes up and down, before the first draft and commit
        self._number = 0  # of the last draft on this connection
        self._read = 0  # of the last one that the server has read
        self._drafts = self._reconnects = 0
        self._pinged = self._rtt_ms = self._first_token_s = 0.0
        spec = SpecConfig(("none",), max_draft=MAX_IDS)
        self._answer = _Answer(Seq(secrets.token_hex(4), [], 0, _sampling(body), spec))

    async def finish(self) -> EdgeResult:
        try:
            return self._result(await self._answered())
        finally:
            if self._answer.base_hash is not None:
                await self._drafting.end(self._answer.seq)

    async def _answered(self) -> End:
        answer, delay, cut_at = self._answer, RETRY_S[0], time.monotonic()
        while answer.ended is None:
            before, down, reused = answer.have, self._connection.down, self._connection.is_open
            try:
                await self._connect()
            except _Cut as cut:
                await self._connection.close()
                now = time.monotonic()
                if reused and self._connection.down == down:
                    continue  # the server had closed it since the last answer
                if answer.have > before:
                    delay, cut_at = RETRY_S[0], now
                if now - cut_at > self._settings.reconnect_s:
                    raise PacelineError(f"the server cannot be reached any more: {cut}") from None
                self._reconnects += 1
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_S[1])
            except ServerError:
                raise  # the answer has ended; the next one may follow on this connection
            except BaseException:
                await self._leave()
                raise
        return answer.ended

    async def _leave(self) -> None:
        """The server need not finish an answer that nobody wants."""
        with suppress(_Cut):
            await self._connection.send(Cancel())
        await self._connection.close()

    async def _connect(self) -> None:
        """One connection, until the answer or the connection ends.

        The request follows the hello at once, which saves a round trip: it needs no welcome.
        """
        answer, connection = self._answer, self._connection
        if not connection.is_open:
            await connection.open(self._vocabulary.hello())
        self._number = self._read = 0
        self._pinged = time.perf_counter()
        await connection.send(Ping(1))
        if answer.secret:
            await connection.send(Resume(answer.secret, *answer.in_stream))
        else:
            await self._open()
        while answer.ended is None:
            await self._handle(await connection.receive())
            if not connection.has_more:  # else a draft would be for an old text
                await self._draft()

    async def _open(self) -> None:
        settings = self._settings
        tail = min(settings.prompt_tail, MAX_TAIL) if self._answer.base_hash is None else 0
        prediction = self._prediction[:MAX_TAIL]
        await self._connection.send(Open(self._body, self._mode, settings.wait_ms, tail, prediction))

    async def _handle(self, message: ServerMessage) -> None:
        if isinstance(message, Opened):
            await self._opened(message)
        elif isinstance(message, Commit):
            self._committed(message)
        elif isinstance(message, End):
            self._check_end(message)
        elif isinstance(message, Pong):
            self._rtt_ms = 1000 * (time.perf_counter() - self._pinged)
        elif isinstance(message, Error):
            await self._failed(message)

    async def _opened(self, message: Opened) -> None:
        answer, connection = self._answer, self._connection
        answer.secret = message.secret
        answer.draft, answer.expected = None, ()
        if answer.base_hash is None:
            self._opening = (connection.up - self._up, connection.down - self._down)
            answer.base_hash = answer.hash = message.hash
            answer.seq.tokens = list(message.tail) or [0]
            answer.seq.prompt_len = len(answer.seq.tokens)
            if self._mode is Mode.PATIENT and connection.takes_drafts:
                await connection.send(Reading())
            await self._drafting.begin(answer.seq)
        elif message.hash != answer.base_hash:
            raise PacelineError("the server has restarted with another model: the text cannot be continued")

    def _committed(self, message: Commit) -> None:
        answer = self._answer
        if not self._first_token_s:
            self._first_token_s = time.perf_counter() - self._started
        self._read, answer.wanted = message.draft, message.max_draft
        tokens = self._new_tokens(message)
        answer.seq.tokens.extend(tokens)
        answer.hash = extend_hash(answer.hash, tokens)
        if not answer.overlap and answer.hash != message.hash:
            raise _Cut("a commit has another hash")
        self._follow(tokens)
        self._show()

    def _new_tokens(self, message: Commit) -> tuple[int, ...]:
        """Those of a commit that are not known yet. Known ones must be the same."""
        answer = self._answer
        known = answer.tokens[message.start : message.start + len(message.tokens)]
        if message.start > answer.have:
            raise _Cut("a commit is missing")
        if tuple(known) != message.tokens[: len(known)]:
            raise PacelineError("the server's text differs from what it sent before: start again")
        answer.overlap = answer.overlap[len(message.tokens) :]
        return message.tokens[len(known) :]

    def _follow(self, tokens: tuple[int, ...]) -> None:
        """Compares what was expected with what came; drafts that come true are followed by longer ones."""
        answer = self._answer
        if answer.expected[: len(tokens)] == tokens:
            answer.expected = answer.expected[len(tokens) :]
        else:
            answer.expected, answer.length = (), FIRST_DRAFT
        answer.silent += len(tokens)

    async def _draft(self) -> None:
        """Sends a draft, unless the last one still has enough left or too many are on their way.

        A patient server waits for an answer to each commit, unless what it has fills a pass.
        """
        answer, mode = self._answer, self._mode
        if answer.base_hash is None or answer.overlap or answer.ended is not None or mode is Mode.ONE_SHOT:
            return
        if not self._connection.takes_drafts or self._number - self._read >= self._connection.credits:
            return
        if len(answer.expected) > answer.wanted or (not answer.wanted and answer.silent < PROBE_TOKENS):
            return
        if answer.draft is not None and answer.draft.base == answer.have:
            return  # this position has had one
        if answer.draft is not None and answer.expected:
            answer.length = min(2 * answer.length, MAX_IDS)
        tokens = await self._drafting.draft(answer.seq, answer.length)
        longer = len(tokens) > len(answer.expected) or tokens[: len(answer.expected)] != answer.expected
        if longer or mode is Mode.PATIENT:
            await self._send_draft(tokens or answer.expected)

    async def _send_draft(self, tokens: tuple[int, ...]) -> None:
        answer = self._answer
        self._number += 1
        answer.draft = DraftMessage(self._number, answer.have, answer.hash, tokens)
        answer.expected, answer.silent = tokens, 0
        self._drafts += 1
        await self._connection.send(answer.draft)
        self._show()

    def _show(self) -> None:
        if self._update is not None:
            self._update(tuple(self._answer.tokens), self._answer.expected)

    def _check_end(self, message: End) -> None:
        answer = self._answer
        if (message.tokens, message.hash) != (answer.have, answer.hash):
            raise _Cut("the answer has another end")
        answer.ended, answer.expected = message, ()
        self._show()

    async def _failed(self, error: Error) -> None:
        answer = self._answer
        if error.name == "unknown_stream" and answer.base_hash is not None:
            # The server has restarted: what is known already is the draft of the beginning.
            answer.secret, answer.overlap, self._prediction = b"", answer.tokens, tuple(answer.tokens)
            await self._open()
            return
        if error.name == "unknown_position":
            raise PacelineError(f"the server's text differs from what it sent before: {error.message}")
        if answer.secret and error.status in (408, 429, 503) and error.retry_ms:
            raise _Cut(error.message)
        raise ServerError(error)

    def _result(self, ended: End) -> EdgeResult:
        tokens, connection = tuple(self._answer.tokens), self._connection
        return EdgeResult(
            tokens,
            self._vocabulary.text(tokens)[: ended.characters],
            Finish(ended.finish).name.lower(),
            json.loads(ended.report),
            self._drafts,
            connection.up - self._up,
            connection.down - self._down,
            *self._opening,
            self._reconnects,
            self._rtt_ms,
            self._first_token_s,
            time.perf_counter() - self._started,
        )


def _sampling(body: Mapping[str, Any]) -> SamplingParams:
    """For drafters that sample with the target's noise. Unknown values cost acceptance, and nothing else."""
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    try:
        return SamplingParams(**{name: body[name] for name in names if body.get(name) is not None})
    except (PacelineError, TypeError, ValueError):
        return SamplingParams()


async def _message(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        return f"status {response.status}"
