"""Messages survive the wire, and any other bytes are a clear error."""

import hashlib
import struct
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.errors import WireError
from paceline.split import wire
from paceline.split.wire import (
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
    decode_client,
    decode_server,
    encode,
    extend_hash,
)
from support import examples

U8, U16, U32, U64 = (st.integers(0, (1 << bits) - 1) for bits in (8, 16, 32, 64))
TOKENS = st.integers(0, wire.MAX_U24)
NAMES = st.text(max_size=60)
BYTES32 = st.binary(min_size=32, max_size=32)


def ids(limit: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.lists(TOKENS, max_size=limit).map(tuple)


CLIENT = st.one_of(
    st.builds(Hello, BYTES32, NAMES, NAMES, st.tuples(U8, U8)),
    st.builds(Open, st.binary(max_size=300), st.sampled_from(Mode), U16, U16, ids(40)),
    st.builds(DraftMessage, U32, U32, U64, ids(wire.MAX_IDS)),
    st.builds(Resume, BYTES32, U32, U64),
    st.just(Cancel()),
    st.just(Reading()),
    st.builds(Ping, U32),
)
SERVER = st.one_of(
    st.builds(Welcome, BYTES32, U32, st.booleans(), U8, U8, NAMES, U8),
    st.builds(Opened, BYTES32, NAMES, U32, U64, ids(40)),
    st.builds(Commit, TOKENS, ids(wire.MAX_IDS), U64, U32, TOKENS, U8, U8),
    st.builds(End, U32, U64, st.sampled_from(Finish), U32, st.binary(max_size=300)),
    st.builds(Error, U16, NAMES, NAMES, U32, st.booleans()),
    st.builds(Pong, U32),
)


@settings(max_examples=examples(300), deadline=None)
@given(CLIENT)
def test_what_a_client_sends_is_what_the_server_reads(message: ClientMessage) -> None:
    assert decode_client(encode(message)) == message


@settings(max_examples=examples(300), deadline=None)
@given(SERVER)
def test_what_a_server_sends_is_what_the_client_reads(message: ServerMessage) -> None:
    assert decode_server(encode(message)) == message


@settings(max_examples=examples(500), deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_a_wire_error(data: bytes) -> None:
    for decode in (decode_client, decode_server):
        try:
            message = decode(data)
        except WireError:
            continue
        assert encode(message) == data


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(CLIENT, SERVER), st.data())
def test_a_changed_byte_is_another_message_or_a_wire_error(
    message: ClientMessage | ServerMessage, data: st.DataObject
) -> None:
    encoded = bytearray(encode(message))
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= data.draw(st.integers(1, 255))
    for decode in (decode_client, decode_server):
        with suppress(WireError):
            assert decode(bytes(encoded)) != message


@settings(max_examples=examples(200), deadline=None)
@given(st.one_of(CLIENT, SERVER), st.data())
def test_a_message_that_was_cut_is_a_wire_error(
    message: ClientMessage | ServerMessage, data: st.DataObject
) -> None:
    whole = encode(message)
    part = whole[: data.draw(st.integers(0, len(whole) - 1))]
    for decode in (decode_client, decode_server):
        with pytest.raises(WireError):
            assert decode(part) is None


def test_lengths_do_not_tell_how_many_tokens_there_are() -> None:
    drafts = {len(encode(DraftMessage(1, 2, 3, (5,) * n))) for n in range(1, 11)}
    commits = {len(encode(Commit(1, (5,) * n, 3))) for n in range(1, 10)}
    assert drafts == {wire.DRAFT_BLOCK}
    assert commits == {wire.COMMIT_BLOCK}


def test_padding_is_zeros() -> None:
    data = bytearray(encode(Commit(0, (1,), 2)))
    data[-1] = 1
    with pytest.raises(WireError, match="follow the end"):
        decode_server(bytes(data))


def test_a_message_is_read_up_to_its_own_limit() -> None:
    """What a message costs is decided before it is parsed."""
    with pytest.raises(WireError, match="at most"):
        decode_client(bytes([DraftMessage.code]) + bytes(1 << 16))
    with pytest.raises(WireError, match="at most"):
        encode(Open(b" " * wire.MAX_OPEN_BYTES))


@pytest.mark.parametrize(
    "message",
    [
        DraftMessage(1, 2, 3, (wire.MAX_U24 + 1,)),
        DraftMessage(1, 2, 3, (-1,)),
        DraftMessage(1, 2, 3, (0,) * (wire.MAX_IDS + 1)),
        DraftMessage(1, -2, 3, ()),
        Hello(b"short"),
        Ping(1 << 32),
    ],
)
def test_a_message_that_does_not_fit_is_not_sent(message: ClientMessage) -> None:
    with pytest.raises(WireError):
        encode(message)


def test_the_newest_common_version_is_spoken() -> None:
    assert wire.negotiate((0, 200)) == wire.VERSIONS[1]
    assert wire.negotiate(wire.VERSIONS) == wire.VERSIONS[1]
    for strange in ((2, 9), (0, 0), (3, 1)):
        with pytest.raises(WireError) as caught:
            wire.negotiate(strange)
        assert caught.value.code == "unsupported_version"


@settings(max_examples=examples(200), deadline=None)
@given(ids(20), ids(20), U64)
def test_the_hash_runs_over_tokens(first: tuple[int, ...], more: tuple[int, ...], start: int) -> None:
    assert extend_hash(extend_hash(start, first), more) == extend_hash(start, first + more)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(TOKENS, min_size=1, max_size=20), st.data())
def test_one_other_token_is_another_hash(tokens: list[int], data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(tokens) - 1))
    other = data.draw(TOKENS.filter(lambda token: token != tokens[at]))
    changed = [*tokens[:at], other, *tokens[at + 1 :]]
    assert extend_hash(wire.HASH_START, tokens) != extend_hash(wire.HASH_START, changed)


def test_the_hash_is_the_documented_one() -> None:
    """The vector of docs/split.md: other implementations check themselves by it."""
    assert extend_hash(wire.HASH_START, ()) == 0xCBF29CE484222325
    assert extend_hash(wire.HASH_START, (1, 2, 300, 49151)) == 0xC1CF037754903257


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.binary(max_size=20), max_size=30), st.data())
def test_a_vocabulary_survives_the_wire(pieces: list[bytes], data: st.DataObject) -> None:
    control = frozenset(token for token in range(len(pieces)) if data.draw(st.booleans()))
    assert wire.decode_vocabulary(wire.encode_vocabulary(pieces, control)) == (pieces, control)


def test_the_fingerprint_is_over_lengths_and_bytes() -> None:
    data = struct.pack("<H", 2) + b"ab" + struct.pack("<H", 0) + struct.pack("<H", 1) + b"c"
    assert wire.fingerprint([b"ab", b"", b"c"]) == hashlib.sha256(data).digest()
    assert wire.fingerprint([b"a", b"b", b"c"]) != wire.fingerprint([b"ab", b"", b"c"])


@settings(max_examples=examples(200), deadline=None)
@given(st.binary(max_size=60))
def test_any_bytes_are_a_vocabulary_or_a_wire_error(data: bytes) -> None:
    try:
        pieces, control = wire.decode_vocabulary(data)
    except WireError:
        return
    assert wire.encode_vocabulary(pieces, control) == data


def test_the_documented_bytes_are_those_of_a_draft_and_a_commit() -> None:
    draft = encode(DraftMessage(7, 3, 0xC1CF037754903257, (1, 300)))
    assert draft.hex() == "030700000003000000573290547703cfc102" + "010000" + "2c0100" + "00" * 24
    commit = encode(Commit(3, (300,), 0xC1CF037754903257, 7, 4, 1, 8))
    assert commit.hex() == "83030000573290547703cfc1070000000400000108" + "01" + "2c0100" + "00" * 27
