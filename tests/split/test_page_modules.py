"""The page's modules under node: the codec, the vocabulary and the drafter as in Python, and the session."""

import json
import shutil
import subprocess
from dataclasses import fields
from pathlib import Path
from random import Random
from typing import Any

import pytest

import paceline.split
from paceline.drafters.ngram import Ngram
from paceline.split import wire
from paceline.types import Ask, Seq

NODE = shutil.which("node")
PAGE = Path(paceline.split.__file__).parent / "page"
SCRIPTS = Path(__file__).parent / "page"
PIECES = [b"<s>", b"a", b" the", "é".encode()[:1], "é".encode()[1:], "日".encode(), b"\xff", b""]

pytestmark = pytest.mark.skipif(NODE is None, reason="needs node, which is not installed")


def node(script: str, given: str = "") -> str:
    command = [str(NODE), str(SCRIPTS / script), PAGE.as_uri()]
    done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(word.capitalize() for word in rest)


def value(found: Any) -> Any:
    """As JSON; 64-bit numbers as text."""
    if isinstance(found, bytes):
        return found.hex()
    return list(found) if isinstance(found, tuple) else found


def entry(kind: str, message: Any, left_out: tuple[str, ...] = (), **other: Any) -> dict[str, Any]:
    given = {
        camel(f.name): value(getattr(message, f.name)) for f in fields(message) if f.name not in left_out
    }
    if "hash" in given:
        given["hash"] = str(given["hash"])
    return {"type": kind, "fields": {**given, **other}, "data": wire.encode(message).hex()}


def client_messages(random: Random) -> list[dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": "né 日"}], "seed": 7}
    encoded = json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()
    opened = wire.Open(encoded, wire.Mode.PATIENT, 500, 1024, (1, 49151))
    made = [
        entry("hello", wire.Hello(random.randbytes(32), "ticket", "é"), ("versions",)),
        entry("hello", wire.Hello(), ("versions",)),
        entry("open", opened, ("body", "mode"), body=body, mode="patient"),
        entry("resume", wire.Resume(random.randbytes(32), 12, (1 << 64) - 1)),
        entry("cancel", wire.Cancel()),
        entry("reading", wire.Reading()),
        entry("ping", wire.Ping((1 << 32) - 1)),
    ]
    for count in (1, 10, 11, 64):
        tokens = tuple(random.randrange(1 << 24) for _ in range(count))
        draft = wire.DraftMessage(random.randrange(1 << 32), count, random.randrange(1 << 64), tokens)
        made.append(entry("draft", draft))
    return made


def server_messages(random: Random) -> list[dict[str, Any]]:
    report = {"passes": 3}
    end = wire.End(5, random.randrange(1 << 64), wire.Finish.LENGTH, 21, json.dumps(report).encode())
    made = [
        entry("welcome", wire.Welcome(random.randbytes(32), 49152, True, 64, 4, "smollm2-135m")),
        entry(
            "opened", wire.Opened(random.randbytes(32), "req-é", 9, random.randrange(1 << 64), (1, 70_000))
        ),
        entry("end", end, ("finish", "report"), finish="length", report=report),
        entry("error", wire.Error(429, "server_busy", "too many: é", 1000, False)),
        entry("pong", wire.Pong(77)),
    ]
    for count in (0, 10, 11, 64):
        tokens = tuple(random.randrange(1 << 24) for _ in range(count))
        commit = wire.Commit(count, tokens, random.randrange(1 << 64), 3, 4, 2, 8)
        made.append(entry("commit", commit))
    return made


def wrong_messages(right: list[dict[str, Any]]) -> list[str]:
    """Cut, lengthened, of another type, and with padding that is not zero."""
    datas = [bytes.fromhex(one["data"]) for one in right]
    cut = [data[:-1] for data in datas if len(data) > 1]
    longer = [data + b"\0" for data in datas]
    commit = next(data for data in datas if data[0] == wire.Commit.code)
    return [data.hex() for data in (*cut, *longer, b"", b"\x03", b"\x00", commit[:-1] + b"\1")]


def ngram_cases(random: Random, count: int = 40) -> list[dict[str, Any]]:
    made = []
    for case in range(count):
        drafter, asks = Ngram(), list[dict[str, Any]]()
        tokens = [random.randrange(4) for _ in range(random.randrange(1, 30))]
        seq = Seq(f"s{case}", tokens, len(tokens))
        drafter.begin(seq)
        for _ in range(4):
            after = tuple(random.randrange(4) for _ in range(random.randrange(4)))
            size = random.randrange(1, 9)
            [draft] = drafter.draft([Ask(seq, size, after)])
            given = {"tokens": list(seq.tokens), "after": list(after), "count": size}
            asks.append({**given, "drafted": list(draft.tokens)})
            seq.tokens += [random.randrange(4) for _ in range(random.randrange(1, 4))]
        made.append({"asks": asks})
    return made


def test_the_page_reads_and_writes_the_bytes_of_python() -> None:
    random = Random(7)
    control = frozenset({0})
    texts = [[0, 1, 2, 3, 4, 5], [3], [3, 1], [6, 7, 2]]
    server = server_messages(random)
    vectors: dict[str, Any] = {
        "hashes": [
            {"tokens": tokens, "hash": str(wire.extend_hash(wire.HASH_START, tokens))}
            for tokens in ([], [1, 2, 300, 49151], [random.randrange(1 << 24) for _ in range(99)])
        ],
        "client": client_messages(random),
        "server": server,
        "wrong": wrong_messages(server),
        "vocabulary": {
            "data": wire.encode_vocabulary(PIECES, control).hex(),
            "fingerprint": wire.fingerprint(PIECES).hex(),
            "control": sorted(control),
            "pieces": [piece.hex() for piece in PIECES],
            "texts": [{"tokens": tokens, "text": text_of(tokens, control)} for tokens in texts],
        },
        "ngram": ngram_cases(random),
    }
    counts = json.loads(node("vectors.mjs", json.dumps(vectors)))
    assert counts == {"client": 11, "server": 9, "wrong": len(vectors["wrong"]), "ngram": 40}


def text_of(tokens: list[int], control: frozenset[int]) -> str:
    """An unfinished character at the end is held back."""
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return "".join(decoder.decode(PIECES[token]) for token in tokens if token not in control)


def test_a_session_drafts_resumes_and_believes_commits_alone() -> None:
    out = node("session.mjs")
    assert out.count("ok ") == out.count("\n") == 21


def test_no_module_of_the_page_parses_text_as_html_or_asks_another_host() -> None:
    for path in sorted(PAGE.glob("*.js")):
        code = path.read_text()
        for word in (
            "innerHTML",
            "outerHTML",
            "insertAdjacent",
            "document.write",
            "eval(",
            "https:",
            "http:",
        ):
            assert word not in code, f"{path.name}: {word}"
