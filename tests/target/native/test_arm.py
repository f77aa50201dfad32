"""The NEON paths and the plain one on ARM, emulated, against this machine's library: the same bits."""

import ctypes as c
from pathlib import Path

import numpy as np
import pytest

from paceline.heads.runner import ChainStart
from paceline.target.native import library
from paceline.target.native.packing import TO_FOUR_BITS
from paceline.target.weights.dequant import ENCODINGS
from support.checks import story
from support.emulated import (
    PROCESSORS,
    Memory,
    Script,
    check,
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
    "gemma3_text": {"sliding_window": 100},  # two frequencies, norms behind the products
    "gemma2": {"sliding_window": 20},  # soft-capping
    "qwen3_moe": {},  # a dense layer among those with experts
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
    return packed.linear.outputs // library.UNIT * pair


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
        target = native_target(model, cache_mb=1, dtype=dtype, home=folder / "home")
        with recorded_passes(target, threads=2) as script:
            story(target, 270 if model.stem == "mixed" else 130)
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
