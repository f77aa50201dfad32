"""Answers that come back as messages: which templates render them to the tokens that were generated."""

from pathlib import Path

import pytest

from paceline.text import Tokenizer, check_own_turns, named_format
from paceline.text.own_turns import answers, as_message
from support.servers import TEMPLATE
from support.tokenizers import byte_level_facts, write_gguf

TRIMS = TEMPLATE.replace("{{ message.content + '' }}", "{{ message.content | trim }}")
ADDS = TEMPLATE.replace("<|im_start|>assistant\n{% endif %}", "<|im_start|>assistant\n<think>\n{% endif %}")
WRITTEN_AGAIN = {
    "call with compact JSON",
    "call with number 1.2e1",
    "call with escaped letter",
    "call in a code fence",
}

MERGED = {"text after line breaks"}  # with the line break of the generation prompt


def reused(folder: Path, template: str) -> dict[str, bool]:
    tokenizer = Tokenizer.load(write_gguf(folder / "t.gguf", byte_level_facts("smollm"), template=template))
    return {turn.kind: turn.reused for turn in check_own_turns(tokenizer)}


def test_arguments_are_written_again_in_the_templates_spacing(tmp_path: Path) -> None:
    turns = reused(tmp_path, TEMPLATE)
    again = {kind for kind, same in turns.items() if not same}
    assert WRITTEN_AGAIN <= again <= WRITTEN_AGAIN | MERGED | {"text and call", "two calls"}
    assert {turns[kind] for kind in ("text", "text before a line break", "call")} == {True}


def test_a_template_that_trims_is_named(tmp_path: Path) -> None:
    turns = reused(tmp_path, TRIMS)
    assert turns["text"]
    assert not turns["text before a line break"]


def test_a_generation_prompt_that_history_lacks_is_named(tmp_path: Path) -> None:
    assert not any(reused(tmp_path, ADDS).values())


def test_the_first_difference_is_shown(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", byte_level_facts("smollm"), template=TEMPLATE))
    turn = next(t for t in check_own_turns(tokenizer) if t.kind == "call with compact JSON")
    assert 0 < turn.shared < turn.tokens
    assert "was generated" in str(turn)
    assert turn.generated != turn.rendered


def test_a_model_without_a_template_has_no_turns(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", byte_level_facts("smollm")))
    assert check_own_turns(tokenizer) == []


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "smollm2"])
def test_every_kind_of_answer_is_read_as_meant(name: str) -> None:
    for kind, text in answers(named_format(name)).items():
        message = as_message(text, named_format(name))
        expected = 2 if kind == "two calls" else int("call" in kind)
        if (name, kind) == ("llama3", "text and call"):  # its calls stand alone
            expected = 0
        assert len(message.get("tool_calls") or ()) == expected, kind


@pytest.mark.model
def test_smollm2_reuses_its_own_turns(smollm2_path: Path) -> None:
    turns = {t.kind: t for t in check_own_turns(Tokenizer.load(smollm2_path))}
    assert {kind for kind, turn in turns.items() if not turn.reused} == WRITTEN_AGAIN | MERGED


@pytest.mark.large
def test_qwen_reuses_its_own_turns(qwen_path: Path) -> None:
    turns = {t.kind: t for t in check_own_turns(Tokenizer.load(qwen_path))}
    assert {kind for kind, turn in turns.items() if not turn.reused} == WRITTEN_AGAIN | MERGED
