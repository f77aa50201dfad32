"""The endpoint and its clients: resumed, lying, flooding, slow, without a key."""

import asyncio
import gc
import json
import random
import re
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import httpx
import pytest

from bench.network import Network, network
from paceline.drafters.mailbox import _Box, _Post
from paceline.drafters.ngram import Ngram
from paceline.split import wire
from paceline.split.edge import Edge, EdgeResult, EdgeSettings, ServerError
from paceline.split.streams import MAX_TICKETS, MAX_TICKETS_OF_KEY, TICKET_S, Stream, Tickets
from paceline.split.wire import (
    Cancel,
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
    extend_hash,
)
from paceline.trace.store import Store
from paceline.web import api_keys
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import Key
from support.servers import until
from support.split_client import Closed, RawClient, raw_client
from support.split_server import GENEROUS, LONG_MS, SplitServer, Start

pytestmark = pytest.mark.slow  # real connections and waits: left out of make quick

T = TypeVar("T")

BODY: dict[str, Any] = {"prompt": "one two three one two", "max_tokens": 60, "temperature": 0.8, "seed": 5}
LONG = {**BODY, "max_tokens": 400}
# An answer that is not complete before the test wants it: the server waits for a draft that never comes.
WAITING: dict[str, Any] = {"mode": Mode.PATIENT, "wait_ms": LONG_MS}


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, 300))


async def follow(client: RawClient, text: Sequence[int]) -> End:
    """Reads the answer to its end; a patient server gets the text itself as drafts."""
    for number in count(1):
        at = len(client.tokens)
        await drafted(client, number, tuple(text[at : at + wire.MAX_IDS]))
        if isinstance(message := await client.commit(), End):
            return message
    raise AssertionError


async def drafted(client: RawClient, number: int, tokens: tuple[int, ...], **changed: Any) -> DraftMessage:
    """Sends a draft at the end of the text; changed: other fields."""
    assert client.opened is not None
    at = extend_hash(client.opened.hash, client.tokens)
    message = DraftMessage(number, len(client.tokens), at, tokens)
    message = replace(message, **changed)
    await client.send(message)
    return message


# Lies


@pytest.mark.parametrize("mode", [Mode.OPPORTUNISTIC, Mode.PATIENT])
@pytest.mark.parametrize(
    "lie", ["random", "beyond the vocabulary", "wrong hash", "far base", "replayed", "reordered"]
)
def test_a_lying_client_gets_the_targets_text(lie: str, mode: Mode, split_server: SplitServer) -> None:
    rng, plain = random.Random(lie), split_server.tokens(BODY)

    def lied(number: int, at: int) -> tuple[int, tuple[int, ...], dict[str, int]]:
        """Number, tokens and other wrong fields of a draft."""
        if lie == "beyond the vocabulary":
            strange = range(split_server.split.vocab_size, 1 << 23)
            return number, tuple(rng.choice(strange) for _ in range(8)), {}
        if lie == "wrong hash":
            return number, plain[at : at + 8], {"hash": rng.randrange(1 << 64)}
        if lie == "far base":
            return number, plain[at : at + 8], {"base": rng.randrange(len(plain), 1 << 32)}
        number = rng.randrange(1, 100) if lie == "reordered" else number
        return number, tuple(rng.randrange(60) for _ in range(8)), {}

    async def test() -> tuple[list[int], Commit | End]:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            await client.open(BODY, mode, wait_ms=20)
            old = list[DraftMessage]()
            while isinstance(message := await client.commit(), Commit):
                number, tokens, changed = lied(len(old) + 1, len(client.tokens))
                old.append(await drafted(client, number, tokens, **changed))
                if lie == "replayed":
                    await client.send(rng.choice(old))
                    await client.send(old[0])
            return client.tokens, message

    tokens, end = run(test())
    assert isinstance(end, End)
    assert tuple(tokens) == split_server.tokens(BODY)
    assert end.hash == extend_hash(wire_base(split_server), tokens)
    if lie in ("wrong hash", "far base", "beyond the vocabulary"):
        assert json.loads(end.report)["drafted_tokens"] == 0


def wire_base(split_server: SplitServer) -> int:
    return extend_hash(wire.HASH_START, split_server.llm.tokenizer.encode(BODY["prompt"]))


def test_nothing_is_learned_from_a_client_for_others(split_server: SplitServer) -> None:
    result = run(Edge(split_server.url, [Ngram()], EdgeSettings(Mode.PATIENT, LONG_MS)).generate(BODY))
    assert result.report["drafted_tokens"] > 0
    learned = split_server.running.app.engine.llm.saved_estimates._estimates
    for by_route in (learned.acceptance, learned.gains):
        assert by_route
        assert not any(drafter == "mailbox" for _, drafter in by_route)


def test_drafts_of_another_vocabulary_are_dropped_and_the_text_is_streamed(split_server: SplitServer) -> None:
    async def test() -> tuple[list[int], End]:
        async with raw_client(split_server.url) as client:
            welcome = await client.hello(b"x" * 32)
            assert not welcome.drafts
            await client.open(BODY)
            await drafted(client, 1, split_server.tokens(BODY)[:20])
            return client.tokens, await client.rest()

    tokens, end = run(test())
    assert tuple(tokens) == split_server.tokens(BODY)
    assert json.loads(end.report)["drafted_tokens"] == 0


def test_a_flood_ends_its_connection_and_the_stream_can_be_resumed(
    split_server: SplitServer, start_split: Start
) -> None:
    running, split = start_split(replace(GENEROUS, messages_per_s=1))

    async def test() -> list[int]:
        async with raw_client(running.url) as client:
            await client.hello(split.fingerprint)
            opened = await client.open(LONG)
            errors: list[str] = []
            with suppress(Closed, ConnectionError, aiohttp.ClientError):
                for number in range(2000):
                    await drafted(client, number, (1, 2, 3))
                while True:
                    message = await client.receive()
                    errors += [message.name] if isinstance(message, Error) else []
            assert errors in ([], ["too_many_messages"])  # none if the flood's own bytes hid it
            assert client.ws.closed
        async with raw_client(running.url) as client:
            await client.hello(split.fingerprint)
            await client.send(Resume(opened.secret, 0, opened.hash))
            assert isinstance(await client.receive(), Opened)
            await client.rest()
            return client.tokens

    assert tuple(run(test())) == split_server.tokens(LONG)


def test_what_a_flood_leaves_is_bounded(start_split: Start) -> None:
    """Drafts at the text and far from it, requests that nobody reads: of each a known number is held."""
    running, split = start_split(replace(GENEROUS, messages_per_s=1_000_000, max_streams=3, detached_s=600))

    async def flood() -> None:
        async with raw_client(running.url) as client:
            await client.hello(split.fingerprint)
            await client.open(LONG, **WAITING)
            for number in range(1, 101):
                await drafted(client, 2 * number, (number,) * wire.MAX_IDS)
                await drafted(client, 2 * number + 1, (1,) * wire.MAX_IDS, base=number << 20)
            await client.send(Ping(1))
            while not isinstance(await client.receive(), Pong):
                pass
            assert held(DraftMessage) <= 3  # here and there, one in each hand

    def held(*kinds: type) -> int:
        gc.collect()
        return sum(isinstance(found, kinds) for found in gc.get_objects())

    before = held(Stream, _Post, _Box)
    for _ in range(8):
        run(flood())
    assert until(lambda: running.in_flight == 0, 60)
    assert until(lambda: len(split.mailbox) == 0, 60)
    assert len(split.streams) == 3
    assert held(Stream, _Post, _Box) - before <= 3


@pytest.mark.parametrize(
    "data",
    [b"", b"\x00", b"\xff" * 40, wire.encode(DraftMessage(1, 0, 0, (1,)))[:-1], bytes([3]) + bytes(5000)],
)
def test_bytes_that_are_no_message_end_the_connection(data: bytes, split_server: SplitServer) -> None:
    async def test() -> Error:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            await client.ws.send_bytes(data)
            error = await client.receive()
            assert isinstance(error, Error)
            with pytest.raises(Closed):
                await client.receive()
            return error

    error = run(test())
    assert (error.status, error.name, error.closes) == (400, "malformed_message", True)


def test_messages_out_of_turn_end_the_connection(split_server: SplitServer) -> None:
    async def answer_to(*messages: wire.ClientMessage) -> str:
        async with raw_client(split_server.url) as client:
            for message in messages:
                await client.send(message)
            while not isinstance(got := await client.receive(), Error):
                pass
            return got.name

    hello, request = Hello(split_server.split.fingerprint), Open(json.dumps(LONG).encode(), **WAITING)
    assert run(answer_to(Ping(1))) == "malformed_message"
    assert run(answer_to(hello, hello)) == "malformed_message"
    assert run(answer_to(hello, request, request)) == "busy"
    assert run(answer_to(hello, Resume(bytes(32), 0, 0))) == "unknown_stream"
    assert run(answer_to(Hello(versions=(2, 3)))) == "unsupported_version"


def test_a_text_message_ends_the_connection(split_server: SplitServer) -> None:
    async def test() -> None:
        async with raw_client(split_server.url) as client:
            await client.ws.send_str("hello")
            assert isinstance(await client.receive(), Error)

    run(test())


def test_a_message_beyond_the_limit_is_not_read(split_server: SplitServer) -> None:
    async def test() -> int | None:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            await client.ws.send_bytes(bytes(wire.MAX_OPEN_BYTES + 1))
            with pytest.raises(Closed):
                await client.receive()
            return client.ws.close_code

    assert run(test()) == 1009


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"n": 2}, "n: expected 1"),
        ({"prompt": ["a", "b"]}, "prompt: expected one"),
        ({"prompt": None}, "expected messages"),
        ({"temperature": -1}, "temperature"),
        ({"strange": 1}, "strange"),
        ({"model": "another"}, "another"),
    ],
)
def test_a_request_is_refused_as_over_http_and_the_next_one_is_served(
    change: dict[str, Any], named: str, split_server: SplitServer
) -> None:
    async def test() -> tuple[Error, list[int]]:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            await client.send(Open(json.dumps({**BODY, **change}).encode()))
            error = await client.receive()
            assert isinstance(error, Error)
            await client.open(BODY)
            await client.rest()
            return error, client.tokens

    error, tokens = run(test())
    assert named in error.message
    assert not error.closes
    assert error.status in (400, 404)
    assert tuple(tokens) == split_server.tokens(BODY)


# Patience


@pytest.mark.parametrize(
    ("mode", "asked", "adaptive"),
    [
        (Mode.PATIENT, {}, False),
        (Mode.PATIENT, {"drafters": ["mailbox"]}, False),
        (Mode.PATIENT, {"adaptive": True}, True),
        (Mode.OPPORTUNISTIC, {}, True),
    ],
)
def test_a_patient_server_verifies_whole_drafts_unless_it_is_told_otherwise(
    mode: Mode, asked: dict[str, Any], adaptive: bool, start_split: Start
) -> None:
    running, split = start_split()
    running.app.engine.llm.spec = replace(running.app.engine.llm.spec, adaptive=True)

    async def test() -> Stream | None:
        async with raw_client(running.url) as client:
            await client.hello(split.fingerprint)
            return split.streams.find((await client.open({**BODY, "speculative_config": asked}, mode)).secret)

    stream = run(test())
    assert stream is not None
    assert stream.output.seq.spec.adaptive is adaptive
    assert stream.output.seq.spec.drafters[0] == "mailbox"


def test_a_drafter_that_still_reads_is_waited_for(split_server: SplitServer) -> None:
    split, plain = split_server.split, split_server.tokens(BODY)

    async def test() -> tuple[int, Commit | End]:
        async with raw_client(split_server.url) as client:
            await client.hello(split.fingerprint)
            opened = await client.open(BODY, **WAITING)
            await client.send(Reading())
            await client.commit()
            await client.send(Ping(1))
            assert await client.receive() == Pong(1)  # so the server knows that it reads
            stream = split.streams.find(opened.secret)
            assert stream is not None
            split.mailbox.set_patience(stream.output.seq.id, replace(stream.patience, wait_s=0.001))
            split._wake_engine()
            await asyncio.sleep(0.2)
            before = len(stream.tokens)
            await drafted(client, 1, plain[before:])
            message = await client.commit()
            await client.rest()
            assert tuple(client.tokens) == plain
            return before, message

    before, message = run(test())
    assert before == 1
    assert isinstance(message, Commit)
    assert message.accepted >= split_server.llm.spec.max_draft  # more where passes are told together


# Connections


def test_a_connection_has_one_answer_after_another(split_server: SplitServer) -> None:
    async def test() -> None:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            for _ in range(3):
                client.tokens = []
                await client.open(BODY)
                await client.rest()
                assert tuple(client.tokens) == split_server.tokens(BODY)
            await client.send(Ping(9))
            assert await client.receive() == Pong(9)

    run(test())


def test_the_prompts_last_tokens_come_on_request(split_server: SplitServer) -> None:
    prompt = split_server.llm.tokenizer.encode(BODY["prompt"])

    async def test(tail: int) -> Opened:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            return await client.open(BODY, prompt_tail=tail)

    assert run(test(0)).tail == ()
    assert run(test(3)).tail == tuple(prompt[-3:])
    opened = run(test(60_000))
    assert opened.tail == tuple(prompt)
    assert opened.prompt_len == len(prompt)
    assert opened.hash == extend_hash(wire.HASH_START, prompt)


def test_another_connection_takes_a_stream_over(split_server: SplitServer) -> None:
    async def test() -> list[int]:
        async with raw_client(split_server.url) as first, raw_client(split_server.url) as second:
            for client in (first, second):
                await client.hello(split_server.split.fingerprint)
            opened = second.opened = await first.open(LONG, **WAITING)
            await first.commit()  # the first token waits for no draft
            await drafted(first, 1, split_server.tokens(LONG)[len(first.tokens) : 5])
            while len(first.tokens) < 5:
                await first.commit()
            second.tokens = first.tokens[:5]
            await second.send(Resume(opened.secret, 5, extend_hash(opened.hash, second.tokens)))
            again = await second.receive()
            assert isinstance(again, Opened)
            assert again.secret == opened.secret
            await follow(second, split_server.tokens(LONG))
            with suppress(Closed):
                while True:  # its own commits, then the end of the connection
                    assert isinstance(await first.receive(), Commit)
            assert first.ws.closed
            return second.tokens

    assert tuple(run(test())) == split_server.tokens(LONG)


def test_a_wrong_position_is_refused_and_the_right_one_is_served(split_server: SplitServer) -> None:
    async def test() -> list[int]:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            opened = await client.open(BODY)
            await client.rest()
            client.tokens = []
            for have, value in ((3, opened.hash), (1 << 31, opened.hash)):
                await client.send(Resume(opened.secret, have, value))
                error = await client.receive()
                assert isinstance(error, Error)
                assert error.name == "unknown_position"
            await client.send(Resume(opened.secret, 0, opened.hash))
            await client.receive()
            assert (await client.rest()).finish == Finish.LENGTH
            return client.tokens

    assert tuple(run(test())) == split_server.tokens(BODY)


def test_a_reader_that_is_slow_gets_everything_in_fewer_commits(split_server: SplitServer) -> None:
    async def test() -> tuple[list[int], int]:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            opened = await client.open(LONG)
        # Nobody is connected for a while: the answer is written all the same.
        stream = split_server.split.streams.find(opened.secret)
        assert stream is not None
        while not stream.ended:
            await asyncio.sleep(0.01)
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            await client.send(Resume(opened.secret, 0, opened.hash))
            await client.receive()
            commits = 0
            while isinstance(await client.commit(), Commit):
                commits += 1
            return client.tokens, commits

    tokens, commits = run(test())
    assert tuple(tokens) == split_server.tokens(LONG)
    assert commits == -(-len(tokens) // wire.MAX_IDS)


def test_a_cancelled_answer_ends_at_once(split_server: SplitServer) -> None:
    async def test() -> End:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            await client.open(LONG, **WAITING)
            await client.commit()
            await client.send(Cancel())
            return await client.rest()

    assert run(test()).finish == Finish.CANCELLED
    assert until(lambda: split_server.running.in_flight == 0, 60)
    assert len(split_server.split.mailbox) == 0


def test_nobody_reads_an_answer_that_has_no_connection_for_long(start_split: Start) -> None:
    running, split = start_split(replace(GENEROUS, detached_s=0.2))

    async def test() -> None:
        async with raw_client(running.url) as client:
            await client.hello(split.fingerprint)
            await client.open(LONG)
            await client.commit()

    run(test())
    assert until(lambda: running.in_flight == 0, 60)
    assert until(lambda: len(split.streams) == 0, 60)
    assert len(split.mailbox) == 0


@pytest.mark.parametrize("says_hello", [False, True])
def test_a_connection_that_says_nothing_ends(says_hello: bool, start_split: Start) -> None:
    limits = replace(GENEROUS, idle_timeout_s=0.2) if says_hello else replace(GENEROUS, hello_timeout_s=0.2)
    running, split = start_split(limits)

    async def test() -> None:
        async with raw_client(running.url) as client:
            if says_hello:
                await client.hello(split.fingerprint)
            with pytest.raises(Closed):
                await client.receive()

    run(test())


def test_streams_are_bounded_and_those_that_nobody_reads_make_room(start_split: Start) -> None:
    running, split = start_split(replace(GENEROUS, max_streams=2, detached_s=600))

    async def opened(client: RawClient) -> wire.ServerMessage:
        await client.hello(split.fingerprint)
        await client.send(Open(json.dumps(LONG).encode(), **WAITING))
        return await client.receive()

    async def test() -> None:
        async with raw_client(running.url) as a, raw_client(running.url) as b, raw_client(running.url) as c:
            assert isinstance(await opened(a), Opened)
            assert isinstance(await opened(b), Opened)
            refused = await opened(c)
            assert isinstance(refused, Error)
            assert (refused.status, refused.closes) == (429, False)
        while any(stream.reader is not None for stream in split.streams):
            await asyncio.sleep(0.01)
        async with raw_client(running.url) as d:
            assert isinstance(await opened(d), Opened)
        assert len(split.streams) == 2

    run(test())


def test_of_streams_that_nobody_reads_a_complete_one_goes_first(start_split: Start) -> None:
    running, split = start_split(replace(GENEROUS, max_streams=2, detached_s=600))

    async def leave(**options: Any) -> bytes:
        async with raw_client(running.url) as client:
            await client.hello(split.fingerprint)
            return (await client.open(LONG, **options)).secret

    async def test() -> None:
        incomplete = await leave(**WAITING)
        await leave()
        while not all(stream.reader is None for stream in split.streams):
            await asyncio.sleep(0.01)
        for stream in split.streams:  # without a reader nobody is waited for: both end
            while not stream.ended:
                await asyncio.sleep(0.01)
        found = split.streams.find(incomplete)
        assert found is not None
        found.ended = False
        await leave()
        assert split.streams.find(incomplete) is found

    run(test())


def test_a_cancel_that_follows_at_once_leaves_nothing(split_server: SplitServer) -> None:
    async def test() -> None:
        async with raw_client(split_server.url) as client:
            await client.hello(split_server.split.fingerprint)
            for _ in range(20):
                await client.send(Open(json.dumps(LONG).encode(), **WAITING))
                await client.send(Cancel())
                while not isinstance(message := await client.receive(), End):
                    assert isinstance(message, Opened | Commit)
                assert message.finish == Finish.CANCELLED

    run(test())
    assert until(lambda: split_server.running.in_flight == 0, 60)
    assert until(lambda: len(split_server.split.mailbox) == 0, 60)


def test_an_answer_survives_a_restart_of_the_server(split_server: SplitServer, start_split: Start) -> None:
    """The client opens its request again: the same text follows what it has."""
    other, split = start_split()
    cuts = iter([1500])  # bytes: within the answer, whose 400 tokens alone have 1200

    async def test() -> EdgeResult:
        async with network(Network(split_server.port)) as between:

            def cut_after() -> int | None:
                """Of the first connection; later ones are to the other server."""
                between.port = int(other.url.rsplit(":", 1)[1])
                return next(cuts, None)

            between.cut_after = cut_after
            vocabulary = await Edge(split_server.url, []).vocabulary()
            return await Edge(between.url, [Ngram()], vocabulary=vocabulary).generate(LONG)

    result = run(test())
    assert result.token_ids == split_server.tokens(LONG)
    assert result.reconnects == 1
    assert len(split.streams) == 1
    assert result.passes < len(result.token_ids)


# Keys


def test_a_key_or_a_ticket_is_needed_where_there_are_keys(start_split: Start) -> None:
    running, split = start_split(api_keys=("secret",))
    headers = {"authorization": "Bearer secret", "origin": running.url}

    async def hello(ticket: str = "", **headers: str) -> wire.ServerMessage:
        async with raw_client(running.url, headers=headers) as client:
            await client.send(Hello(split.fingerprint, ticket))
            return await client.receive()

    def ticket() -> str:
        answer = httpx.post(f"{running.url}/v1/split/tickets", headers=headers, trust_env=False).json()
        assert answer["expires_in"] == TICKET_S
        return str(answer["ticket"])

    refused = run(hello())
    assert isinstance(refused, Error)
    assert (refused.status, refused.name) == (401, "invalid_api_key")
    assert isinstance(run(hello(authorization="Bearer secret")), wire.Welcome)
    one, other = ticket(), ticket()
    assert isinstance(run(hello(one, origin=running.url)), wire.Welcome)
    for wrong in (hello(one, origin=running.url), hello(other), hello("guessed")):
        refused = run(wrong)
        assert isinstance(refused, Error)
        assert refused.name == "invalid_ticket"
    for path, method in (("vocabulary", "GET"), ("tickets", "POST")):
        answer = httpx.request(method, f"{running.url}/v1/split/{path}", trust_env=False)
        assert answer.status_code == 401


def test_limits_of_a_key_hold(start_split: Start, tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    key = api_keys.add(file, "ada", {"concurrent": 1})
    stranger = api_keys.add(file, "bert")
    running, split = start_split(keys=str(file))

    async def test() -> None:
        headers = {"authorization": f"Bearer {key}"}
        async with (
            raw_client(running.url, headers=headers) as a,
            raw_client(running.url, headers=headers) as b,
        ):
            for client in (a, b):
                await client.hello(split.fingerprint)
            opened = await a.open(LONG, **WAITING)
            await b.send(Open(json.dumps(BODY).encode()))
            refused = await b.receive()
            assert isinstance(refused, Error)
            assert (refused.status, refused.name) == (429, "rate_limit_exceeded")
            assert refused.retry_ms
        async with raw_client(running.url, headers={"authorization": f"Bearer {stranger}"}) as c:
            await c.hello(split.fingerprint)
            await c.send(Resume(opened.secret, 0, opened.hash))
            error = await c.receive()
            assert isinstance(error, Error)
            assert error.name == "unknown_stream"

    run(test())


def test_pages_of_other_sites_get_no_connection(split_server: SplitServer) -> None:
    async def test() -> None:
        async with raw_client(split_server.url, headers={"origin": "https://evil.example"}):
            pass

    with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
        run(test())
    assert caught.value.status == 403


def test_tickets_are_bounded_and_expire() -> None:
    now = [0.0]
    tickets = Tickets(lambda: now[0])
    ada, bert = Key(name="ada", hash="0" * 64), Key(name="bert", hash="1" * 64)
    first, of_bert = tickets.issue(ada, "a"), tickets.issue(bert, "a")
    for _ in range(MAX_TICKETS):
        last = tickets.issue(ada, "a")
    assert len(tickets) == MAX_TICKETS_OF_KEY + 1
    with pytest.raises(ApiError):
        tickets.redeem(first, "a")
    assert tickets.redeem(last, "a") is ada
    assert tickets.redeem(of_bert, "a") is bert  # whatever others do
    for i in range(MAX_TICKETS + 10):
        tickets.issue(Key(name=f"key-{i}", hash="2" * 64), "a")
    assert len(tickets) == MAX_TICKETS
    late = tickets.issue(None, "a")
    now[0] += TICKET_S + 1
    with pytest.raises(ApiError):
        tickets.redeem(late, "a")


# The rest of the server


def test_a_stream_counts_and_is_traced_like_any_request(start_split: Start, tmp_path: Path) -> None:
    running, _ = start_split(store=str(tmp_path / "traces.db"))
    result = run(Edge(running.url, [Ngram()]).generate(BODY))
    metrics = httpx.get(f"{running.url}/metrics", trust_env=False).text
    assert re.search(r"^vllm:generation_tokens_total{.*} 60\.0$", metrics, re.MULTILINE)
    store = Store.open(str(tmp_path / "traces.db"))
    assert until(lambda: len(store.list()) == 1, 60)
    (record,) = store.list()
    store.close()
    assert record.endpoint == "/v1/split"
    assert (record.output_tokens, record.passes) == (60, result.passes)


def test_errors_of_the_server_are_the_clients(split_server: SplitServer) -> None:
    async def test() -> EdgeResult:
        async with Edge(split_server.url, []) as edge:
            with pytest.raises(ServerError, match="temperature") as caught:
                await edge.generate({**BODY, "temperature": -1.0})
            assert caught.value.status == 400
            assert edge._connection is not None
            assert edge._connection.is_open
            return await edge.generate(BODY)

    assert run(test()).token_ids == split_server.tokens(BODY)


def test_the_vocabulary_is_sent_once(split_server: SplitServer) -> None:
    url = f"{split_server.url}/v1/split/vocabulary"
    answer = httpx.get(url, trust_env=False)
    pieces, control = wire.decode_vocabulary(answer.content)
    tokenizer = split_server.llm.tokenizer
    assert pieces == [tokenizer.piece(token) for token in range(tokenizer.vocab_size)]
    assert control == tokenizer.control
    assert answer.headers["etag"] == f'"{wire.fingerprint(pieces).hex()}"'
    again = httpx.get(url, headers={"if-none-match": answer.headers["etag"]}, trust_env=False)
    assert again.status_code == 304
