"""Wheels with prebuilt kernels; all else of the package is in pyproject.toml.

A wheel holds every C++ library of the package for one architecture, the one that $CXX compiles for: each
path of the CPU engine whose flags the compiler knows, the sampler and the suffix index. They are loaded
through ctypes, so one wheel serves every Python. Without a compiler, or as editable, it holds none.
"""

import sys
from functools import cache
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).parent / "src"))

from paceline import native_build
from paceline.drafters.suffix import native as suffix
from paceline.errors import NotCompiled
from paceline.sampling import native as sampling
from paceline.target.native import library


@cache
def machine() -> str | None:
    """The architecture the libraries are built for; None: nothing here builds them."""
    try:
        return native_build.target_machine()
    except NotCompiled as reason:
        print(f"no prebuilt kernels in this wheel: {reason}", file=sys.stderr)
        return None


def libraries() -> list[native_build.Sources]:
    possible = library.paths_of(machine() or "")
    paths = [path for path in possible if native_build.compiles(library.FLAGS[path])]
    return [sampling.SOURCES, suffix.SOURCES, *(library.sources(path) for path in paths)]


class BuildWithKernels(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode or machine() is None:
            return
        folder = Path(self.build_lib, "paceline", native_build.PREBUILT.name)
        folder.mkdir(exist_ok=True)
        for old in folder.glob("*.so"):  # of an earlier build
            old.unlink()
        for sources in libraries():
            print(native_build.prebuild(sources, folder).name)


class WithKernels(Distribution):
    def has_ext_modules(self) -> bool:
        """A wheel is for one platform if it holds libraries."""
        return machine() is not None


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        *_, platform = super().get_tag()
        if sys.platform == "linux" and (found := machine()):  # it may be built for another architecture
            platform = f"linux_{found}"
        return "py3", "none", platform


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": PlatformWheel}, distclass=WithKernels)
