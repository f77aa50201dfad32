"""What is said about a model before it is loaded is true of the loaded one."""

from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import ModelError
from paceline.target import load
from paceline.target.load import load_target, plan_load
from support import tiny_gguf

CPU = EngineConfig("cpu", cache_mb=16, threads=1)


@pytest.mark.parametrize(
    ("family", "kind", "dtype"),
    [
        ("llama", "Q8_0", "auto"),
        ("gemma3", "Q4_K", "auto"),
        ("qwen3moe", "Q4_K", "auto"),
        ("llama", "F32", "int8"),
        ("llama", "F32", "auto"),
        ("qwen2", "Q8_0", "float32"),
        ("qwen3", "Q8_0", "bfloat16"),
    ],
)
def test_the_plan_is_what_is_loaded(tmp_path: Path, family: str, kind: str, dtype: str) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", family, kind=kind)
    config = EngineConfig("cpu", dtype, 1, cache_mb=16)
    planned = plan_load(path, config)
    target = load_target(path, config)
    assert target.describe().startswith(planned.engine)
    assert planned.weights == pytest.approx(target.bytes_held, rel=0.01)  # norms are float32 everywhere
    assert planned.cache == 16 << 20
    assert target.capacity == pytest.approx(planned.cache / planned.token, abs=64)  # whole blocks


def test_the_reason_is_the_one_against_the_faster_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    floats = tiny_gguf.write(tmp_path / "floats.gguf", "llama")
    assert "is F32; dtype=int8 would round" in plan_load(floats, CPU).reason
    assert plan_load(floats, EngineConfig("cpu", "float32")).reason == "dtype=float32"
    quantised = tiny_gguf.write(tmp_path / "quantised.gguf", "llama", kind="Q8_0")
    assert plan_load(quantised, CPU).reason.endswith("the best this processor lists")
    monkeypatch.setenv("PACELINE_CPU", "torch")
    plan = plan_load(quantised, CPU)
    assert (plan.engine, plan.reason) == ("torch", "PACELINE_CPU=torch")


def test_on_a_gpu_the_plan_is_that_of_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one: a plan is made of tensors without memory."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(load, "placement", lambda config: (gpu, torch.bfloat16))
    monkeypatch.setattr(load, "unusable", lambda device: None)
    path = tiny_gguf.write(tmp_path / "m.gguf", "llama", kind="Q8_0")
    plan = plan_load(path, CPU)
    elements = sum(values.size for values in tiny_gguf.tensors("llama").values())
    assert plan.engine == "cuda"
    assert plan.weights == pytest.approx(2 * elements, rel=0.1)
    assert plan.other > 0
    for family, named in (("qwen3moe", "qwen3_moe"), ("gpt-oss", "gpt_oss")):
        slower = plan_load(tiny_gguf.write(tmp_path / f"{family}.gguf", family, kind="Q8_0"), CPU)
        assert slower.engine == "torch"
        assert slower.reason == f"the kernels know no mixtures of experts ({named})"
    monkeypatch.setenv("PACELINE_GPU", "torch")
    assert plan_load(path, CPU).reason == "PACELINE_GPU=torch"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"there is no m\.gguf"):
        plan_load(tmp_path / "m.gguf", CPU)
