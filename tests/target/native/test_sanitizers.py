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

pytestmark = pytest.mark.slow

LIGHT = ("-O1", "-g1")
MEMORY = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", *LIGHT)
THREADS = ("-fsanitize=thread", *LIGHT)
PARTS = ("products", "odd rows", "passes", "blocks", "pages")  # see sanitized.py


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


def run(paths: list[str], folder: Path, flags: tuple[str, ...], preload: str) -> str:
    """All parts on all paths in one process, each library built once; gives what it printed.

    Libraries are built here: there the compiler too would run under the sanitizer.
    """
    environment = {
        **os.environ,
        "LD_PRELOAD": f"{runtime(preload)} {runtime('libstdc++.so.6')}",
        "ASAN_OPTIONS": "detect_leaks=0",  # Python itself keeps what it allocated until it ends
        "TSAN_OPTIONS": "halt_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, str(SUPPORT / "sanitized.py"), str(folder), ",".join(paths), *flags]
    if preload == "libtsan.so":
        # It cannot place its shadow where addresses are randomised too freely.
        if shutil.which("setarch") is None:
            pytest.skip("no setarch here")
        command = ["setarch", "-R", *command]
        tried = subprocess.run(["setarch", "-R", "true"], capture_output=True, check=False)
        if tried.returncode:
            pytest.skip("setarch -R is not allowed here")
    for path in paths:
        library.build(path, flags)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("ThreadSanitizer cannot map its shadow here")
    return f"{done.stdout}{done.stderr}\nexit status {done.returncode}"


def runnable(*paths: str) -> list[str]:
    return [path for path in paths if hardware.has(library.NEEDS[path])]


@pytest.fixture(scope="module")
def memory_checked(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Not avx512, whose dot products are written in assembler that no sanitizer looks into."""
    return run(runnable("avx2", "portable"), tmp_path_factory.mktemp("memory"), MEMORY, "libasan.so")


@pytest.mark.parametrize("path", ["avx2", "portable"])
@pytest.mark.parametrize("part", PARTS)
def test_no_access_out_of_bounds_and_no_undefined_behaviour(
    path: str, part: str, memory_checked: str
) -> None:
    if path not in runnable(path):
        pytest.skip(f"this processor lists no {path}")
    assert f"{path}: {part} ran to the end" in memory_checked, memory_checked[-4000:]


def test_the_memory_sanitizers_report_nothing(memory_checked: str) -> None:
    require_no_report(memory_checked)


def test_no_data_race(tmp_path: Path) -> None:
    if not runnable("avx2"):
        pytest.skip("this processor lists no avx2")
    output = run(["avx2"], tmp_path, THREADS, "libtsan.so")
    require_no_report(output)
    for part in PARTS:
        assert f"avx2: {part} ran to the end" in output, output[-4000:]


def require_no_report(output: str) -> None:
    assert output.endswith("exit status 0"), output[-4000:]
    assert "Sanitizer" not in output, output[:4000]
    assert "runtime error" not in output, output[:4000]
