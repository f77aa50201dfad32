"""The drafter's network in C++: against torch, and against itself in other company."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import SamplingParams
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.runner import (
    AnchorContext,
    CacheRows,
    ChainStart,
    SampleCall,
    TapInput,
    TorchBlock,
    chain_starts,
)
from paceline.sampling import CHOICE, chooser, noise_key
from paceline.target.native.block_head import NativeBlock, unsupported_reason
from support.native_targets import (
    SHAPES,
    a_net,
    a_pool,
    a_target,
    a_text,
    all_of,
    as_float32,
    beside,
    every_path,
    native,
    rows_of,
    runnable,
    some_hidden,
)

CLOSE = 0.02  # of the spread: weights, rows and keys are rounded
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))


def off(found: Tensor, expected: Tensor) -> float:
    """The largest difference, beside the spread of what is expected."""
    spread = expected.max() - expected.min()
    return float((found.float() - expected.float()).abs().max() / spread)


@shapes
@pytest.mark.parametrize("path", every_path())
def test_it_says_what_torch_says(shape: BlockConfig, path: str) -> None:
    net = a_net(shape)
    ours, theirs = native(net, path), TorchBlock(net)
    for count in (1, 30, 300):
        text, same = (a_text(runner, shape, count) for runner in (ours, theirs))
        assert off(text.rows.cut(), same.rows.cut()) < CLOSE
        for slots in (shape.block, 3, 1):
            (block,), (expected,) = (r.fill([t], slots) for r, t in ((ours, text), (theirs, same)))
            hidden, base = block.hidden[:slots], block.base[:slots]
            assert off(hidden, expected.hidden) < 2 * CLOSE  # a few steps of 1/127, layer upon layer
            assert off(base, expected.base) < 2 * CLOSE
            assert (base - expected.base).norm() < CLOSE * expected.base.norm()


@shapes
def test_chains_follow_from_a_block_as_with_torch(shape: BlockConfig) -> None:
    net = a_net(shape)
    ours, theirs = native(net), TorchBlock(net)
    blocks = ours.fill([a_text(ours, shape, count, seed) for seed, count in enumerate((9, 40))], shape.block)
    strange = next(
        t for t in range(shape.vocab) if net.draft_index[t] == shape.draft_vocab or t == shape.vocab - 1
    )
    places = [ChainStart(blocks[0], 0, 5), ChainStart(blocks[1], shape.block - 3, strange)]
    same = [replace(place, block=as_float32(place.block)) for place in places]
    logits, sure = ours.logits_at(places)
    expected, expected_sure = theirs.logits_at(same)
    assert logits.shape == (2, shape.draft_vocab)
    assert off(torch.from_numpy(logits), torch.from_numpy(expected)) < CLOSE
    assert sure == pytest.approx(expected_sure, abs=1e-4)
    sizes = [shape.block, 2]
    said, said_sure = ours.chains(places, sizes)
    for place, size, tokens, chances in zip(places, sizes, said, said_sure, strict=True):
        at = place
        for token, chance in zip(tokens[:size], chances[:size], strict=True):
            (row,), (one,) = ours.logits_at([at])
            assert token == net.draft_ids[int(np.argmax(row))]
            assert chance == pytest.approx(one, abs=1e-5)
            at = ChainStart(place.block, at.slot + 1, token)


@shapes
@pytest.mark.parametrize("threads", [1, 3])
def test_tokens_are_sampled_as_the_sampler_does(shape: BlockConfig, threads: int) -> None:
    net = a_net(shape)
    ours = native(net, threads=threads)
    params = SamplingParams(temperature=1.5, top_p=0.95)
    among = chooser(params).among
    assert among is not None
    blocks = ours.fill([a_text(ours, shape, 9, seed) for seed in range(3)], shape.block)
    places, sizes = (
        [ChainStart(block, 0, 5 + i) for i, block in enumerate(blocks)],
        [shape.block, shape.block, 2],
    )
    keys = [noise_key(1, 0, CHOICE, i) for i in range(shape.block)]
    draw = SampleCall(among.function, among.settings, keys, None)
    said, sure = ours.chains(places, sizes, [draw, None, draw])
    plain, plain_sure = ours.chains(places, sizes)
    assert (said[1], sure[1]) == (plain[1], plain_sure[1])
    assert said[0] != plain[0]
    for chain in (0, 2):
        at = places[chain]
        for step, token in enumerate(said[chain][: sizes[chain]]):
            (row,), (one,) = ours.logits_at([at])
            whole = np.full(shape.vocab, -np.inf, np.float32)
            whole[net.draft_ids.numpy()] = row
            assert token == chooser(params)(whole, keys[step])
            assert sure[chain][step] == one
            at = ChainStart(at.block, at.slot + 1, token)


@shapes
def test_bits_depend_on_the_text_alone(shape: BlockConfig) -> None:
    net = a_net(shape)
    alone, pair = native(net, threads=1), native(net, threads=3)
    texts = [a_text(alone, shape, count, seed) for seed, count in enumerate((200, 3, 129, 31))]
    together = pair.fill([a_text(pair, shape, t.rows.count, i) for i, t in enumerate(texts)], shape.block)
    for text, block in zip(texts, together, strict=True):
        (whole,) = alone.fill([text], shape.block)
        assert torch.equal(whole.base, block.base)
        assert torch.equal(whole.hidden, block.hidden)
    places = [ChainStart(block, i % 2, 3 + i) for i, block in enumerate(together)]
    sizes = [shape.block - i % 2 for i in range(len(places))]
    said, sure = pair.chains(places, sizes)
    for place, size, tokens, chances in zip(places, sizes, said, sure, strict=True):
        (one,), (one_sure,) = alone.chains([place], [size])
        assert (one, one_sure) == (tokens[:size], chances[:size])


@shapes
def test_one_call_gives_what_three_give(shape: BlockConfig) -> None:
    net = a_net(shape)
    runner, other = native(net), native(net, threads=3)
    counts, size = (150, 2, 40), shape.block
    hidden = [some_hidden(shape, count, seed) for seed, count in enumerate(counts)]
    texts = [a_text(runner, shape, count, seed) for seed, count in enumerate(counts)]
    rows = [torch.full_like(text.rows.cut(), torch.nan) for text in texts]
    parts = [TapInput(0, *given) for given in zip(hidden, map(all_of, rows), strict=True)]
    unread = [replace(text, rows=part.rows) for text, part in zip(texts, parts, strict=True)]
    firsts, sizes = [(0, texts[0].token), (1, 5), (size - 1, 2)], [size, size - 2, 1]
    filled, (said, sure) = other.draft_chains(parts, unread, size, firsts, sizes)
    expected = runner.fill(texts, size)
    chains = runner.chains(chain_starts(expected, firsts), sizes)
    for i, (block, same) in enumerate(zip(filled, expected, strict=True)):
        assert torch.equal(rows[i], texts[i].rows.cut())
        assert torch.equal(block.base, same.base)
        assert said[i][: sizes[i]] == chains[0][i][: sizes[i]]
        assert sure[i][: sizes[i]] == chains[1][i][: sizes[i]]


def test_all_paths_give_the_same_bits() -> None:
    shape = SHAPES["odd"]
    net = a_net(shape)
    found = []
    for path in runnable():
        runner = native(net, path)
        (block,) = runner.fill([a_text(runner, shape, 150)], shape.block)
        said, sure = runner.chains([ChainStart(block, 0, 5)], [shape.block])
        found.append((block.base, block.hidden, said, sure))
    for base, hidden, said, sure in found[1:]:
        assert torch.equal(base, found[0][0])
        assert torch.equal(hidden, found[0][1])
        assert (said, sure) == found[0][2:]


def test_rows_do_not_depend_on_how_they_are_read() -> None:
    shape = SHAPES["odd"]
    runner = native(a_net(shape))
    hidden = some_hidden(shape, 40)
    whole = rows_of(runner, shape, hidden, start=5)
    cut = torch.empty_like(whole)
    pieces = ((0, 1), (1, 14), (14, 40))
    runner.read(
        [
            TapInput(5 + a, {tap: h[a:b] for tap, h in hidden.items()}, CacheRows(cut, a, b - a))
            for a, b in pieces
        ],
    )
    assert torch.equal(cut, whole)


def test_a_block_may_take_the_memory_of_an_old_one() -> None:
    shape = SHAPES["odd"]
    runner = native(a_net(shape))
    text, other = (a_text(runner, shape, 20, seed) for seed in (0, 1))
    (fresh,) = runner.fill([text], shape.block)
    kept = as_float32(fresh)
    (old,) = runner.fill([other], shape.block)
    (again,) = runner.fill([replace(text, old=old)], shape.block)
    assert again.base.data_ptr() == old.base.data_ptr()
    assert torch.equal(again.base, kept.base)


def test_what_it_cannot_run_is_refused() -> None:
    shape = SHAPES["odd"]
    net = a_net(shape)
    target = a_target().shape
    assert unsupported_reason(shape, target) is None
    assert (
        unsupported_reason(replace(shape, markov_rank=24), target) == "markov_rank is 24, no multiple of 32"
    )
    assert unsupported_reason(replace(shape, width=96), target) == "its width is 96, and the target's is 64"
    runner = native(net)
    text = a_text(runner, shape, 4)
    with pytest.raises(ValueError, match="not of this runner's type"):
        runner.fill([replace(text, rows=all_of(text.rows.cut().float()))], 2)
    with pytest.raises(ValueError, match="not one of the model's"):
        runner.fill([replace(text, token=shape.vocab)], 2)
    (block,) = runner.fill([text], 2)
    with pytest.raises(ValueError, match="not in this block"):
        runner.chains([ChainStart(block, 0, 1)], [3])


def test_odd_numbers_harm_no_other_text() -> None:
    shape = SHAPES["odd"]
    net = a_net(shape)
    runner = native(net)
    text = a_text(runner, shape, 12)
    (alone,) = runner.fill([text], shape.block)
    kept = as_float32(alone)
    lost = rows_of(runner, shape, {tap: h * np.nan for tap, h in some_hidden(shape, 12).items()})
    broken = AnchorContext(3, 12, range(12), all_of(lost))
    bad, good = runner.fill([broken, text], shape.block)
    assert torch.equal(good.base, kept.base)
    said, _ = runner.chains([ChainStart(bad, 0, 1)], [shape.block])
    assert set(said[0]) <= set(net.draft_ids.tolist())


def test_a_net_may_be_gone_before_its_runner() -> None:
    shape = SHAPES["one head"]

    def made() -> tuple[NativeBlock, BlockHead]:
        net = a_net(shape)
        return native(net), net

    runner, net = made()
    text = a_text(runner, shape, 10)
    (before,) = runner.fill([text], shape.block)
    kept = as_float32(before)
    with torch.no_grad():
        for weight in net.parameters():
            weight.fill_(torch.nan)
    del net
    (after,) = runner.fill([text], shape.block)
    assert torch.equal(after.base, kept.base)


def test_weights_stay_as_long_as_threads_may_fetch_them() -> None:
    shape = SHAPES["odd"]
    net, pool = a_net(shape), a_pool()
    first = beside(net, pool)
    first.fill([a_text(first, shape, 3)], shape.block)
    weights = weakref.ref(first._held[0])
    del first
    assert weights() is not None
    second = beside(net, pool)
    second.fill([a_text(second, shape, 3)], shape.block)
    assert weights() is None
