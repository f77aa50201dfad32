"""What only Linux has is looked for before it is used: modules of macOS lack it."""

import subprocess
import sys

import pytest

# In a process of its own. Other packages are imported first: they choose by the real system.
WITHOUT_LINUX = """
import builtins, importlib, mmap, os, pathlib, pkgutil, sys
import torch, numpy, tokenizers, llguidance, pydantic, starlette, uvicorn, sqlalchemy, platformdirs
import rich, typer

MACOS = {"MADV_NORMAL", "MADV_RANDOM", "MADV_SEQUENTIAL", "MADV_WILLNEED", "MADV_DONTNEED", "MADV_FREE"}
LINUX = ("sched_getaffinity", "sched_setaffinity", "posix_fadvise", "posix_fallocate", "memfd_create")
sys.platform = "darwin"
advice = [name for name in dir(mmap) if name.startswith("MADV_") and name not in MACOS]
for module, names in ((os, LINUX), (mmap, advice)):
    for name in names:
        if hasattr(module, name):
            delattr(module, name)


def refusing(real):
    def opened(path, *arguments, **options):
        if str(path).startswith(("/proc", "/sys/fs/cgroup")):
            raise FileNotFoundError(2, "not on this system", str(path))
        return real(path, *arguments, **options)

    return opened


builtins.open, pathlib.Path.open = refusing(builtins.open), refusing(pathlib.Path.open)
import paceline
from paceline import limits

RUN = ("__main__", "process_main", "sandbox_process", "amx_probe")  # they work when they are imported
for found in pkgutil.walk_packages(paceline.__path__, "paceline."):
    if not found.name.startswith("paceline.vllm") and not found.name.endswith(RUN):
        importlib.import_module(found.name)
assert limits.cores() == os.cpu_count()
assert limits.total_memory() > 0
assert limits.available_memory() is None
assert limits.describe() == "none"
from paceline.target.native.int8_weights import Int8Weights  # huge pages
from paceline.target.native.packed_file import _huge_pages

assert len(_huge_pages(1 << 20)) == 1 << 20
print("done")
"""


@pytest.mark.slow
def test_nothing_of_linux_is_needed_to_import_and_to_ask_for_limits() -> None:
    ended = subprocess.run([sys.executable, "-c", WITHOUT_LINUX], capture_output=True, text=True, timeout=300)
    assert ended.stdout == "done\n", ended.stderr
