"""Whatever was opened, drafted, kept, dropped, shared and evicted before: bits as of a cold start."""

from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.errors import CacheFull, ModelError
from paceline.target.cost import measure
from paceline.target.kv.cache import BLOCK
from paceline.target.native.target import SPARE, NativeTarget
from paceline.types import NO_DRAFT, Draft, Feed, Scores, Seq
from support import examples
from support.models import open_with, random_tree, rows_in_one_pass, some_tokens
from support.native_targets import SIZES, native_target, tiny_model

TAPS = (0, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("walk") / "m.gguf", "qwen2", "Q4_0")


@pytest.fixture(scope="module")
def fresh(model: Path) -> NativeTarget:
    """Computes everything from scratch: no two of its sequences share a tenant."""
    return native_target(model)


class Walk:
    """A target with a cache of few blocks, and what it must hold."""

    def __init__(self, target: NativeTarget, fresh: NativeTarget, random: Random, most: int = 5) -> None:
        self.target, self.fresh, self.random = target, fresh, random
        self.most = most  # sequences at once
        self.live: dict[str, list[int]] = {}  # tokens whose rows are valid
        self.wanted: dict[str, list[int]] = {}  # tokens of a prompt that are not computed yet
        self.past: list[list[int]] = [[]]
        self.opened = self.passes = self.full = 0

    def tokens(self, most: int) -> list[int]:
        return [self.random.randrange(SIZES.vocab) for _ in range(self.random.randint(1, most))]

    def draft(self) -> Draft:
        kind, seed = self.random.randrange(3), self.random.randrange(1000)
        if kind == 0:
            return NO_DRAFT
        return Draft(tuple(self.tokens(12))) if kind == 1 else random_tree(1 + seed % 20, 3, seed)

    def open(self) -> None:
        begin = self.random.choice([*self.past, *self.live.values()])
        tokens = begin[: self.random.randint(0, len(begin))] + self.tokens(30 * self.most)
        name = f"s{self.opened}"
        self.opened += 1
        shared = self.target.open(Seq(name, tokens, len(tokens)))
        self.live[name], self.wanted[name] = tokens[:shared], tokens[shared:]

    def forward(self) -> None:
        names = self.random.sample(sorted(self.live), self.random.randint(1, min(3, len(self.live))))
        feeds = []
        for name in names:
            waiting = self.wanted[name]
            count = self.random.randint(1, len(waiting)) if waiting else 0
            tokens = waiting[:count] or self.tokens(3)
            inner = count < len(waiting)  # nothing is drafted within a prompt
            feeds.append(Feed(name, tokens, NO_DRAFT if inner else self.draft(), scored=not inner))
        try:
            scores = self.target.forward(feeds, TAPS)
        except CacheFull:
            self.full += 1
            self.close(self.random.choice(sorted(self.live)))
            return
        self.passes += 1
        for start, first, feed in zip(scores.starts, scores.rows, feeds, strict=True):
            self.compare(feed, scores, start, first)
        for feed in feeds:
            self.keep(feed)

    def compare(self, feed: Feed, scores: Scores, start: int, first: int) -> None:
        tokens = [*self.live[feed.seq_id], *feed.tokens]
        tenant = f"{id(self)} {self.passes} {feed.seq_id}"
        self.fresh.open(Seq("fresh", tokens, len(tokens), tenant=tenant))
        cold = self.fresh.forward([Feed("fresh", tokens, feed.draft)], TAPS)
        self.fresh.keep("fresh", 0)
        self.fresh.close("fresh")
        if feed.scored:
            assert torch.equal(scores.logits[start : start + 1 + len(feed.draft)], cold.logits), feed
        count = len(feed.tokens) + len(feed.draft)
        for tap in TAPS:
            assert torch.equal(scores.hidden[tap][first : first + count], cold.hidden[tap][-count:]), feed

    def keep(self, feed: Feed) -> None:
        live, fed = self.live[feed.seq_id], len(feed.tokens)
        self.wanted[feed.seq_id] = self.wanted[feed.seq_id][fed:]
        length = len(live) + fed
        path: tuple[int, ...] = ()
        if feed.draft and self.random.random() < 0.8:
            whole = self.random.choice(feed.draft.paths())
            path = whole[: self.random.randint(0, len(whole))]
        elif not self.wanted[feed.seq_id] and self.random.random() < 0.3:
            length = self.random.randint(0, length)  # a stop cut the output, or rows are computed anew
        self.target.keep(feed.seq_id, length, path)
        tokens = [*live, *feed.tokens][:length] + [feed.draft.tokens[node] for node in path]
        self.live[feed.seq_id] = tokens
        if not tokens:
            self.wanted[feed.seq_id] = self.tokens(20)

    def close(self, name: str) -> None:
        self.target.close(name)
        self.past.append(self.live.pop(name))
        del self.wanted[name]

    def step(self) -> None:
        what = self.random.random()
        if not self.live or (what < 0.2 and len(self.live) < self.most):
            self.open()
        elif what < 0.3:
            self.close(self.random.choice(sorted(self.live)))
        else:
            self.forward()


@settings(max_examples=examples(25))
@given(random=st.randoms(use_true_random=False))
def test_any_walk_gives_the_bits_of_a_cold_start(model: Path, fresh: NativeTarget, random: Random) -> None:
    walk = Walk(native_target(model, cache_mb=1), fresh, random)
    for _ in range(30):
        walk.step()


@pytest.mark.slow
def test_a_long_walk_through_a_small_cache(model: Path, fresh: NativeTarget) -> None:
    walk = Walk(native_target(model, cache_mb=1), fresh, Random(1), most=8)
    for _ in range(400):
        walk.step()
    stats = walk.target.cache_stats
    assert walk.passes > 200
    assert stats.hit_tokens > 200
    assert stats.evicted > 20
    assert walk.full > 0


def star(leaves: int) -> Draft:
    return Draft(tuple(some_tokens(leaves, seed=leaves)), (-1,) * leaves)


def test_a_tree_with_too_many_branches_leaves_all_as_it_was(model: Path, fresh: NativeTarget) -> None:
    target = native_target(model)
    tokens = {name: some_tokens(70, seed=i) for i, name in enumerate(("a", "b", "c"))}
    for name in tokens:
        open_with(target, name, tokens[name])
        open_with(fresh, name, tokens[name], tenant="too many")
    broad, deep = star(SPARE * EngineConfig().max_batch + 2), random_tree(20, 3, seed=1)
    with pytest.raises(CacheFull, match="draft less"):
        target.forward([Feed("a", [1], deep), Feed("b", [2], broad), Feed("c", [3])])
    for name in tokens:
        target.keep(name, 70)
    feeds = [Feed("a", [1], deep), Feed("b", [2], star(SPARE // 2)), Feed("c", [3])]
    for _ in range(2):  # spare blocks are handed out anew
        scores = target.forward(feeds)
        for start, feed in zip(scores.starts, feeds, strict=True):
            alone = fresh.forward([feed]).logits
            fresh.keep(feed.seq_id, 70)
            assert torch.equal(scores.logits[start : start + len(alone)], alone), feed.seq_id
            target.keep(feed.seq_id, 70)
    target.forward(feeds)
    target.keep("a", 71, deep.paths()[-1])
    length = 71 + len(deep.paths()[-1])
    found = rows_in_one_pass(target, "a", length, [8, 9])
    whole = [*tokens["a"], 1, *(deep.tokens[node] for node in deep.paths()[-1])]
    open_with(fresh, "again", whole, tenant="too many again")
    assert torch.equal(found, rows_in_one_pass(fresh, "again", length, [8, 9]))
    for name in (*tokens, "again"):
        fresh.close(name)


def test_a_full_cache_leaves_all_as_it_was(model: Path, fresh: NativeTarget) -> None:
    target = native_target(model, cache_mb=1)
    blocks = target.cache_stats.blocks
    tokens = {"a": some_tokens(100, 1), "b": some_tokens((blocks - 3) * BLOCK, 2)}
    for name in tokens:
        open_with(target, name, tokens[name])
        open_with(fresh, name, tokens[name], tenant="full")
    tree = random_tree(10, 2, seed=5)
    with pytest.raises(CacheFull):
        target.forward([Feed("a", [1], tree), Feed("b", some_tokens(2 * BLOCK, 3))])
    for name in tokens:
        target.keep(name, len(tokens[name]))
        found, expected = (each.forward([Feed(name, [4], tree)]).logits for each in (target, fresh))
        assert torch.equal(found, expected), name
        target.keep(name, len(tokens[name]))
        fresh.keep(name, len(tokens[name]))
        fresh.close(name)


def test_what_the_pass_takes_for_granted_is_checked(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = native_target(model)
    open_with(target, "s", [1, 2, 3])
    for token in (-1, target.vocab_size):
        with pytest.raises(ValueError, match="not one of the model's"):
            target.forward([Feed("s", [token])])
        target.keep("s", 3)
    for tap in (-1, target.shape.layers):
        with pytest.raises(ValueError, match="layers 0 to"):
            target.forward([Feed("s", [1])], [tap])
        target.keep("s", 3)
    monkeypatch.setattr("os.getpid", lambda: -1)
    with pytest.raises(ModelError, match="forked"):
        target.forward([Feed("s", [1])])


def test_measuring_leaves_no_memory_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = native_target(tiny_model(tmp_path / "m.gguf"))
    released: list[bool] = []
    release = target._kv.release

    def counted() -> None:
        release()
        released.append(not target._kv.keys.any() and not target._kv.values.any())

    monkeypatch.setattr(target._kv, "release", counted)
    measure(target)
    assert released == [True, True]  # one for each context
    target.open(Seq("s", [1, 2, 3], 3))
    target.forward([Feed("s", [1, 2, 3])])
    target.keep("s", 3)
    measure(target)
    assert len(released) == 2  # the cache is in use
    assert target._kv.keys.any()
