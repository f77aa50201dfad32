"""The core promise: a row's bits depend on its sequence alone.

Not on other rows, their number or order, nor on batches, chunks of a prompt, trees, threads, what was cached,
or the processor's instructions. PACELINE_CPU from outside chooses the path of the tests that name none.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from paceline.target.load import load_target
from paceline.target.native import library
from paceline.target.native.target import PASS_ROWS, NativeTarget
from paceline.types import NO_DRAFT, Draft, Feed, Seq, Target
from support import examples
from support.checks import check_chain, check_tree, check_two_sequences, same, story
from support.models import CONFIG, open_with, random_tree, rows_in_one_pass, save_reference, some_tokens
from support.native_targets import built, every_path, native_target, runnable, sized, tiny_model

COUNTS = (*range(2, 17), 25, 40, 70)  # keys of more than 64 rows are not shared out between threads
CONTEXTS = (1, 250, 255, 256, 700)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("tiny") / "tiny.gguf", "qwen3", tied=False)


@pytest.fixture(scope="module")
def seven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven heads on one KV head: more than the queries that are computed together."""
    path = tmp_path_factory.mktemp("seven") / "seven.gguf"
    return tiny_model(path, "qwen2", "Q4_0", sized(32, 7, 1, 96, 61))


@pytest.fixture(scope="module")
def tiny(model: Path) -> NativeTarget:
    return native_target(model)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("context", CONTEXTS)
def test_chains(model: Path, path: str, context: int) -> None:
    counts = COUNTS if path != "portable" else (2, 5, 16, 70)
    check_chain(native_target(model, path), context, counts)


@pytest.mark.parametrize("path", every_path())
def test_trees_and_two_sequences(model: Path, path: str) -> None:
    target = native_target(model, path)
    for context, seed in ((1, 1), (9, 2), (250, 3), (255, 4), (256, 5)):
        check_tree(target, context, random_tree(15, 4, seed))
    check_two_sequences(target)


def test_many_heads_on_one_kv_head(seven: Path) -> None:
    target = native_target(seven)
    for context in (14, 250, 530):
        check_chain(target, context, (2, 3, 16, 17, 33))
        check_tree(target, context, random_tree(20, 3, context, vocab=61))


SETTINGS = {
    "gemma3_text": {"sliding_window": 290},  # two frequencies, norms behind the products
    "gemma2": {"sliding_window": 20},  # soft-capping
    "qwen3_moe": {},  # a dense layer among those with experts
    "gpt_oss": {},  # sinks, biases of experts, a clamped activation
}


def check_scored_rows(target: NativeTarget) -> None:
    """A tap of the last layer makes every row go through it; without one only scored rows do."""
    vocab, lengths = target.vocab_size, {"prompt": 300, "silent": 20}
    for name, length in lengths.items():
        open_with(target, name, some_tokens(length, 5, vocab), tenant="scored")
    feeds = (
        Feed("silent", some_tokens(25, 7, vocab), NO_DRAFT, scored=False),
        Feed("prompt", some_tokens(30, 6, vocab), random_tree(7, 3, 2, vocab=vocab)),
    )
    found = []
    for taps in ((target.layers - 1,), ()):
        found.append(target.forward(feeds, taps).logits)
        for name, length in lengths.items():
            target.keep(name, length)
    assert torch.equal(*found)
    for name in lengths:
        target.close(name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("family", SETTINGS)
def test_every_setting_of_the_decoder(tmp_path: Path, family: str) -> None:
    save_reference(family, tmp_path, head_dim=32, hidden_size=96, **SETTINGS[family])
    target = native_target(tmp_path, dtype="int8", home=tmp_path / "home")
    for context in (18, 284, 700):
        check_chain(target, context, (2, 5, 16, 17, 70))
    check_tree(target, 286, random_tree(20, 4, 1))
    check_two_sequences(target)
    check_scored_rows(target)
    paths = [native_target(tmp_path, path, dtype="int8", home=tmp_path / "home") for path in runnable()[:2]]
    whole = story(target, 540)
    assert all(same(story(other, 540), whole) for other in paths)


@settings(max_examples=examples(60))
@given(
    nodes=st.integers(1, 40),
    width=st.integers(1, 5),
    seed=st.integers(0, 999),
    context=st.integers(0, 40) | st.integers(230, 280),
)
def test_any_tree_anywhere(tiny: NativeTarget, nodes: int, width: int, seed: int, context: int) -> None:
    check_tree(tiny, max(1, context), random_tree(nodes, width, seed))


def prompted(target: Target, tokens: Sequence[int], chunk: int, tenant: str) -> list[Tensor]:
    """A prompt that finds nothing cached: logits and hidden states of few and of many rows after it."""
    assert open_with(target, "s", tokens, chunk, tenant) == 0
    found = []
    for rows in (4, 100):  # the keys of few rows are shared out between threads, those of many are not
        scores = target.forward([Feed("s", [3], Draft(tuple(some_tokens(rows, rows))))], taps=(0, 1))
        found += [scores.logits, scores.hidden[0], scores.hidden[1]]
        target.keep("s", len(tokens))
    target.close("s")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("path", every_path())
def test_prompts_in_any_chunking(model: Path, path: str) -> None:
    target, tokens = native_target(model, path), some_tokens(700, seed=8)
    whole = prompted(target, tokens, 700, "whole")
    for chunk in (1, 7, 64, 256) if path != "portable" else (7, 256):
        assert same(prompted(target, tokens, chunk, f"by {chunk}"), whole), chunk


def test_more_rows_than_one_pass_takes(tiny: NativeTarget) -> None:
    """A feed that is cut, with a tree at its end, beside others that share the first or the last piece."""
    long, tree = some_tokens(2 * PASS_ROWS + 77, seed=3), random_tree(30, 3, seed=3)
    others = {"before": some_tokens(100, 5), "behind": some_tokens(PASS_ROWS, 6)}
    alone = {}
    for name, tokens in {"long": long, **others}.items():
        open_with(tiny, name, tokens[:-1], 64, tenant="alone")
        alone[name] = tiny.forward([Feed(name, tokens[-1:], tree)], taps=(1,))
        tiny.keep(name, len(tokens), tree.paths()[-1])
        tiny.close(name)
    order = {"before": others["before"], "long": long, "behind": others["behind"]}
    for name, tokens in order.items():
        tiny.open(Seq(name, tokens, len(tokens), tenant="together"))
    scores = tiny.forward([Feed(name, tokens, tree) for name, tokens in order.items()], taps=(1,))
    for start, first, (name, tokens) in zip(scores.starts, scores.rows, order.items(), strict=True):
        rows = slice(start, start + 1 + len(tree))
        assert torch.equal(scores.logits[rows], alone[name].logits), name
        rows = slice(first + len(tokens) - 1, first + len(tokens) + len(tree))
        assert torch.equal(scores.hidden[1][rows], alone[name].hidden[1]), name
    for name, tokens in order.items():
        tiny.keep(name, len(tokens), tree.paths()[-1])
    after = tiny.forward([Feed(name, [9]) for name in order]).logits
    for i, (name, tokens) in enumerate(order.items()):
        tiny.close(name)
        whole = [*tokens, *(tree.tokens[node] for node in tree.paths()[-1])]
        open_with(tiny, "cold", whole, tenant=f"cold {name}")
        assert torch.equal(rows_in_one_pass(tiny, "cold", len(whole), [9])[0], after[i]), name
        tiny.close("cold")


def crowd(count: int) -> dict[str, tuple[list[int], Feed]]:
    """Sequences at different places, and what each of them puts into the pass."""
    kinds: dict[str, tuple[list[int], Feed]] = {}
    for i in range(count):
        name, context = f"s{i}", some_tokens((37 * i * i + 11 * i) % 290 + 1, seed=100 + i)
        token = some_tokens(1, seed=200 + i)
        if i % 4 == 0:
            feed = Feed(name, token, Draft(tuple(some_tokens(i % 9, seed=300 + i))))
        elif i % 4 == 1:
            feed = Feed(name, token, random_tree(3 + i, 3, seed=i))
        elif i % 4 == 2:
            feed = Feed(name, some_tokens(5 * i + 20, seed=i), NO_DRAFT, scored=i % 8 == 2)
        else:
            feed = Feed(name, some_tokens(i, seed=i), random_tree(6, 2, seed=i))
        kinds[name] = context, feed
    return kinds


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", every_path())
@pytest.mark.parametrize("count", [1, 2, 16])
def test_any_batch_of_chains_trees_and_prompts(model: Path, path: str, count: int) -> None:
    """Without a tap of the last layer, which is 1, only the rows that are scored go through all of it."""
    target, alone = native_target(model, path), {}
    for name, (context, feed) in crowd(count).items():
        open_with(target, name, context)
        alone[name] = target.forward([feed], taps=(0, 1))
        target.keep(name, len(context))
    orders = (list(alone), list(alone)[::-1], list(alone)[::3])
    for names, taps in product(orders, ((1, 0, 0), (0,), ())):
        feeds = [crowd(count)[name][1] for name in names]
        scores = target.forward(feeds, taps)
        for start, first, name in zip(scores.starts, scores.rows, names, strict=True):
            rows = slice(start, start + len(alone[name].logits))
            assert torch.equal(scores.logits[rows], alone[name].logits), name
            rows = slice(first, first + len(alone[name].hidden[0]))
            for layer in set(taps):
                assert torch.equal(scores.hidden[layer][rows], alone[name].hidden[layer]), name
        for name in names:
            target.keep(name, len(crowd(count)[name][0]))


def test_a_cache_hit_equals_a_cold_start(tiny: NativeTarget) -> None:
    tokens = some_tokens(321, seed=77)
    for cut in (320, 256, 200, 64, 63, 1):
        open_with(tiny, "first", tokens[:cut], tenant=f"hit {cut}")
        tiny.close("first")
        hit = open_with(tiny, "hit", tokens, tenant=f"hit {cut}")
        cold = open_with(tiny, "cold", tokens, 100, tenant=f"cold {cut}")
        assert (hit, cold) == (cut, 0)
        draft = random_tree(12, 3, seed=cut)
        one, other = (tiny.forward([Feed(name, [3], draft)], taps=(1,)) for name in ("hit", "cold"))
        assert torch.equal(one.logits, other.logits), cut
        assert torch.equal(one.hidden[1], other.hidden[1]), cut
        tiny.close("hit")
        tiny.close("cold")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("length", [20, 300, 900])
def test_any_number_of_threads(model: Path, length: int) -> None:
    """Some share out a row's chunks of keys, others do not."""
    told = [story(native_target(model, threads=threads), length) for threads in (1, 2, 3, 7)]
    assert all(same(each, told[0]) for each in told)


@pytest.mark.slow
@pytest.mark.parametrize("length", [40, 520])
def test_all_paths_tell_the_same_story(model: Path, seven: Path, length: int) -> None:
    for file in (model, seven):
        told = {path: story(native_target(file, path), length) for path in runnable()}
        for path in told:
            assert same(told[path], told["portable"]), path


def test_the_setting_picks_the_path(model: Path, monkeypatch: pytest.MonkeyPatch, tiny: NativeTarget) -> None:
    paths = {choice: library.best_path(choice) for choice in ("avx512", "avx2", "portable")}
    for found in filter(None, paths.values()):
        built(found)  # before the folder changes, so that it is not built anew there
    monkeypatch.setenv("PACELINE_HOME", str(model.parent / "home"))
    for choice, path in paths.items():
        if path is None:
            continue
        monkeypatch.setenv(library.SETTING, choice)
        target = load_target(model, CONFIG)
        assert isinstance(target, NativeTarget)
        assert target.path == path
        assert target._lib is library.load(path)
    monkeypatch.delenv(library.SETTING)
    target = load_target(model, CONFIG)
    assert isinstance(target, NativeTarget)
    assert target.path == library.best_path("auto")
