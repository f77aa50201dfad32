"""Real models that guess for themselves: the text is the same, and guesses come true."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig, SpecConfig
from paceline.drafters.draft_model import SelfDrafter
from paceline.errors import DrafterMismatch, UsageError

PLAIN = SpecConfig(("none",), max_draft=0)
SELF = SpecConfig(("self",), max_draft=3, adaptive=False)
PROMPTS = [
    "Once upon a time there was a",
    "def fibonacci(n):\n    ",
    "The three most important facts are:\n1.",
]


@pytest.fixture(scope="module")
def native(smollm2_path: Path) -> LLM:
    return LLM("smollm2-135m", spec=SELF, config=EngineConfig(cache_mb=128))


@pytest.fixture(scope="module")
def on_torch(smollm2_path: Path) -> LLM:
    return LLM("smollm2-135m", spec=SELF, config=EngineConfig(cache_mb=128, dtype="float32"))


def check_text(llm: LLM, temperature: float, tokens: int) -> None:
    options: dict[str, Any] = {
        "seed": 5,
        "max_tokens": tokens,
        "temperature": temperature,
        "ignore_eos": True,
    }
    plain = [llm.generate(p, spec=PLAIN, tenant=f"plain {temperature}", **options).token_ids for p in PROMPTS]
    for width in (1, 2):
        spec = replace(SELF, tree_width=width)
        tenant = f"{width} {temperature}"
        alone = llm.generate(PROMPTS[0], spec=spec, tenant=tenant, **options)
        assert alone.token_ids == plain[0]
        assert alone.drafted["self"] > 0
        together = llm.batch(PROMPTS, spec=spec, tenant=f"batch {tenant}", **options)
        assert [r.token_ids for r in together] == plain


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_text(native: LLM, temperature: float) -> None:
    check_text(native, temperature, 24)


@pytest.mark.model
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_text_is_plain_text_on_torch(on_torch: LLM, temperature: float) -> None:
    check_text(on_torch, temperature, 8)


def per_pass(llm: LLM, tenant: str, tokens: int) -> float:
    made = [
        llm.generate(p, spec=SELF, tenant=tenant, seed=1, max_tokens=tokens, ignore_eos=True) for p in PROMPTS
    ]
    return sum(len(r.token_ids) for r in made) / sum(r.passes for r in made)


@pytest.mark.model
def test_drafts_are_accepted_with_the_layers_that_count(native: LLM) -> None:
    assert per_pass(native, "floor", 24) > 1.4
    drafter = native.drafters["self"]
    assert isinstance(drafter, SelfDrafter)
    found, layers = drafter.layers, native.target.layers
    try:
        drafter.layers = tuple(range(2, layers - 2))  # as many and more, but not the first and the last
        assert per_pass(native, "shuffled", 24) < 1.2
    finally:
        drafter.layers = found


@pytest.mark.large
def test_drafts_of_a_larger_model_are_accepted(qwen_path: Path) -> None:
    llm = LLM("qwen2.5-coder-1.5b", spec=SELF, config=EngineConfig(cache_mb=128))
    assert per_pass(llm, "floor", 12) > 1.5
    check_text(llm, 0.8, 6)


@pytest.mark.model
def test_who_does_not_name_them_has_none(smollm2_path: Path) -> None:
    llm = LLM("smollm2-135m", config=EngineConfig(cache_mb=64))
    assert not {"self", "quantized"} & set(llm.drafters)
    with pytest.raises(UsageError, match="'self' is known but not loaded: load the model with spec="):
        llm.generate("x", spec=SELF)


@pytest.mark.model
def test_a_model_of_four_bits_gets_no_copy(smollm2_path: Path) -> None:
    with pytest.raises(DrafterMismatch, match="leave `quantized` out"):
        LLM("smollm2-135m", spec=SpecConfig(("quantized",)), config=EngineConfig(cache_mb=64))
