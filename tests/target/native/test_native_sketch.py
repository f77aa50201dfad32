"""Some layers of the native target: what they compute, and that nothing of it stays."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_cases import SIZES, native_target, tiny_model
from sketch_checks import check_all_layers_are_a_pass, check_nothing_stays, check_steps_are_one_stretch
from torch_cases import open_with, some_tokens

from paceline.config import EngineConfig
from paceline.target.native.layout import Layout
from paceline.target.native.native_target import NativeTarget
from paceline.target.native.packed import PackedWeights
from paceline.types import Feed, Seq


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> NativeTarget:
    path = tmp_path_factory.mktemp("tiny") / "tiny.gguf"
    return native_target(tiny_model(path, "qwen3", sizes=replace(SIZES, layers=3)))


def only(target: NativeTarget, layers: tuple[int, ...]) -> NativeTarget:
    """A model that has no other layers than these of the target's."""
    weights: PackedWeights = target._held[0]

    def renamed(tensors: Any) -> dict[str, Any]:
        found = {n: t for n, t in tensors.items() if not n.startswith("layers.")}
        for i, layer in enumerate(layers):
            old = f"layers.{layer}."
            found |= {
                f"layers.{i}." + n.removeprefix(old): t for n, t in tensors.items() if n.startswith(old)
            }
        return found

    layout = Layout(renamed(weights.layout.matrices), renamed(weights.layout.vectors), weights.nbytes)
    shape = replace(target.shape, layers=len(layers))
    less = PackedWeights(layout, weights._data)
    return NativeTarget(shape, less, "less", target.path, EngineConfig(cache_mb=16))


@pytest.mark.parametrize("layers", [(0, 2), (1,), (0, 1)])
def test_a_sketch_is_the_model_without_the_other_layers(
    target: NativeTarget, layers: tuple[int, ...]
) -> None:
    tokens, less = some_tokens(11, seed=3), only(target, layers)
    for model in (target, less):
        model.open(Seq("s", tokens, len(tokens), tenant=str(layers)))
    sketched = target.sketch([Feed("s", tokens)], [0], layers).logits
    assert torch.equal(sketched, less.forward([Feed("s", tokens)]).logits)
    target.close("s")


@pytest.mark.parametrize("context", [1, 62, 255])
def test_all_layers_are_a_pass(target: NativeTarget, context: int) -> None:
    check_all_layers_are_a_pass(target, context)


@pytest.mark.parametrize("context", [1, 14, 62])
def test_steps_are_one_stretch(target: NativeTarget, context: int) -> None:
    check_steps_are_one_stretch(target, context, (0, 2))


@settings(max_examples=6)
@given(seed=st.integers(1, 10**6), context=st.integers(1, 70))
def test_nothing_of_a_sketch_stays(target: NativeTarget, seed: int, context: int) -> None:
    check_nothing_stays(target, seed, context)


def test_a_sketched_row_that_stays_is_caught(target: NativeTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    real = NativeTarget.sketch

    def keeping(self: NativeTarget, feeds: Any, starts: Any, layers: Any) -> Any:
        scores = real(self, feeds, [self._cache.length(feed.seq_id) for feed in feeds], layers)
        for feed in feeds:
            self._cache.append(feed.seq_id, feed.tokens)
        return scores

    monkeypatch.setattr(NativeTarget, "sketch", keeping)
    with pytest.raises((AssertionError, ValueError), match=r"a sketch has changed|cannot keep"):
        check_nothing_stays(only(target, (0, 1, 2)), 5, 40)


def test_a_sketch_over_a_kept_row_is_refused_and_would_be_caught(
    target: NativeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine = only(target, (0, 1, 2))
    open_with(mine, "s", some_tokens(20))
    with pytest.raises(ValueError, match="would spoil some"):
        mine.sketch([Feed("s", [1])], [19], (0,))
    mine.close("s")
    real, make_room = NativeTarget.sketch, NativeTarget._make_room

    def early(self: NativeTarget, feeds: Any, starts: Any, layers: Any) -> Any:
        return real(self, feeds, [start - 1 for start in starts], layers)

    monkeypatch.setattr(NativeTarget, "sketch", early)
    monkeypatch.setattr(
        NativeTarget,
        "_make_room",
        lambda self, feeds, starts: make_room(self, feeds, [s + 1 for s in starts]),
    )
    with pytest.raises(AssertionError, match="a sketch has changed"):
        check_nothing_stays(mine, 5, 40)


def test_layers_that_are_none(target: NativeTarget) -> None:
    target.open(Seq("s", [1], 1))
    for layers in ((), (2, 1), (1, 1), (-1,), (3,)):
        with pytest.raises(ValueError, match="expected some of 0 to 2, ascending"):
            target.sketch([Feed("s", [1])], [0], layers)
    target.close("s")


def test_taps_are_of_the_layers_that_run(target: NativeTarget) -> None:
    """The last state of a whole pass is still the last layer's."""
    open_with(target, "s", some_tokens(5))
    hidden = target.forward([Feed("s", [7])], taps=(0, 1, 2)).hidden
    target.keep("s", 5)
    target.close("s")
    assert sorted(hidden) == [0, 1, 2]
    assert len({hidden[i].numpy().tobytes() for i in hidden}) == 3
