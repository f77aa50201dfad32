"""The net that is trained gives the rows that are served, and its gradients go where they should."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.target.eager.target import TorchTarget
from paceline.target.weights.model_config import Weights
from paceline.target.weights.reader import load
from paceline.train.draft_model.model import TrainableDraftModel
from paceline.types import Draft, Feed, Seq
from support.heads import tiny_weights
from support.models import CONFIG, TRAINED, VOCAB, save_reference, some_tokens

LENGTH, START = 60, 37
BOUND = 1e-5  # of the largest logit


@pytest.fixture(scope="module", params=TRAINED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp(request.param)
    save_reference(request.param, made)
    return made


def served(weights: Weights, tokens: list[int]) -> Tensor:
    target = TorchTarget(weights, CONFIG)
    target.open(Seq("all", tokens, 1))
    return target.forward([Feed("all", tokens[:1], Draft(tuple(tokens[1:])))]).logits


def close(ours: Tensor, theirs: Tensor) -> bool:
    return float((ours - theirs).abs().max()) < BOUND * float(theirs.abs().max())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("rank", [0, 2])
def test_every_family_gives_the_rows_that_are_served(folder: Path, rank: int) -> None:
    tokens = some_tokens(LENGTH)
    net = TrainableDraftModel(load(folder), "cpu", rank, 4.0)
    logits = net.model.logits(net.hidden(torch.tensor([tokens])))
    assert close(logits[0].detach(), served(load(folder), tokens))
    logits.logsumexp(-1).sum().backward()  # type: ignore[no-untyped-call]
    reached = {name for name, weight in net.trained.items() if weight.grad is not None}
    assert reached == set(net.trained)


def test_a_prompt_that_is_only_read_changes_no_row(folder: Path) -> None:
    net, tokens = (
        TrainableDraftModel(load(folder), "cpu"),
        torch.tensor([some_tokens(LENGTH), some_tokens(LENGTH, 1)]),
    )
    whole, after = net.hidden(tokens), net.hidden(tokens, START)
    assert after.shape[1] == LENGTH - START
    assert close(after.detach(), whole[:, START:].detach())


def test_no_gradient_goes_through_what_is_only_read() -> None:
    net = TrainableDraftModel(tiny_weights(), "cpu")  # whose head is not its embedding
    tokens = torch.arange(LENGTH)[None]
    for start in (0, START):
        net.model.embed.grad = None
        net.hidden(tokens, start)[:, -1].sum().backward()  # type: ignore[no-untyped-call]
        assert net.model.embed.grad is not None
        touched = net.model.embed.grad.abs().sum(1).nonzero().flatten().tolist()
        assert touched == list(range(start, LENGTH))


@pytest.mark.parametrize("rank", [0, 2])
def test_the_weights_come_back_under_their_names(folder: Path, rank: int) -> None:
    weights = load(folder)
    found = TrainableDraftModel(weights, "cpu", rank, 4.0).weights()
    assert set(found) == set(weights.tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.tensors.items())


def test_training_leaves_the_weights_it_began_from(folder: Path) -> None:
    weights, before = load(folder), load(folder)
    net = TrainableDraftModel(weights, "cpu")
    with torch.no_grad():
        for weight in net.trained.values():
            weight.add_(1.0)
    assert all(torch.equal(weights.tensors[name], tensor) for name, tensor in before.tensors.items())
    moved = net.weights()
    assert all(torch.allclose(moved[name], tensor + 1) for name, tensor in before.tensors.items())


@pytest.mark.model
def test_the_real_model_gives_the_rows_that_are_served(smollm2_path: Path) -> None:
    weights = load(smollm2_path)
    tokens = some_tokens(12, vocab=weights.shape.vocab_size)
    net = TrainableDraftModel(weights, "cpu", 2, 4.0)
    logits = net.model.logits(net.hidden(torch.tensor([tokens]), 5))
    assert logits.shape[-1] > VOCAB
    assert close(logits[0].detach(), served(weights, tokens)[5:])
