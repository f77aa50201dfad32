"""Bits of rows and of skipped layers: checks for any target."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.target.eager.linear import MAX_ROWS
from paceline.types import Draft, Feed, LayerSkipTarget, Seq, Target
from support.models import open_with, random_tree, rows_in_one_pass, rows_one_by_one, some_tokens


def check_chain(target: Target, context: int, counts: Sequence[int] = range(2, MAX_ROWS + 1)) -> None:
    """Rows one by one against as many in one pass as each of the counts says."""
    tokens = some_tokens(context + max(counts), seed=context, vocab=target.vocab_size)
    after = tokens[context:]
    open_with(target, "s", tokens[:context])
    alone = rows_one_by_one(target, "s", context, after)
    for rows in counts:
        among = rows_in_one_pass(target, "s", context, after[:rows])
        assert torch.equal(among, alone[:rows]), f"{rows} rows after {context} tokens"
    target.close("s")


def check_tree(target: Target, context: int, draft: Draft) -> None:
    """Every node of a tree against the chain of its path, then what follows two paths that are kept."""
    tokens = some_tokens(context + 1, seed=context, vocab=target.vocab_size)
    root, length = tokens[context], context + 1
    open_with(target, "s", tokens[:context])
    tree = target.forward([Feed("s", [root], draft)]).logits
    target.keep("s", context)
    for path in draft.paths():
        chain = rows_in_one_pass(target, "s", context, [root, *(draft.tokens[node] for node in path)])
        assert torch.equal(tree[[0, *(node + 1 for node in path)]], chain)
    for path in dict.fromkeys((draft.paths()[0], draft.paths()[-1])):
        target.forward([Feed("s", [root], draft)])
        target.keep("s", length, path)
        kept = target.forward([Feed("s", [0])]).logits
        target.keep("s", context)
        target.forward([Feed("s", [root], Draft(tuple(draft.tokens[node] for node in path)))])
        target.keep("s", length, range(len(path)))
        assert torch.equal(kept, target.forward([Feed("s", [0])]).logits)
        target.keep("s", context)
    target.close("s")


def check_two_sequences(target: Target) -> None:
    """A chain and a tree, of two sequences in one pass, against each on its own."""
    contexts = {"a": 200, "b": 300}
    drafts = {"a": Draft(tuple(some_tokens(6, 1))), "b": random_tree(7, 3, 2)}
    alone: dict[str, Tensor] = {}
    for name, context in contexts.items():
        open_with(target, name, some_tokens(context, seed=context, vocab=target.vocab_size))
        alone[name] = target.forward([Feed(name, [7], drafts[name])]).logits
        target.keep(name, context)
    scores = target.forward([Feed(name, [7], drafts[name]) for name in contexts])
    for start, name in zip(scores.starts, contexts, strict=True):
        assert torch.equal(scores.logits[start : start + len(alone[name])], alone[name])
        target.keep(name, contexts[name])
        target.close(name)


def story(target: Target, length: int = 300) -> list[Tensor]:
    """Logits and hidden states of passes of every kind, one after another."""
    told: list[Tensor] = []

    def pass_of(*feeds: Feed) -> None:
        scores = target.forward(feeds, taps=(0, 1))
        told.extend((scores.logits, scores.hidden[0], scores.hidden[1]))

    vocab = target.vocab_size
    tokens, tree = some_tokens(length, seed=1, vocab=vocab), random_tree(18, 3, seed=1, vocab=vocab)
    open_with(target, "a", tokens[:-1])
    pass_of(Feed("a", tokens[-1:]))
    target.keep("a", length)
    pass_of(Feed("a", [3], Draft(tuple(some_tokens(9, 2, vocab)))))
    target.keep("a", length + 1, range(4))
    pass_of(Feed("a", [4], tree))
    target.keep("a", length + 6, tree.paths()[-1])
    target.open(Seq("b", tokens[:40], 40, tenant="b"))
    pass_of(Feed("a", [5], tree), Feed("b", tokens[:40]))
    return told


def same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def check_it_is_the_model_without(target: LayerSkipTarget, less: Target, layers: Sequence[int]) -> None:
    """less: the model that has these layers only."""
    tokens = some_tokens(11, seed=3)
    for model in (target, less):
        model.open(Seq("s", tokens, len(tokens), tenant=str(layers)))
    sketched = target.skip_forward([Feed("s", tokens)], [0], layers).logits
    assert torch.equal(sketched, less.forward([Feed("s", tokens)]).logits)
    target.close("s")


def check_all_layers_are_a_pass(target: LayerSkipTarget, context: int) -> None:
    tokens = some_tokens(context + 4, seed=context, vocab=target.vocab_size)
    open_with(target, "s", tokens[:context])
    for start in range(context, context + 4):
        sketched = target.skip_forward(
            [Feed("s", tokens[start : start + 1])], [start], range(target.layers)
        ).logits
        passed = target.forward([Feed("s", tokens[context : start + 1])]).logits
        target.keep("s", context)
        assert torch.equal(sketched, passed), start
    target.close("s")


def check_steps_are_one_stretch(target: LayerSkipTarget, context: int, layers: Sequence[int]) -> None:
    """Rows that sketches leave are read by the sketches after them; another sequence changes nothing."""
    tokens = some_tokens(context + 5, seed=context, vocab=target.vocab_size)
    for name in "ab":
        open_with(target, name, tokens[:context], tenant=name)
    for start in range(context, context + 5):
        feeds = [Feed("b", tokens[context : start + 1]), Feed("a", tokens[start : start + 1])]
        whole, step = target.skip_forward(feeds, [context, start], layers).logits
        assert torch.equal(whole, step), start
    for name in "ab":
        target.close(name)


def told(target: LayerSkipTarget, seed: int, context: int, rounds: int, sketched: bool) -> list[Tensor]:
    """Logits of rounds with chains and trees, each verified after what was sketched or after nothing."""
    vocab, tenant = target.vocab_size, f"{seed} {sketched}"
    tokens = some_tokens(context, seed, vocab)
    open_with(target, "s", tokens, tenant=tenant)
    rows, length = [], context
    for i in range(rounds):
        draft = random_tree(6, 1 + i % 3, seed + i, vocab)
        if sketched:
            guess(target, length, some_tokens(9, seed - i, vocab), layers=[0, target.layers - 1][: 1 + i % 2])
        path = draft.paths()[i % len(draft.paths())][: i % 4]
        rows.append(target.forward([Feed("s", [i], draft)]).logits)
        target.keep("s", length + 1, path)
        tokens += [i, *(draft.tokens[node] for node in path)]
        length = len(tokens)
    target.close("s")
    again = Seq("s", [*tokens, 1], len(tokens), tenant=tenant)
    assert target.open(again) == length, "a sketch has changed what is cached"
    rows.append(target.forward([Feed("s", [1], Draft((2, 3)))]).logits)
    target.close("s")
    return rows


def guess(target: LayerSkipTarget, start: int, tokens: Sequence[int], layers: Sequence[int]) -> None:
    for i, token in enumerate(tokens):
        target.skip_forward([Feed("s", [token])], [start + i], layers)


def check_nothing_stays(target: LayerSkipTarget, seed: int, context: int, rounds: int = 9) -> None:
    plain, fast = (told(target, seed, context, rounds, sketched) for sketched in (False, True))
    assert all(map(torch.equal, plain, fast)), "a sketch has changed what came after it"


def check_a_row_that_stays_is_caught(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = type(target)
    real = kind.skip_forward

    def keeping(self: Any, feeds: Any, starts: Any, layers: Any) -> Any:
        scores = real(self, feeds, [self._cache.length(feed.seq_id) for feed in feeds], layers)
        for feed in feeds:
            self._cache.append(feed.seq_id, feed.tokens)
        return scores

    monkeypatch.setattr(kind, "skip_forward", keeping)
    with pytest.raises((AssertionError, ValueError), match=r"a sketch has changed|cannot keep"):
        check_nothing_stays(target, 5, 40)


def check_a_kept_row_is_guarded(target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sketch over it is refused, and without that would be caught."""
    kind = type(target)
    open_with(target, "s", some_tokens(20))
    with pytest.raises(ValueError, match="would overwrite some"):
        target.skip_forward([Feed("s", [1])], [19], (0,))
    target.close("s")
    real, reserve = kind.skip_forward, kind._reserve_skip_rows

    def early(self: Any, feeds: Any, starts: Any, layers: Any) -> Any:
        return real(self, feeds, [start - 1 for start in starts], layers)

    def blind(self: Any, feeds: Any, starts: Any) -> Any:
        return reserve(self, feeds, [start + 1 for start in starts])

    monkeypatch.setattr(kind, "skip_forward", early)
    monkeypatch.setattr(kind, "_reserve_skip_rows", blind)
    with pytest.raises(AssertionError, match="a sketch has changed"):
        check_nothing_stays(target, 5, 40)


def check_layers_that_are_none(target: LayerSkipTarget) -> None:
    """Layers of a target with three."""
    target.open(Seq("s", [1], 1))
    for layers in ((), (2, 1), (1, 1), (-1,), (3,)):
        with pytest.raises(ValueError, match="expected some of 0 to 2, ascending"):
            target.skip_forward([Feed("s", [1])], [0], layers)
    target.close("s")
