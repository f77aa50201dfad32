"""C++ compiled for ARM, emulated, against this machine's libraries: the same bits, the same tokens.

Every NEON path and the plain one: products, passes and block heads. Sampling, which has one path.
"""

import ctypes as c
from pathlib import Path

import numpy as np
import pytest

from paceline import native_build
from paceline.config import SamplingParams
from paceline.heads.runner import ChainStart
from paceline.native_build import Unit, load
from paceline.sampling import CHOICE, noise_key
from paceline.sampling.distribution import History
from paceline.sampling.native import HEADERS, SOURCE, NativeChooser, Settings, bind
from paceline.target.native import library
from paceline.target.native.packing import TO_FOUR_BITS
from paceline.target.weights.dequant import ENCODINGS
from support.checks import story
from support.emulated import (
    PROCESSORS,
    Memory,
    Script,
    attach_fields,
    check,
    cross_compiler,
    recorded_blocks,
    recorded_passes,
    require_emulator,
)
from support.models import save_reference
from support.native_targets import (
    HALVES,
    KINDS,
    SHAPES,
    Bytes,
    Floats,
    Packed,
    a_net,
    a_text,
    built,
    native_target,
    pack,
    random_blocks,
    runnable,
    sized,
    tiny_model,
)

pytestmark = pytest.mark.slow

ARM = tuple(PROCESSORS)
FAMILIES = {
    "gemma3_text": {"sliding_window": 30},  # two frequencies, norms behind the products
    "gemma2": {"sliding_window": 20},  # soft-capping
    "qwen3_moe": {},  # a dense layer among those with experts
    "gpt_oss": {},  # sinks, biases of experts, a clamped activation
}


@pytest.fixture(autouse=True)
def _emulator() -> None:
    require_emulator()


def add_product(script: Script, kind: str, source: Bytes, x: Floats) -> None:
    """Packing, unpacking and multiplying, as this machine does them."""
    lib = built(runnable()[0])
    (packed,) = pack(lib, kind, source)
    linear, memory = empty_like(script, packed)
    rows = np.full(packed.linear.outputs, -1, np.int32)
    rows[: len(source)] = np.arange(len(source))
    script.call(
        "paceline_pack",
        *(list(library.ENCODINGS).index(kind), script.memory(source.tobytes()), source.strides[0]),
        *(packed.linear.inputs // library.GROUP, script.memory(rows.tobytes()), linear),
        *(0, packed.linear.outputs // library.TILE),
    )
    for name, copy in memory.items():
        size = byte_count(packed, name)
        script.expect(f"{name} of {kind}", copy, c.string_at(getattr(packed.linear, name), size))
    every = np.arange(packed.linear.outputs, dtype=np.int32)
    out = script.memory(bytes(4 * packed.linear.outputs * packed.linear.inputs))
    script.call("paceline_unpack", linear, script.memory(every.tobytes()), len(every), out)
    script.expect(f"weights of {kind}", out, packed.unpacked(lib).tobytes())
    out = script.memory(bytes(4 * len(x) * packed.linear.outputs))
    script.call("paceline_multiply", linear, script.memory(x.tobytes()), len(x), out)
    script.expect(f"product of {kind} with {len(x)} rows", out, packed.times(lib, x).tobytes())


def byte_count(packed: Packed, name: str) -> int:
    pair: int = getattr(packed.linear, f"{name}_pair")
    return int(packed.linear.outputs) // library.UNIT * pair


def empty_like(script: Script, packed: Packed) -> tuple[Memory, dict[str, Memory]]:
    own, parts = script.memory(bytes(packed.linear)), {}
    for name in ("codes", "scales"):
        parts[name] = script.memory(bytes(byte_count(packed, name)))
        script.point(own, getattr(library.Linear, name).offset, parts[name])
    return own, parts


def some_rows(count: int, inputs: int, random: np.random.Generator) -> Floats:
    """Of very different sizes; some groups are zero."""
    x = random.standard_normal((count, inputs)) * 10.0 ** random.uniform(-3, 3, (count, 1))
    x.reshape(count, -1, 32)[random.random((count, inputs // 32)) < 0.1] = 0
    return x.astype(np.float32)


def blocks_of(kind: str, code: int) -> Bytes:
    """32 rows of 256 inputs with this byte everywhere but in the half-precision numbers."""
    flat = np.full((32 * 256 // ENCODINGS[kind].elements, ENCODINGS[kind].nbytes), code, np.uint8)
    for at in HALVES[kind]:
        flat[:, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
    return flat.reshape(32, -1)


@pytest.fixture(scope="module")
def products() -> Script:
    """Every encoding: 1 to 9 rows, any finite scale, codes at the ends of their range; rounded floats."""
    script, random = Script(), np.random.default_rng(0)
    for kind in KINDS:
        for count in range(1, 10):
            add_product(script, kind, random_blocks(kind, 33, 512, random), some_rows(count, 512, random))
        tame = random_blocks(kind, 48, 256, random, tame=True)
        add_product(script, kind, tame, np.full((4, 256), [[1.0], [-1.0], [1e30], [1e-38]], np.float32))
        for code in (0x00, 0x7F, 0x80, 0xFF):
            add_product(script, kind, blocks_of(kind, code), some_rows(3, 256, random))
    floats = random.standard_normal((35, 96), np.float32)
    floats[0] = 0
    for kind in ("F32", TO_FOUR_BITS):
        add_product(script, kind, floats.view(np.uint8), some_rows(5, 96, random))
    return script


@pytest.mark.parametrize("path", ARM)
def test_products(products: Script, path: str, tmp_path: Path) -> None:
    check(products, path, tmp_path)


@pytest.fixture(scope="module")
def stories(tmp_path_factory: pytest.TempPathFactory) -> list[Script]:
    """Passes of every kind: prompts, chains, trees, two sequences; every encoding and setting somewhere."""
    folder, scripts = tmp_path_factory.mktemp("stories"), []
    models = [
        tiny_model(folder / "mixed.gguf", "qwen3", tied=False),
        tiny_model(folder / "seven.gguf", "qwen2", "Q4_0", sized(32, 7, 1, 96, 61)),
    ]
    for family, settings in FAMILIES.items():
        (folder / family).mkdir()
        save_reference(family, folder / family, head_dim=32, hidden_size=96, **settings)
        models.append(folder / family)
    for model in models:
        dtype = "int8" if model.is_dir() else "auto"
        target = native_target(model, cache_mb=1, dtype=dtype, home=folder / "home", max_batch=2)
        with recorded_passes(target, threads=2) as script:
            story(target, 270 if model.stem == "mixed" else 50)
        scripts.append(script)
    return scripts


@pytest.mark.parametrize("path", ARM)
def test_passes(stories: list[Script], path: str, tmp_path: Path) -> None:
    for script in stories:
        check(script, path, tmp_path)


@pytest.fixture(scope="module")
def blocks() -> list[Script]:
    scripts = []
    for shape in SHAPES.values():
        runner, script = recorded_blocks(a_net(shape), threads=2)
        texts = [a_text(runner, shape, count, seed) for seed, count in enumerate((1, 140, 9))]
        filled = runner.fill(texts, shape.block)
        runner.chains([ChainStart(block, 0, 3) for block in filled], [1, shape.block, 2])
        runner.logits_at([ChainStart(block, 1, 3) for block in filled])
        scripts.append(script)
    return scripts


@pytest.mark.parametrize("path", ARM)
def test_block_heads(blocks: list[Script], path: str, tmp_path: Path) -> None:
    for script in blocks:
        check(script, path, tmp_path)


def recorded_choices(script: Script, params: SamplingParams, random: np.random.Generator) -> None:
    """Tokens of rows of several sizes, with and without a mask, and after a text where that matters."""
    function = bind(load("sampling", [Unit(SOURCE)], HEADERS))

    def choose(row: int, size: int, settings: int, mask: int | None, text: int | None, *numbers: int) -> int:
        given = Settings.from_address(settings)
        memory = script.memory(bytes(given))
        attach_fields(script, memory, 0, given, {"bias_ids": 8 * given.biased, "biases": 4 * given.biased})
        pieces = [(row, 4 * size), (mask, (size + 31) // 32 * 4), (text, 8 * numbers[0])]
        row_, mask_, text_ = (script.memory(c.string_at(at, n)) if at else 0 for at, n in pieces)
        answer = int(function(row, size, settings, mask, text, *numbers))
        result = script.call("paceline_choose", row_, size, memory, mask_, text_, *numbers)
        script.expect(f"a token with {params}", result.memory, np.int64(answer).tobytes())
        return answer

    pick = NativeChooser(params, choose)
    for seed, size in enumerate((33, 1000, 50_000)):
        logits = (4 * random.standard_normal(size)).astype(np.float32)
        history = History(random.integers(0, size, 40).tolist(), 20)
        mask = random.integers(0, 2**32, (size + 31) // 32, dtype=np.uint32)
        for key in range(12):
            pick(logits, noise_key(seed, key, CHOICE, 1), history)
            pick(logits, noise_key(seed, key, CHOICE, 2), history, mask)


def test_sampled_tokens(tmp_path: Path) -> None:
    script, random = Script(), np.random.default_rng(7)
    for params in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.8, top_p=0.95),
        SamplingParams(temperature=1.0, top_k=50, min_p=0.02),
        SamplingParams(temperature=0.7, presence_penalty=0.5, frequency_penalty=0.3, repetition_penalty=1.2),
        SamplingParams(temperature=1.3, logit_bias=((3, 2.5), (7, -50.0))),
    ):
        recorded_choices(script, params, random)
    with cross_compiler():
        file = native_build.library("sampling", [Unit(SOURCE)], HEADERS)
    check(script, "portable", tmp_path, file)
