"""A head's one guess is what a ranking of all tokens would put first."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import SamplingParams
from paceline.drafters.heads.tree_growth import Position, grow
from paceline.drafters.support.draft_sampling import sample_tokens
from paceline.sampling import Floats
from paceline.types import Ask, Seq

VOCAB = 60


@given(st.integers(0, 2**32 - 1), st.floats(0.1, 2.0), st.sampled_from([0, 5]), st.sampled_from([1.0, 0.8]))
def test_a_chain_has_the_first_token_of_each_position(
    seed: int, temperature: float, top_k: int, top_p: float
) -> None:
    random = np.random.default_rng(seed)
    rows: list[Floats] = [random.normal(0, 3, VOCAB).astype(np.float32) for _ in range(4)]
    for row in rows:
        row[random.permutation(VOCAB)[:20]] = -np.inf  # tokens that the head does not know
    params = SamplingParams(temperature=temperature, seed=seed, top_k=top_k, top_p=top_p)
    seq = Seq("s", [1, 2, 3, 4], 3, params)

    def look(positions: list[Position]) -> list[tuple[Floats, float]]:
        return [(rows[len(position.written)], 0.5) for position in positions]

    (draft,) = grow([Ask(seq, 4)], look, "head", VOCAB)  # type: ignore[arg-type]
    expected: tuple[int, ...] = ()
    for row in rows:
        expected += tuple(sample_tokens(row, seq, expected, width=2).tokens[:1])
    assert draft.tokens == expected
