"""The processor probe."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from paceline.target import cpu


@pytest.fixture
def claims_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A processor that lists AMX, and no memory of having tried it."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setenv(cpu.ISA_SETTING, "")
    monkeypatch.delenv(cpu.ISA_SETTING)
    monkeypatch.setattr(cpu, "_cpuinfo", lambda: {"model name": "Test", "flags": "avx2 amx_tile"})
    cpu.amx.cache_clear()
    yield monkeypatch
    cpu.amx.cache_clear()


def dying(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_TRIAL", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")


def test_illegal_amx_is_avoided_for_bfloat16_only(claims_amx: pytest.MonkeyPatch) -> None:
    dying(claims_amx)
    cpu.prepare(torch.float32)
    assert cpu.ISA_SETTING not in os.environ
    cpu.prepare(torch.bfloat16)
    assert os.environ[cpu.ISA_SETTING] == cpu.WITHOUT_AMX
    assert cpu.describe()["amx"] == "illegal"
    assert cpu.describe()["isa cap"] == cpu.WITHOUT_AMX


def test_working_amx_is_used(claims_amx: pytest.MonkeyPatch) -> None:
    claims_amx.setattr(cpu, "_TRIAL", "pass")
    cpu.prepare(torch.bfloat16)
    assert cpu.ISA_SETTING not in os.environ
    assert cpu.amx() == "works"


def test_the_users_setting_stands(claims_amx: pytest.MonkeyPatch) -> None:
    dying(claims_amx)
    claims_amx.setenv(cpu.ISA_SETTING, "AVX2")
    cpu.prepare(torch.bfloat16)
    assert os.environ[cpu.ISA_SETTING] == "AVX2"


def test_the_trial_is_remembered(claims_amx: pytest.MonkeyPatch, tmp_path: Path) -> None:
    dying(claims_amx)
    assert cpu.amx() == "illegal"
    cpu.amx.cache_clear()
    claims_amx.setattr(cpu, "_TRIAL", "pass")
    assert cpu.amx() == "illegal"
    (tmp_path / "cpu.json").write_text("{ damaged")
    cpu.amx.cache_clear()
    assert cpu.amx() == "works"


def test_a_folder_that_cannot_be_written_is_no_obstacle(
    claims_amx: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    claims_amx.setenv("PACELINE_HOME", str(tmp_path / "file"))
    claims_amx.setattr(cpu, "_TRIAL", "pass")
    assert cpu.amx() == "works"


def test_the_trial_itself_runs_here() -> None:
    """It must fail for no reason but illegal instructions."""
    assert cpu.amx() != "absent" or cpu._try_amx() == "works"


def test_describes_this_machine() -> None:
    found = cpu.describe()
    assert found["cores"] >= 1
    assert found["torch threads"] >= 1
    assert found["amx"] in ("absent", "works", "illegal")
