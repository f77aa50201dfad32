"""paceline layers, on the real SmolLM2."""

import json
from pathlib import Path

import pytest

from support.clients import run

pytestmark = pytest.mark.model


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    """As `paceline trace export` writes it, with and without token ids."""
    text = (
        "The tide came in and the boats rose, one after another, until they all lay level with the quay. " * 4
    )
    lines = [
        {"prompt_ids": list(range(300, 340)), "output_ids": [500, 501, 502]},
        {"prompt": text, "output": "Then it went out again."},
    ]
    path = tmp_path / "export.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return path


def test_layers_are_found_and_remembered(
    smollm2_path: Path,
    exported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    code, out, err = run(capsys, "layers", str(smollm2_path), "--text", str(exported), "--json")
    assert code == 0
    said = json.loads(out)
    assert "75 of 75 sets of layers tried" in err
    assert 15 <= len(said["layers"]) <= 23
    assert 0.3 < said["agreement"] <= 1
    (noted,) = json.loads((tmp_path / "layers.json").read_text()).values()
    assert noted["layers"] == said["layers"]


def test_a_text_that_cannot_be_used_is_refused(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.txt"
    short.write_text("Hello.")
    code, _, err = run(capsys, "layers", str(smollm2_path), "--text", str(short))
    assert code == 2
    assert "expected 32 or more" in err
    code, _, err = run(capsys, "layers", str(smollm2_path), "--text", str(tmp_path / "missing"))
    assert code == 2
    assert "cannot be read" in err
