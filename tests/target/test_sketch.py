"""Some layers of the torch target: what they compute, and that nothing of it stays."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sketch_checks import check_all_layers_are_a_pass, check_nothing_stays, check_steps_are_one_stretch
from torch_cases import CONFIG, open_with, random_weights, some_tokens

from paceline.target.shape import Weights, layer_share
from paceline.target.torch_target import TorchTarget
from paceline.types import Feed, Seq

LAYERS = 3


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(random_weights(layers=LAYERS), CONFIG)


def only(layers: tuple[int, ...]) -> TorchTarget:
    """A model that has no other layers than these of the target's."""
    whole = random_weights(layers=LAYERS)
    tensors: dict[str, Any] = {n: t for n, t in whole.tensors.items() if not n.startswith("layers.")}
    for i, layer in enumerate(layers):
        old, new = f"layers.{layer}.", f"layers.{i}."
        tensors |= {new + n.removeprefix(old): t for n, t in whole.tensors.items() if n.startswith(old)}
    return TorchTarget(Weights(replace(whole.shape, layers=len(layers)), tensors, "less"), CONFIG)


@pytest.mark.parametrize("layers", [(0, 2), (1,), (0, 1)])
def test_a_sketch_is_the_model_without_the_other_layers(target: TorchTarget, layers: tuple[int, ...]) -> None:
    tokens, less = some_tokens(11, seed=3), only(layers)
    for model in (target, less):
        model.open(Seq("s", tokens, len(tokens), tenant=str(layers)))
    sketched = target.sketch([Feed("s", tokens)], [0], layers).logits
    assert torch.equal(sketched, less.forward([Feed("s", tokens)]).logits)
    target.close("s")


@pytest.mark.parametrize("context", [1, 62, 255])
def test_all_layers_are_a_pass(target: TorchTarget, context: int) -> None:
    check_all_layers_are_a_pass(target, context)


@pytest.mark.parametrize("context", [1, 62])
def test_steps_are_one_stretch(target: TorchTarget, context: int) -> None:
    check_steps_are_one_stretch(target, context, (0, 2))


@settings(max_examples=4)
@given(seed=st.integers(1, 10**6), context=st.integers(1, 70))
def test_nothing_of_a_sketch_stays(target: TorchTarget, seed: int, context: int) -> None:
    check_nothing_stays(target, seed, context)


def test_a_sketched_row_that_stays_is_caught(target: TorchTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    real = TorchTarget.sketch

    def keeping(self: TorchTarget, feeds: Any, starts: Any, layers: Any) -> Any:
        scores = real(self, feeds, [self._cache.length(feed.seq_id) for feed in feeds], layers)
        for feed in feeds:
            self._cache.append(feed.seq_id, feed.tokens)
        return scores

    monkeypatch.setattr(TorchTarget, "sketch", keeping)
    with pytest.raises((AssertionError, ValueError), match=r"a sketch has changed|cannot keep"):
        check_nothing_stays(TorchTarget(random_weights(layers=LAYERS), CONFIG), 5, 40)


def test_a_sketch_over_a_kept_row_is_refused_and_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target = TorchTarget(random_weights(layers=LAYERS), CONFIG)
    open_with(target, "s", some_tokens(20))
    with pytest.raises(ValueError, match="would spoil some"):
        target.sketch([Feed("s", [1])], [19], (0,))
    target.close("s")
    real, make_room = TorchTarget.sketch, TorchTarget._make_room

    def early(self: TorchTarget, feeds: Any, starts: Any, layers: Any) -> Any:
        return real(self, feeds, [start - 1 for start in starts], layers)

    monkeypatch.setattr(TorchTarget, "sketch", early)
    monkeypatch.setattr(
        TorchTarget, "_make_room", lambda self, feeds, starts: make_room(self, feeds, [s + 1 for s in starts])
    )
    with pytest.raises(AssertionError, match="a sketch has changed"):
        check_nothing_stays(target, 5, 40)


@pytest.mark.parametrize("layers", [(), (2, 1), (1, 1), (-1,), (3,)])
def test_layers_that_are_none(target: TorchTarget, layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="expected some of 0 to 2, ascending"):
        target.sketch([Feed("s", [1])], [0], layers)


def test_the_share_of_a_layer() -> None:
    shape = random_weights(layers=LAYERS).shape
    head = shape.vocab_size * shape.width
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    assert layer_share(shape) == pytest.approx(layer / (3 * layer + head))
