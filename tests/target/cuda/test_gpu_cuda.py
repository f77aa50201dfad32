"""The CUDA kernels on a GPU: bits of rows, trees and batches, and speculative text equal to plain text."""

import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.constraints.draft_masks import Masks
from paceline.drafters import model_free
from paceline.drafters.heads import BlockDrafter
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.engine.verify import sampler_of
from paceline.errors import CacheFull, PacelineError, UsageError
from paceline.heads.base import DenseTargetEmbeddings
from paceline.heads.block import BlockConfig, BlockHead
from paceline.heads.head_checkpoint import read
from paceline.heads.local_heads import SHIPPED
from paceline.heads.runner import AnchorContext, BlockRunner, CacheRows, ChainStart, TapInput, TorchBlock
from paceline.sampling import CHOICE, History, chooser, noise_key
from paceline.target.cuda.arguments import THREADS, Linear
from paceline.target.cuda.batch import pass_groups
from paceline.target.cuda.block_head import CudaBlock
from paceline.target.cuda.driver import GpuLauncher
from paceline.target.cuda.graphs import defines, packed_shared_bytes, packed_tiling
from paceline.target.cuda.packing import FORMATS, pack_fp8, pack_gguf, quantise_fp8
from paceline.target.cuda.target import CudaTarget
from paceline.target.load import load_target
from paceline.target.weights.model_config import ModelConfig, Rope, Weights
from paceline.target.weights.tensors import EncodedMatrix
from paceline.text import Tokenizer
from paceline.types import Draft, Feed, Seq
from support.cuda_models import VOCAB, gap, reference_logits, stored_block, tiny_weights
from support.models import open_with, random_tree, rows_in_one_pass, rows_one_by_one, some_tokens
from support.native_targets import decoded, random_blocks, small_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

CONFIG = EngineConfig(device="cuda", cache_mb=2048, max_batch=32)
COUNTS = (1, 2, 3, 5, 8, 16, 32, 33, 64)


def random_model(
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ff: int,
    vocab: int,
    family: str = "llama",
) -> Weights:
    """Random weights on the GPU."""
    shape = ModelConfig(
        family, layers, width, heads, kv_heads, head_dim, ff, vocab, 16384, 1e-5, Rope(100000.0)
    )
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(*size, generator=generator, device="cuda", dtype=torch.bfloat16)
        return made.mul_(scale)

    tensors = {"embed": normal(vocab, width, scale=4 * width**-0.5), "norm": 1 + normal(width, scale=0.1)}
    sizes = {
        "q": (heads * head_dim, width),
        "k": (kv_heads * head_dim, width),
        "v": (kv_heads * head_dim, width),
    }
    sizes |= {"o": (width, heads * head_dim), "gate": (ff, width), "up": (ff, width), "down": (width, ff)}
    for i in range(layers):
        tensors |= {f"layers.{i}.{p}": normal(*size, scale=size[1] ** -0.5) for p, size in sizes.items()}
        tensors |= {f"layers.{i}.{p}": 1 + normal(width, scale=0.1) for p in ("attn_norm", "ffn_norm")}
        if family == "qwen3":
            tensors |= {f"layers.{i}.{p}": 1 + normal(head_dim, scale=0.1) for p in ("q_norm", "k_norm")}
    return Weights(shape, tensors, f"random {family} {width}")


def smollm2_path() -> Path:
    """PACELINE_SMOLLM2, else the model as `paceline pull` keeps it."""
    if given := os.environ.get("PACELINE_SMOLLM2"):
        return Path(given)
    from paceline.errors import UnknownModel
    from paceline.hub import resolve

    try:
        return resolve("smollm2-135m")
    except UnknownModel:
        pytest.skip("smollm2-135m is not here: run `paceline pull smollm2-135m`")


@pytest.fixture(scope="module")
def small() -> CudaTarget:
    """The shape of SmolLM2."""
    return CudaTarget(random_model(30, 576, 9, 3, 64, 1536, 49152), CONFIG)


@pytest.fixture(scope="module")
def wide() -> CudaTarget:
    """Four layers in the shape of an 8B model."""
    return CudaTarget(random_model(4, 4096, 32, 8, 128, 14336, 32000), CONFIG)


@pytest.fixture(scope="module")
def normed() -> CudaTarget:
    """Six layers in the shape of Qwen 3 0.6B."""
    return CudaTarget(random_model(6, 1024, 16, 8, 128, 3072, 151936, "qwen3"), CONFIG)


@pytest.fixture(scope="module")
def smollm2() -> CudaTarget:
    target = load_target(smollm2_path(), CONFIG)
    assert isinstance(target, CudaTarget)
    return target


MODELS = [
    ("llama", 64, 0),
    ("llama", 128, 0),
    ("mistral", 64, 16),
    ("qwen2", 64, 0),
    ("qwen3", 128, 0),
    ("qwen3", 64, 0),
]


@pytest.mark.parametrize(("family", "head_dim", "window"), MODELS)
def test_logits_are_those_of_float64(family: str, head_dim: int, window: int) -> None:
    weights, tokens = tiny_weights(family, head_dim, window), some_tokens(200, vocab=VOCAB)
    expected = reference_logits(weights, tokens)
    target = CudaTarget(weights, CONFIG)
    open_with(target, "s", tokens[:150])
    logits = target.forward([Feed("s", tokens[150:151], Draft(tuple(tokens[151:])))]).logits
    assert gap(logits.cpu(), expected[150:]) < 0.008


def check_rows(target: CudaTarget, context: int) -> None:
    vocab, name = target.vocab_size, f"rows {context}"
    new = some_tokens(64, 1, vocab)
    open_with(target, name, some_tokens(context, 2, vocab), tenant=name)
    alone = rows_one_by_one(target, name, context, new)
    for count in COUNTS:
        for start in {0, 64 - count}:
            open_rows(target, name, context, new[:start])
            among = rows_in_one_pass(target, name, context + start, new[start : start + count])
            assert torch.equal(among, alone[start : start + count]), (
                f"{count} rows from {start} after {context}"
            )
            target.keep(name, context)
    for seed in range(3):
        draft = random_tree((31, 50, 63)[seed], 4, seed, vocab)
        path = max(draft.paths(), key=len)
        tokens = list(draft.tokens)
        for node, token in zip(path, new[1:], strict=False):
            tokens[node] = token
        tree = target.forward([Feed(name, new[:1], Draft(tuple(tokens), draft.parents))]).logits
        rows = tree[[0, *(node + 1 for node in path)]]
        assert torch.equal(rows, alone[: len(rows)]), f"tree {seed} after {context}"
        target.keep(name, context + 1, path)
        after = rows_in_one_pass(target, name, context + len(rows), new[len(rows) : len(rows) + 2])
        assert torch.equal(after, alone[len(rows) : len(rows) + 2]), f"kept path {seed} after {context}"
        target.keep(name, context)
    target.close(name)
    target.forget(name)


def open_rows(target: CudaTarget, name: str, context: int, tokens: Sequence[int]) -> None:
    if tokens:
        target.forward([Feed(name, tokens, scored=False)])
        target.keep(name, context + len(tokens))


@pytest.mark.parametrize("context", [5, 250, 1000, 4090, 8170])
def test_row_bits_of_a_small_model(small: CudaTarget, context: int) -> None:
    check_rows(small, context)


@pytest.mark.parametrize("context", [300, 8170])
def test_row_bits_of_a_wide_model(wide: CudaTarget, context: int) -> None:
    check_rows(wide, context)


@pytest.mark.parametrize("context", [300, 4090])
def test_row_bits_of_a_model_with_query_norms(normed: CudaTarget, context: int) -> None:
    check_rows(normed, context)


@pytest.mark.parametrize("context", [300, 1000])
def test_row_bits_of_a_real_model(smollm2: CudaTarget, context: int) -> None:
    check_rows(smollm2, context)


def test_row_bits_of_int8_weights() -> None:
    weights = random_model(4, 2048, 16, 4, 128, 8192, 32000)
    check_rows(CudaTarget(weights, CONFIG, kind="int8"), 300)


@pytest.fixture(scope="module")
def smollm2_gguf() -> CudaTarget:
    """Q4_1, with a head of Q8_0."""
    target = load_target(smollm2_path(), replace(CONFIG, dtype="gguf"))
    assert isinstance(target, CudaTarget)
    return target


@pytest.mark.parametrize("context", [300, 1000])
def test_row_bits_of_a_real_file_as_it_is(smollm2_gguf: CudaTarget, context: int) -> None:
    check_rows(smollm2_gguf, context)


def test_row_bits_of_fp8_weights() -> None:
    weights = random_model(4, 2048, 16, 4, 128, 8192, 32000)
    check_rows(CudaTarget(weights, CONFIG, kind="fp8"), 300)


def encoded_model(encoding: str, head: str) -> Weights:
    """Random blocks: every matrix in one encoding but for v and the head."""
    weights, random = random_model(2, 2048, 16, 4, 128, 4096, 8192), np.random.default_rng(1)
    tensors = dict(weights.tensors)
    encoded = {}
    for name in [n for n, t in tensors.items() if t.dim() == 2]:
        kind = head if name == "embed" or name.endswith(".v") else encoding
        outputs, inputs = tensors[name].shape
        encoded[name] = EncodedMatrix(kind, torch.from_numpy(small_blocks(kind, outputs, inputs, random)))
        if name != "embed":
            del tensors[name]
    return Weights(weights.shape, tensors, f"random {encoding}", encoded)


@pytest.mark.parametrize(
    ("encoding", "head"),
    [
        ("Q4_K", "Q6_K"),
        ("Q5_K", "Q6_K"),
        ("Q4_0", "Q8_0"),
        ("Q4_1", "Q8_0"),
        ("Q5_0", "Q5_1"),
        ("Q5_1", "Q8_0"),
    ],
)
def test_row_bits_of_encoded_weights(encoding: str, head: str) -> None:
    weights = encoded_model(encoding, head)
    check_rows(CudaTarget(weights, CONFIG, kind="gguf"), 300)


@pytest.mark.parametrize("name", FORMATS)
def test_packed_products_are_those_of_float64(name: str) -> None:
    """Weights are not rounded: in bfloat16 they would be off by a thousandth."""
    shape, device, random = (
        random_model(1, 256, 4, 2, 64, 512, 1024).shape,
        torch.device("cuda"),
        np.random.default_rng(2),
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    launcher = GpuLauncher(device, defines(shape, processors, {("store", name)}))
    if name == "FP8":
        codes, scale = quantise_fp8(torch.from_numpy(random.standard_normal((1024, 4096))).cuda())
        weight, values = pack_fp8(codes), codes.view(torch.float8_e4m3fn).double() * scale.double()[:, None]
    else:
        blocks = random_blocks(name, 1024, 4096, random, tame=True)
        weight, scale = pack_gguf(name, torch.from_numpy(blocks).cuda()), None
        values = torch.from_numpy(decoded(name, blocks)).double().cuda()
    x = torch.randn(64, 4096, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
    results = []
    for row_tiles in (1, 2, 4, 8):
        out = torch.zeros(8 * row_tiles, 1024, device="cuda")
        argument = Linear(
            weight=weight.data_ptr(),
            scale=None if scale is None else scale.data_ptr(),
            x=x.data_ptr(),
            inputs=4096,
            out_f32=out.data_ptr(),
            columns=1024,
        )
        tiles, kb = packed_tiling("store", 8 * row_tiles, shape, processors)
        shared = packed_shared_bytes(8 * row_tiles, tiles, kb, FORMATS[name])
        launcher.launch(f"store_{row_tiles}_{name}", 1024 // 16 // tiles, THREADS, shared, argument)
        torch.cuda.synchronize()
        results.append(out)
    assert gap(results[-1].cpu(), (x.double() @ values.T).cpu()) < 3e-5
    for out in results:
        assert torch.equal(out, results[-1][: len(out)])


def test_bits_do_not_depend_on_dependent_launch(wide: CudaTarget) -> None:
    device = torch.device("cuda")
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    launcher = GpuLauncher(
        device, defines(wide.shape, processors, groups=pass_groups(CONFIG.max_batch)), pdl=False
    )
    plain = CudaTarget(random_model(4, 4096, 32, 8, 128, 14336, 32000), CONFIG, launcher)
    tokens = some_tokens(350, 3, wide.vocab_size)
    rows = []
    for target in (wide, plain):
        open_with(target, "pdl", tokens[:330], tenant="pdl")
        rows.append(rows_in_one_pass(target, "pdl", 330, tokens[330:]))
        target.close("pdl")
    assert torch.equal(*rows)


def test_a_pass_runs_in_any_thread(small: CudaTarget) -> None:
    tokens = some_tokens(50, 41, small.vocab_size)
    open_with(small, "t", tokens[:-1], tenant="t")
    here = rows_in_one_pass(small, "t", 49, tokens[-1:])
    with ThreadPoolExecutor(1) as pool:
        there = pool.submit(rows_in_one_pass, small, "t", 49, tokens[-1:]).result()
    small.close("t")
    assert torch.equal(here, there)


def test_row_bits_do_not_depend_on_the_batch(small: CudaTarget) -> None:
    vocab = small.vocab_size
    lengths = (250, 3, 1000, 129, 64, 700, 2049)
    alone = {}
    for i, length in enumerate(lengths):
        open_with(small, f"b{i}", some_tokens(length, 10 + i, vocab), tenant=f"b{i}")
        draft = random_tree(6, 3, i, vocab) if i % 2 else Draft(tuple(some_tokens(i + 1, i, vocab)))
        alone[i] = (draft, small.forward([Feed(f"b{i}", [7], draft)]).logits)
        small.keep(f"b{i}", length)
    for members in ((0, 1), (2, 3, 4), tuple(range(7)), (6, 5, 4, 3, 2, 1, 0)):
        scores = small.forward([Feed(f"b{i}", [7], alone[i][0]) for i in members])
        for start, i in zip(scores.starts, members, strict=True):
            rows = scores.logits[start : start + len(alone[i][1])]
            assert torch.equal(rows, alone[i][1]), f"{i} among {members}"
            small.keep(f"b{i}", lengths[i])
    for i in range(len(lengths)):
        small.close(f"b{i}")


def test_row_bits_do_not_depend_on_a_batch_of_many(small: CudaTarget) -> None:
    """48 sequences with a row each, in one pass."""
    lengths = {f"m{i}": 5 + 29 * i for i in range(48)}
    alone = {}
    for i, (name, length) in enumerate(lengths.items()):
        open_with(small, name, some_tokens(length, 50 + i, small.vocab_size), tenant=name)
        alone[name] = small.forward([Feed(name, [7])]).logits.clone()
        small.keep(name, length)
    scores = small.forward([Feed(name, [7]) for name in lengths])
    for start, (name, length) in zip(scores.starts, lengths.items(), strict=True):
        assert torch.equal(scores.logits[start : start + 1], alone[name]), name
        small.keep(name, length)
        small.close(name)


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_among_250_have_the_bits_of_few_unless_torch_multiplies(deterministic: bool) -> None:
    config = replace(CONFIG, max_batch=64, deterministic=deterministic)
    target = CudaTarget(random_model(4, 4096, 32, 8, 128, 14336, 32000), config)
    open_with(target, "s", some_tokens(300, 1, target.vocab_size))
    new = some_tokens(250, 2, target.vocab_size)
    many = rows_in_one_pass(target, "s", 300, new)
    few = rows_in_one_pass(target, "s", 300, new[:8])
    assert torch.equal(many[:8], few) is deterministic
    assert float((many[:8] - few).abs().max() / few.abs().max()) < 0.05


def test_a_cached_prefix_gives_the_bits_of_a_cold_start(small: CudaTarget) -> None:
    tokens, after = some_tokens(300, 20, small.vocab_size), some_tokens(5, 21, small.vocab_size)
    open_with(small, "cold", tokens, tenant="p")
    cold = rows_in_one_pass(small, "cold", 300, after)
    small.close("cold")
    assert open_with(small, "warm", tokens, tenant="p") > 0
    assert torch.equal(rows_in_one_pass(small, "warm", 300, after), cold)
    small.close("warm")


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.0, 2.0])
def test_tokens_are_those_that_sampling_chooses(
    small: CudaTarget, normed: CudaTarget, smollm2: CudaTarget, temperature: float
) -> None:
    for target in (small, normed, smollm2):
        tokens, draft = some_tokens(100, 31, target.vocab_size), some_tokens(31, 32, target.vocab_size)
        open_with(target, "c", tokens[:-1], tenant="c")
        for seed in range(8):
            params = SamplingParams(temperature=temperature, seed=seed * 77777777777, choice=seed % 2)
            sampler = sampler_of(Seq("c", [1] * (60 + seed), 60, params))
            scores = target.forward([Feed("c", tokens[-1:], Draft(tuple(draft)), sampler=sampler)])
            keys = [noise_key(params.noise_seed, params.choice, CHOICE, seed + i) for i in range(32)]
            rows = scores.logits.cpu().numpy()
            assert scores.tokens == [chooser(params)(row, key) for row, key in zip(rows, keys, strict=True)]
            target.keep("c", 99)
        target.close("c")


CUTS: list[dict[str, Any]] = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 40, "top_p": 0.95},
    {"top_p": 0.8, "min_p": 0.1},
]


def left_to_the_host(target: CudaTarget, tokens: Sequence[int], params: SamplingParams) -> int:
    """Compares the tokens of the last 32 rows with sampling's; gives how many the device did not choose."""
    context = len(tokens) - 32
    open_with(target, "c", tokens[:context], tenant="c")
    sampler = sampler_of(Seq("c", [1] * 60, 60, params))
    feed = Feed("c", tokens[context : context + 1], Draft(tuple(tokens[context + 1 :])), sampler=sampler)
    scores = target.forward([feed])
    chosen = list(scores.tokens) or [-1] * 32
    for i, (row, token) in enumerate(zip(scores.logits.cpu().numpy(), chosen, strict=True)):
        expected = chooser(params)(row, noise_key(params.noise_seed, 0, CHOICE, i))
        assert token in (expected, -1), f"{params}, row {i}"
    target.close("c")
    return chosen.count(-1)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_cut_tokens_are_those_that_sampling_chooses(
    small: CudaTarget, smollm2: CudaTarget, temperature: float
) -> None:
    """After text the device chooses every token. After noise a cut may keep more than it can sort."""
    text = Tokenizer.load(smollm2_path()).encode(
        "The harbour wakes slowly. At six in the morning the first boats come in, their decks covered with "
        "nets and crates of fish, and the gulls follow them over the grey water. A woman sells coffee."
    )
    for seed, cut in enumerate(CUTS):
        params = SamplingParams(temperature=temperature, seed=seed, **cut)
        left_to_the_host(small, some_tokens(100, 31, small.vocab_size), params)
        assert left_to_the_host(smollm2, text, params) == 0


PROCESSED: list[dict[str, Any]] = [
    {"logit_bias": ((5, 4.0), (17, -3.5), (1000, 2.25))},
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.7, "frequency_penalty": 0.31},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.4, "logit_bias": ((9, 1.0),), "top_k": 40},
]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_processed_tokens_are_those_that_sampling_chooses(
    smollm2: CudaTarget, temperature: float, masked: bool
) -> None:
    """Bias, penalties over text and draft, and masks: two passes, so that counts are carried on."""
    vocab, generator = smollm2.vocab_size, np.random.default_rng(3)
    prompt, draft = some_tokens(120, 33, 400), some_tokens(31, 34, 400)
    for seed, more in enumerate(PROCESSED):
        params = SamplingParams(temperature=temperature, seed=seed, **more)
        seq = Seq("p", list(prompt), 90, params)
        open_with(smollm2, "p", prompt[:-1], tenant="p")
        for turn in range(2):
            rows = generator.integers(0, 2**32, (32, vocab // 32), np.uint32) if masked else [None] * 32
            sampler = sampler_of(seq, partial(Masks, list(rows)) if masked else None)
            fed, length = seq.tokens[-1:], len(seq.tokens)
            scores = smollm2.forward([Feed("p", fed, Draft(tuple(draft)), sampler=sampler)])
            expected = [
                chooser(params)(
                    row,
                    noise_key(params.noise_seed, 0, CHOICE, length - 90 + i),
                    History(seq.tokens, 90, draft[:i]),
                    mask,
                )
                for i, (row, mask) in enumerate(zip(scores.logits.cpu().numpy(), rows, strict=True))
            ]
            assert scores.tokens == expected, f"{more}, turn {turn}"
            smollm2.keep("p", length, tuple(range(4)))
            seq.tokens += [*draft[:4], expected[4]]
        smollm2.close("p")


def texts(
    target: CudaTarget, prompts: Mapping[int, Sequence[int]], spec: SpecConfig, temperature: float
) -> dict[int, list[int]]:
    """64 tokens after each prompt, all in one batch; its number is its seed."""
    engine = Engine(target, model_free(), Fixed(), config=CONFIG)
    seqs = {}
    for i, prompt in prompts.items():
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=64, ignore_eos=True)
        seqs[i] = Seq(f"t{i}", list(prompt), len(prompt), params, spec, tenant=f"{spec} {i}")
        engine.submit(seqs[i])
    while engine.busy:
        engine.step()
    return {i: seq.output for i, seq in seqs.items()}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("name", ["smollm2", "smollm2_gguf"])
def test_speculative_text_is_plain_text(
    request: pytest.FixtureRequest, name: str, temperature: float, width: int
) -> None:
    smollm2: CudaTarget = request.getfixturevalue(name)
    encode = Tokenizer.load(smollm2_path()).encode
    story = "The cat sat on the mat. The dog sat on the log. The cat sat on the mat again, and the dog"
    prompts = {i: encode(f"{i}. {story} " * (1 + i)) for i in range(8)}
    plain = SpecConfig((), max_draft=0)
    fast = SpecConfig(("suffix", "ngram"), max_draft=7, adaptive=False, tree_width=width)
    expected: dict[int, list[int]] = {}
    alone: dict[int, list[int]] = {}
    for i, prompt in prompts.items():
        expected |= texts(smollm2, {i: prompt}, plain, temperature)
        alone |= texts(smollm2, {i: prompt}, fast, temperature)
    assert alone == expected
    assert texts(smollm2, prompts, plain, temperature) == expected
    assert texts(smollm2, prompts, fast, temperature) == expected


# ---- block heads


def block_runner(target: CudaTarget, shape: BlockConfig) -> tuple[CudaBlock, TorchBlock]:
    """A random head in graphs, and the same in torch."""
    lent = target.embeddings()
    embed, head = (cast(Tensor, table).float() for table in (lent.embed, lent.head))
    dense = DenseTargetEmbeddings(embed, head, lent.norm.float(), "random")
    net = BlockHead(shape, dense, torch.arange(0, 2 * shape.draft_vocab, 2))
    generator = torch.Generator().manual_seed(0)
    net.init_weights(dense, generator)
    with torch.no_grad():
        for weight in net.parameters():
            scale = 0.3 if weight.dim() == 1 else weight.shape[1] ** -0.5
            weight.add_((scale * torch.randn(weight.shape, generator=generator)).to(weight))
    runner = target.block_runner(stored_block(net, target.fingerprint))
    assert runner is not None
    return runner, TorchBlock(net)


def read_text(runner: BlockRunner, shape: BlockConfig, count: int, seed: int) -> AnchorContext:
    generator = torch.Generator("cuda").manual_seed(seed)
    rows = runner.like.new_empty(count, shape.layers, 2, shape.kv_heads, shape.head_dim)
    states = 3 * torch.randn(len(shape.taps), count, shape.width, generator=generator, device="cuda")
    hidden = dict(zip(shape.taps, states, strict=True))
    runner.read([TapInput(0, hidden, CacheRows(rows, 0, count))])
    return AnchorContext(7 + seed, count, range(count), CacheRows(rows, 0, count))


BLOCKS = {
    "small": BlockConfig(576, 9, 3, 64, 1536, 49152, 8192, (1, 8, 14, 20, 27)),
    "wide": BlockConfig(4096, 32, 8, 128, 14336, 32000, 16000, (0, 1, 2)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_are_those_of_torch_whatever_is_drafted_beside_them(
    name: str, request: pytest.FixtureRequest
) -> None:
    shape = BLOCKS[name]
    runner, theirs = block_runner(request.getfixturevalue(name), shape)
    counts, size = [600, 1, 130, 1024, *range(2, 18)], shape.block
    texts = [read_text(runner, shape, count, i) for i, count in enumerate(counts)]
    together = runner.fill(texts, size)
    starts = [ChainStart(block, 0, text.token) for block, text in zip(together, texts, strict=True)]
    tokens, sure = runner.chains(starts, [size] * len(starts))
    shorter, _ = runner.chains(starts[:2], [1, size])  # the first is not the longest
    assert shorter[1][:size] == tokens[1][:size]
    for i in (0, 1, 2, 3, 19):
        same = read_text(theirs, shape, counts[i], i)
        (expected,) = theirs.fill([same], size)
        assert gap(together[i].base[:size].cpu(), expected.base.double().cpu()) < 0.03
        (alone,) = runner.fill([texts[i]], size)
        assert torch.equal(alone.base, together[i].base)
        (one,), (one_sure,) = runner.draft_chains([], [texts[i]], size, [(0, texts[i].token)], [size])[1]
        assert (one[:size], one_sure[:size]) == (tokens[i][:size], sure[i][:size])
        (row,), (logit,) = runner.logits_at([ChainStart(alone, 0, texts[i].token)])
        assert tokens[i][0] == runner.draft_ids[int(row.argmax())]
        assert sure[i][0] == pytest.approx(logit, abs=1e-2)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_text_with_a_trained_drafter_is_plain_text(smollm2: CudaTarget, temperature: float) -> None:
    """The drafter of the package, alone and after the others, four sequences at once."""
    head = read(SHIPPED / "smollm2-135m-block", smollm2.fingerprint, smollm2.vocab_size)
    runner = smollm2.block_runner(head)
    assert runner is not None
    tokenizer, results = Tokenizer.load(smollm2_path()), []
    prompts = [f"Write {n} sentences about the sea, then count to {n}:" for n in (3, 5, 8, 12)]
    for names in ((), ("block",), ("suffix", "ngram", "block")):
        drafters = {**model_free(), "block": BlockDrafter(runner, head.card.calibration)}
        engine = Engine(smollm2, drafters, Fixed(), config=CONFIG)
        seqs, drafted, accepted = [], 0, 0
        for i, prompt in enumerate(prompts):
            tokens = tokenizer.encode(prompt)
            params = SamplingParams(temperature=temperature, seed=i, max_tokens=100, ignore_eos=True)
            spec = SpecConfig(names, max_draft=5 if names else 0, adaptive=False)
            seqs.append(Seq(f"{names} {i}", tokens, len(tokens), params, spec, tenant=str(names)))
            engine.submit(seqs[-1])
        while engine.busy:
            for r in engine.step():
                drafted += r.draft.sources.count("block")
                accepted += r.sources.count("block")
        assert (accepted > 40) == (drafted > 40) == bool(names)
        results.append([seq.output for seq in seqs])
    assert results[0] == results[1] == results[2]


# ---- without memory


@contextmanager
def filled_memory() -> Iterator[None]:
    """Nothing more can be allocated on the GPU."""
    held, size = [], 2**34
    while size >= 512:
        try:
            held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        yield
    finally:
        held.clear()
        torch.cuda.empty_cache()


def test_a_gpu_without_memory_ends_one_output_and_no_other(small: CudaTarget) -> None:
    """One asks for log-probabilities, whose logits are copied; the others need no memory."""
    prompt = some_tokens(40, 3, small.vocab_size)
    params = SamplingParams(max_tokens=60, ignore_eos=True)

    def run(requests: Sequence[SamplingParams]) -> tuple[list[Seq], list[PacelineError | None]]:
        engine, ends = Engine(small, model_free(), Fixed(), config=CONFIG), dict[str, PacelineError | None]()
        seqs = [Seq(f"m{i}", list(prompt), len(prompt), p, tenant="m") for i, p in enumerate(requests)]
        for seq in seqs:
            engine.submit(seq)
        while engine.busy:
            ends |= {r.request: r.error for r in engine.step() if r.finish}
        small.forget("m")
        return seqs, [ends[seq.id] for seq in seqs]

    plain, _ = run([params, replace(params, temperature=0.8, seed=1)])
    requests = [params, replace(params, logprobs=2), replace(params, temperature=0.8, seed=1)]
    with filled_memory():
        seqs, errors = run(requests)
    assert [seqs[0].output, seqs[2].output] == [seq.output for seq in plain]
    assert isinstance(errors[1], CacheFull)
    assert "no memory left" in str(errors[1])
    assert errors[0] is errors[2] is None
    seqs, errors = run(requests)
    assert errors == [None] * 3
    assert len(seqs[1].output) == 60


def test_a_full_gpu_refuses_a_model_and_says_what_would_fit() -> None:
    path = smollm2_path()
    with filled_memory(), pytest.raises(UsageError, match="does not fit into the GPU's memory"):
        load_target(path, EngineConfig(device="cuda", cache_mb=512))
