"""Many rows at once are chosen as sampling/ chooses them one by one."""

import numpy as np
import pytest
import torch

from paceline.config import SamplingParams
from paceline.sampling.choose import choose
from paceline.sampling.distribution import distribution
from paceline.sampling.noise import CHOICE, noise_key
from paceline.train.data.rollout import greedy, nucleus

ROWS, VOCAB = 64, 700


@pytest.mark.parametrize("spread", [0.3, 1.0, 4.0])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.7, 0.9), (1.3, 0.5)])
def test_rows_are_sampled_as_one_by_one(spread: float, temperature: float, top_p: float) -> None:
    rng = np.random.default_rng(int(spread * 10))
    logits = (rng.standard_normal((ROWS, VOCAB)) * spread).astype(np.float32)
    seeds = rng.integers(0, 2**63 - 1, ROWS)
    index = rng.integers(0, 500, ROWS)
    params = SamplingParams(temperature=temperature, top_p=top_p)
    theirs = [
        choose(distribution(row, params), noise_key(int(seed), 0, CHOICE, int(at)))
        for row, seed, at in zip(logits, seeds, index, strict=True)
    ]
    ours = nucleus(
        torch.from_numpy(logits), temperature, top_p, torch.from_numpy(seeds), torch.from_numpy(index)
    )
    agree = sum(a == b for a, b in zip(ours.tolist(), theirs, strict=True))
    assert agree == ROWS if spread > 0.3 else agree > ROWS // 2  # a nucleus larger than ours is cut
    assert len(set(theirs)) > 5


def test_greedy_takes_the_lowest_of_equals() -> None:
    assert greedy(torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]])).tolist() == [1, 0]
