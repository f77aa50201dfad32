"""Whatever drafts, networks and clients do, the text is that of plain decoding, each token once."""

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from bench.network import Network, network
from paceline.drafters.ngram import Ngram
from paceline.drafters.suffix import Suffix
from paceline.split.edge import Edge, EdgeResult, EdgeSettings
from paceline.split.wire import Mode
from paceline.types import Ask, Draft, Drafter
from support.split_server import LONG_MS, SplitServer

MAX_BYTES = 60  # each way, for a token


def body(temperature: float, seed: int = 7, max_tokens: int = 60) -> dict[str, Any]:
    prompt = "one two three one two three one"
    return {"prompt": prompt, "max_tokens": max_tokens, "temperature": temperature, "seed": seed}


class Liar(Drafter):
    """Random tokens, some of which are in no vocabulary."""

    name = "liar"

    def __init__(self) -> None:
        self.rng = random.Random(1)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft(tuple(self.rng.randrange(1 << 12) for _ in range(ask.budget))) for ask in asks]


class Oracle(Drafter):
    """Knows the text, and is wrong now and then."""

    name = "oracle"

    def __init__(self, text: Sequence[int], wrong: float = 0.1) -> None:
        self.text, self.wrong, self.rng = text, wrong, random.Random(2)

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [self._draft(len(ask.seq.output), ask.budget) for ask in asks]

    def _draft(self, at: int, budget: int) -> Draft:
        known = self.text[at : at + budget]
        return Draft(tuple(t if self.rng.random() > self.wrong else t ^ 1 for t in known))


DRAFTERS: dict[str, Callable[[Sequence[int]], list[Drafter]]] = {
    "none": lambda text: [],
    "ngram": lambda text: [Ngram()],
    "ngram,suffix": lambda text: [Ngram(), Suffix()],
    "liar": lambda text: [Liar()],
    "oracle": lambda text: [Oracle(text)],
}


def run(url: str, request: dict[str, Any], drafters: Sequence[Drafter], **settings: Any) -> EdgeResult:
    prediction = settings.pop("prediction", ())
    edge = Edge(url, drafters, EdgeSettings(**settings))
    return asyncio.run(edge.generate(request, prediction=prediction))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", list(Mode))
def test_the_text_is_the_targets(
    mode: Mode, temperature: float, drafter: str, split_server: SplitServer
) -> None:
    request = body(temperature)
    plain = split_server.tokens(request)
    result = run(split_server.url, request, DRAFTERS[drafter](plain), mode=mode, wait_ms=100)
    assert result.token_ids == plain
    assert result.text == split_server.llm.tokenizer.decode(plain, skip_special=True)
    assert result.finish_reason == "length"
    facts = result.as_json()
    assert facts["bytes_up_per_token"] <= MAX_BYTES
    assert facts["bytes_down_per_token"] <= MAX_BYTES


def mailbox_only(request: dict[str, Any]) -> dict[str, Any]:
    """Without the server's own drafters."""
    return {**request, "speculative_config": {"drafters": ["mailbox"], "adaptive": False}}


def test_a_patient_server_needs_half_the_passes(split_server: SplitServer) -> None:
    request = body(0.0)
    plain = split_server.tokens(request)
    result = run(
        split_server.url, mailbox_only(request), [Suffix(), Ngram()], mode=Mode.PATIENT, wait_ms=LONG_MS
    )
    assert result.token_ids == plain
    assert 2 * result.passes <= len(plain)
    assert result.report["accepted_tokens"] >= len(plain) - result.passes


def test_one_connection_serves_one_answer_after_another(split_server: SplitServer) -> None:
    requests, connections = [body(0.8, seed) for seed in range(3)], list[None]()

    async def test() -> list[EdgeResult]:
        async with network(Network(split_server.port, cut_after=lambda: connections.append(None))) as between:
            vocabulary = await Edge(split_server.url, []).vocabulary()
            settings = EdgeSettings(Mode.PATIENT, LONG_MS)
            async with Edge(between.url, [Suffix(), Ngram()], settings, vocabulary=vocabulary) as edge:
                assert len(await edge.round_trips_s(2)) == 2
                return [await edge.generate(mailbox_only(request)) for request in requests]

    results = asyncio.run(test())
    assert [result.token_ids for result in results] == [split_server.tokens(request) for request in requests]
    assert all(result.report["accepted_tokens"] > 0 for result in results)
    assert len(connections) == 1


def test_a_connection_that_was_closed_between_two_answers_is_replaced(split_server: SplitServer) -> None:
    async def test() -> list[EdgeResult]:
        results = []
        async with network(Network(split_server.port)) as between, Edge(between.url, [Ngram()]) as edge:
            for _ in range(3):
                results.append(await edge.generate(body(0.8)))
                between.cut_all()
        return results

    for result in asyncio.run(test()):
        assert result.token_ids == split_server.tokens(body(0.8))
        assert result.reconnects == 0


def test_a_draft_of_the_whole_answer_comes_with_the_request(split_server: SplitServer) -> None:
    request = body(0.8)
    plain = split_server.tokens(request)
    only = {**request, "speculative_config": {"drafters": ["prediction"], "adaptive": False}}
    told = run(split_server.url, only, [], mode=Mode.ONE_SHOT, prediction=plain)
    assert told.token_ids == plain
    assert told.passes <= len(plain) / 4
    lied = run(split_server.url, only, [], mode=Mode.ONE_SHOT, prediction=(1 << 23, *plain))
    assert lied.token_ids == plain
    assert lied.passes == len(plain)


def test_what_is_provisional_goes_with_the_end(split_server: SplitServer) -> None:
    shown = list[tuple[tuple[int, ...], tuple[int, ...]]]()
    edge = Edge(split_server.url, [Ngram()], EdgeSettings(Mode.PATIENT, LONG_MS))
    request = mailbox_only(body(0.0))
    result = asyncio.run(edge.generate(request, lambda *texts: shown.append(texts)))
    assert any(provisional for _, provisional in shown)
    assert shown[-1] == (result.token_ids, ())


def test_a_text_ends_before_a_stop_string(split_server: SplitServer) -> None:
    request = body(0.0)
    whole = split_server.llm.tokenizer.decode(split_server.tokens(request), skip_special=True)
    stop = whole[20:24]
    result = run(split_server.url, {**request, "stop": stop}, [Ngram()])
    assert result.text == whole[: whole.index(stop)]
    assert result.finish_reason == "stop"


@pytest.mark.slow
def test_nothing_is_lost_or_repeated_by_a_hundred_cuts(
    split_server: SplitServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.split.edge.RETRY_S", (0.001, 0.01))
    rng, cuts, answers = random.Random(3), 0, 0

    async def one(seed: int, request: dict[str, Any]) -> EdgeResult:
        faults = Network(split_server.port, 0.001, 0.002, lambda: rng.randrange(500, 1200))
        async with network(faults) as between:
            vocabulary = await Edge(split_server.url, []).vocabulary()  # longer than a cut allows
            settings = EdgeSettings(Mode(1 + seed % 2), 20)
            edge = Edge(between.url, [Ngram(), Suffix()], settings, vocabulary=vocabulary)
            return await edge.generate(mailbox_only(request))

    while cuts < 100:
        request = body(0.8 * (answers % 2), answers, 400)
        result = asyncio.run(one(answers, request))
        assert result.token_ids == split_server.tokens(request)
        cuts, answers = cuts + result.reconnects, answers + 1
        assert answers < 100, f"only {cuts} cuts"


@pytest.mark.parametrize("mode", [Mode.OPPORTUNISTIC, Mode.PATIENT])
def test_a_slow_and_shaky_network_changes_nothing(mode: Mode, split_server: SplitServer) -> None:
    async def one() -> EdgeResult:
        async with network(Network(split_server.port, delay_s=0.01, jitter_s=0.02)) as between:
            edge = Edge(between.url, [Ngram(), Suffix()], EdgeSettings(mode, 200))
            return await edge.generate(body(0.8))

    assert asyncio.run(one()).token_ids == split_server.tokens(body(0.8))
