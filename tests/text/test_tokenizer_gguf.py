"""Tokenizers built from small GGUF files, against transformers on the same vocabulary."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from transformers import LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from paceline.errors import CorruptModel, TextError
from paceline.text import Tokenizer
from support import examples
from support.tokenizers import (
    CORPUS,
    byte_level_facts,
    byte_level_vocabulary,
    sentencepiece_facts,
    sentencepiece_vocabulary,
    texts,
    write_gguf,
)

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
GPT2 = {**BYTE_LEVEL, "use_regex": True}


def split(regex: str) -> dict[str, Any]:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [step, BYTE_LEVEL]}


# The pre_tokenizer, normalizer and ignore_merges of each family's own tokenizer.json.
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = split(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{OTHERS}")
LLAMA3 = split(rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{OTHERS}")
O200K = "|".join(  # as tiktoken has it
    [
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n/]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)
SMOLLM = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2]}
DEFINITIONS: dict[str, tuple[dict[str, Any], dict[str, Any] | None, bool]] = {
    "gpt-2": (GPT2, None, False),
    "default": (GPT2, None, False),
    "smollm": (SMOLLM, None, False),
    "qwen2": (QWEN2, {"type": "NFC"}, False),
    "llama-bpe": (LLAMA3, None, True),
    "gpt-4o": (split(O200K), None, True),
}


def definition(pre: str) -> dict[str, Any]:
    """A whole tokenizer.json, in the form the family publishes."""
    cut, normalizer, ignore_merges = DEFINITIONS[pre]
    tokens, merges = byte_level_vocabulary()
    facts = byte_level_facts(pre)
    added = [
        {"id": i, "content": facts["tokens"][i], "special": facts["token_type"][i] == 3}
        | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        for i in range(len(tokens), len(facts["tokens"]))
    ]
    model = {"type": "BPE", "vocab": {t: i for i, t in enumerate(tokens)}, "merges": merges}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": normalizer,
        "pre_tokenizer": cut,
        "decoder": BYTE_LEVEL,
        "model": {**model, "ignore_merges": ignore_merges},
    }


@pytest.fixture(scope="module", params=DEFINITIONS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    """Ours from a GGUF, and transformers from a tokenizer.json, with the same vocabulary."""
    folder = tmp_path_factory.mktemp("pair")
    file = folder / "tokenizer.json"
    file.write_text(json.dumps(definition(request.param)))
    facts = byte_level_facts(request.param) | {"add_bos_token": False}
    ours = Tokenizer.load(write_gguf(folder / "tiny.gguf", facts))
    return ours, PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    tokens, scores, _ = sentencepiece_vocabulary()
    ids = {t: i for i, t in enumerate(tokens)}
    theirs = LlamaTokenizer(vocab=ids, merges=generate_merges(ids, dict(zip(tokens, scores, strict=True))))
    theirs.add_bos_token = True
    return Tokenizer.load(write_gguf(tmp_path_factory.mktemp("l") / "l.gguf", sentencepiece_facts())), theirs


@pytest.mark.sampled(5)
@pytest.mark.parametrize("text", CORPUS)
def test_byte_level_equals_its_definition(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)
    assert ours.encode(text, special=False) == theirs.encode(text, split_special_tokens=True)
    assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))


@settings(max_examples=examples(50))
@given(text=texts)
def test_byte_level_equals_its_definition_on_any_text(pair: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs.encode(text)


def test_the_pre_tokenizers_differ_on_this_corpus(tmp_path: Path) -> None:
    """Otherwise the comparisons above would not notice a wrong one."""
    encoded = {}
    for pre in ("gpt-2", "smollm", "qwen2", "llama-bpe", "gpt-4o"):
        facts = byte_level_facts(pre) | {"add_bos_token": False}
        encoded[pre] = str([Tokenizer.load(write_gguf(tmp_path / pre, facts)).encode(t) for t in CORPUS])
    assert len(set(encoded.values())) == 5


@pytest.mark.parametrize("text", CORPUS)
def test_sentencepiece_equals_transformers(llama2: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = llama2
    assert ours.encode(text) == theirs.encode(text)
    ids = ours.encode(text)
    assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)


@settings(max_examples=examples(100))
@given(text=texts)
def test_sentencepiece_equals_transformers_on_any_text(llama2: tuple[Tokenizer, Any], text: str) -> None:
    ours, theirs = llama2
    assert ours.encode(text) == theirs.encode(text)
    ids = ours.encode(text, special=False)
    assert ours.decode(ids) == theirs.decode(ids)


def test_plain_text_never_becomes_a_control_token(llama2: tuple[Tokenizer, Any], tmp_path: Path) -> None:
    byte_level = Tokenizer.load(write_gguf(tmp_path / "b", byte_level_facts("smollm")))
    for tokenizer, control in ((llama2[0], {0, 1, 2}), (byte_level, set(byte_level.eos_ids))):
        for text in CORPUS:
            assert not control & set(tokenizer.encode(text, special=False))


def test_pieces_that_spell_a_control_token_or_a_byte_are_not_joined(tmp_path: Path) -> None:
    facts = sentencepiece_facts()
    parts = ["<", "s>", "</", "<0x0", "A>"]
    extra = {
        "tokens": [*facts["tokens"], *parts],
        "scores": [*facts["scores"], *(-1000.0 for _ in parts)],
        "token_type": [*facts["token_type"], *(1 for _ in parts)],
    }
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", facts | extra))
    assert tokenizer.encode("a<s>b", special=False) != tokenizer.encode("a<s>b", bos=False)
    text = "<s> </s> <0x0A>"
    assert tokenizer.decode(tokenizer.encode(text, special=False)) == text
    assert not {1, 2} & set(tokenizer.encode(text, special=False))


def test_begin_token_is_added_only_where_the_file_says(tmp_path: Path) -> None:
    for pre, stated, expected in (
        ("smollm", {}, False),
        ("llama-bpe", {}, True),
        ("smollm", {"add_bos_token": True}, True),
    ):
        tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level_facts(pre) | stated))
        assert (tokenizer.encode("a")[0] == tokenizer.bos_id) is expected
        assert (tokenizer.encode("a", special=False, bos=True)[0] == tokenizer.bos_id) is expected
        assert tokenizer.bos_id not in tokenizer.encode("a", special=False)
        assert tokenizer.bos_id not in tokenizer.encode("a", bos=False)


def test_end_tokens_are_the_stated_one_and_the_turn_marks(tmp_path: Path) -> None:
    facts = byte_level_facts("smollm")
    size = len(facts["tokens"])
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", facts | {"eot_token_id": 5}))
    assert tokenizer.eos_ids == {size - 4, size - 2, 5}  # <|endoftext|>, <|im_end|>, the stated end of turn


def test_llama_3_takes_a_whole_word_before_merging(tmp_path: Path) -> None:
    for pre, whole in (("llama-bpe", True), ("gpt-2", False)):
        facts = byte_level_facts(pre)
        word = {
            "tokens": [*facts["tokens"], "zqzqz"],
            "token_type": [*facts["token_type"], 1],
        }  # no merge makes it
        tokenizer = Tokenizer.load(write_gguf(tmp_path / pre, facts | word))
        assert (tokenizer.encode("zqzqz", bos=False) == [len(facts["tokens"])]) is whole


def test_an_added_token_is_spelled_in_plain_letters(tmp_path: Path) -> None:
    facts = byte_level_facts("smollm")
    added = {"tokens": [*facts["tokens"], "<é>"], "token_type": [*facts["token_type"], 4]}
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "m.gguf", facts | added))
    ids = tokenizer.encode("a<é>b", special=False)
    assert len(facts["tokens"]) in ids
    assert tokenizer.decode(ids) == "a<é>b"


def test_padding_has_no_text_and_no_effect_on_the_fingerprint(tmp_path: Path) -> None:
    facts = byte_level_facts("smollm")
    plain = Tokenizer.load(write_gguf(tmp_path / "a.gguf", facts))
    wide = {**facts, "tokens": [*facts["tokens"], "[PAD1]"], "token_type": [*facts["token_type"], 5]}
    padded = Tokenizer.load(write_gguf(tmp_path / "b.gguf", wide))
    assert padded.vocab_size == plain.vocab_size + 1
    assert padded.piece(padded.vocab_size - 1) == b""
    assert padded.decode([padded.vocab_size - 1, padded.vocab_size + 7, -1]) == ""
    assert padded.fingerprint == plain.fingerprint


def test_the_fingerprint_sees_a_changed_token_and_a_changed_merge_order(tmp_path: Path) -> None:
    facts = byte_level_facts("smollm")
    merges = [*facts["merges"][:-2], facts["merges"][-1], facts["merges"][-2]]
    renamed = ["<|other|>" if t == "<tool_call>" else t for t in facts["tokens"]]
    prints = {
        Tokenizer.load(write_gguf(tmp_path / f"{i}.gguf", facts | change)).fingerprint
        for i, change in enumerate(({}, {"merges": merges}, {"tokens": renamed}))
    }
    assert len(prints) == 3


def test_an_unknown_pre_tokenizer_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"'kimi-k9'.*smollm.*qwen2.*llama-bpe"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level_facts("kimi-k9")))


def test_an_unknown_tokenizer_type_is_named(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"'rwkv'.*gpt2, llama"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", {"model": "rwkv", "tokens": ["a"]}))


@pytest.mark.parametrize(
    "change",
    [
        {"tokens": ["a", "b"]},
        {"merges": ["ab"]},
        {"merges": ["never seen"]},
        {"merges": 7},
        {"tokens": "a"},
        {"token_type": [1]},
    ],
)
def test_parts_that_do_not_fit_are_damage(tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(CorruptModel, match=r"^[^\n]*pull it again$"):
        Tokenizer.load(write_gguf(tmp_path / "m.gguf", byte_level_facts("smollm") | change))


def test_text_with_a_lone_surrogate_is_refused(llama2: tuple[Tokenizer, Any]) -> None:
    with pytest.raises(TextError, match="lone surrogates"):
        llama2[0].encode("a\ud800b")
