"""C++ sources, compiled once with the machine's own compiler, cached, and loaded through ctypes.

home/native/NAME-RECIPE-CONTENT.so     RECIPE is a hash of sources, headers, flags, compiler and architecture,
                                       CONTENT of the library itself: a damaged one may kill whoever loads it

The compiler is $CXX, else the first of c++, g++ and clang++. PACELINE_COMPILER=none behaves as if there were
none. Where the folder cannot be written to, a library lives in a temporary one for as long as the process.
"""

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from paceline import limits
from paceline.errors import NotCompiled
from paceline.paths import home

COMPILERS: Final = ("c++", "g++", "clang++")
# The same bits on every machine: no contraction into fused multiply-adds, nothing "fast", no -march=native.
COMPILE: Final = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")
LINK: Final = ("-shared", "-pthread")
SHOWN_ERRORS: Final = 3  # lines of the compiler's that a message repeats


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation: a source file, and the flags that it alone gets."""

    source: Path
    flags: tuple[str, ...] = ()


def load(
    name: str, units: Sequence[Unit], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL:
    """The library, built if it is not in the cache; a cached one that does not load is built anew."""
    recipe = _recipe(name, units, headers, flags)
    if path := _cached(recipe):
        with suppress(OSError):
            return ctypes.CDLL(str(path))
    path = _built(recipe)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        remedy = "set PACELINE_HOME to a folder that programs may run from"
        raise _not_compiled(name, f"it was built but does not load ({error})", remedy) from error


def library(
    name: str, units: Sequence[Unit], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> Path:
    """Path of the shared library, built if it is not in the cache.

    Headers are those whose change asks for a new build; flags go to every compilation and to the linker.
    """
    recipe = _recipe(name, units, headers, flags)
    return _cached(recipe) or _built(recipe)


@dataclass(frozen=True, slots=True)
class _Recipe:
    name: str
    compiler: tuple[str, ...]
    units: tuple[Unit, ...]
    flags: tuple[str, ...]
    digest: str  # of all that the library is made from and with


def _recipe(name: str, units: Sequence[Unit], headers: Sequence[Path], flags: Sequence[str]) -> _Recipe:
    compiler = _compiler(name)
    inputs: list[object] = [_identity(compiler, name), platform.machine(), COMPILE, LINK, tuple(flags)]
    try:
        inputs += [(unit.source.name, unit.flags, unit.source.read_bytes()) for unit in units]
        inputs += [(header.name, header.read_bytes()) for header in headers]
    except OSError as error:
        why = f"its source {error.filename} cannot be read ({error.strerror})"
        raise _not_compiled(name, why, "install paceline again") from error
    return _Recipe(name, compiler, tuple(units), tuple(flags), _digest(repr(inputs).encode()))


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _cached(recipe: _Recipe) -> Path | None:
    """The library, if there is one that is whole; a damaged one is removed."""
    folders = [home() / "native", *([_own_folder()] if _own_folder.cache_info().currsize else [])]
    try:
        for path in (p for folder in folders for p in folder.glob(f"{recipe.name}-{recipe.digest}-*.so")):
            if path.stem.endswith(_digest(path.read_bytes())):
                return path
            path.unlink()
    except OSError:  # the folder cannot be read, or not be written to
        pass
    return None


def _built(recipe: _Recipe) -> Path:
    try:
        return _build_in(home() / "native", recipe)
    except OSError:  # it cannot be written to
        pass
    try:
        return _build_in(_own_folder(), recipe)
    except OSError as error:
        raise _not_compiled(recipe.name, str(error), "set PACELINE_HOME to a folder with room") from error


def _build_in(folder: Path, recipe: _Recipe) -> Path:
    """Compiles all units at once, links, and gives the library its name in one move.

    Processes that build at the same time do not meet: the last one's library, equal to the others', stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{recipe.name}-") as temporary:
        objects = [os.path.join(temporary, f"{i}.o") for i in range(len(recipe.units))]
        compilations = [
            [*COMPILE, *recipe.flags, *unit.flags, "-c", str(unit.source.absolute()), "-o", goal]
            for unit, goal in zip(recipe.units, objects, strict=True)
        ]
        with ThreadPoolExecutor(limits.cores()) as pool:
            list(pool.map(lambda arguments: _run(recipe, arguments), compilations))
        linked = Path(temporary, "linked.so")
        _run(recipe, [*LINK, *recipe.flags, *objects, "-o", str(linked)])
        _sync(linked)
        made = folder / f"{recipe.name}-{recipe.digest}-{_digest(linked.read_bytes())}.so"
        return linked.replace(made)


def _run(recipe: _Recipe, arguments: Sequence[str]) -> None:
    done = subprocess.run(
        [*recipe.compiler, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env={**os.environ, "LC_ALL": "C"},  # its messages are searched for the word "error"
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines()
        errors = [line.strip() for line in lines if "error" in line] or lines or ["no message"]
        why = f"{shlex.join(recipe.compiler)} stopped with: {' | '.join(errors[:SHOWN_ERRORS])}"
        raise _not_compiled(recipe.name, why, "set CXX to another C++17 compiler")


def _sync(path: Path) -> None:
    """Else a power cut right after the renaming may leave the name with nothing behind it."""
    with path.open("rb") as stream:
        os.fsync(stream.fileno())


def _compiler(name: str) -> tuple[str, ...]:
    """As words: $CXX may hold arguments too."""
    install = "install g++ or clang++, or set CXX to a C++17 compiler"
    if os.environ.get("PACELINE_COMPILER") == "none":
        raise _not_compiled(name, "PACELINE_COMPILER=none forbids it", "unset it")
    if words := shlex.split(os.environ.get("CXX", "")):
        if shutil.which(words[0]) is None:
            raise _not_compiled(name, f"CXX={words[0]} is not a program here", install)
        return tuple(words)
    for candidate in COMPILERS:
        if shutil.which(candidate):
            return (candidate,)
    raise _not_compiled(name, f"no C++ compiler is here ({', '.join(COMPILERS)})", install)


def _identity(compiler: tuple[str, ...], name: str) -> str:
    try:
        return _version(compiler)
    except (OSError, subprocess.SubprocessError) as error:
        why = f"{shlex.join(compiler)} --version failed ({error})"
        raise _not_compiled(name, why, "set CXX to a C++17 compiler") from error


@cache
def _version(compiler: tuple[str, ...]) -> str:
    version = subprocess.run(
        [*compiler, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60
    )
    return version.stdout.decode(errors="replace").partition("\n")[0]


@cache
def _own_folder() -> Path:
    """One that is gone when the process ends."""
    folder = tempfile.mkdtemp(prefix="paceline-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _not_compiled(name: str, why: str, remedy: str) -> NotCompiled:
    return NotCompiled(f"no native {name}, so a slower path is taken: {why}; {remedy}")
