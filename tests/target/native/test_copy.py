"""A copy of a model in 4 bits a weight: where it is kept, where refused, and that it resembles the model."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from paceline.config import EngineConfig, SamplingParams, SpecConfig
from paceline.drafters.draft_model import ModelDrafter
from paceline.engine.control import Fixed
from paceline.engine.engine import Engine
from paceline.errors import DrafterMismatch
from paceline.target.base import ModelTarget
from paceline.target.eager.target import TorchTarget
from paceline.target.load import load_quantized_copy, load_target
from paceline.target.native.target import NativeTarget
from paceline.types import Feed, Round, Seq
from support.models import open_with, some_tokens
from support.native_targets import SIZES, tiny_model, wanted_path

CONFIG = EngineConfig(device="cpu", cache_mb=16)


@pytest.fixture(autouse=True)
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted_path()
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))


def a_model(folder: Path, kind: str, seed: int = 0) -> Path:
    """With a head of its own: random models that share it with the embedding all repeat the last token."""
    return tiny_model(folder / f"{kind} {seed}.gguf", "llama", kind, SIZES, tied=False, seed=seed)


def both(path: Path, config: EngineConfig = CONFIG) -> tuple[ModelTarget, NativeTarget]:
    target = load_target(path, config)
    return target, load_quantized_copy(path, config, target)


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_copy_resembles_the_model(kind: str, tmp_path: Path) -> None:
    target, copy = both(a_model(tmp_path, kind))
    assert isinstance(target, NativeTarget if kind == "Q8_0" else TorchTarget)
    assert copy.bytes_held < 0.6 * target.bytes_held
    rows = []
    for model in (target, copy):
        open_with(model, "s", some_tokens(20))
        rows.append(model.forward([Feed("s", [5])]).logits[0])
    alike = torch.nn.functional.cosine_similarity(rows[0], rows[1], dim=0)
    assert 0.9 < alike < 0.999999


def test_a_copy_is_kept_beside_the_packed_weights(tmp_path: Path) -> None:
    path = a_model(tmp_path, "Q8_0")
    _, copy = both(path)
    files = sorted((tmp_path / "packed").glob("*.bin"))
    assert [file.name for file in files] == [
        f"{copy.fingerprint[:32]}-4bit.bin",
        f"{copy.fingerprint[:32]}.bin",
    ]
    made = [file.stat().st_mtime_ns for file in files]
    both(path)
    assert [file.stat().st_mtime_ns for file in files] == made


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q3_K", "Q5_K"])
def test_what_is_small_already_gets_no_copy(kind: str, tmp_path: Path) -> None:
    """Five bits are packed in eight, so a copy of these is worth it."""
    path = a_model(tmp_path, kind)
    target = load_target(path, CONFIG)
    if kind == "Q5_K":
        assert load_quantized_copy(path, CONFIG, target).bytes_held < target.bytes_held
        return
    with pytest.raises(DrafterMismatch, match=r"save too little of a pass; leave `quantized` out"):
        load_quantized_copy(path, CONFIG, target)
    assert not list((tmp_path / "packed").glob("*-4bit.bin"))


def test_what_the_native_engine_cannot_run_gets_no_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = a_model(tmp_path, "Q8_0")
    monkeypatch.setenv("PACELINE_CPU", "torch")
    target = load_target(path, CONFIG)
    with pytest.raises(DrafterMismatch, match="PACELINE_CPU=torch"):
        load_quantized_copy(path, CONFIG, target)


def run(
    target: ModelTarget, drafter: ModelDrafter, spec: SpecConfig, temperature: float
) -> tuple[list[list[int]], list[Round]]:
    engine = Engine(target, {drafter.name: drafter}, Fixed())
    seqs = []
    for i in range(3):
        prompt = some_tokens(10 + 30 * i, seed=i)
        params = SamplingParams(temperature=temperature, seed=i, max_tokens=24)
        tenant = f"{spec} {temperature}"
        seqs.append(Seq(f"s{i}", prompt, len(prompt), params, spec, tenant=tenant))
        engine.submit(seqs[-1])
    rounds = []
    while engine.busy:
        rounds += engine.step()
    return [seq.output for seq in seqs], rounds


def per_pass(rounds: Sequence[Round]) -> float:
    return sum(len(r.tokens) for r in rounds) / sum(bool(r.tokens) for r in rounds)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_text_is_the_models_own_and_drafts_are_accepted(
    kind: str, temperature: float, tmp_path: Path
) -> None:
    target, copy = both(a_model(tmp_path, kind))
    drafter = ModelDrafter(copy, target.vocab_size, name="quantized")
    plain, _ = run(target, drafter, SpecConfig((), max_draft=0), temperature)
    for width in (1, 2):
        spec = SpecConfig(("quantized",), max_draft=4, tree_width=width, adaptive=False)
        fast, rounds = run(target, drafter, spec, temperature)
        assert fast == plain
        assert (known := per_pass(rounds)) > 1.5
    stranger = load_quantized_copy(a_model(tmp_path, kind, seed=9), CONFIG, target)
    shuffled = ModelDrafter(stranger, target.vocab_size, name="quantized")
    out, rounds = run(target, shuffled, SpecConfig(("quantized",), max_draft=4, adaptive=False), temperature)
    assert out == plain
    assert per_pass(rounds) - 1 < (known - 1) / 2
