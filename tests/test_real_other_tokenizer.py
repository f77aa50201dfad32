"""A real draft model with another tokenizer: the text is plain text, and enough of it was guessed."""

import random
from pathlib import Path
from typing import Any

import pytest

from paceline import LLM, EngineConfig, SpecConfig
from paceline.config import SamplingParams
from paceline.drafters.draft_model import TextDrafter, drafter_for
from paceline.drafters.draft_model.retokenizer import IncrementalRetokenizer
from paceline.drafters.draft_model.select import overlap
from paceline.drafters.draft_model.vocab_mapping import TokenizerPair
from paceline.errors import UsageError
from paceline.target.load import load_target
from paceline.text import Tokenizer
from paceline.types import Ask, Drafter, Seq

PLAIN = SpecConfig(("none",), max_draft=0)
FAST = SpecConfig(("model",), max_draft=4, adaptive=False)
CONFIG = EngineConfig(cache_mb=256)
CHAT = [{"role": "user", "content": "Write a Python function that reverses a linked list, with type hints."}]
TOKENS = 32
FLOORS = {"intersection": 1.6, "text": 2.4}  # tokens a pass of code, greedy


@pytest.fixture(scope="module")
def qwen(qwen_path: Path, smollm2_path: Path) -> LLM:
    return LLM("qwen2.5-coder-1.5b", draft_model="smollm2-135m", config=CONFIG)


@pytest.fixture(scope="module")
def ways(qwen: LLM, smollm2_path: Path) -> dict[str, Drafter]:
    """The same draft model, by tokens and by text."""
    model, tokenizer = load_target(smollm2_path, CONFIG), Tokenizer.load(smollm2_path)
    size = qwen.target.vocab_size
    return {
        "intersection": drafter_for(model, tokenizer, qwen.tokenizer, size, "intersection"),
        "text": drafter_for(model, tokenizer, qwen.tokenizer, size, "text"),
    }


def with_drafter(llm: LLM, drafter: Drafter) -> LLM:
    llm.drafters["model"] = llm.engine._drafting._drafters["model"] = drafter
    llm.engine._drafting._lists.clear()
    return llm


@pytest.mark.large
@pytest.mark.parametrize("way", ["intersection", "text"])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.2])
def test_text_is_plain_text(qwen: LLM, ways: dict[str, Drafter], way: str, temperature: float) -> None:
    options: dict[str, Any] = {"temperature": temperature, "seed": 4, "max_tokens": TOKENS}
    plain = qwen.generate(CHAT, spec=PLAIN, tenant="p", **options)
    fast = with_drafter(qwen, ways[way]).generate(CHAT, spec=FAST, tenant=way, **options)
    assert fast.token_ids == plain.token_ids
    assert len(fast.token_ids) / fast.passes >= (FLOORS[way] if temperature == 0 else 1.2)


@pytest.mark.large
@pytest.mark.parametrize("way", ["intersection", "text"])
def test_floor_is_owed_to_what_is_read(
    qwen: LLM, ways: dict[str, Drafter], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = IncrementalRetokenizer.update

    def shuffled(self: IncrementalRetokenizer, tokens: list[int]) -> list[int]:
        told = update(self, tokens)
        return random.Random(len(told)).sample(told, len(told))

    monkeypatch.setattr(IncrementalRetokenizer, "update", shuffled)
    fast = with_drafter(qwen, ways[way]).generate(CHAT, spec=FAST, tenant=way, max_tokens=24, seed=0)
    assert len(fast.token_ids) / fast.passes < 1.5


@pytest.mark.large
@pytest.mark.parametrize("way", ["intersection", "text"])
def test_cached_rows_draft_as_rows_computed_again(qwen: LLM, ways: dict[str, Drafter], way: str) -> None:
    """On the real cache: a drafter that follows a text, and one that begins in the middle of it."""
    text = "def caf\u00e9(n: int):\n    return n + 1\n\n\nprint(caf\u00e9(12), '漢字 👍🏽 and   more')\n# end"
    tokens = qwen.tokenizer.encode(text)
    for end in range(4, len(tokens), 5):
        params = SamplingParams(temperature=0.8, seed=3)
        old = Seq("old", tokens[:end], 4, params, FAST, tenant="old")
        new = Seq("new", tokens[:end], 4, params, FAST, tenant=f"new{end}")
        if end == 4:
            ways[way].begin(old)
        ways[way].begin(new)
        kept, fresh = ways[way].draft([Ask(old, 3)])[0], ways[way].draft([Ask(new, 3)])[0]
        assert (kept.tokens, kept.scores) == (fresh.tokens, fresh.scores)
        ways[way].end(new)
    ways[way].end(old)


@pytest.mark.large
def test_a_grammar_holds(qwen: LLM, ways: dict[str, Drafter]) -> None:
    options: dict[str, Any] = {"output": dict[str, int], "max_tokens": 40, "seed": 2}
    asked = "Count the letters of each word in 'to be or not' as JSON:\n"
    plain = qwen.generate(asked, spec=PLAIN, tenant="gp", **options)
    for way, drafter in ways.items():
        fast = with_drafter(qwen, drafter).generate(
            asked, spec=SpecConfig(("grammar", "model"), adaptive=False), tenant=f"g{way}", **options
        )
        assert fast.token_ids == plain.token_ids
        assert fast.accepted["model"] > 0


@pytest.mark.large
def test_chat_marks_are_the_draft_models_own(qwen: LLM, smollm2_path: Path) -> None:
    theirs = Tokenizer.load(smollm2_path)
    two = TokenizerPair(theirs, qwen.tokenizer)
    tokens = qwen.tokenizer.encode_chat(CHAT)
    assert theirs.decode(IncrementalRetokenizer(two).update(tokens)) == qwen.tokenizer.decode(tokens)
    assert IncrementalRetokenizer(two).update(tokens) == theirs.encode(qwen.tokenizer.decode(tokens))
    assert 0.85 < overlap(two) < 0.95
    assert isinstance(qwen.drafters["model"], TextDrafter)


@pytest.mark.gemma
@pytest.mark.model
def test_gemma_reads_another_familys_marks(gemma_path: Path, smollm2_path: Path) -> None:
    gemma, smollm2 = Tokenizer.load(gemma_path), Tokenizer.load(smollm2_path)
    tokens = smollm2.encode("<|im_start|>user\nHi caf\u00e9<|im_end|>\n", bos=False)
    told = IncrementalRetokenizer(TokenizerPair(gemma, smollm2)).update(tokens)
    assert gemma.decode(told) == "<bos><start_of_turn>user\nHi caf\u00e9<end_of_turn>\n"
    assert told == gemma.encode("<start_of_turn>user\nHi caf\u00e9<end_of_turn>\n")


@pytest.mark.gemma
@pytest.mark.model
@pytest.mark.parametrize("way", ["intersection", "text"])
def test_gemma_drafts_for_smollm2(gemma_path: Path, smollm2_path: Path, way: Any) -> None:
    llm = LLM("smollm2-135m", draft_model="gemma3-270m", draft_vocab=way, config=CONFIG)
    for temperature in (0.0, 0.8):
        options: dict[str, Any] = {"max_tokens": 12, "seed": 1, "temperature": temperature}
        plain = llm.generate("The capital of France is", spec=PLAIN, **options)
        fast = llm.generate("The capital of France is", spec=FAST, **options)
        assert fast.token_ids == plain.token_ids
        assert fast.passes < plain.passes


def test_an_unknown_way_is_refused_before_anything_is_loaded(smollm2_path: Path) -> None:
    with pytest.raises(UsageError, match="draft_vocab='words'"):
        LLM(str(smollm2_path), draft_vocab="words")  # type: ignore[arg-type]
