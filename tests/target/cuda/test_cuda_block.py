"""A block head's kernels, run by the CPU shim: against torch, and bit for bit against themselves."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters.heads import BlockDrafter
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.heads.block import BlockHead
from paceline.heads.runner import (
    AnchorContext,
    BlockRunner,
    CacheRows,
    ChainStart,
    SampleCall,
    TapInput,
    TorchBlock,
    chain_starts,
)
from paceline.sampling import CHOICE, chooser, noise_key
from paceline.target.cuda.block_head import CudaBlock, unsupported_reason
from paceline.target.cuda.driver import CpuLauncher
from paceline.target.cuda.target import CudaTarget
from paceline.types import Seq
from support.cuda_models import BLOCK, VOCAB, block_net, gap, stored_block, tiny_weights
from support.models import some_tokens

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(device="cpu", cache_mb=1, max_batch=4)
SIZE = BLOCK.block


@cache
def launcher() -> CpuLauncher:
    return CpuLauncher(["-DWITH_INT8"])


@cache
def target() -> CudaTarget:
    return CudaTarget(tiny_weights(), CONFIG, launcher())


@cache
def net() -> BlockHead:
    return block_net(tiny_weights())


def runner_of(net: BlockHead) -> CudaBlock:
    made = target().block_runner(stored_block(net, target().fingerprint))
    assert made is not None
    return made


@pytest.fixture(scope="module")
def runner() -> CudaBlock:
    return runner_of(net())


def hidden(count: int, seed: int = 0) -> dict[int, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {tap: 3 * torch.randn(count, BLOCK.width, generator=generator) for tap in BLOCK.taps}


def new_rows(runner: BlockRunner, count: int) -> Tensor:
    return runner.like.new_empty(count, BLOCK.layers, 2, BLOCK.kv_heads, BLOCK.head_dim)


def text(runner: BlockRunner, count: int, seed: int = 0) -> AnchorContext:
    """After `count` tokens whose hidden states are random."""
    rows = CacheRows(new_rows(runner, count), 0, count)
    if count:
        runner.read([TapInput(0, hidden(count, seed), rows)])
    return AnchorContext(7 + seed, count, range(count), rows)


@pytest.mark.parametrize(("count", "slots"), [(0, SIZE), (1, 1), (30, 4), (150, SIZE)])
def test_a_block_is_that_of_torch(runner: CudaBlock, count: int, slots: int) -> None:
    """150 rows end in a second chunk of keys."""
    theirs = TorchBlock(net())
    ours, same = (text(one, count) for one in (runner, theirs))
    if count:
        assert gap(ours.rows.cut().float(), same.rows.cut().double()) < 0.01
    (block,), (expected,) = (one.fill([t], slots) for one, t in ((runner, ours), (theirs, same)))
    assert gap(block.base[:slots], expected.base.double()) < 0.02


@pytest.mark.parametrize("head_dim", [64, 128])
def test_other_shapes_are_those_of_torch(head_dim: int) -> None:
    """Five taps, one layer, a large block, a Markov table of 128, a window that hides part of the text."""
    weights = tiny_weights(head_dim=head_dim)
    shape = replace(
        BLOCK, head_dim=head_dim, taps=(0, 1, 0, 1, 1), layers=1, block=11, markov_rank=128, draft_vocab=VOCAB
    )
    small = block_net(weights, shape)
    other = CudaTarget(weights, CONFIG, launcher())
    ours = other.block_runner(stored_block(small, other.fingerprint))
    assert ours is not None
    theirs = TorchBlock(small)
    bases = []
    for one in (ours, theirs):
        rows = one.like.new_empty(20, 1, 2, 2, head_dim)
        one.read([TapInput(3, hidden(20), CacheRows(rows, 0, 20))])
        context = AnchorContext(9, 23, range(3, 23), CacheRows(rows, 5, 15))
        (block,) = one.fill([context], 11)
        bases.append(block.base[:11].double())
        tokens, sure = one.chains([ChainStart(block, 0, 9)], [3])
        assert len(tokens[0]) >= 3 <= len(sure[0])
    assert gap(bases[0], bases[1]) < 0.02


def test_chains_take_the_best_token_of_each_slot(runner: CudaBlock) -> None:
    blocks = runner.fill([text(runner, count, seed) for seed, count in enumerate((9, 40))], SIZE)
    strange = next(t for t in range(VOCAB) if net().draft_index[t] == BLOCK.draft_vocab)
    starts = [ChainStart(blocks[0], 0, 5), ChainStart(blocks[1], SIZE - 3, strange)]
    sizes = [SIZE, 2]
    chains = runner.chains(starts, sizes)
    for start, size, tokens, sure in zip(starts, sizes, *chains, strict=True):
        at = start
        for token, logit in zip(tokens[:size], sure[:size], strict=True):
            (row,), (one,) = runner.logits_at([at])
            assert token == net().draft_ids[int(np.argmax(row))]
            assert logit == pytest.approx(one, abs=1e-4)
            at = ChainStart(start.block, at.slot + 1, token)


def test_confidences_are_those_of_torch(runner: CudaBlock) -> None:
    theirs = TorchBlock(net())
    logits = []
    for one in (runner, theirs):
        (block,) = one.fill([text(one, 30)], SIZE)
        logits.append(one.logits_at([ChainStart(block, slot, 5) for slot in range(SIZE)])[1])
    assert logits[0] == pytest.approx(logits[1], abs=0.05)


def test_sampled_chains_have_the_noise_of_the_target(runner: CudaBlock) -> None:
    params = SamplingParams(temperature=1.5)
    blocks = runner.fill([text(runner, 9, seed) for seed in range(2)], SIZE)
    starts = [ChainStart(block, 0, 5 + i) for i, block in enumerate(blocks)]
    keys = [noise_key(1, 0, CHOICE, i) for i in range(SIZE)]
    call = SampleCall(0, 0, keys, None, params.temperature)
    (greedy, sampled), _ = runner.chains(starts, [SIZE, SIZE], [None, call])
    plain, _ = runner.chains(starts, [SIZE, SIZE])
    assert greedy[:SIZE] == plain[0][:SIZE]
    assert sampled[:SIZE] != plain[1][:SIZE]
    at = starts[1]
    for token, key in zip(sampled, keys, strict=False):
        whole = np.full(VOCAB, -np.inf, np.float32)
        whole[net().draft_ids.numpy()] = runner.logits_at([at])[0][0]
        assert token == chooser(params)(whole, key)
        at = ChainStart(at.block, at.slot + 1, token)


def test_bits_depend_on_the_text_alone(runner: CudaBlock) -> None:
    """More texts than a graph takes, beside each other and alone."""
    counts = [200, 3, 129, 31, 0, *range(1, 9)]
    together = runner.fill([text(runner, count, i) for i, count in enumerate(counts)], SIZE)
    starts = [ChainStart(block, i % 2, 3 + i) for i, block in enumerate(together)]
    sizes = [SIZE - (i + 2) % 3 - 1 for i in range(len(starts))]  # the first is not the longest
    tokens, sure = runner.chains(starts, sizes)
    for i in range(0, len(counts), 2):
        (alone,) = runner.fill([text(runner, counts[i], i)], SIZE)
        assert torch.equal(alone.base, together[i].base)
        (one,), (one_sure,) = runner.chains([replace(starts[i], block=alone)], [sizes[i]])
        assert one[: sizes[i]] == tokens[i][: sizes[i]]
        assert one_sure[: sizes[i]] == sure[i][: sizes[i]]


def test_one_call_gives_what_three_give(runner: CudaBlock) -> None:
    """More rows to read than a graph takes, in parts, some of which are no plain view of a pass."""
    counts = (70, 2, 40)
    texts = [text(runner, count, seed) for seed, count in enumerate(counts)]
    expected = runner.fill(texts, SIZE)
    firsts, sizes = [(0, texts[0].token), (1, 5), (SIZE - 1, 2)], [SIZE, SIZE - 2, 1]
    chains = runner.chains(chain_starts(expected, firsts), sizes)
    rows = [torch.full_like(t.rows.cut(), torch.nan) for t in texts]
    parts = [part for i, count in enumerate(counts) for part in in_parts(hidden(count, i), rows[i])]
    unread = [replace(t, rows=CacheRows(r, 0, len(r))) for t, r in zip(texts, rows, strict=True)]
    filled, (tokens, sure) = runner.draft_chains(parts, unread, SIZE, firsts, sizes)
    for i, (block, same) in enumerate(zip(filled, expected, strict=True)):
        assert torch.equal(rows[i], texts[i].rows.cut())
        assert torch.equal(block.base, same.base)
        assert tokens[i][: sizes[i]] == chains[0][i][: sizes[i]]
        assert sure[i][: sizes[i]] == chains[1][i][: sizes[i]]


def test_graphs_that_were_captured_ahead_give_the_same(runner: CudaBlock) -> None:
    other = runner_of(net())
    other.capture_usual()
    results = []
    for one in (runner, other):
        filled, chains = one.draft_chains([], [text(one, 40)], SIZE, [(0, 3)], [SIZE])
        results.append((filled[0].base.clone(), chains))
    assert results[0][1] == results[1][1]
    assert torch.equal(results[0][0], results[1][0])


def in_parts(states: Mapping[int, Tensor], rows: Tensor) -> list[TapInput]:
    """The first row out of a longer pass; the rest of states that are not contiguous."""
    one_pass = dict(
        zip(states, torch.stack([torch.cat((h[1:3], h[:1])) for h in states.values()]), strict=True)
    )
    strided = {tap: h.repeat_interleave(2, 1)[:, ::2] for tap, h in states.items()}
    return [
        TapInput(0, one_pass, CacheRows(rows, 0, 1), first=len(next(iter(one_pass.values()))) - 1),
        TapInput(1, strided, CacheRows(rows, 1, len(rows) - 1), first=1),
    ]


def test_what_is_not_this_runners_is_refused(runner: CudaBlock) -> None:
    with pytest.raises(ValueError, match="token 500"):
        runner.fill([replace(text(runner, 3), token=VOCAB)], SIZE)
    (block,) = runner.fill([text(runner, 3)], 4)
    with pytest.raises(ValueError, match="not in this block"):
        runner.chains([ChainStart(block, 2, 1)], [3])
    with pytest.raises(ValueError, match="type"):
        runner.read([TapInput(0, hidden(2), CacheRows(new_rows(runner, 2).float(), 0, 2))])


def test_shapes_that_the_kernels_do_not_know() -> None:
    shape = target().shape
    assert unsupported_reason(BLOCK, shape) is None
    others = [replace(BLOCK, width=64), replace(BLOCK, head_dim=32), replace(BLOCK, ff_width=200)]
    others += [replace(BLOCK, markov_rank=32), replace(BLOCK, block=17)]
    assert all(unsupported_reason(other, shape) for other in others)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_with_the_drafter_is_plain_text(temperature: float) -> None:
    """Two sequences; their drafts are random, some of them right by the shared noise."""
    drafters = {"block": BlockDrafter(runner_of(net()))}
    texts = []
    for spec in (SpecConfig((), max_draft=0), SpecConfig(("block",), max_draft=4, adaptive=False)):
        engine = Engine(target(), drafters, Fixed(), config=CONFIG)
        seqs = []
        for i in range(2):
            params = SamplingParams(temperature=temperature, seed=i, max_tokens=10, ignore_eos=True)
            tokens = some_tokens(40 + i, i, VOCAB)
            seqs.append(Seq(f"{spec.max_draft} {i}", tokens, len(tokens), params, spec, tenant=str(spec)))
            engine.submit(seqs[-1])
        drafted = 0
        while engine.busy:
            drafted += sum(len(r.draft.tokens) for r in engine.step())
        assert (drafted > 20) == (spec.max_draft > 0)
        texts.append(outputs(seqs))
    assert texts[0] == texts[1]


def outputs(seqs: Sequence[Seq]) -> list[list[int]]:
    return [seq.output for seq in seqs]
