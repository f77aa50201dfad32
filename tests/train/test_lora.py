"""Low-rank additions: nothing at first, then what a merged matrix gives too."""

import torch
from torch import Tensor

from paceline.train.draft_model.model import MATRICES, LoraAdapter, add_adapters, merge
from paceline.train.train_decoder import TrainDecoder
from support.heads import tiny_weights
from support.models import some_tokens

TOKENS = torch.tensor([some_tokens(30), some_tokens(30, 1)])
RANK, ALPHA = 3, 12.0


def rows(model: TrainDecoder) -> Tensor:
    return model.logits(model.features(TOKENS)[1])


def tiny() -> TrainDecoder:
    return TrainDecoder(tiny_weights(), "cpu", torch.float32)


def added(seed: int = 0) -> tuple[TrainDecoder, dict[str, Tensor]]:
    model = tiny()
    return model, add_adapters(model, RANK, ALPHA, torch.Generator().manual_seed(seed))


def stirred() -> tuple[TrainDecoder, dict[str, Tensor]]:
    """With additions that add something."""
    model, trained = added()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in trained.items():
            if name.endswith("up"):
                weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))
    return model, trained


def test_nothing_is_added_before_the_first_step() -> None:
    assert torch.equal(rows(added()[0]), rows(tiny()))


def test_every_matrix_has_an_addition_of_the_rank() -> None:
    model, trained = added()
    assert len(trained) == 2 * len(model.layers) * len(MATRICES)
    for layer in model.layers:
        assert set(layer.added) == set(MATRICES)
        for name, low in layer.added.items():
            assert isinstance(low, LoraAdapter)
            assert (*low.up.shape[:1], *low.down.shape[1:]) == layer.parts[name].shape
            assert low.up.shape[1] == low.down.shape[0] == RANK
            assert low.scale == ALPHA / RANK


def test_merged_it_gives_the_same_rows() -> None:
    model, _ = stirred()
    apart, plain = rows(model), rows(tiny())
    assert (apart - plain).abs().max() > 0.1
    merge(model)
    assert not any(layer.added for layer in model.layers)
    assert torch.allclose(rows(model), apart, atol=1e-4, rtol=1e-5)  # logits of about 10


def test_the_seed_decides_how_it_begins() -> None:
    first, same, other = (added(seed)[1]["layers.0.qkv.down"] for seed in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)
