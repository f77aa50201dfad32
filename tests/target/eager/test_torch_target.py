"""The torch target and its cache: what is kept, dropped, shared and refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig
from paceline.errors import CacheFull, PromptTooLong, UsageError
from paceline.target.base import ModelTarget
from paceline.target.eager.target import TorchTarget, placement
from paceline.target.kv.cache import BLOCK
from paceline.target.weights.reader import load_embeddings
from paceline.types import NO_DRAFT, Draft, Feed, Seq
from support.models import (
    CONFIG,
    VOCAB,
    feed_draft,
    open_with,
    random_tree,
    random_weights,
    rows_in_one_pass,
    rows_one_by_one,
    save_reference,
    some_tokens,
)


@pytest.fixture
def target() -> TorchTarget:
    return TorchTarget(random_weights(), CONFIG)


def fresh_rows(before: list[int], after: list[int]) -> Tensor:
    """The rows of a fresh target after `before`, whose prefill is one pass."""
    target = TorchTarget(random_weights(), CONFIG)
    open_with(target, "s", before)
    return rows_one_by_one(target, "s", len(before), after)


def test_is_a_target(target: TorchTarget) -> None:
    as_protocol: ModelTarget = target
    assert as_protocol.vocab_size == VOCAB
    assert as_protocol.max_context == 4096
    assert target.fingerprint == "random 0"
    assert as_protocol.invariant_rows == 16


def test_holds_its_weights_once_and_the_tied_head_twice() -> None:
    weights = random_weights()
    held = sum(t.numel() for t in weights.tensors.values()) + weights.tensors["embed"].numel()
    assert TorchTarget(weights, CONFIG).bytes_held == 4 * held
    assert not weights.tensors


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "family", ["qwen2", "gemma3_text", "llama"]
)  # tied; scaled; with its own output matrix
def test_heads_borrow_the_weights_that_the_file_has(family: str, dtype: str, tmp_path: Path) -> None:
    save_reference(family, tmp_path)
    target = TorchTarget.load(tmp_path, replace(CONFIG, dtype=dtype))
    lent, read = target.embeddings(), load_embeddings(tmp_path, getattr(torch, dtype))
    tokens = torch.arange(VOCAB)
    for ours, theirs in ((lent.embed, read.embed), (lent.head, read.head)):
        assert len(ours) == VOCAB
        assert ours[tokens].equal(theirs[tokens])
    assert lent.norm.equal(read.norm)
    assert (lent.embed_scale, lent.fingerprint) == (read.embed_scale, read.fingerprint)


def test_scores_hold_the_last_token_and_the_nodes(target: TorchTarget) -> None:
    for name in "abc":
        target.open(Seq(name, [1, 2, 3], 3))
    draft = Draft((5, 6, 7), (-1, 0, -1))
    feeds = [Feed("a", [1, 2, 3], draft), Feed("b", [1, 2], scored=False), Feed("c", [4])]
    scores = target.forward(feeds, taps=(1,))
    assert scores.starts == (0, 4, 4)
    assert scores.logits.shape == (5, VOCAB)
    assert scores.rows == (0, 6, 8)
    assert scores.hidden[1].shape == (9, 64)


def test_a_pass_without_scored_rows(target: TorchTarget) -> None:
    target.open(Seq("s", [1, 2], 2))
    scores = target.forward([Feed("s", [1, 2], scored=False)], taps=(0,))
    assert scores.logits.shape == (0, VOCAB)
    assert scores.hidden[0].shape == (2, 64)


def test_what_follows_a_kept_path_equals_fresh_computation(target: TorchTarget) -> None:
    tokens, after = some_tokens(90), some_tokens(4, seed=9)
    open_with(target, "s", tokens)
    feed_draft(target, "s", 3, Draft((4, 5, 6)))
    target.keep("s", 91, (0, 1))
    assert torch.equal(rows_one_by_one(target, "s", 93, after), fresh_rows([*tokens], [3, 4, 5, *after])[3:])


def test_what_follows_a_path_of_a_tree_equals_fresh_computation(target: TorchTarget) -> None:
    tokens, after, draft = some_tokens(90), some_tokens(4, seed=9), random_tree(12, 3, seed=5)
    for path in (draft.path(node) for node in range(len(draft))):
        open_with(target, "s", tokens)
        feed_draft(target, "s", 3, draft)
        target.keep("s", 91, path)
        ours = rows_one_by_one(target, "s", 91 + len(path), after)
        chosen = [draft.tokens[node] for node in path]
        assert torch.equal(ours, fresh_rows(tokens, [3, *chosen, *after])[1 + len(path) :])
        target.keep("s", 0)
        target.close("s")


def test_two_trees_in_one_pass_are_kept_apart(target: TorchTarget) -> None:
    drafts = {"a": random_tree(9, 3, seed=1), "b": random_tree(8, 3, seed=2)}
    tokens = {"a": some_tokens(70, seed=1), "b": some_tokens(65, seed=2)}
    for name in drafts:
        open_with(target, name, tokens[name])
    target.forward([Feed(name, [3], draft) for name, draft in drafts.items()])
    for name, draft in drafts.items():
        path, length = draft.paths()[-1], len(tokens[name])
        target.keep(name, length + 1, path)
        chosen = [draft.tokens[node] for node in path]
        ours = rows_one_by_one(target, name, length + 1 + len(path), [8])
        assert torch.equal(ours, fresh_rows(tokens[name], [3, *chosen, 8])[-1:])


def test_shortened_and_regrown_equals_fresh_computation(target: TorchTarget) -> None:
    tokens, other = some_tokens(200), some_tokens(8, seed=3)
    open_with(target, "s", tokens[:150])
    target.keep("s", 130)  # a drafter that guessed past what was kept
    target.keep("s", 130)
    regrown = rows_one_by_one(target, "s", 130, other)
    assert torch.equal(regrown, rows_in_one_pass(target, "s", 130, other))
    assert_close(regrown, fresh_rows(tokens[:130], other))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))
    assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_pass_shorter_than_what_was_valid_before(target: TorchTarget) -> None:
    tokens = some_tokens(70)
    open_with(target, "s", tokens)
    target.forward([Feed("s", [1], Draft((2, 3)))])
    target.keep("s", 66)
    assert_close(rows_one_by_one(target, "s", 66, [9]), fresh_rows(tokens[:66], [9]))


def test_keep_refuses_what_was_not_computed(target: TorchTarget) -> None:
    open_with(target, "s", [1, 2, 3])
    target.forward([Feed("s", [4, 5], Draft((6,)))])
    with pytest.raises(ValueError, match="cannot keep 6"):
        target.keep("s", 6)
    target.forward([Feed("s", [4, 5], Draft((6,)))])
    with pytest.raises(ValueError, match="cannot keep 4"):
        target.keep("s", 4, (0,))


def test_shared_prefix_gives_what_a_cold_start_gives(target: TorchTarget) -> None:
    tokens, after = some_tokens(300), some_tokens(5, seed=7)
    cold = fresh_rows(tokens, after)
    assert open_with(target, "first", tokens[:260]) == 0
    assert open_with(target, "second", tokens) == 260 // BLOCK * BLOCK
    assert_close(rows_one_by_one(target, "second", 300, after), cold)
    assert open_with(target, "stranger", tokens, tenant="other") == 0
    assert target.cache_stats.hit_tokens == 256


def test_rows_do_not_depend_on_where_their_blocks_lie() -> None:
    """The scattered sequence fills the end of the cache, then its beginning: its keys have to be gathered."""
    tokens, after = some_tokens(900), some_tokens(9, seed=3)
    scattered = small_target(blocks=12)
    open_with(scattered, "s", tokens[:700], chunk=100)
    scattered.close("ballast")
    scattered.forward([Feed("s", tokens[700:], scored=False)])
    scattered.keep("s", 900)
    table = scattered._cache.table("s")
    assert table[0] > table[-1]
    alone = TorchTarget(random_weights(), CONFIG)
    open_with(alone, "s", tokens[:700], chunk=100)
    alone.forward([Feed("s", tokens[700:], scored=False)])
    alone.keep("s", 900)
    assert alone._cache.first_slot("s", 900) is not None
    ours, theirs = (rows_in_one_pass(target, "s", 900, after) for target in (scattered, alone))
    assert torch.equal(ours, theirs)


def small_target(blocks: int) -> TorchTarget:
    """A cache of so many blocks: the random llama takes 32 KB for one."""
    target = TorchTarget(random_weights(), EngineConfig(device="cpu", cache_mb=1))
    assert target._cache.blocks == 32
    target.open(Seq("ballast", [1], 1))
    target._cache.extend("ballast", (32 - blocks) * BLOCK)
    return target


def test_a_full_cache_leaves_its_sequences_usable() -> None:
    target = small_target(blocks=3)
    tokens = some_tokens(100)
    open_with(target, "a", tokens)
    open_with(target, "b", tokens[:10][::-1])
    with pytest.raises(CacheFull):
        target.forward([Feed("a", [3], Draft((4, 5))), Feed("b", some_tokens(200))])
    ours = target.forward([Feed("a", [3]), Feed("b", [3])]).logits
    target.keep("a", 101)
    target.keep("b", 11)
    assert torch.equal(ours[:1], fresh_rows(tokens, [3]))
    assert torch.equal(ours[1:], fresh_rows(tokens[:10][::-1], [3]))


def test_a_sequence_longer_than_the_cache_is_refused() -> None:
    target = TorchTarget(random_weights(), EngineConfig(device="cpu", cache_mb=1))
    assert target.max_context == 32 * BLOCK
    with pytest.raises(PromptTooLong, match=r"2049 tokens.*2048"):
        target.open(Seq("s", [1] * 2049, 2049))


def test_closed_sequences_are_forgotten(target: TorchTarget) -> None:
    open_with(target, "s", [1, 2, 3])
    target.forward([Feed("s", [4])])
    target.close("s")
    assert target.open(Seq("s", [1, 2, 3], 3)) == 2
    target.keep("s", 1)
    assert feed_draft(target, "s", 5, NO_DRAFT).shape == (1, VOCAB)


def test_a_cache_too_small_for_one_block_is_refused() -> None:
    weights = random_weights(layers=200, kv_heads=4)
    with pytest.raises(UsageError, match=r"cache_mb=1 .*expected 7 or more"):
        TorchTarget(weights, EngineConfig(device="cpu", cache_mb=1))


def test_placement() -> None:
    assert placement(EngineConfig(device="cpu")) == (torch.device("cpu"), torch.float32)
    assert placement(EngineConfig(device="cpu", dtype="float16"))[1] == torch.float16
    with pytest.raises(UsageError, match="expected auto, cpu"):
        placement(EngineConfig(device="toaster"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    with pytest.raises(UsageError, match="no GPU"):
        placement(EngineConfig(device="cuda"))
