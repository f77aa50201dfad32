"""The server's side: GET /v1/split as a WebSocket, /v1/split/vocabulary and /v1/split/tickets.

Requests take the way of /v1/chat/completions: the same keys, limits, routes, admission, traces and metrics.
The drafts of a client land in the mailbox of its sequence (drafters/mailbox.py). The server tokenizes,
samples and owns the text; a draft decides only how many tokens a pass may bring.
"""

import asyncio
import json
import logging
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Final

from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from paceline.config import SpecConfig, require, require_min
from paceline.drafters.mailbox import NO_PATIENCE, Mailbox, Patience
from paceline.errors import PacelineError, WireError
from paceline.server.access_log import figures
from paceline.server.admission import RequestContext
from paceline.server.app import App
from paceline.server.async_engine import GenerateParams, PreparedPrompt
from paceline.server.openai.params import chat_params, completion_params, read_prompts
from paceline.server.openai.protocol import ChatRequest, CompletionRequest
from paceline.server.openai.serving import Serving, usage
from paceline.split.streams import TICKET_S, Stream, Streams, Tickets
from paceline.split.wire import (
    MAX_IDS,
    MAX_OPEN_BYTES,
    Cancel,
    ClientMessage,
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
    decode_client,
    encode,
    encode_vocabulary,
    fingerprint,
    negotiate,
)
from paceline.web.api_errors import ApiError, api_error, log_and_convert, with_error_responses
from paceline.web.api_keys import Key
from paceline.web.request_body import INLINE_BYTES, off_loop, parse_object, parse_request

log = logging.getLogger("paceline.split")
access_log = logging.getLogger("paceline.access")

PATH: Final = "/v1/split"
DRAFTER: Final = Mailbox.name
DEFAULT_DRAFT: Final = 8  # tokens in a pass, on a server that drafts nothing itself
FINISHES: Final = {"stop": Finish.STOP, "length": Finish.LENGTH, "tool_calls": Finish.TOOL_CALLS}
GOING_AWAY, POLICY, OK = 1001, 1008, 1000  # WebSocket close codes


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """Bounds on what a client can hold or cost. Times are seconds."""

    credits: int = 4  # drafts on their way
    max_streams: int = 256  # running, or kept to be resumed
    detached_s: float = 60.0  # that a stream is kept without a connection
    hello_timeout_s: float = 5.0
    idle_timeout_s: float = 60.0  # of a connection without an answer in progress
    write_timeout_s: float = 20.0  # for a client that does not read
    max_wait_s: float = 2.0  # for a draft
    max_reading_s: float = 30.0  # from the first token on, for a drafter that still reads the prompt
    max_patience_s: float = 300.0  # from the first token on: then a stream waits for no more drafts
    messages_per_s: int = 200  # of a connection; twice as many at once

    def __post_init__(self) -> None:
        require_min(self, credits=1, max_streams=1, messages_per_s=1)
        for name in (field.name for field in fields(self) if field.name.endswith("_s")):
            require(lambda x: x > 0, name, getattr(self, name), "more than 0 seconds")


class SplitServing:
    """The endpoint. `routes` is what the application needs of it."""

    def __init__(self, app: App, limits: SplitLimits | None = None) -> None:
        self.limits = limits or SplitLimits()
        self._serving: Serving = app.chat
        self._engine = engine = app.engine
        self._authenticated = app.authenticated
        drafter = engine.llm.drafters[DRAFTER]
        assert isinstance(drafter, Mailbox)
        self.mailbox = drafter
        self.streams = Streams(self.limits.max_streams, self.limits.detached_s)
        self.tickets = Tickets()
        # At the start: 0.3 s for 150,000 tokens, during which the event loop would serve nobody.
        llm = engine.llm
        tokenizer = llm.tokenizer
        pieces = [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
        self.fingerprint = fingerprint(pieces)
        self._vocabulary = encode_vocabulary(pieces, frozenset(tokenizer.control))
        # Of the tokens that a draft may have: those that the model scores and the tokenizer knows.
        self.vocab_size = min(tokenizer.vocab_size, llm.target.vocab_size)

    def routes(self) -> list[BaseRoute]:
        paths = ((f"{PATH}/vocabulary", self.vocabulary, "GET"), (f"{PATH}/tickets", self.ticket, "POST"))
        return [
            WebSocketRoute(PATH, self.connect),
            *(
                Route(path, with_error_responses(self._authenticated(call)), methods=[method])
                for path, call, method in paths
            ),
        ]

    async def connect(self, ws: WebSocket) -> None:
        await _Connection(self, ws).serve()

    async def vocabulary(self, http: Request) -> Response:
        """The bytes of all tokens, for clients without a tokenizer; they change with the model only."""
        tag = f'"{self.fingerprint.hex()}"'
        headers = {"etag": tag, "cache-control": "private, no-cache"}
        if http.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        return Response(self._vocabulary, headers=headers, media_type="application/octet-stream")

    async def ticket(self, http: Request) -> Response:
        """For a WebSocket of the same page, within a minute, once."""
        ticket = self.tickets.issue(http.state.key, http.headers.get("origin", ""))
        return JSONResponse({"ticket": ticket, "expires_in": int(TICKET_S)})

    @property
    def model(self) -> str:
        return self._engine.llm.name

    def authenticate(self, ws: WebSocket, ticket: str) -> Key | None:
        if ticket:
            return self.tickets.redeem(ticket, ws.headers.get("origin", ""))
        return self._serving.admission.authenticate(ws.headers)

    def refused(self, error: Exception) -> None:
        self._serving.log.refused(error)

    async def open(self, ws: HTTPConnection, key: Key | None, message: Open) -> Stream:
        """Admits a request as an HTTP endpoint does, tokenizes its prompt, and starts its answer."""
        serving = self._serving
        http = _as_request(ws, key, len(message.body) > INLINE_BYTES)
        try:
            http.state.ticket = serving.admission.enter(key)
            body, request = await off_loop(http, partial(_parsed, message.body))
            context = serving.admission.admit(http, body, request, "split-")
        except Exception as error:
            serving.log.refused(error, http)
            if http.state.ticket is not None:
                http.state.ticket.leave(0, time.monotonic(), api_error(error).retryable)
            raise
        with serving.recorded(context):
            await serving.load(context)
            read = partial(self._params, context, message)
            params = serving.limited(context, await off_loop(http, read))
            (prepared,) = await serving.prepare(context, [params])
            stream = Stream(context, prepared.first)
            self.streams.add(stream)
        seq = prepared.first.seq
        if message.mode is not Mode.ONE_SHOT:
            self.mailbox.open(seq.id, self.vocab_size)
        if message.mode is Mode.PATIENT:
            seq.held_until = partial(self.mailbox.held_until, seq)
            stream.patience = self._patience(message)
        stream.task = asyncio.create_task(self._run(stream, prepared))
        return stream

    def _patience(self, message: Open) -> Patience:
        limits = self.limits
        wait_s = min(message.wait_ms / 1000, limits.max_wait_s)
        return Patience(wait_s, limits.max_reading_s, limits.max_patience_s)

    def _params(self, context: RequestContext, message: Open) -> GenerateParams:
        request, llm = context.request, self._engine.llm
        spec, drafters = self._engine.spec(context.route), self._engine.drafters
        if isinstance(request, ChatRequest):
            params = chat_params(request, spec, drafters, llm.tokenizer.template)
        else:
            assert isinstance(request, CompletionRequest)
            prompts = read_prompts(request.prompt)
            if len(prompts) > 1:
                raise ApiError(400, "prompt: expected one, as a stream has one answer", param="prompt")
            params = completion_params(request, prompts[0], spec, drafters)
        if params.n > 1:
            raise ApiError(400, "n: expected 1, as a stream has one answer", param="n")
        asked = request.speculative_config
        if asked is None or not (asked.disabled or asked.drafters or asked.draft_model):
            params = replace(params, spec=_with_drafts(params.spec or spec, message))
        if message.mode is Mode.PATIENT and (asked is None or asked.adaptive is None):
            params = replace(params, spec=replace(params.spec or spec, adaptive=False))  # fewest passes
        if message.prediction and not params.prediction:
            params = replace(params, prediction=_within(message.prediction, self.vocab_size))
        return params

    async def _run(self, stream: Stream, prepared: PreparedPrompt) -> None:
        """Until its end, whoever reads it."""
        serving, context = self._serving, stream.context
        try:
            with serving.recorded(context):
                async with aclosing(self._engine.generate(context, prepared)) as deltas:
                    async for _ in deltas:
                        stream.advance()
            serving.log.finished(context)
            stream.end()
        except asyncio.CancelledError:
            stream.end()
        except Exception as error:
            stream.end(log_and_convert(error, PATH))
        finally:
            self.mailbox.close(stream.output.seq.id)
            seconds = time.perf_counter() - context.arrived
            access_log.info(
                "SPLIT %s %.3fs id=%s dropped=%d %s",
                PATH,
                seconds,
                context.id,
                stream.dropped,
                " ".join(figures(context)),
            )

    def attach(self, stream: Stream, reader: object, drafts: bool) -> None:
        """drafts: the reader may send some."""
        self.streams.attach(stream, reader)
        self.mailbox.set_patience(stream.output.seq.id, stream.patience if drafts else NO_PATIENCE)

    def detach(self, stream: Stream, reader: object) -> None:
        if self.streams.detach(stream, reader):  # nobody is left to wait for
            self.mailbox.set_patience(stream.output.seq.id, NO_PATIENCE)
            self._wake_engine()

    def post(self, stream: Stream, message: DraftMessage) -> None:
        """A draft of the client, if it is on the text. Numbers ascend: a replayed or reordered one is old."""
        on_text = message.number > stream.draft and stream.is_at(message.base, message.hash)
        stream.draft = max(stream.draft, message.number)
        if not on_text or not self.mailbox.post(stream.output.seq.id, message.base, message.tokens):
            stream.dropped += 1
        elif stream.output.seq.held_until is not None:
            self._wake_engine()

    def read_on(self, stream: Stream) -> None:
        """The engine need not be told: at the end of its wait it looks again."""
        self.mailbox.read_on(stream.output.seq.id)

    def _wake_engine(self) -> None:
        self._engine.thread.between_passes(lambda: None)

    def max_draft(self, stream: Stream) -> int:
        """Tokens that the next draft should have; 0 while drafts are rejected."""
        seq = stream.output.seq
        return min(seq.spec.max_draft, MAX_IDS) if self.mailbox.useful(seq.id) else 0

    def end(self, stream: Stream) -> End:
        output, tokens = stream.output, len(stream.tokens)
        finish = FINISHES[output.finish_reason] if output.finish in ("stop", "length") else Finish.CANCELLED
        report: dict[str, Any] = {
            "id": stream.context.id,
            "model": self.model,
            "passes": output.passes,
            "drafted_tokens": output.drafted[DRAFTER],
            "accepted_tokens": output.accepted[DRAFTER],
            "dropped_drafts": stream.dropped,
            "seed": output.seq.params.noise_seed,
            "usage": usage([output]),
        }
        if output.calls:
            report["tool_calls"] = [{"name": name, "arguments": text} for name, text in output.calls]
        return End(tokens, stream.hashes[tokens], finish, len(output.text), _short_report(report))


def mount(app: App, limits: SplitLimits | None = None) -> SplitServing:
    """Adds the endpoint to a server's application."""
    split = SplitServing(app, limits)
    app.extra_routes += split.routes()
    return split


class _Connection:
    """One WebSocket: reads messages; a task beside it writes the commits of the stream it reads."""

    def __init__(self, split: SplitServing, ws: WebSocket) -> None:
        self._split, self._ws, self._limits = split, ws, split.limits
        self._key: Key | None = None
        self._drafts = False  # the vocabularies agree
        self._stream: Stream | None = None
        self._numbers = 0  # added to the client's, which begin anew with each connection
        self._writer: asyncio.Task[None] | None = None
        self._allowance = 2.0 * self._limits.messages_per_s
        self._allowance_at = time.monotonic()

    async def serve(self) -> None:
        await self._ws.accept()
        code = OK
        try:
            await self._hello()
            while True:
                await self._handle(await self._receive())
        except WireError as error:
            code = POLICY
            self._split.refused(ApiError(400, str(error)))
            await self._try_send(Error(400, error.code, str(error)))
        except (ApiError, PacelineError) as error:
            code = POLICY
            await self._try_send(_error(api_error(error), closes=True))
        except TimeoutError:
            code = GOING_AWAY
        except (WebSocketDisconnect, OSError):
            return
        finally:
            await self._leave()
        with suppress(WebSocketDisconnect, RuntimeError, OSError):
            await self._ws.close(code)

    async def _hello(self) -> None:
        try:
            hello = await self._receive(self._limits.hello_timeout_s)
            if not isinstance(hello, Hello):
                raise WireError("the first message is no hello")
            version = negotiate(hello.versions)
            self._key = self._split.authenticate(self._ws, hello.ticket)
        except ApiError as error:
            self._split.refused(error)
            raise
        self._drafts = hello.fingerprint == self._split.fingerprint
        await self._send(
            Welcome(
                self._split.fingerprint,
                self._split.vocab_size,
                self._drafts,
                MAX_IDS,
                self._limits.credits,
                self._split.model[:80],
                version,
            )
        )

    async def _receive(self, timeout_s: float | None = None) -> ClientMessage:
        """timeout_s: None: without one while an answer is in progress; pings find dead peers."""
        while True:
            try:
                async with asyncio.timeout(timeout_s or self._limits.idle_timeout_s):
                    message = await self._ws.receive()
                break
            except TimeoutError:
                if timeout_s is not None or self._stream is None:
                    raise
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", OK))
        data = message.get("bytes")
        if data is None:
            raise WireError("a text message: expected binary ones")
        self._spend()
        return decode_client(data)

    def _spend(self) -> None:
        """A token bucket: messages cost time, whatever they say."""
        now, rate = time.monotonic(), self._limits.messages_per_s
        self._allowance = min(2.0 * rate, self._allowance + rate * (now - self._allowance_at)) - 1
        self._allowance_at = now
        if self._allowance < 0:
            raise WireError(f"more than {rate} messages a second", "too_many_messages")

    async def _handle(self, message: ClientMessage) -> None:
        if isinstance(message, DraftMessage):
            if self._stream is not None and self._drafts:
                number = self._numbers + message.number
                self._split.post(self._stream, replace(message, number=number))
        elif isinstance(message, Reading):
            if self._stream is not None and self._drafts:
                self._split.read_on(self._stream)
        elif isinstance(message, Ping):
            await self._send(Pong(message.number))
        elif isinstance(message, Open):
            await self._open(message)
        elif isinstance(message, Resume):
            await self._resume(message)
        elif isinstance(message, Cancel):
            if self._stream is not None:
                self._stream.cancel()
        else:
            raise WireError("a second hello")

    async def _open(self, message: Open) -> None:
        self._check_free()
        try:
            stream = await self._split.open(self._ws, self._key, message)
        except (ApiError, PacelineError) as error:
            await self._send(_error(api_error(error), closes=False))
            return
        await self._read(stream, 0, message.prompt_tail)

    async def _resume(self, message: Resume) -> None:
        self._check_free()
        stream = self._split.streams.find(message.secret)
        if stream is None or stream.context.client != ("" if self._key is None else self._key.name):
            text = "the stream is unknown: it has ended long ago, or the server has restarted: open it again"
            await self._send(Error(404, "unknown_stream", text, closes=False))
        elif not stream.is_at(message.have, message.hash):
            text = "the text has another hash there: resume from 0"
            await self._send(Error(409, "unknown_position", text, closes=False))
        else:
            await self._read(stream, message.have)

    def _check_free(self) -> None:
        if self._stream is not None:
            raise WireError("an answer is in progress on this connection", "busy")

    async def _read(self, stream: Stream, have: int, tail: int = 0) -> None:
        """Sends the stream from a position on, beside what the client sends."""
        self._stream, self._numbers = stream, stream.draft
        self._split.attach(stream, self, self._drafts)
        seq = stream.output.seq
        prompt = seq.tokens[: seq.prompt_len]
        last = tuple(prompt[len(prompt) - min(tail, len(prompt)) :])
        await self._send(Opened(stream.secret, stream.context.id, seq.prompt_len, stream.hashes[0], last))
        self._writer = asyncio.create_task(self._write(stream, have))

    async def _write(self, stream: Stream, have: int) -> None:
        """A reader that is slow gets fewer and larger commits: nothing waits for it but this task."""
        try:
            while stream.reader is self:
                stream.changed.clear()
                while have < len(stream.hashes) - 1:
                    commit = stream.commit(have, DRAFTER, self._split.max_draft(stream))
                    commit = replace(commit, draft=max(0, commit.draft - self._numbers))
                    await self._send(commit)
                    have += len(commit.tokens)
                if stream.ended:
                    await self._finish(stream)
                    return
                await stream.changed.wait()
            await self._ws.close(GOING_AWAY, "another connection has resumed the stream")
        except (WebSocketDisconnect, OSError, TimeoutError):
            with suppress(WebSocketDisconnect, RuntimeError, OSError):
                await self._ws.close(GOING_AWAY)

    async def _finish(self, stream: Stream) -> None:
        self._stream, self._writer = None, None
        self._split.detach(stream, self)
        ended = self._split.end(stream) if stream.error is None else _error(stream.error, closes=False)
        await self._send(ended)

    async def _leave(self) -> None:
        stream, writer, self._stream, self._writer = self._stream, self._writer, None, None
        if stream is not None:
            self._split.detach(stream, self)
        if writer is not None:
            writer.cancel()
            with suppress(asyncio.CancelledError):
                await writer

    async def _send(self, message: ServerMessage) -> None:
        async with asyncio.timeout(self._limits.write_timeout_s):
            try:
                await self._ws.send_bytes(encode(message))
            except RuntimeError:  # starlette's, where the other task has closed the connection
                raise WebSocketDisconnect(GOING_AWAY) from None

    async def _try_send(self, message: ServerMessage) -> None:
        with suppress(WebSocketDisconnect, OSError, TimeoutError):
            await self._send(message)


def _as_request(ws: HTTPConnection, key: Key | None, large: bool) -> Request:
    """One of the connection's requests, with a state of its own."""
    state = {"key": key, "ticket": None, "large": large, "used_tokens": 0}
    return Request({**ws.scope, "type": "http", "method": "POST", "state": state})


def _parsed(data: bytes) -> tuple[dict[str, Any], ChatRequest | CompletionRequest]:
    body = parse_object(data, MAX_OPEN_BYTES)
    given = [name for name in ("messages", "prompt") if body.get(name) is not None]
    if len(given) != 1:
        raise ApiError(400, "expected messages, or a prompt", param=given[0] if given else "messages")
    if given == ["prompt"]:
        return body, parse_request(body, CompletionRequest)
    request = parse_request(body, ChatRequest)
    if request.prefill:
        raise ApiError(400, "prefill: a stream has text: use /v1/prefill", param="prefill")
    return body, request


def _with_drafts(spec: SpecConfig, message: Open) -> SpecConfig:
    """The server's drafters after those of the client, unless the request names its drafters itself."""
    first = ("prediction",) if message.prediction and "prediction" not in spec.drafters else ()
    first = (*first, DRAFTER) if message.mode is not Mode.ONE_SHOT else first
    names = (*first, *(name for name in spec.drafters if name not in ("none", *first)))
    return replace(spec, drafters=names, max_draft=spec.max_draft or DEFAULT_DRAFT) if names else spec


def _within(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    strange = (i for i, token in enumerate(tokens) if token >= vocab_size)
    return tuple(tokens[: next(strange, len(tokens))])


def _error(error: ApiError, closes: bool) -> Error:
    retry_ms = 1000 * int(error.headers.get("retry-after", 0))
    return Error(error.status, (error.code or error.type)[:60], error.message[:500], retry_ms, closes)


def _short_report(report: dict[str, Any]) -> bytes:
    """Within a message; tool calls can be read from the text too."""
    data = json.dumps(report, ensure_ascii=False, separators=(",", ":")).encode()
    return data if len(data) < 1 << 15 else _short_report({**report, "tool_calls": None})
