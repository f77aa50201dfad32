"""The processor probe."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.target import hardware


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
