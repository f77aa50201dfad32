"""The doubles are what they stand for."""

import torch

from paceline.heads.runner import HeadTarget
from paceline.testing import ToyTarget
from paceline.types import Feed, LayerSkipTarget, Seq


def test_the_toy_is_a_target_with_every_capability() -> None:
    toy = ToyTarget()
    with_heads: HeadTarget = toy
    with_layers: LayerSkipTarget = toy
    assert with_heads.capacity >= with_heads.max_context
    assert with_layers.describe() == "a toy"
    assert with_heads.fingerprint != ToyTarget(seed=1).fingerprint


def test_the_embeddings_of_the_toy_turn_its_last_hidden_state_into_its_logits() -> None:
    toy = ToyTarget()
    toy.open(Seq("s", [1, 2], 2))
    scores = toy.forward([Feed("s", [1, 2])], taps=(0,))
    head = toy.embeddings().head[torch.arange(toy.vocab_size)]
    assert (scores.hidden[0][-1:] @ head.T).equal(scores.logits)


def test_the_toy_counts_the_blocks_of_its_sequences() -> None:
    toy = ToyTarget()
    toy.open(Seq("s", [1, 2], 2))
    assert toy.cache_stats.live == 0
    toy.forward([Feed("s", [1, 2])])
    toy.keep("s", 2)
    assert toy.cache_stats.live == 1
    toy.close("s")
    assert toy.cache_stats.free == toy.cache_stats.blocks
