"""Products with packed weights, run by the CPU shim: against float64, and bit for bit against themselves."""

import ctypes
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters import model_free
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.target.cuda.arguments import THREADS, Linear, PassInput
from paceline.target.cuda.driver import CpuLauncher
from paceline.target.cuda.graphs import defines
from paceline.target.cuda.packing import FORMATS, GGUF, pack_fp8, pack_gguf, quantise_fp8
from paceline.target.cuda.target import CudaTarget
from paceline.target.weights.model_config import ModelConfig, Rope, Weights
from paceline.target.weights.reader import load
from paceline.types import Draft, Feed, Seq
from support import tiny_gguf
from support.cuda_models import gap, reference_logits, tiny_weights
from support.models import open_with, random_tree, rows_in_one_pass, some_tokens
from support.native_targets import decoded, random_blocks

pytestmark = pytest.mark.slow

CONFIG = EngineConfig(device="cpu", cache_mb=1, max_batch=4)
SHAPE = ModelConfig("llama", 2, 256, 4, 2, 64, 512, 96, 128, 1e-5, Rope(10000.0))
MULTIPROCESSORS = 10  # so that products have blocks of 1, 2 and 4 tiles
INPUTS = (256, 4864)  # fewer units than warps; more steps of a warp than stages of its ring


@cache
def launcher() -> CpuLauncher:
    """Every format for logits, all products of the files below."""
    products = {("store", name) for name in FORMATS} | {("residual", name) for name in ("Q6_K", "Q4_1")}
    for name in ("Q4_K", "FP8"):
        products |= {(product, name) for product in ("qkv", "gated", "residual")}
    products |= {("qkv", "Q6_K"), ("gated", "bf16")}
    return CpuLauncher(defines(SHAPE, MULTIPROCESSORS, products), MULTIPROCESSORS)


@cache
def matrix(name: str, inputs: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """64 features: packed, with the scales of features, and in float64."""
    random = np.random.default_rng(inputs)
    if name == "FP8":
        codes, scale = quantise_fp8(torch.from_numpy(random.standard_normal((64, inputs))))
        values = codes.view(torch.float8_e4m3fn).double() * scale.double()[:, None]
        return pack_fp8(codes), scale, values
    blocks = random_blocks(name, 64, inputs, random, tame=True)
    return pack_gguf(name, torch.from_numpy(blocks)), None, torch.from_numpy(decoded(name, blocks)).double()


def product(name: str, x: Tensor, rows: int | None = None) -> Tensor:
    """x times a matrix, by the kernel for 8, 16, 32 or 64 rows. rows: how many the pass has; None: all."""
    bucket = next(size for size in (8, 16, 32, 64) if size >= len(x))
    inputs = x.shape[1]
    padded = torch.full((bucket, inputs), torch.nan, dtype=torch.bfloat16)
    padded[: len(x)] = x
    weight, scale, _ = matrix(name, inputs)
    out, given = torch.full((bucket, 64), 7.0), PassInput(rows=len(x) if rows is None else rows)
    argument = Linear(
        weight=weight.data_ptr(),
        scale=None if scale is None else scale.data_ptr(),
        x=padded.data_ptr(),
        inputs=inputs,
        input=ctypes.addressof(given),
        out_f32=out.data_ptr(),
        columns=64,
    )
    launcher().launch(f"store_{bucket // 8}_{name}", 1, THREADS, 0, argument)
    return out


def some_rows(count: int, inputs: int) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(3)).bfloat16()


@pytest.mark.parametrize("inputs", INPUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_products_are_those_of_float64(name: str, inputs: int) -> None:
    """Weights are not rounded: in bfloat16 they would be off by a thousandth."""
    x = some_rows(8, inputs)
    expected = x.double() @ matrix(name, inputs)[2].T
    assert gap(product(name, x), expected) < 3e-6


@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(name: str) -> None:
    x = some_rows(64, 1280)
    alone = product(name, x[:1])[:1]
    for count in (2, 3, 7, 8, 9, 16, 17, 32, 33):
        among = product(name, x[:count])
        assert torch.equal(among[:1], alone), f"{count} rows"
        if count < len(among):
            assert not among[count:].any(), "rows that the pass does not have are zeros"
    whole = product(name, x)
    for row in (3, 17, 40, 63):  # in another slot
        assert torch.equal(product(name, x[row : row + 1])[0], whole[row])


# What llama.cpp's Q4_K_M and Q4_1 hold, in small; and a pair whose halves differ.
MIXED = {"attn_v.weight": "Q6_K", "ffn_down.weight": "Q6_K"}
FILES: dict[str, tuple[str, str, Mapping[str, str]]] = {
    "q4_k_m": ("qwen2", "Q4_K", MIXED),
    "llama": ("llama", "Q4_K", MIXED),
    "norms": ("qwen3", "Q4_K", {"attn_v.weight": "Q4_K", "ffn_down.weight": "Q4_1"}),
    "unlike": ("qwen2", "Q4_K", {"ffn_up.weight": "Q4_1", "attn_output.weight": "Q4_1"}),
}


def write(folder: Path, name: str) -> Path:
    family, kind, others = FILES[name]
    values = tiny_gguf.tensors(family)
    values = {n: v * v.shape[1] ** -0.5 if v.ndim == 2 else 1 + 0.1 * v for n, v in values.items()}
    values["token_embd.weight"] *= 16
    kinds = {n: others.get(n.split(".", 2)[-1], kind) for n in values} | {"token_embd.weight": "Q8_0"}
    return tiny_gguf.write(folder / f"{name}.gguf", family, values, kinds)


@pytest.fixture(scope="module", params=FILES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("gguf"), request.param)


def make_target(path: Path) -> CudaTarget:
    return CudaTarget(load(path, torch.bfloat16, keep=GGUF), CONFIG, launcher(), "gguf")


def reference(path: Path) -> Weights:
    """Matrices exactly as decoded; what is looked up or multiplied by elements in bfloat16."""
    exact, rounded = load(path), load(path, torch.bfloat16)
    tensors = {n: exact.tensors[n] if t.dim() == 2 else t for n, t in rounded.tensors.items()}
    tensors |= {"embed": rounded.tensors["embed"], "head": exact.tensors["embed"]}
    for name in [n for n in tensors if path.stem == "unlike" and n.endswith(("gate", "up"))]:
        tensors[name] = rounded.tensors[name]  # one product of two encodings
    return Weights(exact.shape, tensors, "")


def test_a_file_is_computed_as_it_is(model: Path) -> None:
    tokens = some_tokens(40, vocab=96)
    expected = reference_logits(reference(model), tokens)
    target = make_target(model)
    target.open(Seq("s", tokens, len(tokens)))
    logits = target.forward([Feed("s", tokens[:1], Draft(tuple(tokens[1:])))]).logits
    assert gap(logits, expected) < 0.008
    target.keep("s", 0)
    for count in (1, 5, 12, 30):
        assert torch.equal(rows_in_one_pass(target, "s", 0, tokens[:count]), logits[:count])
    assert target.describe().endswith("gguf")


def test_nodes_of_a_tree_and_neighbours_have_the_bits_of_a_row_alone(tmp_path: Path) -> None:
    target, new = make_target(write(tmp_path, "q4_k_m")), some_tokens(9, 4, 96)
    for name, length in (("s", 20), ("other", 7)):
        open_with(target, name, some_tokens(length, 1, 96), tenant=name)
    alone = rows_in_one_pass(target, "s", 20, new[:1])
    scores = target.forward(
        [Feed("other", [5], random_tree(6, 3, 1, 96)), Feed("s", new[:1], random_tree(9, 3, 2, 96))]
    )
    assert torch.equal(scores.logits[scores.starts[1] : scores.starts[1] + 1], alone)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_speculative_text_is_plain_text(tmp_path: Path, temperature: float) -> None:
    path, made = write(tmp_path, "llama"), []
    for spec in (SpecConfig((), max_draft=0), SpecConfig(("ngram",), adaptive=False)):
        engine = Engine(make_target(path), model_free(), Fixed(), config=CONFIG)
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=8, ignore_eos=True)
        seq = Seq("s", some_tokens(7, 3, 96) * 3, 21, params, spec)
        engine.submit(seq)
        while engine.busy:
            engine.step()
        made.append(seq.output)
    assert made[0] == made[1]
    assert len(made[0]) == 8


def test_the_head_that_a_drafter_borrows_is_the_files(tmp_path: Path) -> None:
    """The embedding where they are tied, else what the packed head stands for."""
    path = write(tmp_path, "q4_k_m")
    target, values = make_target(path), load(path, torch.bfloat16).tensors["embed"]
    assert torch.equal(cast(Tensor, target.embeddings().head), values)
    target._weights._tied = False
    assert torch.equal(cast(Tensor, target.embeddings().head), values)


def test_fp8_weights_are_what_they_were_rounded_to() -> None:
    weights, tokens = tiny_weights("qwen2", width=256), some_tokens(20)
    rounded = dict(weights.tensors)
    for name in [n for n, t in weights.tensors.items() if t.dim() == 2]:
        codes, scale = quantise_fp8(weights.tensors[name])
        rounded[name] = codes.view(torch.float8_e4m3fn).double() * scale.double()[:, None]
    rounded |= {"head": rounded["embed"], "embed": weights.tensors["embed"]}
    expected = reference_logits(Weights(weights.shape, rounded, ""), tokens)
    target = CudaTarget(weights, CONFIG, launcher(), "fp8")
    target.open(Seq("s", tokens, len(tokens)))
    logits = target.forward([Feed("s", tokens[:1], Draft(tuple(tokens[1:])))]).logits
    assert gap(logits, expected) < 0.008
    target.keep("s", 0)
    assert torch.equal(rows_in_one_pass(target, "s", 0, tokens[:3]), logits[:3])
