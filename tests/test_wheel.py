"""A wheel holds every library, prebuilt, and an installation of it needs no compiler."""

import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from paceline import native_build
from paceline.drafters.suffix import native as suffix
from paceline.target.native import library

ROOT = Path(__file__).parent.parent
CROSS = "aarch64-linux-gnu-g++"
GENERATE = ("generate", "--prompt", "Count: one, two, three, one, two,", "--max-tokens", "12", "--seed", "7")


def ask_setup(code: str, **more: str) -> list[str]:
    """What setup.py answers without torch: an isolated build has what pyproject.toml requires for it."""
    before = "import sys; sys.modules['torch'] = None\n"
    before += "import setuptools; setuptools.setup = lambda **_: None; import setup\n"
    command = [sys.executable, "-c", before + code]
    environment = {**os.environ, **more}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_every_source_is_in_a_library_of_the_wheel() -> None:
    sources = {*(ROOT / "src").rglob("*.cpp")}
    listed = ask_setup("print(*(unit.source for made in setup.libraries() for unit in made.units))")
    assert {Path(line) for line in listed} == sources
    assert len(sources) >= 7


def test_a_wheel_for_arm_is_cross_built(tmp_path: Path) -> None:
    """Every path of ARM is in it, under a tag of its own; the smallest library is built as an example."""
    if shutil.which(CROSS) is None:
        pytest.skip(f"{CROSS} is not here: apt-get install g++-aarch64-linux-gnu")
    names = ask_setup("print(*(made.name for made in setup.libraries()))", CXX=CROSS)
    assert {*names} == {"sampling", "suffix", *(f"forward-{path}" for path in library.paths_of("aarch64"))}
    code = "command = setup.PlatformWheel(setup.WithKernels()); command.finalize_options()\n"
    assert ask_setup(code + "print(*command.get_tag())", CXX=CROSS) == ["py3", "none", "linux_aarch64"]
    build = f"setup.native_build.prebuild(setup.suffix.SOURCES, setup.Path({str(tmp_path)!r}))"
    (made,) = ask_setup(f"print({build})", CXX=CROSS)
    content = Path(made).read_bytes()
    assert content[:4] == b"\x7fELF"
    assert int.from_bytes(content[18:20], "little") == 183  # EM_AARCH64
    on_arm = native_build._source_digest(suffix.SOURCES, (), "aarch64")
    assert Path(made).name.startswith(f"suffix-{on_arm}-")  # the name it is looked for there


def test_a_path_that_the_compiler_does_not_know_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *avx512*) exit 1;; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    known = [path for path in library.paths_of("x86_64") if native_build.compiles(library.FLAGS[path])]
    assert {"avx2vnni", "avx2", "portable"} == {*known}


def test_every_path_belongs_to_an_architecture() -> None:
    x86, arm = library.paths_of("x86_64"), library.paths_of("aarch64")
    assert {"avx512", "avx2vnni", "avx2", "portable"} <= {*x86}
    assert {*x86} & {*arm} == {"portable"}
    assert {*x86} | {*arm} == {*library.NEEDS}
    assert arm == library.paths_of("arm64")  # macOS calls it so


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


def build(folder: Path, **more: str) -> Path:
    """From the source distribution of a fresh copy: what is not in it is not in the wheel."""
    pytest.importorskip("build")
    copy = folder / "copy"
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("*.egg-info", "__pycache__"))
    for name in ("setup.py", "pyproject.toml", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = ["-m", "build", "--no-isolation", "--outdir", str(folder), str(copy)]
    environment = {**os.environ, **more}
    done = subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = folder.glob("*.whl")
    return made


def prebuilt(wheel: Path) -> dict[str, bytes]:
    with ZipFile(wheel) as archive:
        return {
            Path(name).name: archive.read(name)
            for name in archive.namelist()
            if name.startswith("paceline/prebuilt/")
        }


@pytest.mark.slow
def test_a_wheel_holds_the_libraries_that_are_built_here(wheel: Path) -> None:
    assert wheel.name.endswith(
        f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl"
    )
    held = {re.sub(r"(-\w{16}){2}\.so$", "", name): content for name, content in prebuilt(wheel).items()}
    possible = library.paths_of(platform.machine())
    paths = [path for path in possible if native_build.compiles(library.FLAGS[path])]
    assert {*held} == {"sampling", "suffix", *(f"forward-{path}" for path in paths)}
    for path in paths:
        assert held[f"forward-{path}"] == library.build(path).read_bytes()


@pytest.mark.slow
def test_a_wheel_runs_on_systems_of_2021(wheel: Path) -> None:
    """glibc 2.34: Debian 12, Ubuntu 22.04, RHEL 9."""
    pytest.importorskip("auditwheel")
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    tag = re.search(r'platform tag:\s+"manylinux_2_(\d+)_', done.stdout)
    assert tag, done.stdout
    assert int(tag.group(1)) <= 34


@pytest.mark.slow
def test_without_a_compiler_the_wheel_is_for_every_machine(tmp_path: Path) -> None:
    made = build(tmp_path, PACELINE_COMPILER="none")
    assert made.name.endswith("-py3-none-any.whl")
    assert not prebuilt(made)
    with ZipFile(made) as archive:
        names = {*archive.namelist()}
    assert "paceline/target/native/csrc/decoder.cpp" in names  # to be compiled at first use
    assert "paceline/py.typed" in names


@pytest.mark.slow
@pytest.mark.model
def test_an_installed_wheel_generates_without_a_compiler(
    wheel: Path, smollm2_path: Path, tmp_path: Path
) -> None:
    """In an environment of its own, with the dependencies of this one: the same text as from the sources."""
    place = tmp_path / "installed"
    venv.create(place, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(place), "platbase": str(place)}))
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
    ]
    subprocess.run([*pip, str(wheel)], check=True)
    dependencies = Path(sysconfig.get_path("purelib"))
    (site / "dependencies.pth").write_text(f"{dependencies}\n")  # but not what its own .pth files lead to
    python, home = place / "bin" / "python", tmp_path / "home"
    environment = {"PATH": str(place / "bin"), "PACELINE_HOME": str(home), "HOME": str(tmp_path)}
    command = [str(python), "-m", "paceline", *GENERATE, "--model", str(smollm2_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "slower" not in done.stderr
    assert not (home / "native").exists()  # nothing was compiled
    where = [str(python), "-c", "import paceline; print(paceline.__file__)"]
    assert str(site) in subprocess.run(where, env=environment, capture_output=True, text=True).stdout
    here = [sys.executable, "-m", "paceline", *GENERATE, "--model", str(smollm2_path)]
    expected = subprocess.run(here, capture_output=True, text=True, check=True)
    assert done.stdout == expected.stdout
