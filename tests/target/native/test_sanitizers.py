"""The C++ under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer: see sanitized.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import native_build
from paceline.errors import NotCompiled
from paceline.target import hardware
from paceline.target.native import library
from support import SUPPORT

LIGHT = ("-O1", "-g1")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *LIGHT)
THREADS = ("-fsanitize=thread", *LIGHT)


def runtime(name: str) -> str:
    """A sanitizer's library, which has to be in the process before Python is."""
    try:
        compiler = native_build._compiler("test")
    except NotCompiled as error:
        pytest.skip(str(error))
    asked = [*compiler, f"-print-file-name={name}"]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"{compiler[0]} has no {name}")
    return found


def run(what: str, path: str, folder: Path, flags: tuple[str, ...], preload: str) -> None:
    if not hardware.has(library.NEEDS[path]):
        pytest.skip(f"this processor lists no {path}")
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime(preload)} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps what it allocated until it ends
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    script = str(SUPPORT / "sanitized.py")
    command = [sys.executable, script, what, path, str(folder), *flags]
    if preload == "libtsan.so":
        # It cannot place its shadow where addresses are randomised too freely.
        if shutil.which("setarch") is None:
            pytest.skip("no setarch here")
        command = ["setarch", "-R", *command]
        tried = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False)
        if tried.returncode:
            pytest.skip("setarch -R is not allowed here")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot map its shadow here")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[:4000]
    assert f"{what} ran to the end" in said
    assert "Sanitizer" not in said, said[:4000]
    assert "runtime error" not in said, said[:4000]


@pytest.mark.parametrize("path", ["avx2", "portable"])
def test_no_access_out_of_bounds_and_no_undefined_behaviour(path: str, tmp_path: Path) -> None:
    """Not avx512, whose dot products are written in assembler that no sanitizer looks into."""
    run("passes", path, tmp_path, MEMORY, "libasan.so")


@pytest.mark.parametrize(
    "path",
    [
        "avx2",
        "portable",
    ],
)
def test_rows_that_are_no_numbers(path: str, tmp_path: Path) -> None:
    run("odd rows", path, tmp_path, MEMORY, "libasan.so")


def test_no_data_race(tmp_path: Path) -> None:
    run("passes", "avx2", tmp_path, THREADS, "libtsan.so")
