"""`stream_options.include_rounds`: who drafted each token of a stream, and what was rejected."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from paceline.output import RequestOutput
from paceline.server.openai.rounds import MAX_REJECTED, round_report
from paceline.types import TARGET, Draft, Round, Seq
from support.servers import NAME, Running

MESSAGES = [{"role": "user", "content": "one two three one two three one two three one two"}]
LOOPS: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 64, "ignore_eos": True}
ALWAYS: dict[str, Any] = {"speculative_config": {"adaptive": False}}


@pytest.fixture(scope="module")
def server(toy_server: Running) -> Running:
    return toy_server


def streamed(server: Running, path: str = "/v1/chat/completions", **body: Any) -> list[dict[str, Any]]:
    options = {"include_usage": True, **body.pop("stream_options", {})}
    given = {"model": NAME, "stream": True, "stream_options": options, **body}
    response = httpx.post(f"{server.url}{path}", json=given, timeout=120, trust_env=False)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def with_rounds(server: Running, **body: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The chunks without their ids, and the rounds among them."""
    chunks = streamed(server, **body, stream_options={"include_rounds": True})
    return [chunk for chunk in chunks if "round" not in chunk], [c["round"] for c in chunks if "round" in c]


def text(chunks: list[dict[str, Any]]) -> str:
    return "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])


def test_rounds_tell_the_source_of_every_token_and_change_no_text(server: Running) -> None:
    chunks, rounds = with_rounds(server, **LOOPS, **ALWAYS)
    tokens = [token for r in rounds for token in r["tokens"]]
    assert "".join(token["text"] for token in tokens) == text(chunks) == text(streamed(server, **LOOPS))
    assert len(tokens) == chunks[-1]["usage"]["completion_tokens"] == 64
    drafted = [token for token in tokens if token["source"] != TARGET]
    assert {token["source"] for token in drafted} <= {"grammar", "suffix", "ngram"}
    assert drafted
    assert all(token["probability"] is None for token in tokens if token["source"] == TARGET)


def test_positions_and_sums_fit_together(server: Running) -> None:
    wrong = {"prediction": {"type": "content", "content": "one two three one two three"}}
    _, rounds = with_rounds(server, **LOOPS, **wrong, **ALWAYS)
    written = 0
    for r in rounds:
        assert r["start"] == written
        accepted = sum(token["source"] != TARGET for token in r["tokens"])
        assert len(r["rejected"]) == r["drafted"] - accepted
        for guess in r["rejected"]:
            assert written <= guess["position"] < written + r["drafted"]
        written += len(r["tokens"])
        assert r["tokens_per_pass"] == written / r["passes"]
    assert any(r["rejected"] for r in rounds)


def test_plain_decoding_has_the_same_tokens_one_in_a_round(server: Running) -> None:
    _, rounds = with_rounds(server, **LOOPS, **ALWAYS)
    _, plain = with_rounds(server, **LOOPS, speculative_config={"disabled": True})
    ids = [[token["id"] for r in each for token in r["tokens"]] for each in (rounds, plain)]
    assert ids[0] == ids[1]
    assert len(rounds) < len(plain) == 64
    assert all(not r["drafted"] and len(r["tokens"]) == 1 for r in plain)


def test_several_choices_each_have_their_rounds(server: Running) -> None:
    _, rounds = with_rounds(server, **LOOPS | {"max_tokens": 8, "temperature": 1, "seed": 5}, n=2)
    for index in range(2):
        assert sum(len(r["tokens"]) for r in rounds if r["index"] == index) == 8


def test_completions_have_rounds_and_nobody_gets_them_unasked(server: Running) -> None:
    body = {"prompt": "one two one two", "max_tokens": 4, "ignore_eos": True}
    chunks = streamed(server, "/v1/completions", **body, stream_options={"include_rounds": True})
    assert sum(len(c["round"]["tokens"]) for c in chunks if "round" in c) == 4
    assert not any("round" in chunk for chunk in streamed(server, "/v1/completions", **body))


def test_a_tree_with_many_rejected_nodes_is_cut() -> None:
    n = 3 * MAX_REJECTED
    tree = Draft(tuple(range(n)), (-1,) * n, ("suffix",) * n, (0.25,) * n)
    output = RequestOutput(Seq("r", [0] * 7, 5), SimpleNamespace(push=str, flush=str))
    output.take(Round("r", 7, ("suffix",), tree, (4,), (4, 9), n, 1, n + 1, 0, 10))
    tokenizer: Any = SimpleNamespace(piece=lambda token: b"\xff" if token == 0 else b"x")
    report = round_report(tokenizer, output)
    assert len(report["rejected"]) == MAX_REJECTED
    assert report["rejected"][0] == {
        "position": 2,
        "id": 0,
        "text": "�",
        "source": "suffix",
        "probability": 0.25,
    }
    assert 4 not in [guess["id"] for guess in report["rejected"]]
    assert [token["probability"] for token in report["tokens"]] == [0.25, None]
    assert report["drafted"] == n
