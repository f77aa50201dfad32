"""Pairs of answers with drafts and without: what a soak sends, what it compares, and that it can fail."""

import random
from collections.abc import Iterator
from dataclasses import replace
from threading import Thread
from typing import Any

import pytest

from bench.serve.clock_jumps import jumping_clock
from bench.serve.pair_drafters import DEFAULT, List, read_lists, server_options
from bench.serve.pairs import (
    ENDPOINTS,
    MAX_CHOICES,
    RESPONSES,
    Choice,
    PairClients,
    PairRecords,
    PairRequest,
    compare,
    pair_request,
)
from bench.serve.servers import CHAT, COMPLETIONS
from paceline import EngineConfig
from paceline.engine import verify
from paceline.errors import UsageError
from paceline.types import Draft, Verdict
from support.heads import save_untrained
from support.servers import Running, toy_chat_model, toy_running

CHOICE = Choice("a text", {0: ["f", "{}"]}, "stop", [{"token": "a", "logprob": -0.5}])


@pytest.mark.parametrize(
    "change",
    [
        {"text": "a test"},
        {"calls": {0: ["f", '{"a": 1}']}},
        {"finish": "length"},
        {"logprobs": [{"token": "a", "logprob": -0.25}]},
    ],
)
def test_answers_differ_in_any_field_of_any_choice(change: dict[str, Any]) -> None:
    assert not compare({0: CHOICE, 1: CHOICE}, {0: CHOICE, 1: CHOICE})
    assert next(iter(change)) in compare({0: CHOICE, 1: replace(CHOICE, **change)}, {0: CHOICE, 1: CHOICE})
    assert "choices" in compare({0: CHOICE}, {0: CHOICE, 1: CHOICE})


def test_requests_are_drawn_over_all_that_the_api_offers() -> None:
    rng = random.Random(0)
    for path in ENDPOINTS:
        bodies = [pair_request(rng, "m", ("ngram",), path).body for _ in range(300)]
        names = {name for body in bodies for name in body}
        assert {0.0, 0.7, 1.2} == {body["temperature"] for body in bodies}
        assert names >= {"repetition_penalty", "logit_bias", "stop", "min_tokens", "ignore_eos", "top_p"}
        assert names & {"structured_outputs", "text"}
        assert path == COMPLETIONS or "tools" in names
        assert path == RESPONSES or {1, 2, MAX_CHOICES} == {body["n"] for body in bodies}
        assert names & {"logprobs", "include"}


def test_lists_of_drafters_are_read_and_an_unknown_name_is_an_error() -> None:
    assert read_lists("self, default+block") == [("self",), (*DEFAULT, "block")]
    with pytest.raises(UsageError, match="blokc"):
        read_lists("blokc")


def test_a_server_loads_the_drafters_that_the_lists_name() -> None:
    options = server_options("m", [("self",), ("model", "ngram"), ("block",)], ["head"], "")
    assert options[:4] == ["--trained", "head", "--draft-model", "m"]
    assert options[4:] == ["--drafters", ",".join((*DEFAULT, "self"))]


def test_pairs_of_a_drafter_that_never_drafts_are_a_fault() -> None:
    records, lists = PairRecords(), [("self",), ("ngram", "block")]
    request = PairRequest(CHAT, {}, ("self",), {}, (True, False))
    records.add(request, {0: CHOICE}, {0: CHOICE})
    assert records.faults(lists, {"self": (9, 1)}) == []
    assert records.faults(lists, {"block": (9, 1)}) == ["self drafted no token"]
    assert records.rows(lists, {"self": (9, 1)})[0] == {
        "drafters": "self",
        **dict.fromkeys(ENDPOINTS, 0),
        CHAT: 1,
        "drafted": 9,
        "accepted": 1,
    }
    records.add(request, {0: CHOICE}, {0: replace(CHOICE, text="x")})
    assert len(records.wrong) == 1


HEADS = ("block", "medusa", "eagle")
LISTS = [
    DEFAULT,
    *((name,) for name in ("recycle", "self", "quantized", "model", *HEADS)),
    (*DEFAULT, "eagle"),
]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Every drafter, a small cache, and fewer places in a pass than choices of a request."""
    folder = tmp_path_factory.mktemp("pairs")
    model = toy_chat_model(tmp_path_factory.mktemp("model"))
    heads = tuple(str(save_untrained(folder / kind, model, kind, 256)) for kind in HEADS)
    config = EngineConfig("cpu", cache_mb=4, max_batch=6)
    drafters = (*DEFAULT, "self", "quantized")
    with toy_running(folder, config, drafters=drafters, draft_model=str(model), trained=heads) as running:
        yield running


def clients_of(server: Running, lists: list[List], clients: int = 4) -> PairClients:
    return PairClients(int(server.url.rpartition(":")[2]), server.model, lists, clients)


def send(server: Running, pairs: PairClients, lists: list[List], each: int) -> PairRecords:
    """So many pairs of every list on every endpoint, by clients in parallel."""
    kinds = [(names, path) for names in lists for path in ENDPOINTS] * each
    random.Random(1).shuffle(kinds)

    def client(number: int) -> None:
        rng = random.Random(number)
        for names, path in kinds[number::4]:
            pairs.send(pair_request(rng, server.model, names, path), plain_first=rng.random() < 0.5)

    threads = [Thread(target=client, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return pairs.records


@pytest.mark.slow
def test_pairs_of_every_drafter_and_endpoint_are_equal_while_the_clock_jumps(served: Running) -> None:
    with jumping_clock(every_s=0.05):
        records = send(served, clients_of(served, LISTS), LISTS, each=1)
    assert (records.wrong, records.stuck, records.refused) == ([], [], [])
    assert set(records.compared.values()) == {1}
    assert len(records.compared) == len(LISTS) * len(ENDPOINTS)


@pytest.mark.slow
def test_an_accept_rule_that_follows_a_wrong_draft_is_found(
    served: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    def match(draft: Draft, choice: Any) -> Verdict:
        first = draft.children(-1)
        return Verdict((first[0],), choice(first[0])) if len(first) else Verdict((), choice(-1))

    monkeypatch.setattr(verify, "match", match)
    lists: list[List] = [("self",), ("recycle",)]
    assert send(served, clients_of(served, lists), lists, each=2).wrong
