"""The GPU memory that is planned is the memory that is taken."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import SettingError, UsageError
from paceline.target import load
from paceline.target.cuda import memory
from paceline.target.cuda.driver import CpuLauncher
from paceline.target.cuda.memory import MemoryPlan, plan, planned_weights
from paceline.target.cuda.packing import GGUF
from paceline.target.cuda.target import CudaTarget
from paceline.target.cuda.weights import WeightType
from paceline.target.weights.model_config import Weights
from paceline.target.weights.reader import load as load_weights
from paceline.target.weights.reader import open_checkpoint
from support import tiny_gguf
from support.cuda_models import tiny_weights

_MB = 2**20


CONFIG = EngineConfig(device="cpu", cache_mb=1, max_batch=40)


@pytest.mark.parametrize(("max_batch", "deterministic"), [(4, True), (64, True), (256, False)])
def test_passes_of_many_rows_are_planned(
    monkeypatch: pytest.MonkeyPatch, max_batch: int, deterministic: bool
) -> None:
    weights = tiny_weights()
    sizes = {name: tuple(t.shape) for name, t in weights.tensors.items()}
    config = replace(CONFIG, cache_mb=8, max_batch=max_batch, deterministic=deterministic)
    planned = plan(planned_weights(weights.shape, sizes), config)
    few = plan(planned_weights(weights.shape, sizes), replace(config, max_batch=4))
    assert (planned.buffers > few.buffers) == (max_batch > 4)
    check_memory(monkeypatch, planned, weights, "bf16", config)


@pytest.mark.parametrize("kind", ["bf16", "int8", "fp8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # qwen2 is tied here, qwen3 has query norms
def test_a_target_holds_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: WeightType
) -> None:
    weights = tiny_weights(family)
    sizes = {name: tuple(t.shape) for name, t in weights.tensors.items()}
    check_memory(monkeypatch, plan(planned_weights(weights.shape, sizes, kind), CONFIG), weights, kind)


@pytest.mark.parametrize("encoding", ["Q4_K", "Q4_1", "Q2_K"])  # no kernel knows the last
def test_a_file_that_stays_as_it_is_holds_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, encoding: str
) -> None:
    kinds = dict.fromkeys(tiny_gguf.tensors("qwen2"), encoding) | {"token_embd.weight": "Q8_0"}
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind=kinds)
    planned = load._planned(path, open_checkpoint(path), "gguf")
    assert {kind for _, kind in planned.kernels} == {encoding if encoding in GGUF else "bf16", "Q8_0"}
    weights = load_weights(path, torch.bfloat16, keep=GGUF)
    check_memory(monkeypatch, plan(planned, CONFIG), weights, "gguf")


def check_memory(
    monkeypatch: pytest.MonkeyPatch,
    planned: MemoryPlan,
    weights: Weights,
    kind: WeightType,
    config: EngineConfig = CONFIG,
) -> None:
    monkeypatch.setattr(memory, "_on_device", lambda tensor: True)
    target = CudaTarget(weights, config, Unlaunched(), kind)
    buffers = target._runner.buffers
    for pinned in [name for name in vars(buffers) if name.startswith("host")]:
        delattr(buffers, pinned)
    held = target.memory()
    assert held == {"weights": planned.weights, "cache": planned.cache, "buffers": planned.buffers}


class Unlaunched(CpuLauncher):
    def __init__(self) -> None:
        self.multiprocessors = 5


def test_a_model_that_does_not_fit_is_refused_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (3000 * _MB, 8000 * _MB))
    needs = MemoryPlan(weights=2000 * _MB, cache=1000 * _MB, buffers=50 * _MB, graphs=50 * _MB)
    with pytest.raises(
        UsageError, match=r"weights 2,000, cache 1,000, .*3,000 of 8,000 MiB.*cache_mb of at most 900"
    ):
        load._require_room(Path("big.gguf"), needs, torch.device("cuda"))
    too_large = MemoryPlan(weights=4000 * _MB, cache=1000 * _MB, buffers=0)
    with pytest.raises(UsageError, match="int8"):
        load._require_room(Path("big.gguf"), too_large, torch.device("cuda"))
    load._require_room(Path("small.gguf"), MemoryPlan(1000 * _MB, 1000 * _MB, 0), torch.device("cuda"))


@pytest.mark.parametrize("dtype", ["int8", "fp8", "gguf"])
def test_quantised_weights_run_on_the_kernels_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind="Q4_K")
    monkeypatch.setattr(load, "placement", lambda _: (torch.device("cuda"), torch.bfloat16))
    monkeypatch.setattr(load, "unusable", lambda _: None)
    monkeypatch.setattr(load, "make_launcher", lambda *_: Unlaunched())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8000 * _MB, 8000 * _MB))
    config = EngineConfig(device="cuda", dtype=dtype, cache_mb=1)
    target = load.load_target(path, config)
    assert target.describe().endswith(dtype)
    monkeypatch.setattr(load, "unusable", lambda _: "too old")
    with pytest.raises(SettingError, match=f"{dtype}.*too old"):
        load.load_target(path, config)
    monkeypatch.setenv("PACELINE_GPU", "torch")
    with pytest.raises(SettingError, match="PACELINE_GPU=torch"):
        load.load_target(path, config)


def test_a_file_without_quantised_weights_cannot_stay_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind="F16")
    monkeypatch.setattr(load, "placement", lambda _: (torch.device("cuda"), torch.bfloat16))
    monkeypatch.setattr(load, "unusable", lambda _: None)
    with pytest.raises(SettingError, match=r"gguf.*Q4_K.*m\.gguf has none"):
        load.load_target(path, EngineConfig(device="cuda", dtype="gguf"))
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"native engine.*F16"):
        load.load_target(path, EngineConfig(device="cpu", dtype="gguf"))


def test_fp8_is_refused_on_a_cpu(tmp_path: Path) -> None:
    path = tiny_gguf.write(tmp_path / "m.gguf", "qwen2", kind="Q4_K")
    with pytest.raises(SettingError, match=r"fp8.*NVIDIA GPU"):
        load.load_target(path, EngineConfig(device="cpu", dtype="fp8"))
