"""The CUDA kernels, run by the CPU shim: against float64, and bit for bit against themselves.

The shim's arithmetic is not a GPU's, but its order of sums is, so that a row whose bits depend on its company
is found here too.
"""

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.constraints.draft_masks import Masks
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.engine.verify import sampler_of
from paceline.errors import CacheFull
from paceline.sampling import CHOICE, History, chooser, gumbel, noise_key
from paceline.target.cuda.arguments import MAX_DEPTH, STRUCTURES
from paceline.target.cuda.batch import PassRows, SequenceRows, passes
from paceline.target.cuda.driver import CpuLauncher
from paceline.target.cuda.graphs import ChooseKind, PassKernels
from paceline.target.cuda.target import CudaTarget
from paceline.target.cuda.weights import quantise_int8, unsupported_reason
from paceline.target.weights.model_config import Weights
from paceline.types import NO_DRAFT, Bits, Cursor, Draft, Feed, Sampler, Seq
from support.cuda_models import VOCAB, gap, reference_logits, tiny_weights
from support.models import open_with, random_tree, rows_in_one_pass, some_layers, some_tokens

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(device="cpu", cache_mb=1, max_batch=4)
CONTEXT = 122  # 32 rows after it cross a page and a chunk of keys


@cache
def launcher() -> CpuLauncher:
    return CpuLauncher(["-DWITH_INT8", "-DWITH_GROUPS"])


def make_target(weights: Weights) -> CudaTarget:
    return CudaTarget(weights, CONFIG, launcher())


def tokens_of(count: int, seed: int = 0) -> list[int]:
    return some_tokens(count, seed, VOCAB)


@pytest.fixture(scope="module")
def target() -> CudaTarget:
    """Holds a sequence "s" of CONTEXT tokens."""
    made = make_target(tiny_weights())
    open_with(made, "s", tokens_of(CONTEXT))
    return made


@pytest.fixture(scope="module")
def rows(target: CudaTarget) -> Tensor:
    """Logits of 32 rows after the context, in one pass."""
    return rows_in_one_pass(target, "s", CONTEXT, tokens_of(32, 1))


def test_row_bits_are_the_same_among_64_rows(target: CudaTarget, rows: Tensor) -> None:
    many = rows_in_one_pass(target, "s", CONTEXT, [*tokens_of(32, 1), *tokens_of(21, 2)])
    assert torch.equal(many[:32], rows)


def test_structures_are_as_large_as_the_kernels_think() -> None:
    sizes = [launcher().library.size_of(i) for i in range(len(STRUCTURES))]
    assert sizes == [ctypes.sizeof(structure) for structure in STRUCTURES]


@pytest.mark.parametrize(
    ("family", "head_dim", "window"),
    [
        ("llama", 64, 0),
        ("llama", 128, 0),
        ("mistral", 64, 16),
        ("qwen2", 64, 0),
        ("qwen3", 128, 0),
        ("qwen3", 64, 0),
    ],
)
def test_logits_are_those_of_float64(family: str, head_dim: int, window: int) -> None:
    weights, tokens = tiny_weights(family, head_dim, window), tokens_of(30)
    expected = reference_logits(weights, tokens)
    target = make_target(weights)
    target.open(Seq("s", tokens, len(tokens)))
    logits = target.forward([Feed("s", tokens[:2], Draft(tuple(tokens[2:])))]).logits
    assert logits.shape == (29, VOCAB)
    assert gap(logits, expected[1:]) < 0.008


def test_a_window_begins_inside_a_later_chunk_of_keys() -> None:
    weights, tokens = tiny_weights("mistral", window=20), tokens_of(CONTEXT + 40)
    expected = reference_logits(weights, tokens)[-1:]
    target = make_target(weights)
    open_with(target, "s", tokens[:-1])
    assert gap(target.forward([Feed("s", tokens[-1:])]).logits, expected) < 0.008


def test_rows_after_a_long_context_are_those_of_float64(rows: Tensor) -> None:
    expected = reference_logits(tiny_weights(), [*tokens_of(CONTEXT), *tokens_of(32, 1)])
    assert gap(rows, expected[CONTEXT:]) < 0.008


@pytest.mark.parametrize("count", [1, 2, 3, 8, 16])
def test_row_bits_do_not_depend_on_the_number_of_rows(target: CudaTarget, rows: Tensor, count: int) -> None:
    new = tokens_of(32, 1)
    for start in (0, 5):  # the second begins one position before a chunk
        target.forward([Feed("s", new[:start] or new[:1])])
        target.keep("s", CONTEXT + start)
        alone = rows_in_one_pass(target, "s", CONTEXT + start, new[start : start + count])
        target.keep("s", CONTEXT)
        assert torch.equal(alone, rows[start : start + count])


def test_a_block_goes_from_chunk_to_chunk_with_many_query_rows() -> None:
    """72 query rows, 32 at a time: in the last turn half of a block's warps have none.

    On one multiprocessor a block takes several chunks of a head; on many, one chunk for 32 query rows.
    """
    rows = []
    for multiprocessors in (1, 40):
        target = CudaTarget(tiny_weights(heads=8), CONFIG, CpuLauncher(["-DWITH_INT8"], multiprocessors))
        open_with(target, "s", tokens_of(CONTEXT))
        rows.append(rows_in_one_pass(target, "s", CONTEXT, tokens_of(18, 1)))
    assert torch.equal(*rows)


def tree_with(chain: Sequence[int], nodes: int, seed: int) -> tuple[Draft, list[int]]:
    """A random tree that holds this chain, and the chain's nodes."""
    shape = random_tree(nodes, 3, seed, VOCAB)
    path = max(shape.paths(), key=len)
    tokens = list(shape.tokens)
    for node, token in zip(path, chain, strict=False):
        tokens[node] = token
    return Draft(tuple(tokens), shape.parents), list(path)


@pytest.mark.parametrize(("nodes", "seed"), [(12, 1), (31, 2), (45, 3)])
def test_nodes_of_a_tree_have_the_bits_of_their_chain(
    target: CudaTarget, rows: Tensor, nodes: int, seed: int
) -> None:
    root, *chain = tokens_of(32, 1)
    draft, path = tree_with(chain, nodes, seed)
    logits = target.forward([Feed("s", [root], draft)]).logits
    assert torch.equal(logits[[0, *(node + 1 for node in path)]], rows[: len(path) + 1])
    target.keep("s", CONTEXT + 1, path)  # moves the rows of a side branch
    following = chain[len(path) : len(path) + 2]
    length = CONTEXT + 1 + len(path)
    assert torch.equal(
        rows_in_one_pass(target, "s", length, following), rows[len(path) + 1 : len(path) + 1 + len(following)]
    )
    target.keep("s", CONTEXT)


def test_row_bits_do_not_depend_on_pages_and_neighbours(rows: Tensor) -> None:
    """The sequence lies in other, scattered pages, beside one with a tree and one that is being read."""
    other, new = make_target(tiny_weights()), tokens_of(32, 1)
    open_with(other, "ballast", tokens_of(70, 5), tenant="x")
    open_with(other, "s", tokens_of(CONTEXT)[:60], tenant="y")
    open_with(other, "more", tokens_of(3, 6), tenant="z")
    other._cache._free.take(other._cache.table("s")[-1])  # so that the next page is elsewhere
    other.forward([Feed("s", tokens_of(CONTEXT)[60:], scored=False)])
    other.keep("s", CONTEXT)
    table = other._cache.table("s")
    assert table != list(range(table[0], table[0] + len(table)))
    feeds = [
        Feed("ballast", [3], random_tree(9, 3, 4, VOCAB)),
        Feed("s", new[:1], Draft(tuple(new[1:7]))),
        Feed("more", tokens_of(20, 8), scored=False),
    ]
    scores = other.forward(feeds)
    assert torch.equal(scores.logits[scores.starts[1] : scores.starts[1] + 7], rows[:7])
    assert len(scores.logits) == scores.starts[2] == 17


def test_many_sequences_share_a_pass() -> None:
    """40 at once have the bits of 20 at once."""
    target = CudaTarget(tiny_weights(), replace(CONFIG, cache_mb=8, max_batch=40), launcher())
    token = tokens_of(40, 9)
    for i in range(40):
        target.open(Seq(f"s{i}", token[i : i + 1], 1, tenant=f"t{i}"))
    feeds = [Feed(f"s{i}", token[i : i + 1]) for i in range(40)]
    together = target.forward(feeds).logits.clone()
    assert len(list(passes([target._feed_rows(feed, NO_DRAFT, 0, 0) for feed in feeds], 8192))) == 1
    halves = []
    for part in (feeds[:20], feeds[20:]):
        for feed in part:
            target.keep(feed.seq_id, 0)
        halves.append(target.forward(part).logits.clone())
    assert torch.equal(torch.cat(halves), together)


def test_a_prompt_has_the_same_bits_however_it_is_cut(rows: Tensor) -> None:
    other, tokens = make_target(tiny_weights()), [*tokens_of(CONTEXT), *tokens_of(32, 1)]
    open_with(other, "s", tokens[:45], chunk=7)
    other.forward([Feed("s", tokens[45:130], scored=False)])
    other.keep("s", 130)
    assert torch.equal(
        rows_in_one_pass(other, "s", 130, tokens[130:132]), rows[130 - CONTEXT : 132 - CONTEXT]
    )


def test_a_pass_is_cut_where_partial_results_have_no_room(rows: Tensor) -> None:
    other = make_target(tiny_weights())
    other._runner.buffers.max_parts = 5
    open_with(other, "s", tokens_of(CONTEXT))
    assert torch.equal(rows_in_one_pass(other, "s", CONTEXT, tokens_of(32, 1)[:9]), rows[:9])


def test_taps_and_skipped_layers() -> None:
    """What a model of the first layer alone says is what skipping the second says; taps are of every row."""
    tokens = tokens_of(20)
    whole = make_target(tiny_weights())
    short = tiny_weights()
    alone = make_target(Weights(replace(short.shape, layers=1), some_layers(short.tensors, [0]), "first"))
    for target in (whole, alone):
        target.open(Seq("s", tokens, len(tokens)))
    skipped = whole.skip_forward([Feed("s", tokens)], [0], [0])
    scores = alone.forward([Feed("s", tokens)], taps=(0,))
    assert torch.equal(skipped.logits, scores.logits)
    tapped = whole.forward([Feed("s", tokens[:-1], Draft(tuple(tokens[-1:])))], taps=(1, 0))
    assert torch.equal(tapped.hidden[0], scores.hidden[0])
    assert tapped.hidden[1].shape == (20, 128)
    assert not torch.equal(tapped.hidden[1], tapped.hidden[0])


def test_int8_weights_are_what_they_were_rounded_to() -> None:
    weights, tokens = tiny_weights("qwen2"), tokens_of(12)
    matrices = [name for name, t in weights.tensors.items() if t.dim() == 2]
    rounded = dict(weights.tensors)
    for name in matrices:
        codes, scale = quantise_int8(weights.tensors[name])
        rounded[name] = codes.double() * scale.double()[:, None]
    rounded["head"] = rounded["embed"]
    rounded["embed"] = weights.tensors["embed"]
    expected = reference_logits(Weights(weights.shape, rounded, ""), tokens)
    target = CudaTarget(weights, CONFIG, launcher(), "int8")
    target.open(Seq("s", tokens, len(tokens)))
    logits = target.forward([Feed("s", tokens[:1], Draft(tuple(tokens[1:])))]).logits
    assert gap(logits, expected) < 0.008
    target.keep("s", 0)
    alone = rows_in_one_pass(target, "s", 0, tokens[:3])
    assert torch.equal(alone, logits[:3])
    assert torch.equal(rows_in_one_pass(target, "s", 0, [*tokens, *tokens_of(30, 1)])[:12], logits)


def test_what_cannot_be_computed_is_refused_before_anything_is_written(target: CudaTarget) -> None:
    with pytest.raises(ValueError, match="not one of the model's"):
        target.forward([Feed("s", [VOCAB])])
    with pytest.raises(ValueError, match="taps"):
        target.forward([Feed("s", [1])], taps=(2,))
    deep = (-1, -1, *range(1, MAX_DEPTH + 1))  # two branches, one of them too deep
    with pytest.raises(CacheFull, match="deeper"):
        target.forward([Feed("s", [1], Draft(tuple(tokens_of(len(deep))), deep))])
    target.keep("s", CONTEXT)


def test_models_that_the_kernels_do_not_know() -> None:
    weights = tiny_weights("qwen3")
    assert unsupported_reason(weights.shape, weights.tensors) is None
    changes: list[dict[str, Any]] = [
        {"architecture": "gemma3"},
        {"head_dim": 80},
        {"width": 100},
        {"activation": "gelu_tanh"},
    ]
    for change in changes:
        assert unsupported_reason(replace(weights.shape, **change), weights.tensors)
    assert unsupported_reason(weights.shape, [*weights.tensors, "layers.0.post_attn_norm"])


@pytest.mark.parametrize(("temperature", "width"), [(0.0, 1), (0.7, 3)])
def test_speculative_text_is_plain_text(temperature: float, width: int) -> None:
    """Two requests in one batch, with a drafter that repeats the prompt."""
    made = {}
    for spec in (SpecConfig((), max_draft=0), SpecConfig(("ngram",), adaptive=False, tree_width=width)):
        engine = Engine(make_target(tiny_weights()), model_free(), Fixed(), config=CONFIG)
        seqs = []
        for i in range(2):
            params = SamplingParams(temperature=temperature, seed=i, max_tokens=6)
            seqs.append(Seq(f"s{i}", tokens_of(7, i) * 3, 21, params, spec))
            engine.submit(seqs[-1])
        while engine.busy:
            engine.step()
        made[spec] = [seq.output for seq in seqs]
    plain, fast = made.values()
    assert plain == fast
    assert len(plain[0]) == 6


class Even(Cursor):
    """Even tokens only, of which the first five are followed by 8 alone; it ends after six."""

    def __init__(self, taken: int = 0) -> None:
        self._taken = taken

    @property
    def finished(self) -> bool:
        return self._taken >= 6

    def fill(self, row: Bits) -> bool:
        row[:] = 0x55555555 if self._taken % 3 < 2 else 0
        row[0] |= np.uint32(1 << 8)
        return True

    def advance(self, token: int) -> bool:
        row = np.zeros(16, np.uint32)
        self.fill(row)
        allowed = bool(row[token // 32] >> np.uint32(token % 32) & np.uint32(1)) and not self.finished
        self._taken += allowed
        return allowed

    def forced(self) -> list[int]:
        return [8] if self._taken % 3 == 2 and not self.finished else []

    def canonical(self) -> list[int]:
        return []

    def fork(self) -> "Even":
        return Even(self._taken)


@pytest.mark.parametrize(("width", "grammar"), [(1, False), (3, True)])
def test_a_target_chooses_with_bias_penalties_and_a_grammar(
    monkeypatch: pytest.MonkeyPatch, width: int, grammar: bool
) -> None:
    """The same text as from logits on the host, with drafts and without; no logits leave the device."""
    prompt = tokens_of(6, 1) * 3
    features: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.7, "presence_penalty": 0.3}
    features |= {"logit_bias": ((8, 2.0), (3, 1.0)), "top_k": 20}
    made = []
    for on_device, drafts in ((False, False), (True, False), (True, True)):
        engine = Engine(make_target(tiny_weights()), model_free(), Fixed(), config=CONFIG)
        drafters = ("grammar", "ngram") if drafts else ()
        spec = SpecConfig(drafters, max_draft=5 if drafts else 0, adaptive=False, tree_width=width)
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=6, **features)
        seq = Seq("s", list(prompt), len(prompt), params, spec, cursor=Even() if grammar else None)
        with monkeypatch.context() as patch:
            if on_device:
                patch.setattr("paceline.engine.engine.verify", None)
            else:
                patch.setattr("paceline.engine.engine.sampler_of", lambda *_: None)
            engine.submit(seq)
            while engine.busy:
                engine.step()
        made.append(seq.output)
    assert made[0] == made[1] == made[2]
    assert len(made[0]) == 6


@pytest.mark.parametrize("parents", [None, (-1, -1, 0, 2, 2, 4)])
def test_penalties_count_the_tokens_of_the_draft(target: CudaTarget, parents: tuple[int, ...] | None) -> None:
    """A token that the bias makes the best of every row loses once its path holds it often enough."""
    params = SamplingParams(logit_bias=((8, 30.0),), frequency_penalty=2.0, repetition_penalty=3.0, seed=1)
    text, draft = [*tokens_of(CONTEXT), 7], Draft((8, 9, 8, 8, 8, 8), parents)
    sampler = sampler_of(Seq("s", text, 100, params))
    scores = target.forward([Feed("s", [7], draft, sampler=sampler)])
    expected = []
    for node, row in enumerate(scores.logits.numpy(), -1):
        history = History(text, 100, [draft.tokens[i] for i in draft.path(node)])
        expected.append(chooser(params)(row, (0, 0), history))
    assert scores.tokens == expected
    assert expected[0] == 8 != expected[-1]
    target.keep("s", CONTEXT)


def choose_on_device(target: CudaTarget, logits: Tensor, samplers: Sequence[Sampler]) -> list[int]:
    """Runs the kernels that choose over these rows, each of a sequence of its own."""
    runner, count = target._runner, len(logits)
    group = runner.groups[0]
    group.buffers.logits[:count, :VOCAB] = logits
    none = [-1] * count
    rows = PassRows([0] * count, [0] * count, none, [0] * count, [0] * count, list(range(count)), none)
    rows.sequences = [
        SequenceRows(f"c{i}", i, 1, 0, 0, ((0,),), i, sampler, sampler.index)
        for i, sampler in enumerate(samplers)
    ]
    histories = [runner.histories.row(s.seq_id, s.sampler) for s in rows.sequences if s.sampler]
    runner._number += 1
    group.fill(rows, [0] * count, histories, 32, runner._number)
    group.buffers.input.copy_(group.buffers.host_input)
    kind = ChooseKind(
        32,
        cut=any(sampler.cuts for sampler in samplers),
        history=max(histories) >= 0,
        masked=any(sampler.masks for sampler in samplers),
    )
    host = group.masks
    host.clear()
    for i, sampler in enumerate(samplers):
        runner.histories.drop(f"c{i}")
        if sampler.masks is not None and isinstance(mask := sampler.masks()[0], np.ndarray):
            host.set(i, mask)
    runner._graphs.run(kind, lambda kind: PassKernels(runner, kind).launches)
    group.taken[0] = runner._number
    return group.chosen(count)


def strange_logits() -> Tensor:
    logits = 4 * torch.randn(32, VOCAB, generator=torch.Generator().manual_seed(3))
    logits[:, -1] += 9  # the last token counts, those that fill the tile do not
    logits[1] = 0.5  # all equal
    logits[2, 7:] = -torch.inf
    logits[3, [9, 300]] = torch.nan
    logits[4, [30, 20]] = torch.inf
    logits[5, ::2] *= -1e30
    logits[6] = -0.0
    logits[6, 100] = 0.0
    logits[7:12] = logits[7:12].round()  # many equals at the edge of a cut
    logits[12] *= 20
    return logits


def check_choices(
    target: CudaTarget, logits: Tensor, masks: Sequence[Bits | None] | None = None, **more: Any
) -> int:
    """Compares the tokens with sampling's; gives how many the device has left to the host."""
    params = [SamplingParams(seed=5 * 10**17 * i + 5, choice=i % 3, **more) for i in range(len(logits))]
    texts = [tokens_of(5 + 17 * i, i) for i in range(len(logits))]
    rows = masks or [None] * len(logits)
    samplers = []
    for text, p, mask in zip(texts, params, rows, strict=True):
        of_row = None if mask is None else partial(Masks, (mask,))
        sampler = sampler_of(Seq("s", text, 5, p), of_row)
        assert sampler is not None
        samplers.append(sampler)
    chosen = choose_on_device(target, logits, samplers)
    left = 0
    for i, (p, row, token) in enumerate(zip(params, logits, chosen, strict=True)):
        key = noise_key(p.noise_seed, p.choice, CHOICE, 17 * i)
        expected = chooser(p)(row.numpy(), key, History(texts[i], 5), rows[i])
        assert token in (expected, -1), f"row {i}"
        left += token == -1
    return left


@pytest.mark.parametrize("temperature", [0.0, 0.2, 0.7, 1.0, 5.0])
def test_tokens_are_those_that_sampling_chooses(target: CudaTarget, temperature: float) -> None:
    assert check_choices(target, strange_logits(), temperature=temperature) == 0


@pytest.mark.parametrize("temperature", [0.4, 1.0, 3.0])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [
    (1, 1.0, 0.0), (7, 1.0, 0.0), (400, 1.0, 0.0), (0, 0.3, 0.0), (0, 0.95, 0.0), (0, 1.0, 0.05),
    (40, 0.9, 0.0), (3, 0.5, 0.2), (0, 0.9, 0.3), (10**9, 0.8, 0.0),
])  # fmt: skip
def test_cut_tokens_are_those_that_sampling_chooses(
    target: CudaTarget, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    more: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    assert check_choices(target, strange_logits(), **more) == 0


CHANGES: list[dict[str, Any]] = [
    {"logit_bias": ((3, 7.5), (VOCAB - 1, -100.0), (20, 0.25))},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7, "presence_penalty": 0.4},
    {"presence_penalty": -1.9, "frequency_penalty": 0.123456789},
    {"frequency_penalty": 2.0, "logit_bias": ((11, 3.1),)},
]


@pytest.mark.parametrize("cut", [{}, {"top_k": 9}, {"top_p": 0.8, "min_p": 0.02}], ids=str)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_biased_and_penalised_tokens_are_those_that_sampling_chooses(
    target: CudaTarget, temperature: float, change: dict[str, Any], cut: dict[str, Any]
) -> None:
    assert check_choices(target, strange_logits(), temperature=temperature, **change, **cut) == 0


def some_masks(count: int) -> list[Bits | None]:
    """From one allowed token to all of them, some rows without a mask; bits beyond the vocabulary are set."""
    generator = np.random.default_rng(7)
    masks: list[Bits | None] = []
    for i in range(count):
        share = (0.01, 0.1, 0.5, 1.0)[i % 4]
        allowed = generator.random(512) < share
        allowed[(7 * i) % VOCAB] = True
        if i % 7 == 3:
            allowed[:] = False
            allowed[13 * i % VOCAB] = True
        bits = np.packbits(allowed, bitorder="little").view(np.uint32)
        masks.append(None if i % 5 == 4 else bits)
    return masks


@pytest.mark.parametrize(
    "more",
    [{}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1}, {"repetition_penalty": 1.4, "top_k": 30}],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_masked_tokens_are_those_that_sampling_chooses(
    target: CudaTarget, temperature: float, more: dict[str, Any]
) -> None:
    """Where broken logits are not allowed they must not matter, and where nothing else is, they must."""
    assert check_choices(target, strange_logits(), some_masks(32), temperature=temperature, **more) == 0


def test_a_mask_that_allows_nothing_leaves_the_row_to_the_host(target: CudaTarget) -> None:
    nothing, anything = np.zeros(16, np.uint32), np.full(16, 2**32 - 1, np.uint32)
    samplers = [
        Sampler(temperature, 1, 0, 0, masks=partial(tuple, [mask]))
        for temperature in (0.0, 1.0)
        for mask in (nothing, anything)
    ]
    first, second, third, fourth = choose_on_device(target, strange_logits()[13:17], samplers)
    assert first == third == -1
    assert second >= 0
    assert fourth >= 0


@cache
def tied_pairs() -> list[tuple[int, int, int, float]]:
    """Seeds, two tokens and a depth: the second token at that depth scores exactly what the first does."""
    ids, found = np.arange(VOCAB), []
    for seed in range(10**6):
        noise = gumbel(noise_key(seed, 0, CHOICE, 0), ids)
        order = noise.argsort()
        noise = noise[order]
        depth = (noise[:-1] - noise[1:]).astype(np.float32)  # of the one with more noise
        for i in np.flatnonzero(depth + noise[1:] == noise[:-1]):
            found.append((seed, int(order[i]), int(order[i + 1]), float(depth[i])))
        if len(found) >= 12:
            break
    return found


@pytest.mark.parametrize("top_k", [0, 2])
def test_of_equal_noisy_scores_the_lowest_token_is_chosen(target: CudaTarget, top_k: int) -> None:
    """In two blocks, or in one warp where a cut lists them; whichever of them has the larger logit."""
    pairs = tied_pairs()
    logits = torch.full((len(pairs), VOCAB), -1000.0)
    samplers = []
    for row, (seed, lower, higher, depth) in zip(logits, pairs, strict=True):
        row[lower], row[higher] = 0.0, depth
        samplers.append(Sampler(1.0, seed, 0, 0, top_k))
    expected = [min(lower, higher) for _, lower, higher, _ in pairs]
    params = [SamplingParams(temperature=1.0, seed=seed, top_k=top_k) for seed, *_ in pairs]
    keys = [noise_key(p.noise_seed, 0, CHOICE, 0) for p in params]
    sampled = [chooser(p)(row.numpy(), k) for p, row, k in zip(params, logits, keys, strict=True)]
    assert sampled == expected
    assert choose_on_device(target, logits, samplers) == expected
    assert {lower < higher for _, lower, higher, _ in pairs} == {True, False}


def test_a_target_does_not_choose_what_needs_logits() -> None:
    def asked(**more: Any) -> bool:
        return sampler_of(Seq("s", [1], 1, SamplingParams(seed=1, **more))) is not None

    assert asked()
    assert asked(temperature=0.7)
    assert asked(temperature=0.7, top_p=0.5, top_k=5, min_p=0.1)
    assert asked(repetition_penalty=1.1)
    assert asked(logit_bias=((3, 1.0),))
    assert not asked(logit_bias=((3, 1.0), (3, 1.0)))
    assert not asked(logprobs=1)
    assert sampler_of(Seq("s", [1], 1, SamplingParams(), SpecConfig(accept="residual"))) is None


def test_tokens_of_a_pass_may_be_read_after_the_next_pass(target: CudaTarget) -> None:
    read_late, expected = [], []
    for token in tokens_of(2, 5):
        read_late.append(target.forward([Feed("s", [token], sampler=Sampler(0.0, 1, 0, 0))]))
        target.keep("s", CONTEXT)
    for token in tokens_of(2, 5):
        expected.append(int(target.forward([Feed("s", [token])]).logits.argmax()))
        target.keep("s", CONTEXT)
    assert all(scores.running for scores in read_late)
    assert [token for scores in read_late for token in scores.tokens] == expected
    assert expected[0] != expected[1]


def test_a_gpu_without_memory_ends_one_output_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """One asks for log-probabilities, whose logits are copied; the other needs no memory."""
    prompt = tokens_of(5)
    params = SamplingParams(max_tokens=6, ignore_eos=True)

    def run(*requests: SamplingParams) -> list[Seq]:
        engine = Engine(make_target(tiny_weights()), model_free(), Fixed(), config=CONFIG)
        seqs = [Seq(f"s{i}", list(prompt), len(prompt), each) for i, each in enumerate(requests)]
        ends: dict[str, Exception | None] = {}
        for seq in seqs:
            engine.submit(seq)
        while engine.busy:
            ends |= {r.request: r.error for r in engine.step() if r.finish}
        errors.append([ends[seq.id] for seq in seqs])
        return seqs

    errors: list[list[Exception | None]] = []
    (alone,) = run(params)
    whole = CudaTarget._rows_of_logits
    emptied = []

    def without_memory(self: CudaTarget, rows: PassRows, group: int, lent: bool) -> Tensor:
        if not rows.all_chosen:
            raise torch.OutOfMemoryError("full")
        return whole(self, rows, group, lent)

    monkeypatch.setattr(CudaTarget, "_rows_of_logits", without_memory)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(1))
    _, other = run(replace(params, logprobs=1), params)
    assert other.output == alone.output
    failed, ended = errors[-1]
    assert isinstance(failed, CacheFull)
    assert "no memory left" in str(failed)
    assert ended is None
    assert emptied


def test_a_graph_that_finds_no_memory_is_run_kernel_by_kernel(target: CudaTarget) -> None:
    class Full(CpuLauncher):
        tries = 0

        def __init__(self) -> None:
            self.__dict__ |= vars(launcher())

        def capture(self, launches: object) -> None:
            self.tries += 1
            raise torch.OutOfMemoryError("full")

    full = Full()
    other = CudaTarget(tiny_weights(), CONFIG, full)
    logits = []
    for one in (target, other):
        one.open(Seq("alone", [1, 2], 2, tenant="alone"))
        logits.append(one.forward([Feed("alone", [1, 2])]).logits.clone())
        one.close("alone")
    assert torch.equal(*logits)
    assert full.tries == 1
