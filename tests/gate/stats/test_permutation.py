"""Two-sample tests of texts."""

import numpy as np
import pytest

from paceline.gate.stats.permutation import (
    alpha_at_look,
    hamming_kernel,
    look,
    stratified_mmd_p_value,
    swap_p_value,
)


def texts(rng: np.random.Generator, count: int, share: float) -> list[str]:
    """Of words "a" and "b"."""
    return ["".join("a " if bit else "b " for bit in row) for row in rng.random((count, 10)) < share]


def test_the_kernel_is_the_share_of_equal_characters() -> None:
    assert hamming_kernel(["abcd", "abxd", "ab"])[0] == pytest.approx([1.0, 0.75, 0.5])


def test_equal_samplers_are_rejected_as_often_as_the_level_says() -> None:
    rng = np.random.default_rng(5)
    p_values = [swap_p_value(texts(rng, 40, 0.5), texts(rng, 40, 0.5), rng, 199) for _ in range(100)]
    assert sum(p <= 0.1 for p in p_values) <= 18
    groups = [[(texts(rng, 6, 0.5), texts(rng, 6, 0.5)) for _ in range(5)] for _ in range(60)]
    stratified = [stratified_mmd_p_value(group, rng, 199) for group in groups]
    assert sum(p <= 0.1 for p in stratified) <= 12


def test_samplers_that_differ_everywhere_alike_are_found() -> None:
    rng = np.random.default_rng(6)
    assert swap_p_value(texts(rng, 80, 0.5), texts(rng, 80, 0.65), rng) <= 0.005


def test_samplers_that_differ_by_prompt_are_found_within_prompts() -> None:
    """Half of the prompts the one way and half the other: their means agree."""
    rng = np.random.default_rng(7)
    groups = [(texts(rng, 10, 0.5), texts(rng, 10, 0.25 if i % 2 else 0.75)) for i in range(20)]
    assert stratified_mmd_p_value(groups, rng) <= 0.005


def test_identical_texts_are_no_evidence() -> None:
    same = ["one two", "three"] * 10
    assert swap_p_value(same, same, np.random.default_rng(0), 99) == 1.0


def test_looks_come_at_doubling_sizes_and_share_alpha() -> None:
    assert [look(n) for n in (49, 50, 99, 100, 399, 400)] == [
        None,
        (0, 50),
        (0, 50),
        (1, 100),
        (2, 200),
        (3, 400),
    ]
    assert sum(alpha_at_look(0.05, i) for i in range(1000)) == pytest.approx(0.05, rel=0.01)
