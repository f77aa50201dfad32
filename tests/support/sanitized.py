"""Run by test_sanitizers.py in a process of its own: everything the C++ does, in a build with sanitizers.

python sanitized.py FOLDER PATH,... FLAG...        prints "PATH: PART ran to the end" after each part
"""

import errno
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from paceline.heads.runner import ChainStart
from paceline.target.native import library, packed_file
from paceline.target.native import target as native_module
from paceline.target.native.packing import TO_FOUR_BITS
from paceline.types import Draft, Feed, Seq
from support import native_targets
from support.checks import check_chain, check_tree, story
from support.models import open_with, random_tree, some_tokens
from support.native_targets import (
    KINDS,
    SHAPES,
    a_net,
    a_text,
    native,
    native_target,
    pack,
    random_blocks,
    sized,
    tiny_model,
)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "a disk that is always full")


def watch(flags: tuple[str, ...]) -> None:
    """Builds libraries with these flags, and gives them memory that a sanitizer knows the bounds of."""
    real = library.load.__wrapped__
    library.load = cache(lambda wanted, extra=(): real(wanted, flags))
    native_targets.library.load = library.load  # type: ignore[attr-defined]
    os.posix_fallocate = full  # weights in memory from malloc instead of a mapped file
    native_module._memory = lambda nbytes: np.zeros(nbytes, np.uint8)  # type: ignore[assignment, return-value]
    packed_file.log.disabled = True


def products(path: str) -> None:
    lib, random = library.load(path), np.random.default_rng(0)
    for kind in KINDS:
        for outputs, count in ((1, 1), (33, 5), (48, 13)):
            (matrix,) = pack(lib, kind, random_blocks(kind, outputs, 512, random))
            matrix.unpacked(lib)
            matrix.times(lib, random.standard_normal((count, 512), np.float32))
    floats = random.standard_normal((35, 96), np.float32)
    floats[0] = 0
    floats[1, 3:6] = np.nan, np.inf, -np.inf
    pack(lib, TO_FOUR_BITS, floats.view(np.uint8))[0].unpacked(lib)
    (matrix,) = pack(lib, "F32", floats.view(np.uint8))
    matrix.times(lib, random.standard_normal((3, 96), np.float32) * np.float32(1e30))
    matrix.times(lib, np.zeros((2, 96), np.float32))


def odd_rows(path: str) -> None:
    """Numbers that no int8 code stands for."""
    lib, random = library.load(path), np.random.default_rng(1)
    for kind in ("Q8_0", "Q6_K", "Q4_K"):
        (matrix,) = pack(lib, kind, random_blocks(kind, 32, 256, random, tame=True))
        for odd in (np.nan, np.inf, -np.inf, 3e38, 1e-37, 1e-40):
            x = random.standard_normal((5, 256), np.float32)
            x[2, 100:] = odd
            x[3] = odd
            matrix.times(lib, x)


def passes(path: str, folder: Path) -> None:
    long = 270 if path != "portable" else 20  # it takes a minute for the rest
    models: list[Any] = [
        tiny_model(folder / "mixed.gguf", "qwen3", tied=False),
        tiny_model(folder / "odd.gguf", "qwen2", "Q4_0", sized(32, 7, 1, 96, 61)),
        tiny_model(folder / "floats.gguf", "llama", "F16", sized(64, 3, 1, 45, 50)),
        tiny_model(folder / "windows.gguf", "gemma2", "Q8_0", sized(32, 4, 2, 96, 50)),
        tiny_model(folder / "experts.gguf", "qwen3moe", "Q4_0", sized(32, 4, 2, 96, 50)),
    ]
    for model in models:
        dtype = "int8" if model.stem == "floats" else "auto"
        for threads in (1, 3):
            target = native_target(model, path, threads=threads, dtype=dtype)
            story(target, long)
        check_chain(target, 15, (2, 17))
        target.open(Seq("sketched", [1, 2], 2))
        target.skip_forward([Feed("sketched", [1, 2])], [0], (1,))
        check_tree(target, 13, random_tree(9, 3, seed=1, vocab=50))
        for i, name in enumerate("cdef"):
            open_with(target, name, some_tokens(9 * i + 3, seed=i, vocab=50), tenant=name)
        feeds = [Feed(name, [1, 2], random_tree(4, 2, seed=9, vocab=50)) for name in "cde"]
        target.forward([*feeds, Feed("f", some_tokens(2 * long - 10, 1, 50), Draft((1, 2)))], taps=(1,))


def blocks(path: str) -> None:
    for shape in SHAPES.values():
        net = a_net(shape)
        for threads in (1, 3):
            runner = native(net, path, threads)
            counts = (1, 140 if path != "portable" else 20, 9)
            texts = [a_text(runner, shape, count, seed) for seed, count in enumerate(counts)]
            for slots in (1, shape.block):
                filled = runner.fill(texts, slots)
                places = [ChainStart(block, 0, 3) for block in filled]
                runner.chains(places, [1, slots, 1])
                runner.logits_at(places)


def pages(path: str, folder: Path) -> None:
    """Written, read by several threads, damaged, and read again."""
    model = tiny_model(folder / "pages.gguf", "qwen2", "Q4_0", sized(32, 4, 2, 96, 50))
    prompt = some_tokens(150, seed=3, vocab=50)
    for found, threads in ((0, 1), (149, 3), (64, 3)):
        target = native_target(model, path, threads=threads)
        target.add_disk_cache(folder / "kv", 64 << 20, "m")
        target.open(Seq("s", prompt, len(prompt)))
        assert target.restore("s", 60) == (found, False)
        target.forward([Feed("s", prompt[found:], scored=False)])
        target.keep("s", len(prompt))
        target.close("s")
        assert target.flush(60)
        if found:
            key = target._cache.disk.keys("", prompt[:128])[2]  # type: ignore[union-attr]
            (second,) = (folder / "kv").glob(f"*/{key.hex()}.page")
            os.truncate(second, 5000)


def parts(path: str, folder: Path) -> dict[str, Callable[[], None]]:
    return {
        "products": lambda: products(path),
        "odd rows": lambda: odd_rows(path),
        "passes": lambda: passes(path, folder),
        "blocks": lambda: blocks(path),
        "pages": lambda: pages(path, folder),
    }


if __name__ == "__main__":
    into, paths, *flags = sys.argv[1:]
    watch(tuple(flags))
    for path in paths.split(","):
        (folder := Path(into, path)).mkdir()
        for name, part in parts(path, folder).items():
            part()
            print(f"{path}: {name} ran to the end", flush=True)
