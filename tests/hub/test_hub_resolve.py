from pathlib import Path

import pytest

from paceline.errors import UnknownModel
from paceline.hub import CATALOGUE, DEFAULT_MODEL, home, installed, pull, resolve
from paceline.hub.local_models import MANIFEST, model_file, model_folder, sha256
from support.wheels import Shelf, shop, tiny_model


@pytest.fixture
def empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_home_is_where_the_environment_says(empty_home: Path) -> None:
    assert home() == empty_home


def test_home_is_under_the_users_cache_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert home().name == "paceline"


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_known_name_not_pulled_says_how_to_pull_it(empty_home: Path, name: str) -> None:
    with pytest.raises(UnknownModel, match=f"`paceline pull {name}`"):
        resolve(name)


def test_a_close_name_is_suggested(empty_home: Path) -> None:
    with pytest.raises(UnknownModel, match=r"did you mean 'qwen2.5-coder-1.5b'"):
        resolve("qwen2.5-coder-1.5")


def test_a_folder_and_a_gguf_file_are_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").touch()
    (tmp_path / "weights.GGUF").touch()
    monkeypatch.chdir(tmp_path)
    assert resolve("model") == Path("model")
    assert resolve(tmp_path / "weights.GGUF") == tmp_path / "weights.GGUF"


def test_a_folder_that_only_holds_a_gguf_names_it(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").touch()
    with pytest.raises(UnknownModel, match=r"name the file in it: .*weights.gguf"):
        resolve(tmp_path)


@pytest.mark.parametrize("name", ["notes.txt", "folder"])
def test_other_files_and_folders_are_not_models(tmp_path: Path, name: str) -> None:
    (tmp_path / "notes.txt").touch()
    (tmp_path / "folder").mkdir()
    with pytest.raises(UnknownModel, match=r"expected a folder with config.json or a .gguf file"):
        resolve(tmp_path / name)


def test_a_catalogue_name_means_the_same_in_every_folder(
    empty_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / DEFAULT_MODEL).mkdir()
    (tmp_path / DEFAULT_MODEL / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UnknownModel):
        resolve(DEFAULT_MODEL)
    assert resolve(f"./{DEFAULT_MODEL}") == Path(DEFAULT_MODEL)


@pytest.mark.parametrize("manifest", ["", "not json", "[]", '{"sha256": "another"}'])
def test_a_file_without_its_manifest_is_not_a_model(manifest: str) -> None:
    model = tiny_model()
    with shop(model):
        pull("tiny", fetch=Shelf(model))
        (model_folder(model) / MANIFEST).write_text(manifest)
        with pytest.raises(UnknownModel):
            resolve("tiny")


def test_the_list_tells_which_models_are_pulled() -> None:
    model = tiny_model()
    with shop(model):
        before = {line.name: line for line in installed()}
        pull("tiny", fetch=Shelf(model))
        after = {line.name: line for line in installed()}
    assert list(before) == [*CATALOGUE, "tiny"]
    assert not any(line.pulled for line in before.values())
    assert [name for name, line in after.items() if line.pulled] == ["tiny"]
    assert (after["tiny"].size, after["tiny"].licence) == (model.size, "MIT")


@pytest.mark.parametrize(
    ("name", "size", "wheels"),
    [
        ("smollm2-135m", 98_362_432, 1),
        ("qwen2.5-coder-1.5b", 1_117_320_768, 22),
        ("gemma3-270m", 253_113_024, 4),
    ],
)
def test_the_catalogue_adds_up(name: str, size: int, wheels: int) -> None:
    model = CATALOGUE[name]
    assert (model.name, model.size, len(model.pieces)) == (name, size, wheels)
    assert len({piece.requirement for piece in model.pieces}) == wheels
    assert all(len(piece.sha256) == 64 for piece in model.pieces)
    assert [model.offset(index + 1) for index in range(wheels)][-1] == size


@pytest.mark.model
def test_the_real_default_model_is_what_the_catalogue_says(smollm2_path: Path) -> None:
    model = CATALOGUE[DEFAULT_MODEL]
    assert smollm2_path == model_file(model)
    assert sha256(smollm2_path) == model.sha256
