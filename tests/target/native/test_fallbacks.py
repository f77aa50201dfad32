"""The fallback where the native engine cannot run, and the one line that gives the reason."""

import logging
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from paceline.config import EngineConfig, SamplingParams
from paceline.errors import PacelineError, UsageError
from paceline.gguf_header import read_header
from paceline.sampling import native
from paceline.target import hardware
from paceline.target.eager.target import TorchTarget
from paceline.target.load import load_draft, load_target
from paceline.target.native import library
from paceline.target.native.target import NativeTarget
from paceline.types import Feed, Seq
from support.models import CONFIG, open_with, rows_in_one_pass, save_reference
from support.native_targets import SIZES, built, sized, tiny_model

INT8 = EngineConfig(device="cpu", dtype="int8", cache_mb=16)


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a compiler and AVX2, without any setting, and a folder of its own."""
    best = library.best_path("auto")
    if best is None:
        pytest.skip("this processor lists no AVX2")
    for path in (best, "avx2", "portable"):  # before the folder changes: each takes seconds to build
        built(path)
    monkeypatch.delenv(library.SETTING, raising=False)
    monkeypatch.delenv("PACELINE_COMPILER", raising=False)
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "m.gguf", "llama")


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PACELINE_COMPILER", "none")
    monkeypatch.setattr(library, "load", library.load.__wrapped__)  # nothing was loaded before
    for known in (native._functions, native.chooser):
        known.cache_clear()
    yield
    for known in (native._functions, native.chooser):
        known.cache_clear()


def runs_on_torch(path: Path, caplog: pytest.LogCaptureFixture, config: EngineConfig = CONFIG) -> str:
    """Loads it, runs a row, and gives the one line that was logged meanwhile."""
    with caplog.at_level(logging.INFO, "paceline"):
        target = load_target(path, config)
        assert isinstance(target, TorchTarget)
        open_with(target, "s", [1, 2, 3])
        assert rows_in_one_pass(target, "s", 3, [4]).shape == (1, target.vocab_size)
    (line,) = caplog.messages
    assert "\n" not in line
    assert line.startswith(f"{path.name} runs on torch")
    return line


def test_a_disk_tier_that_is_not_there_is_said_once(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    for dtype, disk_mb, lines in (("float32", 64, 1), ("float32", 0, 0), ("auto", 64, 0)):
        caplog.clear()
        with caplog.at_level(logging.INFO, "paceline"):
            config = replace(CONFIG, dtype=dtype, cache_disk_mb=disk_mb, cache_dir=str(model.parent / "kv"))
            target = load_target(model, config)
        said = [line for line in caplog.messages if "is not kept on the disk (cache_disk_mb)" in line]
        assert len(said) == lines
        assert target.disk_tier == (dtype == "auto")


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "PACELINE_COMPILER=none" in runs_on_torch(model, caplog)


@pytest.mark.usefixtures("_no_compiler")
@pytest.mark.parametrize("choice", ["portable", "avx2"])
def test_a_path_that_was_named_but_cannot_be_built(
    model: Path, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(library.SETTING, choice)
    with pytest.raises(UsageError, match=r"^m\.gguf cannot run on the native engine: .*PACELINE_COMPILER"):
        load_target(model, CONFIG)


@pytest.mark.usefixtures("_no_compiler")
def test_eight_bits_without_a_compiler(model: Path) -> None:
    with pytest.raises(UsageError, match="PACELINE_COMPILER=none"):
        load_target(model, INT8)


def test_a_setting_that_names_no_path(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library.SETTING, "nonsense")
    with pytest.raises(UsageError, match=r"nonsense.*auto, amx, avx512, avx2, neon, portable, torch"):
        load_target(model, CONFIG)


def test_torch_on_request_says_nothing(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(library.SETTING, "torch")
    assert isinstance(load_target(model, CONFIG), TorchTarget)
    monkeypatch.delenv(library.SETTING)
    full = EngineConfig(device="cpu", dtype="float32", cache_mb=16)
    assert isinstance(load_target(model, full), TorchTarget)
    assert not caplog.messages


def test_a_processor_without_avx2(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hardware, "has", lambda flags: not flags)
    assert "AVX2" in runs_on_torch(model, caplog)
    with pytest.raises(UsageError, match="AVX2"):
        load_target(model, INT8)
    monkeypatch.setenv(library.SETTING, "avx512")
    with pytest.raises(UsageError, match="avx512"):
        load_target(model, CONFIG)
    monkeypatch.setenv(library.SETTING, "portable")
    target = load_target(model, CONFIG)
    assert isinstance(target, NativeTarget)
    assert target.path == "portable"


def test_a_processor_with_avx2_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "has", lambda flags: set(flags) <= {"avx2", "fma", "f16c"})
    target = load_target(model, CONFIG)
    assert isinstance(target, NativeTarget)
    assert target.path == "avx2"


def test_experts_of_an_odd_width(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "mixture"
    save_reference("mixtral", folder, head_dim=32)
    assert "a width of 60: with experts" in runs_on_torch(folder, caplog)
    with pytest.raises(UsageError, match="a width of 60"):
        load_target(folder, INT8)


def test_heads_that_are_no_multiple_of_a_group(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model(tmp_path / "m.gguf", "llama", "Q8_0", sized(16, 16, 2))
    assert re.search("heads of 16: .*32", runs_on_torch(path, caplog))


def test_an_encoding_it_does_not_hold(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model(tmp_path / "m.gguf", "llama", "Q2_K")
    assert re.search("embed is Q2_K", runs_on_torch(path, caplog))


@pytest.mark.parametrize("kind", ["F16", "BF16", "F32"])
def test_float_weights_are_rounded_on_request_only(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model(tmp_path / "m.gguf", "llama", kind)
    assert re.search(f"embed is {kind}; dtype=int8", runs_on_torch(path, caplog))
    target = load_target(path, INT8)
    assert isinstance(target, NativeTarget)
    open_with(target, "s", [1, 2, 3])
    assert rows_in_one_pass(target, "s", 3, [4]).shape == (1, SIZES.vocab)


def test_floats_of_a_draft_model_are_rounded(tmp_path: Path) -> None:
    folder, odd = tmp_path / "floats", tmp_path / "odd"
    save_reference("qwen2", folder, head_dim=32)
    save_reference("qwen2", odd)  # heads that the native engine cannot run
    floats = EngineConfig(device="cpu", dtype="float32", cache_mb=16)
    assert isinstance(load_draft(folder, CONFIG), NativeTarget)
    for other in (load_target(folder, CONFIG), load_draft(folder, floats), load_draft(odd, CONFIG)):
        assert isinstance(other, TorchTarget)


@pytest.mark.model
@pytest.mark.usefixtures("_no_compiler")
def test_a_whole_engine_without_a_compiler(smollm2_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from paceline import LLM

    with caplog.at_level(logging.WARNING, "paceline"):
        engine = LLM(str(smollm2_path), config=EngineConfig(device="cpu", cache_mb=64))
        assert engine.generate("Hello", SamplingParams(max_tokens=3)).text
    assert isinstance(engine.target, TorchTarget)
    (line,) = caplog.messages
    assert "PACELINE_COMPILER=none" in line


def test_a_changed_header_never_surprises_the_native_engine(tmp_path: Path) -> None:
    """Each file loads and runs, or is refused in one line."""
    whole = tiny_model(tmp_path / "whole.gguf").read_bytes()
    size, random = len(read_header(tmp_path / "whole.gguf").raw), Random(0)
    refused: list[str] = []
    for _ in range(60):
        changed = bytearray(whole)
        for _ in range(3):
            changed[random.randrange(size)] = random.choice((0, 1, 255, random.randrange(256)))
        (tmp_path / "m.gguf").write_bytes(changed)
        try:
            target = load_target(tmp_path / "m.gguf", CONFIG)
            target.open(Seq("s", [1, 2, 3], 3))
            assert target.forward([Feed("s", [1, 2, 3])]).logits.shape[0] == 1
        except PacelineError as error:
            refused.append(str(error))
    assert 10 < len(refused) < 50
    assert not any("\n" in message for message in refused)
