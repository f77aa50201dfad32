"""The core promise on real weights: see test_bits.py. On the portable path, which is slow, in short."""

from pathlib import Path

import pytest
import torch
from test_bits import COUNTS

from paceline.paths import home
from paceline.target.native import library
from paceline.target.native.target import NativeTarget
from support.checks import check_chain, check_tree, check_two_sequences, same, story
from support.models import open_with, random_tree, rows_in_one_pass, some_tokens
from support.native_targets import native_target, wanted_path

CONTEXTS = (5, 255, 700)  # around the first block of keys, and over several


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> NativeTarget:
    return native_target(smollm2_path, home=home(), cache_mb=256)


def quick_only() -> None:
    if wanted_path() == "portable":
        pytest.skip("minutes on the portable path; its short variant runs")


@pytest.mark.model
@pytest.mark.parametrize("context", CONTEXTS)
def test_chains_of_smollm2(smollm2: NativeTarget, context: int) -> None:
    quick_only()
    check_chain(smollm2, context, COUNTS)


@pytest.mark.model
@pytest.mark.parametrize(("context", "seed"), [(9, 1), (253, 2), (600, 3)])
def test_trees_of_smollm2(smollm2: NativeTarget, context: int, seed: int) -> None:
    quick_only()
    check_tree(smollm2, context, random_tree(15, 4, seed, smollm2.vocab_size))


@pytest.mark.model
def test_two_sequences_of_smollm2(smollm2: NativeTarget) -> None:
    quick_only()
    check_two_sequences(smollm2)


@pytest.mark.model
def test_prompts_of_smollm2_in_any_chunking(smollm2: NativeTarget) -> None:
    quick_only()
    tokens = some_tokens(700, seed=4, vocab=smollm2.vocab_size)
    rows = []
    for chunk in (7, 64, 256, 700):
        assert open_with(smollm2, "s", tokens, chunk, tenant=f"by {chunk}") == 0
        rows.append(rows_in_one_pass(smollm2, "s", 700, [1, 2, 3]))
        smollm2.close("s")
    assert all(torch.equal(each, rows[0]) for each in rows)


@pytest.mark.model
def test_smollm2_with_any_number_of_threads(smollm2_path: Path) -> None:
    quick_only()
    targets = [native_target(smollm2_path, home=home(), threads=n, cache_mb=64) for n in (1, 2, 3)]
    told = [story(target, 270) for target in targets]
    assert all(same(each, told[0]) for each in told)


@pytest.mark.model
def test_smollm2_is_the_same_on_avx512_and_avx2(smollm2_path: Path) -> None:
    paths = [path for path in library.CHOICES["auto"] if library.usable(path)]
    if len(paths) < 2:
        pytest.skip(f"this processor has one of these paths at most: {paths}")
    told = [story(native_target(smollm2_path, path, home=home(), cache_mb=64), 270) for path in paths]
    assert all(same(each, told[0]) for each in told)


@pytest.mark.model
def test_smollm2_is_the_same_on_the_portable_path(smollm2_path: Path) -> None:
    """Its rows and those of the wanted path, or of the best one if that is the portable one itself."""
    portable = native_target(smollm2_path, "portable", home=home(), cache_mb=64)
    check_chain(portable, 3, (2, 5))
    check_tree(portable, 2, random_tree(4, 2, seed=1, vocab=portable.vocab_size))
    wanted = wanted_path()
    best = library.best_path("auto") if wanted == "portable" else wanted
    if best is not None:
        target = native_target(smollm2_path, best, home=home(), cache_mb=64)
        rows = []
        for each in (target, portable):
            open_with(each, "s", [1, 2])
            rows.append(rows_in_one_pass(each, "s", 2, [4, 5, 6]))
        assert torch.equal(rows[0], rows[1])


@pytest.mark.large
def test_qwen(qwen_path: Path) -> None:
    quick_only()
    target = native_target(qwen_path, home=home(), cache_mb=256)
    check_chain(target, 250, (2, 8, 16))
    check_tree(target, 250, random_tree(15, 4, 1, target.vocab_size))
    tokens = some_tokens(300, seed=4, vocab=target.vocab_size)
    rows = []
    for chunk in (77, 300):
        open_with(target, "s", tokens, chunk, tenant=f"by {chunk}")
        rows.append(rows_in_one_pass(target, "s", 300, [1, 2]))
        target.close("s")
    assert torch.equal(rows[0], rows[1])
