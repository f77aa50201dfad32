"""paceline export"""

from pathlib import Path

import pytest

from paceline.cli import main
from support.native_targets import tiny_model
from support.tokenizers import byte_level_facts


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def test_a_model_becomes_an_onnx_file_or_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="pip install onnx")
    model = tiny_model(tmp_path / "tiny.gguf", kind="Q4_1", tokenizer=byte_level_facts("smollm"))
    code, out, _ = run(capsys, "export", str(model), str(tmp_path / "m.onnx"), "--onnx", "--context", "64")
    assert code == 0
    assert "m.onnx" in out
    graph = onnx.load(str(tmp_path / "m.onnx")).graph
    assert [one.name for one in graph.input][:3] == ["input_ids", "num_logits", "past_length"]
    assert {tuple(one.dims) for one in graph.initializer if one.name == "rope.cos"} == {(64, 64)}
    code, _, err = run(capsys, "export", str(model), str(tmp_path / "m.onnx"), "--onnx")
    assert code == 2
    assert "is there already" in err
    code, _, err = run(capsys, "export", str(model), str(tmp_path / "o.onnx"), "--onnx", "--dtype", "int3")
    assert code == 2
    assert "float32, float16, gguf" in err
