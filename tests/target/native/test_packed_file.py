"""The packed file: made once, found again, never trusted blindly, and not needed."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from paceline.paths import home
from paceline.target import memory
from paceline.target.native import packing
from paceline.target.native.target import NativeTarget
from support import tiny_gguf
from support.native_cases import SIZES, native_target, sized, tiny_model, wanted_path
from support.row_checks import same, story


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "m.gguf", "qwen2")


@pytest.fixture
def fills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The size of every packing that is done."""
    done: list[int] = []
    real = packing._fill

    def counted(data: packing.Bytes, *others: object) -> None:
        done.append(len(data))
        real(data, *others)  # type: ignore[arg-type]

    monkeypatch.setattr(packing, "_fill", counted)
    return done


def files(model: Path) -> list[Path]:
    return sorted((model.parent / "home" / "packed").iterdir())


def told(model: Path) -> list[Tensor]:
    return story(native_target(model), 30)


def test_a_second_start_packs_nothing(model: Path, fills: list[int]) -> None:
    first = told(model)
    (file,) = files(model)
    made = file.stat()
    assert same(told(model), first)
    assert len(fills) == 1
    assert file.stat().st_mtime_ns == made.st_mtime_ns
    assert made.st_size == fills[0] + 4096


@pytest.mark.parametrize("free", [None, 0, 2**50])
def test_with_and_without_memory_for_a_copy(
    model: Path, fills: list[int], free: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda: free)
    first = told(model)
    assert same(told(model), first)
    assert len(fills) == 1


@pytest.mark.parametrize(
    "damage", ["empty", "no file", "half", "one byte less", "one byte more", "magic", "digest", "a folder"]
)
def test_a_damaged_file_is_made_anew(model: Path, fills: list[int], damage: str) -> None:
    first = told(model)
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
    assert same(told(model), first)
    assert len(fills) >= 2
    if damage != "a folder":
        assert files(model) == [file]
        assert file.read_bytes() == whole


def test_another_version_is_made_anew(model: Path, fills: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    first = told(model)
    (file,) = files(model)
    old = file.read_bytes()
    monkeypatch.setattr(packing, "VERSION", packing.VERSION + 1)
    assert same(told(model), first)
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
    first = told(model)
    (tmp_path / "file").touch()
    target = native_target(model, home=tmp_path / "file" / "home")
    assert "packed weights are not kept" in only_line(caplog)
    assert same(story(target, 30), first)
    assert len(fills) == 2


def test_a_full_disk(
    model: Path, fills: list[int], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        first = told(model)
    assert os.strerror(errno.ENOSPC) in only_line(caplog)
    assert len(fills) == 1
    assert files(model) == []
    assert same(told(model), first)
    assert len(files(model)) == 1


def test_a_failure_leaves_no_temporary_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("in the middle of it")

    with monkeypatch.context() as patch:
        patch.setattr(packing, "_fill", fail)
        with pytest.raises(RuntimeError, match="middle"):
            native_target(model)
    assert files(model) == []


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
    from support.torch_cases import open_with, rows_in_one_pass

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
    assert len(list((shared / "packed").iterdir())) == 2
    assert len(fills) == 3  # a copy of a file is as good as another file


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
