"""Metrics of a run that has rounds of every kind, and how to read them."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count

from prometheus_client.parser import text_string_to_metric_families

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.server.telemetry.metrics import Metrics, ServerMetrics
from paceline.testing import ToyCursor, ToyTarget
from paceline.types import ROOT, Ask, Draft, Drafter, Finish, Round, Seq, Sink


class Heard:
    def __init__(self) -> None:
        self.rounds: list[Round] = []

    def round(self, r: Round) -> None:
        self.rounds.append(r)

    def finish(self, seq: Seq, reason: Finish) -> None:
        return


class Fork(Drafter):
    """A tree: two guesses for the first place, one after each."""

    name = "fork"

    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        return [Draft((1, 2, 1, 2), (ROOT, ROOT, 0, 1)).first(ask.budget) for ask in asks]


def some_metrics(routes: Sequence[str] = ("agents",), clock: Iterator[int] | None = None) -> Metrics:
    ticks = clock or count()
    drafters = [*model_free(), "fork"]
    return Metrics(
        "toy", drafters, lambda: 3, lambda: 2, lambda: 0.25, routes, clock=lambda: float(next(ticks))
    )


def samples(metrics: Metrics | ServerMetrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = metrics.render()[0].decode()
    return {
        (s.name, frozenset(s.labels.items())): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }


def value(metrics: Metrics, name: str, **labels: str) -> float:
    if name.startswith("vllm:"):
        labels["model_name"] = "toy"
    return samples(metrics)[name, frozenset(labels.items())]


def total(metrics: Metrics, name: str, **labels: str) -> float:
    wanted = set(labels.items())
    return sum(v for (n, ls), v in samples(metrics).items() if n == name and wanted <= ls)


def only_digits(output: tuple[int, ...]) -> set[int] | None:
    return {5} if len(output) % 4 else {1, 2, 3}


def stop_at(seq: Seq) -> Callable[[int], bool]:
    return lambda _: len(seq.output) == 24


def run(metrics: Metrics) -> list[Round]:
    """Outputs of all kinds in one batch: chains, trees, certain guesses, none, a stop within a draft."""
    heard = Heard()
    sinks: list[Sink] = [heard, metrics]
    drafters = {**model_free(), "fork": Fork()}
    engine = Engine(
        ToyTarget(vocab_size=8, memory=1), drafters, Fixed(), sinks, EngineConfig(prefill_chunk=8)
    )
    lists = [("suffix", "ngram"), ("fork",), ("none",), ("grammar", "ngram")]
    for i, names in enumerate(lists):
        spec = SpecConfig(names, max_draft=20 if i == 0 else 4)
        seq = Seq(f"s{i}", [1, 2, 3, 1, 2] * 4, 20, SamplingParams(max_tokens=40), spec)
        seq.cursor = ToyCursor(only_digits) if names[0] == "grammar" else None
        if i == 0:
            seq.stopped_by = stop_at(seq)
        metrics.set_route(seq.id, "agents" if i % 2 else "default")
        engine.submit(seq)
    while engine.busy:
        engine.step()
    return heard.rounds
