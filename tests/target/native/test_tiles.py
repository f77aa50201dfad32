"""Products on AMX tiles: the bits of AVX-512, instructions being functions (tiles.h); and their trial."""

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from paceline.target import hardware
from paceline.target.load import native_path
from paceline.target.native import amx_probe, library
from support.checks import same, story
from support.native_targets import KINDS, built, native_target, pack, random_blocks, sized, tiny_model

SHIM = ("-DPACELINE_TILE_SHIM", "-O1")
VERSION = "of a test"


@pytest.fixture(scope="module")
def shim() -> ctypes.CDLL:
    if not hardware.has(library.NEEDS["avx512"]):
        pytest.skip("the CPU lists no AVX-512 with VNNI")
    if library.usable(library.TILES):
        # Libraries of one namespace share static variables in a process (GNU unique symbols).
        pytest.skip("the instructions themselves run here: test_products.py and test_bits.py test them")
    built("avx512")
    return library.load(library.TILES, SHIM)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_products_in_any_number_of_rows(shim: ctypes.CDLL, kind: str) -> None:
    random = np.random.default_rng(3)
    (matrix,) = pack(shim, kind, random_blocks(kind, 33, 512, random))
    for rows in (*range(1, 20), 31, 32, 33, 50):
        x = random.standard_normal((rows, 512), np.float32) * 10 ** random.uniform(-3, 3)
        x[rows // 2, 64:96] = 0
        found, expected = (matrix.times(lib, x.astype(np.float32)) for lib in (shim, built("avx512")))
        np.testing.assert_array_equal(found.view(np.int32), expected.view(np.int32), f"{rows} rows")


@pytest.mark.slow
def test_passes(shim: ctypes.CDLL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [
        tiny_model(tmp_path / "mixed.gguf", "qwen3", tied=False),
        tiny_model(tmp_path / "experts.gguf", "qwen3moe", "Q4_0", sized(32, 4, 2, 96, 50)),
    ]
    plain = [story(native_target(model, "avx512"), 270) for model in models]
    monkeypatch.setattr(library, "load", cache(lambda *_: shim))
    for model, expected in zip(models, plain, strict=True):
        for threads in (1, 3):
            assert same(story(native_target(model, library.TILES, threads=threads), 270), expected)


@pytest.mark.slow
def test_the_trial_accepts_right_products_alone(shim: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    assert amx_probe.equal(shim, built("avx512"))
    times = amx_probe.Trial.times

    def off_by_a_bit(self: amx_probe.Trial, lib: ctypes.CDLL, x: amx_probe.Floats) -> amx_probe.Floats:
        out = times(self, lib, x)
        if lib is shim and len(x) == 37 and library.FORMATS[self.linear.format] == "K6":
            out[36, 63] = np.nextafter(out[36, 63], np.float32(np.inf))
        return out

    monkeypatch.setattr(amx_probe.Trial, "times", off_by_a_bit)
    assert not amx_probe.equal(shim, built("avx512"))


@pytest.fixture
def lists_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A processor that lists everything, a system that allows tiles, and no trial so far."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(hardware, "has", lambda flags: "asimd" not in flags)
    monkeypatch.setattr(hardware, "_listed", list)
    monkeypatch.setattr(hardware, "allow_tiles", lambda: True)
    hardware.tiles.cache_clear()
    yield monkeypatch
    hardware.tiles.cache_clear()


def trial(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(hardware, "_TILE_TRIAL", (sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("code", "result", "auto", "chosen"),
    [
        ("print('faster')", "faster", library.TILES, library.TILES),
        ("print('slower')", "slower", "avx512", library.TILES),
        ("print('unequal')", "unequal", "avx512", None),
        ("import os; os.kill(os.getpid(), 4)", "illegal", "avx512", None),
        ("raise SystemExit('no compiler')", "untried", "avx512", None),
    ],
)
def test_tiles_are_used_only_after_a_trial(
    lists_amx: pytest.MonkeyPatch, code: str, result: str, auto: str, chosen: str | None
) -> None:
    trial(lists_amx, code)
    assert hardware.tiles(VERSION) == result
    assert (library.best_path("auto"), library.best_path("amx")) == (auto, chosen)
    lists_amx.delenv(library.SETTING, raising=False)
    suffix = "" if auto == library.TILES else f" but AMX, which a trial found {result}"
    assert native_path() == (auto, f"the best this processor lists{suffix}")


def test_a_trial_is_remembered_if_it_ran(lists_amx: pytest.MonkeyPatch) -> None:
    for code, result in (
        ("raise SystemExit('no compiler')", "untried"),
        ("print('slower')", "slower"),
        ("print('faster')", "slower"),
    ):
        trial(lists_amx, code)
        assert hardware.tiles(VERSION) == result
        hardware.tiles.cache_clear()
    assert hardware.tiles("another") == "faster"


def test_a_system_that_does_not_allow_tiles(lists_amx: pytest.MonkeyPatch) -> None:
    trial(lists_amx, "print('faster')")
    lists_amx.setattr(hardware, "allow_tiles", lambda: False)
    assert hardware.tiles(VERSION) == "illegal"
    assert library.best_path("amx") is None


@pytest.mark.slow
def test_the_real_trial_ends_where_tiles_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if hardware.has(("amx_tile",)):
        pytest.skip("this processor lists AMX")
    assert not hardware.allow_tiles()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    assert hardware._try_tiles() == "untried"
