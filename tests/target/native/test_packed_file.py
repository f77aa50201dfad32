"""The packed file: made once, found again, never trusted blindly, and not needed."""

import errno
import os
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline import limits
from paceline.atomic import locked
from paceline.paths import home
from paceline.target.native import library, packed_file, packing
from paceline.target.native.target import NativeTarget
from support import tiny_gguf
from support.checks import same, story
from support.native_targets import SIZES, native_target, sized, tiny_model, wanted_path


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "m.gguf", "qwen2")


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every packing that is done."""
    done: list[int] = []
    real = packing.pack_into

    def counted(data: packing.Bytes, *others: Any, **named: Any) -> None:
        done.append(len(data))
        real(data, *others, **named)

    monkeypatch.setattr(packed_file, "pack_into", counted)
    return done


def files(model: Path) -> list[Path]:
    return sorted(
        f for f in (model.parent / "home" / "packed").iterdir() if f.suffix not in (".lock", ".boot")
    )


def rows_of(model: Path) -> list[Tensor]:
    return story(native_target(model), 30)


def test_a_second_start_packs_nothing(model: Path, fills: list[int]) -> None:
    first = rows_of(model)
    (file,) = files(model)
    made = file.stat()
    assert same(rows_of(model), first)
    assert len(fills) == 1
    assert file.stat().st_mtime_ns == made.st_mtime_ns
    assert made.st_size == fills[0] + 4096


@pytest.mark.parametrize("free", [None, 0, 2**50])
def test_with_and_without_memory_for_a_copy(
    model: Path, fills: list[int], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: free)
    first = rows_of(model)
    assert same(rows_of(model), first)
    assert len(fills) == 1


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "damage", ["empty", "no file", "half", "one byte less", "one byte more", "magic", "digest", "a folder"]
)
def test_a_damaged_file_is_made_anew(model: Path, fills: list[int], damage: str) -> None:
    first = rows_of(model)
    (file,) = files(model)
    whole = file.read_bytes()
    changed = {
        "empty": b"",
        "half": whole[: len(whole) // 2],
        "one byte less": whole[:-1],
        "one byte more": whole + b"\0",
        "magic": b"P" + whole[1:],
        "digest": whole[:30] + bytes([whole[30] ^ 1]) + whole[31:],
    }
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "no file":
        file.write_bytes(changed[damage])
    assert same(rows_of(model), first)
    assert len(fills) >= 2
    if damage != "a folder":
        assert files(model) == [file]
        assert file.read_bytes() == whole


@pytest.mark.slow
@pytest.mark.parametrize("free", [0, 2**50])  # mapped, and read into memory
def test_a_flipped_bit_anywhere_is_found(
    model: Path,
    fills: list[int],
    free: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(limits, "available_memory", lambda: free)
    monkeypatch.setattr(packed_file, "_CHUNK", 1 << 16)
    native_target(model)
    (file,) = files(model)
    whole = file.read_bytes()
    random = np.random.default_rng(0)
    in_the_data = random.integers(4096, len(whole), 40).tolist()
    for at in (24, 90, 153, 154, 4095, 4096, len(whole) - 1, *in_the_data):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << int(random.integers(8))
        file.write_bytes(damaged)
        done = len(fills)
        native_target(model)
        assert len(fills) == done + 1, f"byte {at}"
        assert file.read_bytes() == whole
        if at > 100:
            assert caplog.messages[-1] == f"{file.name} is damaged: the weights are packed again"


def test_a_mapped_file_is_checked_once_after_a_boot(
    model: Path, fills: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digests: list[int] = []

    def counted(data: packing.Bytes, *others: Any) -> str:
        digests.append(len(data))
        return real(data, *others)

    real = packed_file.content_digest
    boot = tmp_path / "boot_id"
    boot.write_text("first\n")
    monkeypatch.setattr(limits, "available_memory", lambda: 0)
    monkeypatch.setattr(packed_file, "_BOOT_ID", boot)
    native_target(model)
    (file,) = files(model)
    monkeypatch.setattr(packed_file, "content_digest", counted)
    native_target(model)
    assert len(digests) == 1, "too new to tell another write by its time"
    monkeypatch.setattr(packed_file, "_TICK_NS", 0)
    for checks, change in ((2, None), (2, None), (3, "second\n"), (3, None)):
        if change:
            boot.write_text(change)
        native_target(model)
        assert len(digests) == checks
    os.utime(file)
    native_target(model)
    assert len(digests) == 4
    boot.unlink()  # another system
    native_target(model)
    assert len(digests) == 5
    assert len(fills) == 1


def test_the_checksum_is_xxh64() -> None:
    """Reference values of xxhash.com; the last one covers every loop."""
    lib, digits = library.load(wanted_path()), np.frombuffer(b"0123456789" * 5, np.uint8)[:47]
    known = {b"": 0xEF46DB3751D8E999, b"abc": 0x44BC2CF5AD770999}
    for text, expected in known.items():
        assert lib.paceline_xxh64(text, len(text), 0) == expected
    assert lib.paceline_xxh64(digits.ctypes.data, 47, 0) == xxh64(bytes(digits))


def xxh64(text: bytes) -> int:
    """Straight from the specification, for 32 bytes or more and seed 0."""
    p1, p2, p3, p4, p5 = (
        *(0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        *(0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5),
    )

    def rotate(x: int, by: int) -> int:
        return (x << by | x % 2**64 >> (64 - by)) % 2**64

    def step(lane: int, word: int) -> int:
        return rotate((lane + word * p2) % 2**64, 31) * p1 % 2**64

    lanes, at = [(p1 + p2) % 2**64, p2, 0, -p1 % 2**64], 0
    while at + 32 <= len(text):
        words = struct.unpack_from("<4Q", text, at)
        lanes, at = [step(lane, word) for lane, word in zip(lanes, words, strict=True)], at + 32
    h = sum(rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) % 2**64
    for lane in lanes:
        h = ((h ^ step(0, lane)) * p1 + p4) % 2**64
    h = (h + len(text)) % 2**64
    while at + 8 <= len(text):
        h, at = (rotate(h ^ step(0, *struct.unpack_from("<Q", text, at)), 27) * p1 + p4) % 2**64, at + 8
    if at + 4 <= len(text):
        (word,) = struct.unpack_from("<I", text, at)
        h, at = (rotate(h ^ word * p1 % 2**64, 23) * p2 + p3) % 2**64, at + 4
    for byte in text[at:]:
        h = rotate(h ^ byte * p5 % 2**64, 11) * p1 % 2**64
    h = (h ^ h >> 33) * p2 % 2**64
    h = (h ^ h >> 29) * p3 % 2**64
    return h ^ h >> 32


def test_another_version_is_made_anew(model: Path, fills: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = rows_of(model)
    (file,) = files(model)
    old = file.read_bytes()
    monkeypatch.setattr(packed_file, "VERSION", packed_file.VERSION + 1)
    assert same(rows_of(model), first)
    assert len(fills) == 2
    assert files(model) == [file]
    assert file.read_bytes()[:100] != old[:100]


def only_line(caplog: pytest.LogCaptureFixture) -> str:
    (line,) = caplog.messages
    assert "\n" not in line
    return line


def test_a_home_that_cannot_be_written(
    model: Path, fills: list[int], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    first = rows_of(model)
    (tmp_path / "file").touch()
    target = native_target(model, home=tmp_path / "file" / "home")
    assert "packed weights are not stored" in only_line(caplog)
    assert same(story(target, 30), first)
    assert len(fills) == 2


def test_a_full_disk(
    model: Path, fills: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        first = rows_of(model)
    assert os.strerror(errno.ENOSPC) in only_line(caplog)
    assert len(fills) == 1
    assert files(model) == []
    assert same(rows_of(model), first)
    assert len(files(model)) == 1


def test_a_failure_leaves_no_temporary_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("in the middle of it")

    with monkeypatch.context() as patch:
        patch.setattr(packed_file, "pack_into", fail)
        with pytest.raises(RuntimeError, match="middle"):
            native_target(model)
    assert files(model) == []


def test_what_a_killed_process_left_is_removed(model: Path, fills: list[int]) -> None:
    native_target(model)
    (file,) = files(model)
    file.rename(file.with_name(f"{file.name}.0123456789abcdef.new"))
    native_target(model)
    assert files(model) == [file]
    assert len(fills) == 2


def test_a_second_start_waits_for_the_first_and_packs_nothing(
    model: Path, fills: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    native_target(model)
    (file,) = files(model)
    packed = file.rename(file.with_name("packed"))
    with ThreadPoolExecutor(1) as pool:
        with locked(file.with_suffix(".lock")):
            second = pool.submit(native_target, model)
            while not any("another process" in line for line in caplog.messages):
                assert not second.done()
                time.sleep(0.01)
            packed.rename(file)
        second.result(60)
    assert len(fills) == 1


@pytest.mark.slow
def test_two_processes_at_once(model: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from paceline.config import EngineConfig\n"
        "from paceline.target.load import load_target; from paceline.types import Feed, Seq\n"
        f"target = load_target(Path({str(model)!r}), EngineConfig(device='cpu', cache_mb=16))\n"
        "target.open(Seq('s', [1, 2, 3, 4], 4))\n"
        "sys.stdout.buffer.write(target.forward([Feed('s', [1, 2, 3, 4])]).logits.numpy().tobytes())\n"
    )
    path, folder = wanted_path(), model.parent / "home"
    folder.mkdir()
    (folder / "native").symlink_to(home() / "native")  # not to build the library once more
    environment = {
        **os.environ,
        "PACELINE_HOME": str(folder),
        "PACELINE_CPU": path.removesuffix("vnni"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-c", code]
    three = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) for _ in range(3)]
    said = [process.communicate()[0] for process in three]
    assert len(said[0]) == 4 * SIZES.vocab
    assert said == [said[0]] * 3
    assert [process.returncode for process in three] == [0, 0, 0]
    assert [file.suffix for file in files(model)] == [".bin"]


def first_logits(target: NativeTarget) -> Tensor:
    from support.models import open_with, rows_in_one_pass

    open_with(target, "s", [1, 2])
    return rows_in_one_pass(target, "s", 2, [3])


def test_models_of_one_name_do_not_meet(tmp_path: Path, fills: list[int]) -> None:
    shared = tmp_path / "home"
    logits = []
    for i in range(3):
        (tmp_path / str(i)).mkdir()
        path = tiny_model(tmp_path / str(i) / "m.gguf", "llama", "Q8_0", seed=min(i, 1))
        logits.append(first_logits(native_target(path, home=shared)))
    assert not torch.equal(logits[0], logits[1])
    assert torch.equal(logits[1], logits[2])
    assert len(list((shared / "packed").glob("*.bin"))) == 2
    assert len(fills) == 3  # a copy of a file is as good as another file


PEAK = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from paceline.config import EngineConfig
from paceline.target.load import load_target
target = load_target(Path(sys.argv[1]), EngineConfig(device="cpu", cache_mb=64))
status = dict(line.split(":") for line in open("/proc/self/status"))
print(target.bytes_held, *(1024 * int(status[name].split()[0]) for name in ("VmHWM", "VmRSS")))
"""


@pytest.mark.model
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_packing_holds_the_weights_once(smollm2_path: Path, tmp_path: Path) -> None:
    wanted_path()
    (tmp_path / "native").symlink_to(home() / "native")
    environment = {**os.environ, "PACELINE_HOME": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PEAK, str(smollm2_path)]
    done = subprocess.run(command, env=environment, capture_output=True, check=True, text=True)
    weights, peak, now = map(int, done.stdout.split())
    assert len(list((tmp_path / "packed").glob("*.bin"))) == 1
    assert peak - now < weights / 4


def test_a_model_that_is_replaced_in_place(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    before = first_logits(native_target(tiny_model(path, "llama", "Q8_0", seed=0)))
    after = first_logits(native_target(tiny_model(path, "llama", "Q8_0", seed=1)))
    again = first_logits(native_target(path, home=tmp_path / "another"))
    assert not torch.equal(before, after)
    assert torch.equal(after, again)


def test_models_that_differ_in_the_middle_of_a_tensor(tmp_path: Path) -> None:
    """One row of a large embedding was trained on: all else is equal."""
    sizes = sized(64, 4, 2, 512, 2000)
    path, changed = tmp_path / "m.gguf", tmp_path / "n.gguf"
    weights = tiny_gguf.tensors("qwen2", 0, sizes)
    settings = sizes.settings("qwen2")
    tiny_gguf.write(path, "qwen2", weights, "Q8_0", settings)
    weights["token_embd.weight"][1000] *= -1
    tiny_gguf.write(changed, "qwen2", weights, "Q8_0", settings)
    rows = []
    for file in (path, changed):
        target = native_target(file, home=tmp_path / "home")
        rows.append(first_logits(target)[0, 1000])
    assert not torch.equal(rows[0], rows[1])
