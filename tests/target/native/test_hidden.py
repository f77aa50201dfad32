"""Hidden states of every row of a pass, fed whole or in pieces, drafted or after a cache hit."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from paceline.target.eager.target import TorchTarget
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Seq, Target
from support.models import CONFIG, open_with, random_tree, some_tokens
from support.native_targets import native_target, tiny_model

LAYER = 1
TOKENS = some_tokens(150, seed=4)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Target]:
    model = tiny_model(tmp_path_factory.mktemp("hidden") / "m.gguf", "qwen2", "Q8_0")
    torch_target = TorchTarget(load(model, torch.float32), CONFIG)
    return {"native": native_target(model), "torch": torch_target}


def in_pieces(target: Target, tokens: Sequence[int], chunk: int, tenant: str) -> Tensor:
    """Rows of a prompt that is not cached, scored only at its end."""
    assert target.open(Seq("s", list(tokens), len(tokens), tenant=tenant)) == 0
    rows = []
    for start in range(0, len(tokens), chunk):
        piece = tokens[start : start + chunk]
        last = start + chunk >= len(tokens)
        rows.append(target.forward([Feed("s", piece, scored=last)], (LAYER,)).hidden[LAYER])
        target.keep("s", start + len(piece))
    target.close("s")
    return torch.cat(rows)


def apart(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm(dim=1).max() / b.norm(dim=1).min())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bound"), [("native", 0.0), ("torch", 1e-5)])
def test_any_chunking(targets: dict[str, Target], name: str, bound: float) -> None:
    whole = in_pieces(targets[name], TOKENS, 150, "whole")
    assert whole.shape[0] == 150
    for chunk in (1, 7, 64):
        assert apart(in_pieces(targets[name], TOKENS, chunk, f"by {chunk}"), whole) <= bound


def test_native_and_torch_see_nearly_the_same(targets: dict[str, Target]) -> None:
    """One rounds its activations to eight bits, the other does not."""
    one, other = (in_pieces(target, TOKENS, 50, "both") for target in targets.values())
    near = torch.cosine_similarity(one, other).min()
    assert near > 0.999
    assert torch.cosine_similarity(one, other.roll(1, 0)).median() < 0.9


@pytest.mark.parametrize("name", ["native", "torch"])
def test_a_path_of_a_tree_beside_others_and_a_chain(targets: dict[str, Target], name: str) -> None:
    target, tree = targets[name], random_tree(14, 3, seed=2)
    for seq_id in "ab":
        open_with(target, seq_id, TOKENS[:90], tenant=seq_id)
    beside = Feed("b", some_tokens(5, seed=7), Draft((1, 2)))
    scores = target.forward([beside, Feed("a", [3], tree)], (LAYER,))
    assert scores.rows == (0, 7)
    rows = scores.hidden[LAYER][7:]
    for path in tree.paths():
        target.keep("a", 90)
        chain = Draft(tuple(tree.tokens[node] for node in path))
        alone = target.forward([Feed("a", [3], chain)], (LAYER,)).hidden[LAYER]
        assert torch.equal(rows[[0, *(node + 1 for node in path)]], alone)
    for seq_id in "ab":
        target.close(seq_id)


@pytest.mark.parametrize("name", ["native", "torch"])
def test_what_follows_a_cache_hit(targets: dict[str, Target], name: str) -> None:
    target = targets[name]
    open_with(target, "first", TOKENS[:100], 100, tenant="hit")
    cold = target.forward([Feed("first", TOKENS[100:110])], (LAYER,)).hidden[LAYER]
    target.keep("first", 100)
    target.close("first")
    seq = Seq("second", TOKENS[:110], 110, tenant="hit")
    assert target.open(seq) == 100
    assert torch.equal(target.forward([Feed("second", TOKENS[100:110])], (LAYER,)).hidden[LAYER], cold)
    target.close("second")
