"""Passes of more than 64 rows, run by the CPU shim: the bits are those of the same rows alone."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import CacheFull
from paceline.target.cuda.batch import PassRows
from paceline.target.cuda.driver import CpuLauncher
from paceline.target.cuda.graphs import TorchProduct, defines
from paceline.target.cuda.target import CudaTarget
from paceline.target.cuda.weights import WeightType
from paceline.target.weights.model_config import Weights
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Sampler, Seq
from support import tiny_gguf
from support.cuda_models import VOCAB, gap, reference_logits, tiny_weights
from support.models import open_with, random_tree, rows_in_one_pass, some_tokens

pytestmark = pytest.mark.slow

NARROW = EngineConfig(device="cpu", cache_mb=24, max_batch=16)  # 64 rows in a pass
WIDE = replace(NARROW, max_batch=64)  # 256
CONTEXT = 122


@cache
def launcher() -> CpuLauncher:
    return CpuLauncher(["-DWITH_INT8", "-DWITH_GROUPS"])


def make_target(
    config: EngineConfig, weights: Weights | None = None, kind: WeightType = "bf16"
) -> CudaTarget:
    return CudaTarget(weights or tiny_weights(), config, launcher(), kind)


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return some_tokens(count, seed, VOCAB)


def passes_of(target: CudaTarget, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The rows in the groups of every pass from now on."""
    seen: list[list[int]] = []
    launch = target._launch

    def watched(groups: Sequence[PassRows], *more: tuple[int, ...]) -> None:
        seen.append([len(rows.tokens) for rows in groups])
        launch(groups, *more)

    monkeypatch.setattr(target, "_launch", watched)
    return seen


def ragged_feeds(target: CudaTarget, total: int) -> list[Feed]:
    """A prompt that is cut between groups, a tree, a chain after a context, and sequences of one token."""
    open_with(target, "chain", tokens_of(CONTEXT, 1), tenant="a")
    open_with(target, "tree", tokens_of(9, 2), tenant="b")
    target.open(Seq("prompt", tokens_of(total, 3), total, tenant="c"))
    single = 8
    for i in range(single):
        open_with(target, f"s{i}", tokens_of(1 + 17 * i, 10 + i), tenant=f"s{i}")
    rest = total - 7 - 12 - single
    first, *drafted = tokens_of(7, 4)
    return [
        *(Feed(f"s{i}", [40 + i]) for i in range(single // 2)),
        Feed("prompt", tokens_of(rest, 3), scored=False),
        Feed("tree", [5], random_tree(11, 3, 6, VOCAB)),
        *(Feed(f"s{i}", [40 + i]) for i in range(single // 2, single)),
        Feed("chain", [first], Draft(tuple(drafted))),
    ]


@pytest.mark.parametrize("total", [33, 128, 250])
def test_rows_among_many_have_the_bits_of_rows_alone(total: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, narrow = make_target(WIDE), make_target(NARROW)
    feeds, same = ragged_feeds(wide, total), ragged_feeds(narrow, total)
    seen = passes_of(wide, monkeypatch)
    together = wide.forward(feeds, taps=(0, 1))
    assert seen == [[64] * (total // 64) + [total % 64] * (total % 64 > 0)]
    alone = [narrow.forward([feed], taps=(0, 1)) for feed in same]
    assert torch.equal(together.logits, torch.cat([one.logits for one in alone if len(one.logits)]))
    for layer in (0, 1):
        hidden = torch.cat([one.hidden[layer] for one in alone])
        assert torch.equal(together.hidden[layer], hidden)
    rest = len(next(feed for feed in feeds if feed.seq_id == "prompt").tokens)
    last = []
    for target in (wide, narrow):  # what was written to the cache
        target.keep("prompt", rest)
        last.append(rows_in_one_pass(target, "prompt", rest, tokens_of(3, 7)))
    assert torch.equal(*last)


def sampler(i: int, masked: bool) -> Sampler:
    bits = np.packbits(np.random.default_rng(i).random(512) < 0.3, bitorder="little").view(np.uint32)
    cut = {"top_k": (0, 5, 40)[i % 3], "top_p": (1.0, 0.9)[i % 2]}
    history = {"repetition": 1.3, "text": tokens_of(9, i), "prompt_len": 4} if i % 5 == 0 else {}
    masks = partial(tuple, [bits]) if masked and i % 4 == 0 else None
    return Sampler((0.0, 0.8)[i % 4 > 0], 7 * i + 1, 0, 3, **cut, **history, masks=masks)  # type: ignore[arg-type]


@pytest.mark.parametrize("masked", [False, True])
def test_tokens_of_many_sequences_are_those_of_few(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    count, chosen = 200, []
    for config, limit in ((WIDE, count), (NARROW, 50)):
        target = make_target(config)
        for i in range(count):
            target.open(Seq(f"s{i}", [i], 1, tenant=f"t{i}"))
        feeds = [Feed(f"s{i}", [i], sampler=sampler(i, masked)) for i in range(count)]
        seen, tokens = passes_of(target, monkeypatch), list[int]()
        for first in range(0, count, limit):
            tokens += target.forward(feeds[first : first + limit]).tokens
        chosen.append(tokens)
        assert len(seen) == count // limit
    assert chosen[0] == chosen[1]
    assert len(set(chosen[0])) > 20
    assert -1 not in chosen[0]


def test_tokens_of_a_wide_pass_may_be_read_after_the_next_one() -> None:
    target, count = make_target(WIDE), 70
    for i in range(count):
        target.open(Seq(f"s{i}", [i], 1, tenant=f"t{i}"))
    greedy = Sampler(0.0, 1, 0, 0)
    expected, late = [], []
    for shift in (0, 5):
        feeds = [Feed(f"s{i}", [i + shift]) for i in range(count)]
        expected.append(target.forward(feeds).logits.argmax(-1).tolist())
        for feed in feeds:
            target.keep(feed.seq_id, 0)
    for shift in (0, 5):
        late.append(target.forward([Feed(f"s{i}", [i + shift], sampler=greedy) for i in range(count)]).tokens)
        for i in range(count):
            target.keep(f"s{i}", 0)
    assert [list(tokens) for tokens in late] == expected
    assert expected[0] != expected[1]


@pytest.mark.parametrize(
    ("family", "kind"), [("qwen3", "bf16"), ("qwen2", "int8"), ("mistral", "bf16"), ("llama", "int8")]
)
def test_every_kind_of_product_has_its_bits(family: str, kind: WeightType) -> None:
    window, rows = 16 if family == "mistral" else 0, []
    for config in (WIDE, NARROW):
        target = make_target(config, tiny_weights(family, window=window), kind)
        open_with(target, "s", tokens_of(30))
        rows.append(rows_in_one_pass(target, "s", 30, tokens_of(100, 1)))
    assert torch.equal(*rows)


def test_packed_weights_have_their_bits(tmp_path: Path) -> None:
    kinds = dict.fromkeys(tiny_gguf.tensors("qwen2"), "Q4_K") | {"token_embd.weight": "Q8_0"}
    path, rows = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind=kinds), []
    for config in (WIDE, NARROW):
        weights = load(path, torch.bfloat16, keep=("Q4_K", "Q8_0"))
        products = {("qkv", "Q4_K"), ("gated", "Q4_K"), ("residual", "Q4_K"), ("store", "Q8_0")}
        built = CpuLauncher(defines(weights.shape, 5, products, groups=4))
        target = CudaTarget(weights, config, built, "gguf")
        open_with(target, "s", some_tokens(5, 0, tiny_gguf.VOCAB))
        rows.append(rows_in_one_pass(target, "s", 5, some_tokens(90, 1, tiny_gguf.VOCAB)))
    assert torch.equal(*rows)


# ---- throughput mode


def torch_products(target: CudaTarget) -> int:
    launches = target._runner._graphs._launches.values()
    return sum(isinstance(one, TorchProduct) for each in launches for one in each)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_without_determinism_torch_multiplies_passes_of_many_rows(family: str) -> None:
    tokens, weights = tokens_of(100), tiny_weights(family)
    expected = reference_logits(weights, tokens)
    fast = make_target(replace(WIDE, deterministic=False), weights)
    fast.open(Seq("s", tokens, 1))
    many = rows_in_one_pass(fast, "s", 0, tokens)
    assert torch_products(fast) == 2 * (3 if family == "qwen3" else 4)
    assert gap(many, expected) < 0.02
    exact = make_target(WIDE, tiny_weights(family))
    exact.open(Seq("s", tokens, 1))
    few = [rows_in_one_pass(target, "s", 0, tokens[:64]) for target in (fast, exact)]
    assert torch.equal(*few)
    many_exact = rows_in_one_pass(exact, "s", 0, tokens)
    assert torch_products(exact) == 0
    assert torch.equal(many_exact[:64], few[0])
    assert not torch.equal(many_exact, many)
    assert (fast.invariant_rows, exact.invariant_rows) == (64, 2**31)
    assert fast.describe() == f"{exact.describe()}, throughput"


def test_int8_weights_stay_on_the_kernels_without_determinism() -> None:
    rows = []
    for config in (replace(WIDE, deterministic=False), NARROW):
        target = make_target(config, kind="int8")
        target.open(Seq("s", tokens_of(80), 80))
        rows.append(rows_in_one_pass(target, "s", 0, tokens_of(80)))
        assert torch_products(target) == 0
        assert target.invariant_rows == 2**31
    assert torch.equal(*rows)


# ---- the engine


def outputs(config: EngineConfig, spec: SpecConfig, count: int, temperature: float) -> list[list[int]]:
    engine, seqs = Engine(make_target(config), model_free(), Fixed(), config=config), []
    for i in range(count):
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=3, ignore_eos=True)
        seqs.append(Seq(f"s{i}", tokens_of(3, i) * 3, 9, params, spec, tenant=f"t{i}"))
        engine.submit(seqs[-1])
    while engine.busy:
        engine.step()
    return [seq.output for seq in seqs]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_of_many_sequences_with_trees_is_plain_text_of_few(temperature: float) -> None:
    trees = SpecConfig(("ngram",), max_draft=4, adaptive=False, tree_width=2)
    many = outputs(WIDE, trees, 30, temperature)
    assert many == outputs(NARROW, SpecConfig((), max_draft=0), 30, temperature)


def test_a_gpu_that_has_no_memory_in_the_middle_of_a_wide_pass_tells_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, tries = make_target(WIDE), []

    def full(self: CudaTarget, rows: PassRows, group: int, lent: bool) -> Tensor:
        tries.append(group)
        if group:
            raise torch.OutOfMemoryError("full")
        return self._runner.buffers.logits.new_zeros(len(rows.scored), VOCAB)

    monkeypatch.setattr(CudaTarget, "_rows_of_logits", full)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    target.open(Seq("s", tokens_of(70), 70))
    with pytest.raises(CacheFull, match="smaller cache_mb or max_batch"):
        target.forward([Feed("s", tokens_of(1), Draft(tuple(tokens_of(69, 1))))])
    assert tries == [0, 1, 0, 1]
