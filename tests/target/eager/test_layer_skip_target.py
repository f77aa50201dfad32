"""Some layers of the torch target: what they compute, and that nothing of it stays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.target.eager.target import TorchTarget
from paceline.target.weights.model_config import Weights, layer_share
from support import checks as checks
from support import examples
from support.models import CONFIG, random_weights, some_layers

LAYERS = 3


@pytest.fixture(scope="module")
def target() -> TorchTarget:
    return TorchTarget(random_weights(layers=LAYERS), CONFIG)


def only(layers: tuple[int, ...]) -> TorchTarget:
    """A model that has no other layers than these of the target's."""
    whole = random_weights(layers=LAYERS)
    tensors = some_layers(whole.tensors, layers)
    return TorchTarget(Weights(replace(whole.shape, layers=len(layers)), tensors, "less"), CONFIG)


@pytest.mark.parametrize("layers", [(0, 2), (1,), (0, 1)])
def test_it_is_the_model_without_the_other_layers(target: TorchTarget, layers: tuple[int, ...]) -> None:
    checks.check_it_is_the_model_without(target, only(layers), layers)


@pytest.mark.parametrize("context", [1, 62, 255])
def test_all_layers_are_a_pass(target: TorchTarget, context: int) -> None:
    checks.check_all_layers_are_a_pass(target, context)


@pytest.mark.parametrize("context", [1, 62])
def test_steps_are_one_stretch(target: TorchTarget, context: int) -> None:
    checks.check_steps_are_one_stretch(target, context, (0, 2))


@settings(max_examples=examples(4))
@given(seed=st.integers(1, 10**6), context=st.integers(1, 70))
def test_nothing_of_a_sketch_stays(target: TorchTarget, seed: int, context: int) -> None:
    checks.check_nothing_stays(target, seed, context)


def test_a_sketched_row_that_stays_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_a_row_that_stays_is_caught(only((0, 1, 2)), monkeypatch)


def test_a_sketch_over_a_kept_row_is_refused_and_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_a_kept_row_is_guarded(only((0, 1, 2)), monkeypatch)


def test_layers_that_are_none(target: TorchTarget) -> None:
    checks.check_layers_that_are_none(target)


def test_the_share_of_a_layer() -> None:
    shape = random_weights(layers=LAYERS).shape
    head = shape.vocab_size * shape.width
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 96
    assert layer_share(shape) == pytest.approx(layer / (3 * layer + head))
