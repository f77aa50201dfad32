"""The processor probe."""

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline import limits
from paceline.target import hardware
from paceline.target.native import library
from support.emulated import COMPILER, require_emulator


@pytest.fixture
def claims_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A processor that lists AMX, and no memory of having tried it."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv(hardware.ISA_SETTING, "")
    monkeypatch.delenv(hardware.ISA_SETTING)
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: {"model name": "Test", "flags": "avx2 amx_tile"})
    hardware.amx.cache_clear()
    yield monkeypatch
    hardware.amx.cache_clear()


def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")


def test_illegal_amx_is_avoided_for_bfloat16_only(claims_amx: pytest.MonkeyPatch) -> None:
    dying(claims_amx)
    hardware.prepare(torch.float32)
    assert hardware.ISA_SETTING not in os.environ
    hardware.prepare(torch.bfloat16)
    assert os.environ[hardware.ISA_SETTING] == hardware.WITHOUT_AMX
    assert hardware.describe()["amx"] == "illegal"
    assert hardware.describe()["max cpu isa"] == hardware.WITHOUT_AMX


def test_working_amx_is_used(claims_amx: pytest.MonkeyPatch) -> None:
    claims_amx.setattr(hardware, "_TRIAL", "pass")
    hardware.prepare(torch.bfloat16)
    assert hardware.ISA_SETTING not in os.environ
    assert hardware.amx() == "works"


def test_the_users_setting_stands(claims_amx: pytest.MonkeyPatch) -> None:
    dying(claims_amx)
    claims_amx.setenv(hardware.ISA_SETTING, "AVX2")
    hardware.prepare(torch.bfloat16)
    assert os.environ[hardware.ISA_SETTING] == "AVX2"


def test_the_trial_is_remembered(claims_amx: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying(claims_amx)
    assert hardware.amx() == "illegal"
    hardware.amx.cache_clear()
    claims_amx.setattr(hardware, "_TRIAL", "pass")
    assert hardware.amx() == "illegal"
    (tmp_path / "cpu.json").write_text("{ damaged")
    hardware.amx.cache_clear()
    assert hardware.amx() == "works"


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    claims_amx: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    claims_amx.setenv("PACELINE_HOME", str(tmp_path / "file"))
    claims_amx.setattr(hardware, "_TRIAL", "pass")
    assert hardware.amx() == "works"


@pytest.mark.slow
def test_the_trial_itself_runs_here() -> None:
    """It must fail for no reason but illegal instructions."""
    assert hardware.amx() != "absent" or hardware._try_amx() == "works"


def test_describes_this_machine() -> None:
    found = hardware.describe()
    assert found["cores"] >= 1
    assert found["torch threads"] >= 1
    assert found["amx"] in ("absent", "works", "illegal")


@pytest.mark.parametrize(
    ("words", "features", "path"),
    [
        ((0, 0), [], None),
        ((1 << 1, 0), ["asimd"], "neon"),
        ((1 << 1 | 1 << 20, 0), ["asimd", "asimddp"], "neondotprod"),
        ((1 << 1 | 1 << 20, 1 << 13), ["asimd", "asimddp", "i8mm"], "neoni8mm"),
    ],
)
def test_features_of_arm(
    monkeypatch: pytest.MonkeyPatch, words: tuple[int, int], features: list[str], path: str | None
) -> None:
    """By the kernel's words on Linux, AT_HWCAP and AT_HWCAP2, and by sysctl on macOS."""
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(hardware, "_auxiliary_value", dict(zip((16, 26), words, strict=True)).get)
    assert hardware._arm_features() == features
    assert library.best_path("auto") == library.best_path("neon") == path
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(hardware, "_sysctl", lambda entry: entry in [hardware._SYSCTLS[f] for f in features])
    assert hardware._arm_features() == features
    assert library.best_path("auto") == path


def test_the_kernel_tells_something() -> None:
    """AT_PAGESZ is 6 on every architecture."""
    assert hardware._auxiliary_value(6) == os.sysconf("SC_PAGE_SIZE")


def test_the_bits_are_those_of_the_kernel_s_header() -> None:
    require_emulator()
    source = "#include <sys/auxv.h>\n" + "".join(
        f'static_assert({name} == {value}, "");\n'
        for name, value in (
            ("AT_HWCAP", hardware._AT_HWCAP),
            ("AT_HWCAP2", hardware._AT_HWCAP2),
            ("HWCAP_ASIMD", f"1 << {hardware._HWCAPS['asimd'][1]}"),
            ("HWCAP_ASIMDDP", f"1 << {hardware._HWCAPS['asimddp'][1]}"),
            ("HWCAP2_I8MM", f"1 << {hardware._HWCAPS['i8mm'][1]}"),
        )
    )
    command = [COMPILER, "-xc++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_arm_has_no_name_for_a_processor_but_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: {"CPU implementer": "0x41", "CPU part": "0xd0c"})
    assert hardware.name() == "ARM, implementer 0x41, part 0xd0c"


def test_torch_takes_no_more_threads_than_a_quota_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        monkeypatch.setattr(limits, "cores", lambda: 2)
        hardware.set_torch_threads(0)  # no quota: it is torch's own affair
        assert torch.get_num_threads() == 3
        monkeypatch.setattr(limits, "cpu_quota", lambda: 1.5)
        hardware.set_torch_threads(0)
        assert torch.get_num_threads() == 2
        hardware.set_torch_threads(1)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)
