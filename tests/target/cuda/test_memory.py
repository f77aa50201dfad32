"""The GPU memory that is planned is the memory that is taken."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from paceline.config import EngineConfig
from paceline.errors import SettingError, UsageError
from paceline.target import load
from paceline.target.cuda import memory
from paceline.target.cuda.driver import CpuLauncher
from paceline.target.cuda.memory import MemoryPlan, plan
from paceline.target.cuda.target import CudaTarget
from paceline.target.cuda.weights import WeightType
from support.cuda_models import tiny_weights

_MB = 2**20


@pytest.mark.parametrize("kind", ["bf16", "int8"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])  # qwen2 is tied here, qwen3 has query norms
def test_a_target_holds_what_was_planned(
    monkeypatch: pytest.MonkeyPatch, family: str, kind: WeightType
) -> None:
    weights, config = tiny_weights(family), EngineConfig(device="cpu", cache_mb=1, max_batch=40)
    planned = plan(weights.shape, {name: tuple(t.shape) for name, t in weights.tensors.items()}, config, kind)
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


def test_dtype_int8_runs_on_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = tiny_weights()
    checkpoint = SimpleNamespace(shape=weights.shape, tensors=weights.tensors)
    monkeypatch.setattr(load, "placement", lambda _: (torch.device("cuda"), torch.bfloat16))
    monkeypatch.setattr(load, "open_checkpoint", lambda _: checkpoint)
    monkeypatch.setattr(load, "canonical_tensors", lambda found: found.tensors.items())
    monkeypatch.setattr(load, "unusable", lambda _: None)
    monkeypatch.setattr(load, "make_launcher", lambda *_: Unlaunched())
    monkeypatch.setattr(load, "load", lambda *_: weights)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (8000 * _MB, 8000 * _MB))
    target = load.load_target(Path("tiny"), EngineConfig(device="cuda", dtype="int8", cache_mb=1))
    assert target.describe().endswith("int8")
    monkeypatch.setattr(load, "unusable", lambda _: "too old")
    with pytest.raises(SettingError, match="too old"):
        load.load_target(Path("tiny"), EngineConfig(device="cuda", dtype="int8", cache_mb=1))
