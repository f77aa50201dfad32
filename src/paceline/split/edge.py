"""The client's side: drafts on this device, and takes the text from the server's commits.

A draft is longer than one pass verifies: while a verify is in flight the server already has what may follow,
and this side drafts again only where a commit contradicts it, or little of it is left. Drafts speak the ids
of the server's vocabulary, so that drafters which copy (n-gram, suffix) need no tokenizer here.

Nothing is lost by a cut: the client resumes from the tokens it has. If the server no longer knows the stream
(it was restarted), the client opens the request again with the same seed and its own tokens as prediction:
the same text follows in few passes, and is compared with what was there before.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

import aiohttp

from paceline import __version__
from paceline.config import SpecConfig, require_min
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
RETRY_S: Final = (0.05, 2.0)  # before the first reconnection, and at most; doubled each time
PROBE_TOKENS: Final = 16  # between two drafts while the server wants none
_SMALL_FRAME: Final = 125  # bytes: a larger one has two more of length

Update = Callable[[tuple[int, ...], tuple[int, ...]], None]  # committed and provisional tokens


@dataclass(frozen=True, slots=True)
class EdgeSettings:
    mode: Mode = Mode.OPPORTUNISTIC
    wait_ms: int = 500  # that the server waits for a draft at most, where the mode is patient
    prompt_tail: int = 2048  # last tokens of the prompt to draft from
    reconnect_s: float = 60.0  # that a cut may last
    prediction: tuple[int, ...] = ()  # tokens of the whole answer, sent with the request

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


@dataclass(slots=True)
class _Traffic:
    up: int = 0
    down: int = 0
    opening_up: int = 0
    opening_down: int = 0
    drafts: int = 0
    reconnects: int = 0
    rtt_ms: float = 0.0
    first_token_s: float = 0.0


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


class Edge:
    """A client of one server. Answers come one after the other; drafters remember them.

    url: of the server, http or https. drafters: names in order are those of `paceline.drafters`.
    """

    def __init__(
        self,
        url: str,
        drafters: Sequence[Drafter],
        settings: EdgeSettings | None = None,
        api_key: str | None = None,
    ) -> None:
        self.settings = settings or EdgeSettings()
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise UsageError(f"{url!r} is no address of a server: expected http://HOST:PORT")
        self._headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._drafters = DrafterList(list(drafters)) if drafters else None
        self._vocabulary: Vocabulary | None = None

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

    async def generate(self, body: Mapping[str, Any], update: Update | None = None) -> EdgeResult:
        """Answers a request: a body of /v1/chat/completions or /v1/completions.

        update: called with the committed and the provisional tokens whenever they change.
        """
        seeded = {**body, "seed": secrets.randbits(32) if body.get("seed") is None else body["seed"]}
        vocabulary = await self.vocabulary()
        async with aiohttp.ClientSession(headers=self._headers) as session:
            run = _Run(self, session, vocabulary, json.dumps(seeded).encode(), update)
            return await run.finish()

    def draft(self, seq: Seq, length: int) -> tuple[int, ...]:
        if self._drafters is None:
            return ()
        return self._drafters.draft([Ask(seq, length)])[0].tokens[:length]

    def begin(self, seq: Seq) -> None:
        if self._drafters is not None:
            self._drafters.begin(seq)

    def end(self, seq: Seq) -> None:
        if self._drafters is not None:
            self._drafters.end(seq)


class _Run:
    """One answer, over as many connections as it takes."""

    def __init__(
        self,
        edge: Edge,
        session: aiohttp.ClientSession,
        vocabulary: Vocabulary,
        body: bytes,
        update: Update | None,
    ) -> None:
        self._edge, self._session, self._vocabulary, self._update = edge, session, vocabulary, update
        self._settings, self._body = edge.settings, body
        self._traffic = _Traffic()
        self._started = time.perf_counter()
        self._ws: aiohttp.ClientWebSocketResponse | None = None
        self._drafts = False  # the server takes them
        self._credits = 0
        self._number = 0  # of the last draft on this connection
        self._read = 0  # of the last one that the server has read
        self._pinged = 0.0
        spec = SpecConfig(("none",), max_draft=MAX_IDS)
        self._answer = _Answer(Seq(secrets.token_hex(4), [], 0, spec=spec))

    async def finish(self) -> EdgeResult:
        answer, delay, cut_at = self._answer, RETRY_S[0], time.monotonic()
        while answer.ended is None:
            before = answer.have
            try:
                await self._connect()
            except _Cut as cut:
                now = time.monotonic()
                if answer.have > before:
                    delay, cut_at = RETRY_S[0], now
                if now - cut_at > self._settings.reconnect_s:
                    raise PacelineError(f"the server cannot be reached any more: {cut}") from None
                self._traffic.reconnects += 1
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_S[1])
        self._edge.end(answer.seq)
        return self._result(answer.ended)

    async def _connect(self) -> None:
        """One connection, until the answer or the connection ends."""
        url = f"{self._edge._url}{PATH}"
        try:
            async with self._session.ws_connect(
                url, compress=0, max_msg_size=MAX_OPEN_BYTES, heartbeat=20.0, autoping=True
            ) as ws:
                self._ws, self._number, self._read = ws, 0, 0
                await self._begin()
                async for message in ws:
                    if message.type is not aiohttp.WSMsgType.BINARY:
                        break
                    self._traffic.down += len(message.data) + (2 if len(message.data) <= _SMALL_FRAME else 4)
                    await self._handle(decode_server(message.data))
                    if self._answer.ended is not None:
                        return
        except asyncio.CancelledError:
            await self._cancel()
            raise
        except aiohttp.WSServerHandshakeError as error:
            if error.status in (401, 403, 404):
                raise PacelineError(f"{url} refuses a connection: status {error.status}") from None
            raise _Cut(f"status {error.status}") from None
        except (aiohttp.ClientError, OSError, WireError) as error:
            raise _Cut(str(error) or type(error).__name__) from None
        raise _Cut("the connection was closed")

    async def _cancel(self) -> None:
        """The server need not finish an answer that nobody wants."""
        with suppress(_Cut):
            await self._send(Cancel())

    async def _send(self, message: ClientMessage) -> None:
        assert self._ws is not None
        data = encode(message)
        self._traffic.up += len(data) + (6 if len(data) <= _SMALL_FRAME else 8)
        try:
            await self._ws.send_bytes(data)
        except (aiohttp.ClientError, ConnectionError, RuntimeError) as error:
            raise _Cut(str(error)) from None

    async def _handle(self, message: ServerMessage) -> None:
        if isinstance(message, Welcome):
            self._drafts, self._credits = message.drafts, message.credits
        elif isinstance(message, Opened):
            await self._opened(message)
        elif isinstance(message, Commit):
            await self._committed(message)
        elif isinstance(message, End):
            self._check_end(message)
        elif isinstance(message, Pong):
            self._traffic.rtt_ms = 1000 * (time.perf_counter() - self._pinged)
        else:
            await self._failed(message)

    async def _begin(self) -> None:
        """The request follows the hello at once, which saves a round trip: it needs no welcome."""
        answer = self._answer
        await self._send(Hello(self._vocabulary.fingerprint, client=CLIENT))
        self._pinged = time.perf_counter()
        await self._send(Ping(1))
        if answer.secret:
            await self._send(Resume(answer.secret, answer.have, answer.hash))
        else:
            await self._open(self._settings.prediction)

    async def _open(self, prediction: tuple[int, ...]) -> None:
        settings = self._settings
        tail = min(settings.prompt_tail, MAX_TAIL) if self._answer.base_hash is None else 0
        await self._send(Open(self._body, settings.mode, settings.wait_ms, tail, prediction[:MAX_TAIL]))

    async def _opened(self, message: Opened) -> None:
        answer = self._answer
        answer.secret = message.secret
        if answer.base_hash is None:
            answer.base_hash = answer.hash = message.hash
            answer.seq.tokens = list(message.tail) or [0]
            answer.seq.prompt_len = len(answer.seq.tokens)
            self._edge.begin(answer.seq)
            self._traffic.opening_up, self._traffic.opening_down = self._traffic.up, self._traffic.down
        elif message.hash != answer.base_hash:
            raise PacelineError("the server has restarted with another model: the text cannot be continued")
        answer.draft, answer.expected = None, ()
        await self._draft()

    async def _committed(self, message: Commit) -> None:
        answer = self._answer
        if not self._traffic.first_token_s:
            self._traffic.first_token_s = time.perf_counter() - self._started
        self._read, answer.wanted = message.draft, message.max_draft
        tokens = self._new_tokens(message)
        answer.seq.tokens.extend(tokens)
        answer.hash = extend_hash(answer.hash, tokens)
        if not answer.overlap and answer.hash != message.hash:
            raise _Cut("a commit has another hash")
        self._follow(tokens)
        await self._draft()
        if self._update is not None:
            self._update(tuple(answer.tokens), answer.expected)

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
        """Sends a draft, unless the last one still has enough left or too many are on their way."""
        answer = self._answer
        if not self._drafts or answer.overlap or self._settings.mode is Mode.ONE_SHOT:
            return
        if len(answer.expected) > answer.wanted or self._number - self._read >= self._credits:
            return
        if not answer.wanted and answer.silent < PROBE_TOKENS:
            return
        if answer.draft is not None and not answer.expected and answer.draft.base == answer.have:
            return  # the same as before
        if answer.draft is not None and answer.expected:
            answer.length = min(2 * answer.length, MAX_IDS)
        tokens = self._edge.draft(answer.seq, answer.length)
        longer = len(tokens) > len(answer.expected) or tokens[: len(answer.expected)] != answer.expected
        if longer or (not tokens and self._settings.mode is Mode.PATIENT):
            await self._send_draft(tokens)

    async def _send_draft(self, tokens: tuple[int, ...]) -> None:
        answer = self._answer
        self._number += 1
        answer.draft = DraftMessage(self._number, answer.have, answer.hash, tokens)
        answer.expected, answer.silent = tokens, 0
        self._traffic.drafts += 1
        await self._send(answer.draft)
        if self._update is not None:
            self._update(tuple(answer.tokens), answer.expected)

    def _check_end(self, message: End) -> None:
        answer = self._answer
        if (message.tokens, message.hash) != (answer.have, answer.hash):
            raise _Cut("the answer has another end")
        answer.ended = message

    async def _failed(self, error: Error) -> None:
        answer = self._answer
        if error.name == "unknown_stream" and answer.base_hash is not None:
            answer.secret, answer.overlap = b"", answer.tokens  # opened again on the next connection
            self._reopen()
            raise _Cut(error.message)
        if error.name == "unknown_position":
            raise PacelineError(f"the server's text differs from what it sent before: {error.message}")
        if answer.secret and error.status in (408, 429, 503) and error.retry_ms:
            raise _Cut(error.message)
        raise ServerError(error)

    def _reopen(self) -> None:
        """After a restart: what is known already is the draft of the beginning."""
        self._settings = _predicting(self._settings, tuple(self._answer.tokens))

    def _result(self, ended: End) -> EdgeResult:
        traffic, tokens = self._traffic, tuple(self._answer.tokens)
        return EdgeResult(
            tokens,
            self._vocabulary.text(tokens)[: ended.characters],
            Finish(ended.finish).name.lower(),
            json.loads(ended.report),
            traffic.drafts,
            traffic.up,
            traffic.down,
            traffic.opening_up,
            traffic.opening_down,
            traffic.reconnects,
            traffic.rtt_ms,
            traffic.first_token_s,
            time.perf_counter() - self._started,
        )


def _predicting(settings: EdgeSettings, tokens: tuple[int, ...]) -> EdgeSettings:
    return EdgeSettings(settings.mode, settings.wait_ms, settings.prompt_tail, settings.reconnect_s, tokens)


async def _message(response: aiohttp.ClientResponse) -> str:
    try:
        return str((await response.json())["error"]["message"])
    except (ValueError, KeyError, TypeError, aiohttp.ClientError):
        return f"status {response.status}"
