"""The training decoder gives the rows that the serving one gives.

Errors are relative to the scale of what is compared: max |ours - theirs| / max |theirs|.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.errors import UnknownArchitecture
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.reader import load
from paceline.train.head_pipeline import TrainJob, run
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Draft, Feed, Seq, Target
from support.models import CONFIG, TRAINED, VOCAB, save_reference, some_tokens

BOUND = 1e-5
LENGTH = 80  # five windows of the tiny gemma
TAPS = (0, 2)

Pair = tuple[TorchTarget, TrainDecoder]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).abs().max() / theirs.abs().max())


@pytest.fixture(scope="module", params=TRAINED)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp(request.param)
    save_reference(request.param, folder)
    dense = TrainDecoder(load(folder), "cpu", torch.float32)
    return TorchTarget(load(folder), CONFIG), dense


def served(target: Target, tokens: list[int], taps: tuple[int, ...]) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits and hidden states after every token."""
    target.open(Seq("all", tokens, 1, tenant="nobody else"))
    scores = target.forward([Feed("all", tokens[:1], Draft(tuple(tokens[1:])))], taps)
    target.keep("all", 0)
    target.close("all")
    return scores.logits, dict(scores.hidden)


def padded(*rows: list[int], token: int) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([row + [token] * (longest - len(row)) for row in rows])


def agree(pair: Pair, taps: tuple[int, ...], vocab: int) -> None:
    target, dense = pair
    rows = [some_tokens(length, seed=length, vocab=vocab) for length in (LENGTH, 33, 1)]
    hidden, last = dense.features(padded(*rows, token=5), taps)
    assert set(hidden) == set(taps)
    for i, row in enumerate(rows):
        logits, theirs = served(target, row, taps)
        assert relative_error(dense.logits(last[i, : len(row)]), logits) < BOUND
        for layer in taps:
            assert relative_error(hidden[layer][i, : len(row)], theirs[layer]) < BOUND


def test_every_family_gives_the_rows_that_are_served(pair: Pair) -> None:
    agree(pair, TAPS, VOCAB)


def test_what_comes_later_changes_nothing(pair: Pair) -> None:
    _, dense = pair
    tokens = some_tokens(LENGTH)
    _, short = dense.features(torch.tensor([tokens[:40]]))
    _, long = dense.features(torch.tensor([tokens]))
    assert relative_error(long[:, :40], short) < BOUND
    assert relative_error(long[:, 40:], short) > 0.01


@pytest.mark.model
def test_the_real_model_gives_the_rows_that_are_served(smollm2_path: Path) -> None:
    weights = load(smollm2_path)
    dense = TrainDecoder(weights, "cpu", torch.float32)
    agree((TorchTarget(weights, CONFIG), dense), (0, 14, 29), weights.shape.vocab_size)


@pytest.mark.parametrize(
    ("family", "what"), [("gemma2", "soft-capping"), ("mixtral", "a mixture of experts")]
)
def test_settings_it_does_not_know_are_named(tmp_path: Path, family: str, what: str) -> None:
    save_reference(family, tmp_path)
    with pytest.raises(UnknownArchitecture, match=f"{family} family have {what}"):
        TrainDecoder(load(tmp_path), "cpu", torch.float32)
    job = TrainJob(str(tmp_path), (), tmp_path / "mine")
    with pytest.raises(UnknownArchitecture, match=what):  # before any answer is made
        run(job)
