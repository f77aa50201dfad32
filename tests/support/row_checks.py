"""A row's logits are the same bits whatever rows are computed beside it: checks for any target."""

from collections.abc import Sequence

import torch
from torch import Tensor

from paceline.target.eager.linear import MAX_ROWS
from paceline.types import Draft, Feed, Seq, Target
from support.torch_cases import open_with, random_tree, rows_in_one_pass, rows_one_by_one, some_tokens


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
