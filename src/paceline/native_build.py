"""C++ as shared libraries, loaded through ctypes: those of a wheel, else compiled here once and cached.

prebuilt/NAME-SOURCES-CONTENT.so       SOURCES is a hash of sources, headers, flags and architecture,
home/native/NAME-RECIPE-CONTENT.so     RECIPE of these and the compiler, CONTENT of the library itself: a
                                       damaged one may kill whoever loads it

A wheel holds prebuilt/ (see setup.py); a library in it that is of other sources is not used. The compiler is
$CXX, else the first of c++, g++ and clang++. PACELINE_COMPILER=none behaves as if there were none. Where the
folder cannot be written to, a library lives in a temporary one for as long as the process.
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
from typing import Final, NamedTuple

from paceline import limits
from paceline.errors import NotCompiled
from paceline.paths import home

COMPILERS: Final = ("c++", "g++", "clang++")
# The same bits on every machine: no contraction into fused multiply-adds, nothing "fast", no -march=native.
COMPILE: Final = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread")
LINK: Final = ("-shared", "-pthread")
SHOWN_ERRORS: Final = 3  # lines of the compiler's that a message repeats
PREBUILT: Final = Path(__file__).parent / "prebuilt"


@dataclass(frozen=True, slots=True)
class Unit:
    """One compilation: a source file, and the flags that it alone gets."""

    source: Path
    flags: tuple[str, ...] = ()


class Sources(NamedTuple):
    """What a library is compiled from. Headers are those whose change asks for a new build."""

    name: str
    units: Sequence[Unit]
    headers: Sequence[Path] = ()


def load(
    name: str, units: Sequence[Unit], headers: Sequence[Path] = (), flags: Sequence[str] = ()
) -> ctypes.CDLL:
    """The library, built if there is none yet; one that does not load is built anew."""
    sources = Sources(name, units, headers)
    if path := _prebuilt(sources, flags):
        with suppress(OSError):
            return ctypes.CDLL(str(path))
    recipe = _recipe(sources, flags)
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
    """Path of the library, built if there is none yet. Flags go to every compilation and to the linker."""
    sources = Sources(name, units, headers)
    if path := _prebuilt(sources, flags):
        return path
    recipe = _recipe(sources, flags)
    return _cached(recipe) or _built(recipe)


def prebuild(sources: Sources, folder: Path) -> Path:
    """Puts a library where an installed package looks for it. The machine is the one $CXX compiles for."""
    built = library(*sources)
    digest = _source_digest(sources, (), target_machine())
    return Path(shutil.copy(built, folder / f"{sources.name}-{digest}-{_digest(built.read_bytes())}.so"))


def target_machine() -> str:
    """The architecture that the compiler compiles for, as `platform.machine` calls it there."""
    compiler = _compiler("library")
    _identity(compiler, "library")  # it is one
    return _answer(compiler, "-dumpmachine").partition("-")[0]


def compiles(flags: Sequence[str]) -> bool:
    """Whether the compiler knows these flags."""
    command = [*_compiler("library"), *flags, "-xc++", "-fsyntax-only", os.devnull]
    return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


@dataclass(frozen=True, slots=True)
class _Recipe:
    name: str
    compiler: tuple[str, ...]
    units: tuple[Unit, ...]
    flags: tuple[str, ...]
    digest: str  # of all that the library is made from and with


def _recipe(sources: Sources, flags: Sequence[str]) -> _Recipe:
    compiler = _compiler(sources.name)
    made_from = _source_digest(sources, flags, platform.machine())
    made_with = _identity(compiler, sources.name), compiler[1:]
    digest = _digest(repr((made_from, made_with)).encode())
    return _Recipe(sources.name, compiler, tuple(sources.units), tuple(flags), digest)


def _source_digest(sources: Sources, flags: Sequence[str], machine: str) -> str:
    inputs: list[object] = [machine, COMPILE, LINK, tuple(flags)]
    try:
        inputs += [(unit.source.name, unit.flags, unit.source.read_bytes()) for unit in sources.units]
        inputs += [(header.name, header.read_bytes()) for header in sources.headers]
    except OSError as error:
        why = f"its source {error.filename} cannot be read ({error.strerror})"
        raise _not_compiled(sources.name, why, "install paceline again") from error
    return _digest(repr(inputs).encode())


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _prebuilt(sources: Sources, flags: Sequence[str]) -> Path | None:
    if not PREBUILT.is_dir():
        return None
    return _whole(PREBUILT, sources.name, _source_digest(sources, flags, platform.machine()))


def _cached(recipe: _Recipe) -> Path | None:
    folders = [home() / "native", *([_own_folder()] if _own_folder.cache_info().currsize else [])]
    found = (_whole(folder, recipe.name, recipe.digest) for folder in folders)
    return next((path for path in found if path), None)


def _whole(folder: Path, name: str, digest: str) -> Path | None:
    """The library, if there is one that is whole; a damaged one is removed."""
    try:
        for path in folder.glob(f"{name}-{digest}-*.so"):
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
    install = "install g++ or clang++, set CXX to a C++17 compiler, or install paceline from a wheel"
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
    return _answer(compiler, "--version")


def _answer(compiler: tuple[str, ...], question: str) -> str:
    """Its first line."""
    command = [*compiler, question]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=60)
    return done.stdout.decode(errors="replace").partition("\n")[0]


@cache
def _own_folder() -> Path:
    """One that is gone when the process ends."""
    folder = tempfile.mkdtemp(prefix="paceline-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _not_compiled(name: str, why: str, remedy: str) -> NotCompiled:
    return NotCompiled(f"no native {name}, so a slower path is taken: {why}; {remedy}")
