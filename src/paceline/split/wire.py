"""The messages of a split deployment as bytes: one binary WebSocket message each, little-endian.

Only token ids travel, never probabilities: the server samples every token itself and accepts a draft while it
agrees, so that nothing a client sends can change the text (docs/split.md has the table of all bytes).

A running hash over all tokens names a position in the text. A commit is cumulative: its position, its tokens,
and the hash after them; a client that sees a commit twice, or misses one, can tell. Drafts and commits are
padded with zeros to whole blocks, since lengths would tell an eavesdropper how many tokens were accepted, and
with them the topic of a prompt (arXiv 2411.01076).
"""

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar, Final, Protocol, TypeVar

from paceline.errors import WireError

M = TypeVar("M", bound="Message")

MAGIC: Final = b"PCLS"
VERSIONS: Final = (1, 1)  # the oldest and the newest that this code speaks
MAX_U24: Final = (1 << 24) - 1  # of tokens and counts in a draft or a commit
MAX_IDS: Final = 64  # of a draft or a commit
MAX_OPEN_BYTES: Final = 1 << 20
MAX_TAIL: Final = 65_535  # tokens of a prompt or a prediction
MAX_WAIT_MS: Final = 65_535
DRAFT_BLOCK: Final = 48  # bytes; with a WebSocket's header and mask 54
COMMIT_BLOCK: Final = 52  # bytes; with a WebSocket's header 54
SECRET_BYTES: Final = 32
FINGERPRINT_BYTES: Final = 32
NO_FINGERPRINT: Final = bytes(FINGERPRINT_BYTES)  # of a client that will not draft
CONTROL: Final = 0x8000  # flag of a token's length in the vocabulary: never part of a text

HASH_START: Final = 0xCBF29CE484222325
_HASH_PRIME: Final = 0x100000001B3
_MASK: Final = (1 << 64) - 1


def extend_hash(value: int, tokens: Iterable[int]) -> int:
    """The running hash after more tokens: FNV-1a over tokens instead of bytes, modulo 2 ** 64.

    It is a bijection of the value for each token, and of the token for each value: two texts that differ in
    one token never have the same hash.
    """
    for token in tokens:
        value = ((value ^ token) * _HASH_PRIME) & _MASK
    return value


def fingerprint(pieces: Iterable[bytes]) -> bytes:
    """SHA-256 over the bytes of all tokens in the order of their ids, each behind its length in 16 bits.

    Equal for models whose ids stand for the same bytes, whatever their merges or their padding.
    """
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(struct.pack("<H", len(piece)) + piece)
    return digest.digest()


def encode_vocabulary(pieces: Sequence[bytes], control: frozenset[int]) -> bytes:
    """All tokens: their number, then for each its length, with CONTROL set or not, and its bytes."""
    lengths = (len(piece) | (CONTROL if token in control else 0) for token, piece in enumerate(pieces))
    entries = (struct.pack("<H", length) + piece for length, piece in zip(lengths, pieces, strict=True))
    return struct.pack("<I", len(pieces)) + b"".join(entries)


def decode_vocabulary(data: bytes) -> tuple[list[bytes], frozenset[int]]:
    """The bytes of each token, and the control tokens."""
    reader = _Reader(data)
    pieces, control = list[bytes](), set[int]()
    for token in range(reader.number("<I", "the number of tokens")):
        length = reader.number("<H", "the length of a token")
        if length & CONTROL:
            control.add(token)
        pieces.append(reader.take(length & ~CONTROL, "a token"))
    reader.end()
    return pieces, frozenset(control)


class Mode(IntEnum):
    ONE_SHOT = 0  # the draft comes with the request, and no other
    OPPORTUNISTIC = 1  # the server uses drafts that are there, and never waits
    PATIENT = 2  # the server waits for a draft, up to a deadline


class Finish(IntEnum):
    STOP = 0
    LENGTH = 1
    TOOL_CALLS = 2
    CANCELLED = 3


class Message(Protocol):
    code: ClassVar[int]
    max_bytes: ClassVar[int]
    block: ClassVar[int] = 1  # the encoded message is a whole number of blocks

    def _write(self, out: "_Writer") -> None: ...
    @classmethod
    def _read(cls: type[M], r: "_Reader") -> M: ...


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """The client's first message. fingerprint: of its drafter's vocabulary."""

    code: ClassVar[int] = 0x01
    max_bytes: ClassVar[int] = 1024

    fingerprint: bytes = NO_FINGERPRINT
    ticket: str = ""  # of POST /v1/split/tickets; empty where a header has the key, or none is needed
    client: str = ""  # its name and version, for logs
    versions: tuple[int, int] = VERSIONS

    def _write(self, out: "_Writer") -> None:
        out.raw(MAGIC)
        out.number("<B", self.versions[0])
        out.number("<B", self.versions[1])
        out.raw(_sized(self.fingerprint, FINGERPRINT_BYTES))
        out.text("<B", self.ticket)
        out.text("<B", self.client)

    @classmethod
    def _read(cls, r: "_Reader") -> "Hello":
        if r.take(len(MAGIC), "the magic") != MAGIC:
            raise WireError("the first message is no hello of this protocol")
        versions = (r.number("<B", "the oldest version"), r.number("<B", "the newest version"))
        fingerprint = r.take(FINGERPRINT_BYTES, "the fingerprint")
        return cls(fingerprint, r.text("<B", "the ticket"), r.text("<B", "the client"), versions)


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    """The server's answer to Hello."""

    code: ClassVar[int] = 0x81
    max_bytes: ClassVar[int] = 1024

    fingerprint: bytes
    vocab_size: int
    drafts: bool  # the fingerprints agree; else drafts are dropped, and text is streamed all the same
    max_draft: int  # tokens of one draft
    credits: int  # drafts that may be on their way without an answer
    model: str
    version: int = VERSIONS[1]

    def _write(self, out: "_Writer") -> None:
        out.number("<B", self.version)
        out.number("<B", int(self.drafts))
        out.raw(_sized(self.fingerprint, FINGERPRINT_BYTES))
        out.number("<I", self.vocab_size)
        out.number("<B", self.max_draft)
        out.number("<B", self.credits)
        out.text("<B", self.model)

    @classmethod
    def _read(cls, r: "_Reader") -> "Welcome":
        version, drafts = r.number("<B", "the version"), r.flag("the flag of drafts")
        fingerprint, size = r.take(FINGERPRINT_BYTES, "the fingerprint"), r.number("<I", "the vocabulary")
        max_draft, credits = r.number("<B", "the longest draft"), r.number("<B", "the credits")
        return cls(fingerprint, size, drafts, max_draft, credits, r.text("<B", "the model"), version)


@dataclass(frozen=True, slots=True)
class Open(Message):
    """Begins an answer. body: JSON as for /v1/chat/completions (`messages`) or /v1/completions (`prompt`)."""

    code: ClassVar[int] = 0x02
    max_bytes: ClassVar[int] = MAX_OPEN_BYTES

    body: bytes
    mode: Mode = Mode.OPPORTUNISTIC
    wait_ms: int = 0  # that the server waits for a draft at most, where the mode is patient
    prompt_tail: int = 0  # last tokens of the prompt that the client wants to have
    prediction: tuple[int, ...] = ()  # a draft of the whole answer

    def _write(self, out: "_Writer") -> None:
        out.number("<B", self.mode)
        out.number("<H", self.wait_ms)
        out.number("<H", self.prompt_tail)
        out.ids("<H", self.prediction, MAX_TAIL)
        out.sized("<I", self.body)

    @classmethod
    def _read(cls, r: "_Reader") -> "Open":
        mode, wait_ms = r.number("<B", "the mode"), r.number("<H", "the wait")
        tail, prediction = r.number("<H", "the tail"), r.ids("<H", "the prediction", MAX_TAIL)
        if mode not in Mode.__members__.values():
            raise WireError(f"the mode is {mode}: expected {', '.join(f'{m} ({m.name})' for m in Mode)}")
        return cls(r.sized("<I", "the body"), Mode(mode), wait_ms, tail, prediction)


@dataclass(frozen=True, slots=True)
class Opened(Message):
    """The answer to Open and Resume: the prompt has been tokenized."""

    code: ClassVar[int] = 0x82
    max_bytes: ClassVar[int] = 1 << 18

    secret: bytes  # for Resume; nobody else knows it
    request: str  # its id, as in traces
    prompt_len: int
    hash: int  # after the prompt
    tail: tuple[int, ...] = ()  # last tokens of the prompt

    def _write(self, out: "_Writer") -> None:
        out.raw(_sized(self.secret, SECRET_BYTES))
        out.text("<B", self.request)
        out.number("<I", self.prompt_len)
        out.number("<Q", self.hash)
        out.ids("<H", self.tail, MAX_TAIL)

    @classmethod
    def _read(cls, r: "_Reader") -> "Opened":
        secret, request = r.take(SECRET_BYTES, "the secret"), r.text("<B", "the request")
        prompt_len, value = r.number("<I", "the prompt's length"), r.number("<Q", "the hash")
        return cls(secret, request, prompt_len, value, r.ids("<H", "the tail", MAX_TAIL))


@dataclass(frozen=True, slots=True)
class DraftMessage(Message):
    """Tokens that may follow a position of the answer. Numbers of drafts ascend on a connection."""

    code: ClassVar[int] = 0x03
    block: ClassVar[int] = DRAFT_BLOCK
    max_bytes: ClassVar[int] = 5 * DRAFT_BLOCK

    number: int  # from 1 on
    base: int  # tokens of the answer before it
    hash: int  # after them
    tokens: tuple[int, ...]

    def _write(self, out: "_Writer") -> None:
        out.number("<I", self.number)
        out.number("<I", self.base)
        out.number("<Q", self.hash)
        out.ids("<B", self.tokens, MAX_IDS)

    @classmethod
    def _read(cls, r: "_Reader") -> "DraftMessage":
        number, base = r.number("<I", "the draft's number"), r.number("<I", "the base")
        return cls(number, base, r.number("<Q", "the hash"), r.ids("<B", "the draft", MAX_IDS))


@dataclass(frozen=True, slots=True)
class Reading(Message):
    """The drafter still reads the prompt: a patient server waits longer, until the next draft comes."""

    code: ClassVar[int] = 0x07
    max_bytes: ClassVar[int] = 1

    def _write(self, out: "_Writer") -> None:
        return

    @classmethod
    def _read(cls, r: "_Reader") -> "Reading":
        return cls()


@dataclass(frozen=True, slots=True)
class Commit(Message):
    """Tokens of the answer. The only source of truth: whatever the client has shown from `start` on goes."""

    code: ClassVar[int] = 0x83
    block: ClassVar[int] = COMMIT_BLOCK
    max_bytes: ClassVar[int] = 5 * COMMIT_BLOCK

    start: int  # tokens of the answer before these
    tokens: tuple[int, ...]
    hash: int  # after them
    draft: int = 0  # the number of the last draft that was read before: later ones are on their way
    passes: int = 0  # of the target, so far
    accepted: int = 0  # of these tokens, those that the client had drafted
    max_draft: int = 0  # tokens that the next draft should have; 0: drafts do not pay at present

    def _write(self, out: "_Writer") -> None:
        out.u24(self.start)
        out.number("<Q", self.hash)
        out.number("<I", self.draft)
        out.u24(self.passes)
        out.number("<B", self.accepted)
        out.number("<B", self.max_draft)
        out.ids("<B", self.tokens, MAX_IDS)

    @classmethod
    def _read(cls, r: "_Reader") -> "Commit":
        start, value = r.u24("the start"), r.number("<Q", "the hash")
        draft, passes = r.number("<I", "the draft's number"), r.u24("the passes")
        accepted, max_draft = r.number("<B", "the accepted tokens"), r.number("<B", "the longest draft")
        return cls(start, r.ids("<B", "the tokens", MAX_IDS), value, draft, passes, accepted, max_draft)


@dataclass(frozen=True, slots=True)
class Resume(Message):
    """Continues an answer on a new connection, from the tokens that the client has."""

    code: ClassVar[int] = 0x04
    max_bytes: ClassVar[int] = 64

    secret: bytes  # of Opened
    have: int  # tokens of the answer
    hash: int  # after them

    def _write(self, out: "_Writer") -> None:
        out.raw(_sized(self.secret, SECRET_BYTES))
        out.number("<I", self.have)
        out.number("<Q", self.hash)

    @classmethod
    def _read(cls, r: "_Reader") -> "Resume":
        secret, have = r.take(SECRET_BYTES, "the secret"), r.number("<I", "the tokens it has")
        return cls(secret, have, r.number("<Q", "the hash"))


@dataclass(frozen=True, slots=True)
class Cancel(Message):
    """Ends the answer."""

    code: ClassVar[int] = 0x05
    max_bytes: ClassVar[int] = 1

    def _write(self, out: "_Writer") -> None:
        return

    @classmethod
    def _read(cls, r: "_Reader") -> "Cancel":
        return cls()


@dataclass(frozen=True, slots=True)
class End(Message):
    """The answer is complete; the next Open may follow on this connection."""

    code: ClassVar[int] = 0x84
    max_bytes: ClassVar[int] = 1 << 16

    tokens: int  # of the whole answer
    hash: int  # after all of them
    finish: Finish
    characters: int  # of the text: less than the tokens have where a stop string cut it
    report: bytes = b"{}"  # JSON: passes, drafted and accepted tokens, usage

    def _write(self, out: "_Writer") -> None:
        out.number("<I", self.tokens)
        out.number("<Q", self.hash)
        out.number("<B", self.finish)
        out.number("<I", self.characters)
        out.sized("<H", self.report)

    @classmethod
    def _read(cls, r: "_Reader") -> "End":
        tokens, value = r.number("<I", "the tokens"), r.number("<Q", "the hash")
        finish, characters = r.number("<B", "the reason"), r.number("<I", "the characters")
        if finish not in Finish.__members__.values():
            raise WireError(f"the reason of the end is {finish}: expected 0 to {max(Finish)}")
        return cls(tokens, value, Finish(finish), characters, r.sized("<H", "the report"))


@dataclass(frozen=True, slots=True)
class Error(Message):
    """Ends the answer, or all of the connection. status and name: as HTTP's status and OpenAI's `code`."""

    code: ClassVar[int] = 0x85
    max_bytes: ClassVar[int] = 4096

    status: int
    name: str
    message: str
    retry_ms: int = 0  # 0: the same request would fail again
    closes: bool = True  # the server closes the connection

    def _write(self, out: "_Writer") -> None:
        out.number("<H", self.status)
        out.number("<B", int(self.closes))
        out.number("<I", self.retry_ms)
        out.text("<B", self.name)
        out.text("<H", self.message)

    @classmethod
    def _read(cls, r: "_Reader") -> "Error":
        status, closes = r.number("<H", "the status"), r.flag("the flag of closing")
        retry_ms, name = r.number("<I", "the delay"), r.text("<B", "the name")
        return cls(status, name, r.text("<H", "the message"), retry_ms, closes)


@dataclass(frozen=True, slots=True)
class Ping(Message):
    """Measures the round trip, which scripts of a browser cannot see otherwise."""

    code: ClassVar[int] = 0x06
    max_bytes: ClassVar[int] = 5

    number: int

    def _write(self, out: "_Writer") -> None:
        out.number("<I", self.number)

    @classmethod
    def _read(cls, r: "_Reader") -> "Ping":
        return cls(r.number("<I", "the number"))


@dataclass(frozen=True, slots=True)
class Pong(Message):
    """The answer to Ping, at once."""

    code: ClassVar[int] = 0x86
    max_bytes: ClassVar[int] = 5

    number: int

    def _write(self, out: "_Writer") -> None:
        out.number("<I", self.number)

    @classmethod
    def _read(cls, r: "_Reader") -> "Pong":
        return cls(r.number("<I", "the number"))


ClientMessage = Hello | Open | DraftMessage | Reading | Resume | Cancel | Ping
ServerMessage = Welcome | Opened | Commit | End | Error | Pong

_FROM_CLIENT: Final[dict[int, type[ClientMessage]]] = {
    kind.code: kind for kind in (Hello, Open, DraftMessage, Reading, Resume, Cancel, Ping)
}
_FROM_SERVER: Final[dict[int, type[ServerMessage]]] = {
    kind.code: kind for kind in (Welcome, Opened, Commit, End, Error, Pong)
}


def encode(message: ClientMessage | ServerMessage) -> bytes:
    """Raises WireError for a message that no frame can hold."""
    out = _Writer()
    out.number("<B", message.code)
    message._write(out)
    out.raw(bytes(-len(out.data) % message.block))
    if len(out.data) > message.max_bytes:
        raise WireError(_too_long(type(message).__name__, len(out.data), message.max_bytes))
    return bytes(out.data)


def decode_client(data: bytes) -> ClientMessage:
    """A message of a client. Raises WireError for any other bytes."""
    kind = _FROM_CLIENT.get(_code(data))
    if kind is None:
        raise WireError(f"a client sends no message of type {data[0]:#04x}")
    return _decode(kind, data)


def decode_server(data: bytes) -> ServerMessage:
    """A message of a server. Raises WireError for any other bytes."""
    kind = _FROM_SERVER.get(_code(data))
    if kind is None:
        raise WireError(f"a server sends no message of type {data[0]:#04x}")
    return _decode(kind, data)


def negotiate(versions: tuple[int, int]) -> int:
    """The newest version that both sides speak."""
    oldest, newest = max(versions[0], VERSIONS[0]), min(versions[1], VERSIONS[1])
    if oldest > newest:
        raise WireError(
            f"versions {versions[0]} to {versions[1]} are spoken there, {VERSIONS[0]} to {VERSIONS[1]} here: "
            "update the older side",
            "unsupported_version",
        )
    return newest


def _code(data: bytes) -> int:
    if not data:
        raise WireError("an empty message")
    return data[0]


def _decode(kind: type[M], data: bytes) -> M:
    if len(data) > kind.max_bytes:
        raise WireError(_too_long(kind.__name__, len(data), kind.max_bytes))
    if len(data) % kind.block:
        raise WireError(f"{kind.__name__}: {len(data)} bytes are no whole blocks of {kind.block}")
    reader = _Reader(data, 1)
    message = kind._read(reader)
    reader.end(padding=kind.block - 1)
    return message


def _too_long(name: str, size: int, limit: int) -> str:
    return f"{name}: {size:,} bytes, at most {limit:,} are read"


def _sized(data: bytes, size: int) -> bytes:
    if len(data) != size:
        raise WireError(f"{len(data)} bytes where {size} are expected")
    return data


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()

    def raw(self, data: bytes) -> None:
        self.data += data

    def number(self, form: str, value: int) -> None:
        try:
            self.data += struct.pack(form, value)
        except struct.error:
            raise WireError(f"{value} does not fit {8 * struct.calcsize(form)} bits") from None

    def u24(self, value: int) -> None:
        if not 0 <= value <= MAX_U24:
            raise WireError(f"{value} does not fit 24 bits")
        self.data += value.to_bytes(3, "little")

    def sized(self, form: str, data: bytes) -> None:
        self.number(form, len(data))
        self.data += data

    def text(self, form: str, text: str) -> None:
        self.sized(form, text.encode("utf-8", "replace"))

    def ids(self, form: str, ids: Sequence[int], limit: int) -> None:
        if len(ids) > limit:
            raise WireError(f"{len(ids)} tokens, at most {limit} fit")
        self.number(form, len(ids))
        for token in ids:
            self.u24(token)


class _Reader:
    def __init__(self, data: bytes, at: int = 0) -> None:
        self._data, self._at = data, at

    def take(self, size: int, field: str) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise WireError(f"the message ends within {field}")
        taken, self._at = self._data[self._at : end], end
        return taken

    def number(self, form: str, field: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form), field))[0]
        return value

    def u24(self, field: str) -> int:
        return int.from_bytes(self.take(3, field), "little")

    def flag(self, field: str) -> bool:
        value = self.number("<B", field)
        if value > 1:
            raise WireError(f"{field} is {value}: expected 0 or 1")
        return value == 1

    def sized(self, form: str, field: str) -> bytes:
        return self.take(self.number(form, f"the length of {field}"), field)

    def text(self, form: str, field: str) -> str:
        try:
            return self.sized(form, field).decode()
        except UnicodeDecodeError:
            raise WireError(f"{field} is not UTF-8") from None

    def ids(self, form: str, field: str, limit: int) -> tuple[int, ...]:
        count = self.number(form, f"the number of {field}")
        if count > limit:
            raise WireError(f"{field}: {count} tokens, at most {limit} are read")
        data = self.take(3 * count, field)
        return tuple(int.from_bytes(data[i : i + 3], "little") for i in range(0, 3 * count, 3))

    def end(self, padding: int = 0) -> None:
        rest = self._data[self._at :]
        if len(rest) > padding or any(rest):
            raise WireError("bytes follow the end of the message")
