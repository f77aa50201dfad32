"""C++ is built once, found again, and its absence is one clear line. A wheel's libraries need no compiler."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline import native_build
from paceline.errors import NotCompiled
from paceline.native_build import Sources, Unit, compiles, library, load, prebuild, target_machine

TWICE = '#include "by.h"\nextern "C" int twice(int x) { return x * BY; }\n'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PACELINE_COMPILER", raising=False)
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "by.h").write_text("#define BY 2\n")
    (tmp_path / "twice.cpp").write_text(TWICE)
    return tmp_path / "twice.cpp"


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that gets a line for each time the compiler is started."""
    log, wrapper = tmp_path / "calls", tmp_path / "counted-c++"
    real = native_build._compiler("test")[0]
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {real} "$@"\n')
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    return log


def header(source: Path) -> list[Path]:
    return [source.with_name("by.h")]


def test_builds_and_calls(home: Path, source: Path) -> None:
    assert load("twice", [Unit(source)], header(source)).twice(21) == 42
    (built,) = (home / "native").iterdir()  # and no temporary is left
    assert built.name.startswith("twice-")
    assert built.suffix == ".so"


def test_several_units_each_with_its_flags(home: Path, tmp_path: Path) -> None:
    one, two = tmp_path / "one.cpp", tmp_path / "two.cpp"
    one.write_text('int two();\nextern "C" int sum() { return two() + N; }\n')
    two.write_text("int two() { return N; }\n")
    units = [Unit(one, ("-DN=1",)), Unit(two, ("-DN=20",))]
    assert load("sum", units, flags=("-DOTHER",)).sum() == 21


def test_what_was_built_is_not_built_again(home: Path, source: Path, calls: Path) -> None:
    first = library("twice", [Unit(source)], header(source))
    started = calls.read_text().count("-o ")
    assert started == 2  # one unit, one link
    assert library("twice", [Unit(source)], header(source)) == first
    assert calls.read_text().count("-o ") == started


@pytest.mark.parametrize("change", ["header", "source", "unit flags", "flags"])
def test_a_change_asks_for_a_new_build(home: Path, source: Path, change: str) -> None:
    before = library("twice", [Unit(source)], header(source))
    if change == "header":
        header(source)[0].write_text("#define BY 3\n")
    if change == "source":
        source.write_text(TWICE.replace("x *", "x + 1 *"))
    unit = Unit(source, ("-DA",) if change == "unit flags" else ())
    flags = ("-DA",) if change == "flags" else ()
    assert library("twice", [unit], header(source), flags) != before
    if change == "header":
        assert load("twice", [unit], header(source)).twice(21) == 63


def test_another_compiler_asks_for_a_new_build(
    home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library("twice", [Unit(source)], header(source))
    monkeypatch.setattr(native_build, "_version", lambda compiler: "another 1.0")
    assert library("twice", [Unit(source)], header(source)) != before


def test_a_broken_source_shows_its_line(home: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.cpp"
    broken.write_text("int fine;\nint broken = nothing;\n")
    with pytest.raises(NotCompiled, match=r"broken.cpp:2:.*error.*nothing") as caught:
        library("broken", [Unit(broken)])
    assert "\n" not in str(caught.value)
    assert "slower" in str(caught.value)
    assert not list((home / "native").iterdir())


def test_a_missing_source_is_one_line(home: Path, tmp_path: Path) -> None:
    with pytest.raises(NotCompiled, match=r"gone.cpp cannot be read"):
        library("gone", [Unit(tmp_path / "gone.cpp")])


def test_no_compiler(home: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as m:
        m.setenv("PACELINE_COMPILER", "none")
        with pytest.raises(NotCompiled, match="PACELINE_COMPILER"):
            load("twice", [Unit(source)])
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotCompiled, match="CXX=no-such-compiler is not a program here"):
        load("twice", [Unit(source)])
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotCompiled, match=r"install g\+\+ or clang\+\+"):
        load("twice", [Unit(source)])


def test_a_compiler_that_is_none(home: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NotCompiled, match="false --version failed"):
        load("twice", [Unit(source)])


def test_two_processes_at_once(home: Path, source: Path) -> None:
    code = (
        "from pathlib import Path; from paceline.native_build import Unit, load\n"
        f"s = Path({str(source)!r})\n"
        "print(load('twice', [Unit(s)], [s.with_name('by.h')]).twice(21))"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) for _ in range(2)]
    assert [process.communicate()[0].strip() for process in both] == [b"42", b"42"]
    assert len(list((home / "native").iterdir())) == 1


def test_a_home_that_cannot_be_written(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "file" / "home"))
    assert load("twice", [Unit(source)], header(source)).twice(21) == 42
    assert library("twice", [Unit(source)], header(source)).parent == native_build._own_folder()
    assert len(os.listdir(native_build._own_folder())) == 1
    native_build._own_folder.cache_clear()  # the other tests are not to find it


@pytest.mark.parametrize("damage", ["empty", "text", "half", "one bit"])
def test_a_damaged_library_is_built_anew(home: Path, source: Path, damage: str) -> None:
    path = library("twice", [Unit(source)], header(source))
    whole = path.read_bytes()
    bit = whole[:999] + bytes([whole[999] ^ 1]) + whole[1000:]
    half = whole[: len(whole) // 2]  # the kind that kills the process that loads it
    path.write_bytes({"empty": b"", "text": b"not a library", "half": half, "one bit": bit}[damage])
    assert load("twice", [Unit(source)], header(source)).twice(21) == 42
    assert path.read_bytes() == whole


def test_a_library_that_never_loads_is_one_line(home: Path, tmp_path: Path) -> None:
    source = tmp_path / "loose.cpp"
    source.write_text('int missing();\nextern "C" int f() { return missing(); }\n')
    with pytest.raises(NotCompiled, match="does not load"):
        load("loose", [Unit(source)], flags=("-Wl,-z,now",))


@pytest.fixture
def prebuilt(home: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library of a wheel, on a machine without a compiler."""
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    path = prebuild(Sources("twice", [Unit(source)], header(source)), folder)
    shutil.rmtree(home)
    monkeypatch.setattr(native_build, "PREBUILT", folder)
    monkeypatch.setenv("PACELINE_COMPILER", "none")
    return path


def test_a_prebuilt_library_needs_no_compiler(home: Path, source: Path, prebuilt: Path) -> None:
    assert load("twice", [Unit(source)], header(source)).twice(21) == 42
    assert library("twice", [Unit(source)], header(source)) == prebuilt
    assert not home.exists()


def test_a_prebuilt_library_is_the_one_that_is_built_here(
    home: Path, source: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "PREBUILT", prebuilt.parent / "none")
    monkeypatch.delenv("PACELINE_COMPILER")
    assert library("twice", [Unit(source)], header(source)).read_bytes() == prebuilt.read_bytes()


@pytest.mark.parametrize("change", ["header", "source", "flags", "machine", "damage"])
def test_a_prebuilt_library_of_something_else_is_not_used(
    source: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    if change == "header":
        header(source)[0].write_text("#define BY 3\n")
    if change == "source":
        source.write_text(TWICE + "\n")
    if change == "machine":
        monkeypatch.setattr(platform, "machine", lambda: "another")
    if change == "damage":
        prebuilt.write_bytes(prebuilt.read_bytes()[:-1])
    with pytest.raises(NotCompiled, match="PACELINE_COMPILER=none"):
        load("twice", [Unit(source)], header(source), ("-DA",) if change == "flags" else ())


def test_a_prebuilt_library_that_does_not_load_is_built_here(
    home: Path, source: Path, prebuilt: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = b"no library"  # as of another C library: whole, and yet of no use
    broken = prebuilt.with_name(f"{prebuilt.stem.rpartition('-')[0]}-{native_build._digest(nothing)}.so")
    prebuilt.rename(broken).write_bytes(nothing)
    monkeypatch.delenv("PACELINE_COMPILER")
    assert load("twice", [Unit(source)], header(source)).twice(21) == 42
    assert len(list((home / "native").iterdir())) == 1


def test_without_a_compiler_and_a_prebuilt_library_both_remedies_are_named(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(NotCompiled, match=r"slower path.*install g\+\+.*or install paceline from a wheel"):
        load("twice", [Unit(source)])


def test_the_compiler_is_asked_what_it_compiles_for() -> None:
    assert target_machine() == platform.machine()
    assert compiles(("-O1",))
    assert not compiles(("-mno-such-feature",))


def test_a_compiler_that_is_none_compiles_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(NotCompiled, match="false --version failed"):
        target_machine()


def test_arguments_of_the_compiler_ask_for_a_new_build(
    home: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = library("twice", [Unit(source)], header(source))
    monkeypatch.setenv("CXX", f"{native_build._compiler('test')[0]} -g0")
    assert library("twice", [Unit(source)], header(source)).stem[:22] != before.stem[:22]
