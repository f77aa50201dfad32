"""Packages from npm: what arrives is checked, and only what is missing is fetched."""

import tarfile
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path

import pytest

from paceline.errors import PullError
from paceline.split.npm_packages import PACKAGES, WLLAMA, NpmPackage, PackageFile, npm_pack, pull


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NpmPackage:
    """Like wllama, with small files."""
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    files = {
        name: PackageFile(file.source, sha256(file.source.encode()).hexdigest())
        for name, file in WLLAMA.files.items()
    }
    return replace(WLLAMA, files=files)


class Pack:
    """An archive in place of npm's; each file has its own path as its content, but for changed ones."""

    def __init__(self, package: NpmPackage, **changed: bytes | None) -> None:
        contents: dict[str, bytes | None] = {f.source: f.source.encode() for f in package.files.values()}
        self.contents = contents | {package.files[name].source: content for name, content in changed.items()}
        self.calls: list[str] = []

    def __call__(self, package: str, folder: Path) -> Path:
        self.calls.append(package)
        with tarfile.open(folder / "package.tgz", "w:gz") as archive:
            for name, content in self.contents.items():
                if content is not None:
                    entry = tarfile.TarInfo(name)
                    entry.size = len(content)
                    archive.addfile(entry, BytesIO(content))
        return folder / "package.tgz"


def test_the_files_of_a_package_are_stored_once(package: NpmPackage) -> None:
    pack = Pack(package)
    assert not package.is_pulled
    folder = pull(package, pack)
    assert package.is_pulled
    assert all((folder / name).read_text() == file.source for name, file in package.files.items())
    pull(package, pack)
    assert pack.calls == ["@wllama/wllama@2.3.7"]
    (folder / "index.js").write_bytes(b"damaged")
    pull(package, pack)
    assert (folder / "index.js").read_text() == package.files["index.js"].source


@pytest.mark.parametrize("content", [b"other", None])
def test_a_package_with_another_content_is_refused(package: NpmPackage, content: bytes | None) -> None:
    with pytest.raises(PullError, match=r"multi-thread/wllama\.wasm is damaged"):
        pull(package, Pack(package, **{"multi-thread/wllama.wasm": content}))
    assert not package.is_pulled


def test_npm_that_is_absent_or_fails_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PullError, match=r"install Node\.js"):
        npm_pack(WLLAMA.id, tmp_path)
    failing = tmp_path / "npm"
    failing.write_text("#!/bin/sh\nexit 1\n")
    failing.chmod(0o755)
    with pytest.raises(PullError, match="check the network"):
        npm_pack(WLLAMA.id, tmp_path)


def test_packages_have_folders_of_their_own() -> None:
    assert len({package.folder for package in PACKAGES.values()}) == len(PACKAGES)
