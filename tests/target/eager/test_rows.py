"""Row invariance: a row's logits are the same bits whatever rows are computed beside it."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.config import EngineConfig
from paceline.target.eager.layer import FeedForward, Store, silu
from paceline.target.eager.linear import MAX_ROWS, PlainLinear, Product, RowTile, find_row_tile
from paceline.target.eager.target import TorchTarget
from paceline.target.weights.reader import load
from paceline.types import Feed
from support import examples
from support.checks import check_chain, check_tree, check_two_sequences
from support.models import CONFIG, open_with, random_tree, random_weights, save_reference, some_tokens


@pytest.fixture(scope="module")
def tiny() -> TorchTarget:
    return TorchTarget(random_weights(), CONFIG)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> TorchTarget:
    return TorchTarget(load(smollm2_path, torch.float32), EngineConfig(device="cpu", cache_mb=256))


@pytest.mark.model
@pytest.mark.parametrize("context", [5, 255, 700])
def test_row_bits_do_not_depend_on_the_rows_around_them(smollm2: TorchTarget, context: int) -> None:
    check_chain(smollm2, context)


@pytest.mark.gemma
def test_row_bits_of_gemma(gemma_path: Path) -> None:
    target = TorchTarget(load(gemma_path, torch.float32), EngineConfig(device="cpu", cache_mb=256))
    check_chain(target, 600)  # longer than its window
    check_tree(target, 600, random_tree(15, 4, 1, target.vocab_size))


@pytest.mark.large
def test_row_bits_of_qwen(qwen_path: Path) -> None:
    target = TorchTarget(load(qwen_path, torch.float32), EngineConfig(device="cpu", cache_mb=256))
    check_chain(target, 250, range(2, MAX_ROWS + 1))
    check_tree(target, 250, random_tree(15, 4, 1, target.vocab_size))


@pytest.mark.parametrize("context", [1, 250, 255, 256, 700])
def test_row_bits_of_a_tiny_model(tiny: TorchTarget, context: int) -> None:
    check_chain(tiny, context)


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi4_mini", "gemma2", "qwen3_moe", "gpt_oss"])
def test_row_bits_of_other_families(family: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    target = TorchTarget(load(tmp_path, torch.float32), CONFIG)
    check_chain(target, 250)
    check_tree(target, 250, random_tree(15, 3, seed=1))


def test_activations_do_not_depend_on_where_threads_cut() -> None:
    """Torch would give a third of 16 x 5000 elements to each of three threads, and cut rows to do so."""
    weights = random_weights(ff=5000)
    network = FeedForward("layers.0.", silu, Store(dict(weights.tensors), torch.device("cpu"), 1e-5))
    network.gate_up = network.down = Unchanged()
    gates = torch.randn(2 * MAX_ROWS, 10_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        alone = torch.cat([network(row[None]) for row in gates])
        assert all(torch.equal(network(gates[:n]), alone[:n]) for n in range(2, len(gates)))
    finally:
        torch.set_num_threads(threads)


class Unchanged:
    bytes_held = 0
    weight = torch.empty(0)

    def __call__(self, x: Tensor) -> Tensor:
        return x.clone()


def test_row_bits_in_bfloat16() -> None:
    weights = random_weights(width=128, kv_heads=1)
    for name in weights.tensors:
        weights.tensors[name] = weights.tensors[name].bfloat16()  # type: ignore[index]
    check_chain(TorchTarget(weights, CONFIG), 250)


@pytest.mark.model
@pytest.mark.parametrize(("context", "seed"), [(9, 1), (253, 2), (600, 3)])
def test_tree_rows_are_the_rows_of_their_paths(smollm2: TorchTarget, context: int, seed: int) -> None:
    check_tree(smollm2, context, random_tree(15, 4, seed, smollm2.vocab_size))


@settings(max_examples=examples(30))
@given(st.integers(1, 15), st.integers(1, 4), st.integers(0, 99), st.sampled_from([1, 60, 250, 255]))
def test_tree_rows_of_a_tiny_model(
    tiny: TorchTarget, nodes: int, width: int, seed: int, context: int
) -> None:
    check_tree(tiny, context, random_tree(nodes, width, seed))


@pytest.mark.model
def test_two_sequences_in_one_pass(smollm2: TorchTarget) -> None:
    check_two_sequences(smollm2)


def test_two_sequences_in_one_pass_of_a_tiny_model(tiny: TorchTarget) -> None:
    check_two_sequences(tiny)


def switching(*odd: int, within: bool = False) -> Product:
    """Its last bits are others at some row counts, or within them in the second row."""

    def run(x: Tensor) -> Tensor:
        bits = x.clone()
        if len(x) in odd:
            bits[1 if within else slice(None)] *= 1 + 1e-6
        return bits

    return Product(run, (3,), torch.float32)


def test_row_tile_is_the_smallest_that_agrees() -> None:
    assert find_row_tile(switching()) == RowTile(4)
    assert find_row_tile(switching(1, 2, 3, 6)) == RowTile(4)
    assert find_row_tile(switching(4)) == RowTile(8)
    assert find_row_tile(switching(12)) == RowTile(8)
    assert find_row_tile(switching(8)) == RowTile(16)
    assert find_row_tile(switching(4, 8, 32)) == RowTile(16, exact=True)


def test_row_tile_depends_on_the_position_of_a_row() -> None:
    assert find_row_tile(switching(4, within=True)) == RowTile(8)
    assert find_row_tile(switching(16, within=True)) == RowTile(8, exact=True)
    assert find_row_tile(switching(2, 4, 8, 16, within=True)) == RowTile(1, exact=True)


def test_row_tile_sees_last_bits_through_rounded_results() -> None:
    """The sums differ in one bit of 24, and hardly any of them shows it in its first 8."""
    weight = torch.randn(64, 600, generator=torch.Generator().manual_seed(0))

    def run(x: Tensor) -> Tensor:
        sums = x.float() @ weight
        return (sums * (1 - 2e-7) if len(x) == 8 else sums).bfloat16()

    assert find_row_tile(Product(run, (64,), torch.bfloat16)) == RowTile(16)


ONE, TWO, SIXTEEN = (RowTile(size, exact=True) for size in (1, 2, 16))


@pytest.mark.parametrize(
    ("attention", "linears", "given"),
    [
        (ONE, [ONE] * 5, {1}),
        (SIXTEEN, [SIXTEEN] * 5, {16}),
        (RowTile(4), [RowTile(8), TWO] * 3, {2, 8, 16, 40}),
    ],
)
def test_products_that_need_their_rows_in_groups(
    attention: RowTile,
    linears: list[RowTile],
    given: set[int],
    monkeypatch: pytest.MonkeyPatch,
    tiny: TorchTarget,
) -> None:
    """The way out where a library agrees with no tile: its kernels see one row count only."""
    seen: set[int] = set()

    def watched(self: PlainLinear, x: Tensor) -> Tensor:
        seen.add(len(x))
        return torch.nn.functional.linear(x, self.weight, self._bias)

    tiles = iter([attention, *linears])
    monkeypatch.setattr(PlainLinear, "__call__", watched)
    monkeypatch.setattr("paceline.target.eager.layer.make_linear", PlainLinear)
    monkeypatch.setattr("paceline.target.eager.decoder.find_row_tile", lambda _: next(tiles))
    grouped = TorchTarget(random_weights(), CONFIG)
    tokens, draft = some_tokens(40), random_tree(15, 3, seed=4)
    for target in (grouped, tiny):
        open_with(target, "s", tokens)
    ours, theirs = (target.forward([Feed("s", [3], draft)]).logits for target in (grouped, tiny))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    for target in (grouped, tiny):
        target.keep("s", 41, draft.paths()[1])
    ours, theirs = (target.forward([Feed("s", [9])]).logits for target in (grouped, tiny))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert seen == given
    tiny.close("s")
    grouped.close("s")
    if attention == ONE:
        check_tree(grouped, 40, draft)  # rows one by one agree on every machine
