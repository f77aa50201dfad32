"""Some layers of the native target: what they compute, and that nothing of it stays."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.target.native.packing import Layout, PackedWeights
from paceline.target.native.target import NativeTarget
from paceline.types import Feed
from support import checks as checks
from support import examples
from support.models import open_with, some_layers, some_tokens
from support.native_targets import SIZES, native_target, tiny_model


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NativeTarget:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return native_target(tiny_model(path, "qwen3", sizes=replace(SIZES, layers=3)))


def only(target: NativeTarget, layers: tuple[int, ...]) -> NativeTarget:
    """A model that has no other layers than these of the target's."""
    weights: PackedWeights = target._held[0]

    whole = weights.layout
    matrices, vectors = some_layers(whole.matrices, layers), some_layers(whole.vectors, layers)
    layout = Layout(matrices, vectors, weights.nbytes)
    shape = replace(target.shape, layers=len(layers))
    less = PackedWeights(layout, weights._data)
    return NativeTarget(shape, less, "less", target.path, EngineConfig(cache_mb=16))


@pytest.mark.parametrize("layers", [(0, 2), (1,), (0, 1)])
def test_a_sketch_is_the_model_without_the_other_layers(
    target: NativeTarget, layers: tuple[int, ...]
) -> None:
    checks.check_it_is_the_model_without(target, only(target, layers), layers)


@pytest.mark.parametrize("context", [1, 62, 255])
def test_all_layers_are_a_pass(target: NativeTarget, context: int) -> None:
    checks.check_all_layers_are_a_pass(target, context)


@pytest.mark.parametrize("context", [1, 14, 62])
def test_steps_are_one_stretch(target: NativeTarget, context: int) -> None:
    checks.check_steps_are_one_stretch(target, context, (0, 2))


@settings(max_examples=examples(6))
@given(seed=st.integers(1, 10**6), context=st.integers(1, 70))
def test_nothing_of_a_sketch_stays(target: NativeTarget, seed: int, context: int) -> None:
    checks.check_nothing_stays(target, seed, context)


def test_a_sketched_row_that_stays_is_caught(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    checks.check_a_row_that_stays_is_caught(only(target, (0, 1, 2)), monkeypatch)


def test_a_sketch_over_a_kept_row_is_refused_and_would_be_caught(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks.check_a_kept_row_is_guarded(only(target, (0, 1, 2)), monkeypatch)


def test_layers_that_are_none(target: NativeTarget) -> None:
    checks.check_layers_that_are_none(target)


def test_taps_are_of_the_layers_that_run(target: NativeTarget) -> None:
    """The last state of a whole pass is still the last layer's."""
    open_with(target, "s", some_tokens(5))
    hidden = target.forward([Feed("s", [7])], taps=(0, 1, 2)).hidden
    target.keep("s", 5)
    target.close("s")
    assert sorted(hidden) == [0, 1, 2]
    assert len({hidden[i].numpy().tobytes() for i in hidden}) == 3
