import errno
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.errors import CorruptModel, PullError, UnknownModel
from paceline.hub import huggingface, installed, pull, resolve
from support.wheels import sha

FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.model": b"pieces",
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"not wanted",
    "onnx/config.json": b"not wanted",
}
WANTED = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.model"]


class RepositoryNotFoundError(Exception):
    pass


class GatedRepoError(Exception):
    pass


@dataclass
class FakeHub:
    """Stands in for the module huggingface_hub."""

    files: dict[str, bytes] = field(default_factory=lambda: dict(FILES))
    failure: Exception | None = None
    fails_at: str = ""
    asked: list[str] = field(default_factory=list)

    def HfApi(self) -> "FakeHub":  # noqa: N802
        return self

    def model_info(self, repository: str, files_metadata: bool) -> SimpleNamespace:
        if self.failure and not self.fails_at:
            raise self.failure
        siblings = [
            SimpleNamespace(
                rfilename=name,
                size=len(content),
                lfs=SimpleNamespace(sha256=sha(FILES[name])) if name.endswith(".safetensors") else None,
            )
            for name, content in self.files.items()
        ]
        return SimpleNamespace(siblings=siblings, sha="abc", card_data={"license": "mit"})

    def hf_hub_download(self, repository: str, file: str, *, revision: str, local_dir: Path) -> None:
        assert revision == "abc"
        self.asked.append(file)
        if self.failure and self.fails_at == file:
            raise self.failure
        (local_dir / ".cache").mkdir(exist_ok=True)
        (local_dir / file).write_bytes(self.files[file])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr(huggingface, "_hub", lambda: fake)
    return fake


def test_a_repository_is_pulled_whole_and_found_again(fake: FakeHub) -> None:
    seen: list[tuple[int, int]] = []
    path = pull("owner/name", lambda done, total, label: seen.append((done, total)))
    assert path == resolve("owner/name")
    assert sorted(fake.asked) == WANTED
    assert sorted(file.name for file in path.iterdir()) == sorted([*WANTED, "paceline.json"])
    total = sum(len(FILES[name]) for name in WANTED)
    assert seen[-1] == (total, total)
    line = installed()[-1]
    assert (line.name, line.size, line.licence, line.pulled) == ("owner/name", total, "mit", True)


def test_a_pulled_repository_is_not_requested_again(fake: FakeHub) -> None:
    assert pull("owner/name") == pull("owner/name")
    assert sorted(fake.asked) == WANTED


def test_an_interrupted_repository_is_not_a_model_until_it_is_pulled_again(fake: FakeHub) -> None:
    fake.failure, fake.fails_at = OSError(errno.ENOSPC, "full"), "tokenizer.model"
    with pytest.raises(PullError, match="disk is full"):
        pull("owner/name")
    with pytest.raises(UnknownModel, match="`paceline pull owner/name`"):
        resolve("owner/name")
    assert len(installed()) == 3
    fake.failure = None
    assert (pull("owner/name") / "tokenizer.model").read_bytes() == b"pieces"


def test_a_wrong_checksum_deletes_the_file(fake: FakeHub, tmp_path: Path) -> None:
    fake.files["model.safetensors"] = b"changed"
    with pytest.raises(
        CorruptModel, match=f"model.safetensors .*expected {sha(b'weights')}, got {sha(b'changed')}"
    ):
        pull("owner/name")
    assert not list(tmp_path.rglob("model.safetensors"))


def test_files_of_an_earlier_revision_are_dropped(fake: FakeHub, tmp_path: Path) -> None:
    left = tmp_path / "hub" / "owner" / "name.partial"
    left.mkdir(parents=True)
    (left / "old.safetensors").touch()
    assert not (pull("owner/name") / "old.safetensors").exists()


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        (RepositoryNotFoundError("https://host.test"), "no such public repository"),
        (GatedRepoError("https://host.test"), "give it on the hub and log in"),
        (
            ConnectionError("https://host.test"),
            r"hub cannot be reached \(ConnectionError\); check the network",
        ),
    ],
)
def test_a_hub_that_says_no_is_one_line(fake: FakeHub, failure: Exception, told: str) -> None:
    fake.failure = failure
    with pytest.raises(
        PullError, match=f"could not pull owner/name: .*{told}.* or pull one of smollm2-135m"
    ) as error:
        pull("owner/name")
    assert "host.test" not in str(error.value)


@pytest.mark.parametrize("lacking", ["config.json", "model.safetensors"])
def test_a_repository_without_a_model_is_refused_before_the_download(fake: FakeHub, lacking: str) -> None:
    del fake.files[lacking]
    with pytest.raises(PullError, match=r"expected config.json and \*.safetensors"):
        pull("owner/name")
    assert fake.asked == []


def test_without_the_hub_library_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    missing: Any = None  # makes the import fail
    monkeypatch.setitem(sys.modules, "huggingface_hub", missing)
    with pytest.raises(PullError, match="pip install huggingface_hub"):
        pull("owner/name")
