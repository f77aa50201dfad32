"""Rollouts are what the engine would have answered, whoever is answered beside them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import SamplingParams, SpecConfig
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.model_config import Weights
from paceline.target.weights.reader import load
from paceline.text import Tokenizer
from paceline.train.data import rollout
from paceline.train.data.rollout import Job, Rollout, roll_out
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Seq
from support.models import CONFIG, TRAINED, random_weights, save_reference, some_tokens

EOS = frozenset({3, 77})
NEW = 24
HOW = Rollout(max_new=NEW, slots=3, prefill_tokens=100)
PLAIN = SpecConfig(drafters=(), max_draft=0)
LENGTHS = (1, 30, 5, 64, 17, 2, 50, 9)


def weights() -> Weights:
    """With a head of its own: one that is tied to random embeddings repeats the last token for ever."""
    made = random_weights()
    head = torch.randn(made.tensors["embed"].shape, generator=torch.Generator().manual_seed(9)) / 4
    return Weights(made.shape, {**made.tensors, "head": head}, "lively")


def jobs(sampled: bool) -> list[Job]:
    return [Job(some_tokens(n, seed=n), sampled, seed=2**60 + n) for n in LENGTHS]


def by_the_engine(made: Weights, todo: list[Job], max_new: int = NEW) -> list[list[int]]:
    engine = Engine(TorchTarget(made, CONFIG), {}, Fixed(), (), CONFIG, EOS)
    seqs = []
    for i, job in enumerate(todo):
        params = SamplingParams(max_tokens=max_new, seed=job.seed)
        if job.sampled:
            params = replace(params, temperature=HOW.temperature, top_p=HOW.top_p)
        seqs.append(Seq(f"s{i}", list(job.prompt), len(job.prompt), params, PLAIN))
        engine.submit(seqs[-1])
    while engine.busy:
        engine.step()
    return [seq.output for seq in seqs]


@pytest.mark.parametrize("sampled", [False, True])
def test_answers_are_those_of_the_engine(sampled: bool) -> None:
    todo = jobs(sampled)
    ours = roll_out(TrainDecoder(weights(), "cpu", torch.float32), todo, sorted(EOS), HOW)
    assert ours == by_the_engine(weights(), todo)
    ends = [answer[-1] in EOS for answer in ours]
    assert any(ends)
    assert not all(ends)
    assert all(len(answer) == NEW or end for answer, end in zip(ours, ends, strict=True))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("family", TRAINED)
def test_every_family(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    todo = jobs(sampled=False)
    ours = roll_out(TrainDecoder(load(tmp_path), "cpu", torch.float32), todo, sorted(EOS), HOW)
    assert ours == by_the_engine(load(tmp_path), todo)


@pytest.mark.slow
def test_neighbours_change_nothing() -> None:
    model, todo = TrainDecoder(weights(), "cpu", torch.float32), [*jobs(True), *jobs(False)]
    together = roll_out(model, todo, sorted(EOS), HOW)
    assert together == roll_out(model, todo, sorted(EOS), Rollout(max_new=NEW, slots=2 * len(LENGTHS)))
    assert together == [roll_out(model, [job], sorted(EOS), HOW)[0] for job in todo]
    assert len({tuple(answer) for answer in together}) > len(LENGTHS)


def test_prompts_of_any_length_find_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    model, todo = TrainDecoder(weights(), "cpu", torch.float32), jobs(False)
    expected = roll_out(model, todo, sorted(EOS), HOW)
    monkeypatch.setattr(rollout, "SHORTEST_CACHE", 64)
    seen: list[tuple[int, int]] = []
    assert roll_out(model, todo, sorted(EOS), HOW, lambda *at: seen.append(at)) == expected
    assert seen == [(i + 1, len(todo)) for i in range(len(todo))]


@pytest.mark.model
def test_the_real_model_answers_as_it_does_in_the_engine(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    prompt = tokenizer.encode_chat([{"role": "user", "content": "Count to five."}])
    todo = [Job(prompt, sampled, seed=5) for sampled in (False, True)]
    dense = TrainDecoder(load(smollm2_path), "cpu", torch.float32)
    ours = roll_out(dense, todo, sorted(EOS), Rollout(max_new=12, slots=2))
    assert ours == by_the_engine(load(smollm2_path), todo, 12)
    assert ours[0] != ours[1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_a_graph_answers_as_the_cpu_does() -> None:
    todo = [*jobs(False), *jobs(True)]
    ours = roll_out(TrainDecoder(weights(), "cuda", torch.float32), todo, sorted(EOS), HOW)
    theirs = roll_out(TrainDecoder(weights(), "cpu", torch.float32), todo, sorted(EOS), HOW)
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= len(todo) - 2  # ties
