"""Trained drafters in an LLM: found by name or folder, checked against the model, asked last."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from paceline import LLM, Ask, Draft, Drafter, EngineConfig, SamplingParams, SpecConfig, loading
from paceline.errors import DrafterMismatch, UnknownModel, UsageError
from paceline.heads.local_heads import available_heads, drafter_path
from paceline.heads.registry import HEAD_TYPES
from paceline.loading import check_drafters, find_heads, head_drafters, read_heads
from paceline.target.base import PagedTarget
from paceline.target.cost import CostTable
from paceline.target.native.target import NativeTarget
from support import SUPPORT
from support.heads import save_untrained

pytestmark = pytest.mark.model

CONFIG = EngineConfig("cpu", cache_mb=64)
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, smollm2_path: Path) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("trained")
    return {kind: save_untrained(home / f"my-{kind}", smollm2_path, kind) for kind in HEAD_TYPES}


@pytest.fixture(scope="module")
def llm(folders: dict[str, Path]) -> LLM:
    return LLM("smollm2-135m", trained=tuple(folders.values()), config=CONFIG)


def test_they_come_after_those_that_cost_less(llm: LLM) -> None:
    assert llm.spec.drafters == ("grammar", "suffix", "ngram", *HEAD_TYPES)
    assert llm.trained == {f"my-{kind}": kind for kind in HEAD_TYPES}
    assert {llm.drafters[kind].name for kind in HEAD_TYPES} == set(HEAD_TYPES)


@pytest.mark.parametrize("kind", HEAD_TYPES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_that_of_plain_decoding(llm: LLM, kind: str, temperature: float) -> None:
    found = [
        llm.generate(PROMPT, max_tokens=12, temperature=temperature, seed=3, spec=spec)
        for spec in (SpecConfig((kind,), 3, adaptive=False), SpecConfig(("none",)))
    ]
    assert found[0].token_ids == found[1].token_ids
    assert found[0].drafted[kind] > 10


def test_a_name_is_one_of_those_trained_here(
    folders: dict[str, Path], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "drafters").mkdir()
    (tmp_path / "drafters" / "mine").symlink_to(folders["block"])
    monkeypatch.setenv("PACELINE_HOME", str(tmp_path))
    monkeypatch.setattr("paceline.heads.local_heads.SHIPPED", tmp_path / "none")
    assert available_heads() == [drafter_path("mine")] == [tmp_path / "drafters" / "mine"]
    assert drafter_path("some/folder") == Path("some/folder")
    with pytest.raises(UnknownModel, match=r"'yours': expected a folder, or one trained here \(mine\)"):
        LLM(str(smollm2_path), trained=["yours"])


def test_one_of_each_kind(folders: dict[str, Path], smollm2_path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.symlink_to(folders["block"])
    with pytest.raises(UsageError, match="my-block and other are both block drafters"):
        LLM(str(smollm2_path), trained=[folders["block"], other])


def test_a_name_that_is_taken(folders: dict[str, Path], smollm2_path: Path) -> None:
    class Mine(Drafter):
        name = "block"

        def draft(self, asks: Sequence[Ask]) -> list[Draft]:
            return []

    with pytest.raises(UsageError, match="my-block would be called 'block'"):
        LLM(str(smollm2_path), drafters=[Mine()], trained=[folders["block"]])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle", r"'eagle' is known but not loaded: load the model with trained="),
        ("model", r"'model' is known but not loaded: load the model with draft_model=\.\.\."),
        ("sufix", "unknown drafter 'sufix'; did you mean 'suffix'"),
    ],
)
def test_a_drafter_that_is_not_loaded(smollm2_path: Path, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(str(smollm2_path), spec=SpecConfig((name,)))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model",
            r"'model' is known but not loaded: .*draft_model=.* Loaded: block, eagle, ",
        ),
        ("self", r"'self' is known but not loaded: load the model with spec=SpecConfig\(\('self', "),
        ("blok", "unknown drafter 'blok'; did you mean 'block'"),
    ],
)
def test_a_request_for_a_drafter_that_is_not_loaded(llm: LLM, name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        llm.generate(PROMPT, spec=SpecConfig((name,)))


def test_one_name_may_be_a_text_or_a_path(folders: dict[str, Path], smollm2_path: Path) -> None:
    for name in (str(folders["block"]), folders["block"]):
        llm = LLM(str(smollm2_path), trained=name, config=CONFIG)
        assert llm.trained == {"my-block": "block"}
        assert llm.spec.drafters == (*SpecConfig().drafters, "block")


@pytest.mark.gemma
def test_another_model_is_refused(folders: dict[str, Path], gemma_path: Path) -> None:
    with pytest.raises(DrafterMismatch, match=r"my-block was trained for SmolLM2"):
        LLM(str(gemma_path), trained=[folders["block"]])


@pytest.mark.parametrize("kind", HEAD_TYPES)
def test_one_can_replace_another_between_passes(
    llm: LLM, folders: dict[str, Path], smollm2_path: Path, kind: str
) -> None:
    spec = SpecConfig((kind,), 3, adaptive=False)
    plain = llm.generate(PROMPT, max_tokens=24, seed=3, spec=SpecConfig(("none",)))
    old = llm.drafters[kind]
    heads = read_heads(find_heads([folders[kind]]), smollm2_path)
    (new,) = head_drafters(llm.target, heads, CONFIG)
    running = llm.prepare(PROMPT, SamplingParams(max_tokens=24, seed=3), spec=spec).seq
    llm.engine.submit(running)
    rounds = [r for _ in range(4) for r in llm.engine.step()]
    asked = len(rounds)
    llm.replace_drafter(new)
    while llm.engine.busy:
        rounds += llm.engine.step()
    assert tuple(running.output) == plain.token_ids
    assert sum(len(r.draft) for r in rounds[asked:]) > 10  # the new one guesses for what was running
    assert llm.drafters[kind] is new is not old
    assert llm.generate(PROMPT, max_tokens=24, seed=3, spec=spec).token_ids == plain.token_ids


@pytest.mark.parametrize("kind", ["block", "eagle"])
def test_they_remember_as_many_positions_as_the_target(llm: LLM, kind: str) -> None:
    """Rows that the target finds in its cache are not computed again, so no drafter sees them again."""
    assert isinstance(llm.target, PagedTarget)
    assert llm.drafters[kind]._cache._max_positions == llm.target.capacity  # type: ignore[attr-defined]


def test_none_holds_the_targets_embedding_again(
    llm: LLM, folders: dict[str, Path], smollm2_path: Path
) -> None:
    """Nor what is run in 8 bits in float32, and not even while it is loaded."""
    if not isinstance(llm.target, NativeTarget):
        pytest.skip("the native engine does not run here")
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not say what a process held at most")
    script = SUPPORT / "held_by_drafters.py"
    shipped = drafter_path("smollm2-135m-block")
    command = [sys.executable, "-P", str(script), *map(str, (smollm2_path, shipped, *folders.values()))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    embedding = 4 * 49152 * 576  # bytes; the own weights of the shipped one would take a third of that
    for held, peak in json.loads(done.stdout):
        assert held < embedding / 3
        assert peak < embedding


def test_drafters_that_could_be_loaded_are_not_listed_as_loaded() -> None:
    check_drafters(SpecConfig(("self",)), {"ngram"}, {"self"})
    with pytest.raises(UsageError, match=r"Loaded: ngram$"):
        check_drafters(SpecConfig(("eagle",)), {"ngram"}, {"self"})


def test_memory_is_made_ready_after_passes_are_timed(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Timing gives back what it used, and what was ready."""
    order: list[str] = []

    def timed(_: object) -> CostTable:
        order.append("timed")
        return CostTable({})

    monkeypatch.setattr(loading, "cost_table", timed)
    monkeypatch.setattr(NativeTarget, "make_ready", lambda _: order.append("ready"))
    loading.load_model(smollm2_path, trained=(), config=CONFIG)
    assert order == ["timed", "ready"]
