"""Tokenizers read from Hugging Face folders, against transformers on the same folder."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, processors
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer, LlamaTokenizer, Qwen2Tokenizer
from transformers.tokenization_utils_base import generate_merges

from paceline.errors import CorruptModel, ModelError, TextError, UnknownModel
from paceline.text import Tokenizer
from support.tokenizers import (
    CORPUS,
    byte_level_facts,
    byte_level_vocabulary,
    sentencepiece_facts,
    sentencepiece_vocabulary,
    write_gguf,
)

TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture
def byte_level_folder(tmp_path: Path) -> Path:
    tokens, merges = byte_level_vocabulary()
    names = byte_level_facts("qwen2")["tokens"]
    ids = {t: i for i, t in enumerate(names)}
    theirs = Qwen2Tokenizer(
        vocab=ids,
        merges=[tuple(m.split(" ")) for m in merges],
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    theirs.add_tokens([AddedToken(t, normalized=False, special=True) for t in names[len(tokens) : -1]])
    theirs.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    theirs.chat_template = TEMPLATE
    theirs.save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sentencepiece_folder(tmp_path: Path) -> Path:
    tokens, scores, _ = sentencepiece_vocabulary()
    ids = {t: i for i, t in enumerate(tokens)}
    theirs = LlamaTokenizer(vocab=ids, merges=generate_merges(ids, dict(zip(tokens, scores, strict=True))))
    theirs.add_bos_token = True
    theirs.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("folder", ["byte_level_folder", "sentencepiece_folder"])
def test_a_saved_tokenizer_is_read_equally(folder: str, request: pytest.FixtureRequest) -> None:
    path = request.getfixturevalue(folder)
    ours, theirs = Tokenizer.load(path), AutoTokenizer.from_pretrained(path)
    for text in CORPUS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        assert ours.encode(text, special=False, bos=True) == theirs.encode(text, split_special_tokens=True)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_id, theirs.eos_token_id in ours.eos_ids) == (theirs.bos_token_id, True)


def test_folder_and_gguf_of_one_model_share_a_fingerprint(byte_level_folder: Path, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "same.gguf", byte_level_facts("qwen2"))
    assert Tokenizer.load(file).fingerprint == Tokenizer.load(byte_level_folder).fingerprint


def test_the_template_lies_in_its_own_file_or_in_the_config(byte_level_folder: Path) -> None:
    chat = [{"role": "user", "content": "Hi"}]
    expected = "<|im_start|>[user] Hi<|im_end|>"
    file = byte_level_folder / "chat_template.jinja"
    assert file.is_file()
    assert Tokenizer.load(byte_level_folder).render(chat) == expected
    file.unlink()
    with pytest.raises(TextError, match="no chat template"):
        Tokenizer.load(byte_level_folder).render(chat)
    change(byte_level_folder, chat_template=TEMPLATE)
    assert Tokenizer.load(byte_level_folder).render(chat) == expected


def test_a_template_for_tools_is_used_when_there_are_tools(byte_level_folder: Path) -> None:
    (byte_level_folder / "chat_template.jinja").unlink()
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "{{ tools | length }}"},
    ]
    change(byte_level_folder, chat_template=named)
    tokenizer = Tokenizer.load(byte_level_folder)
    assert tokenizer.render([]) == "plain"
    assert tokenizer.render([], tools=[{"name": "f"}]) == "1"


def change(folder: Path, **settings: Any) -> None:
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def test_special_tokens_may_be_objects_or_in_the_special_tokens_map(byte_level_folder: Path) -> None:
    file = byte_level_folder / "tokenizer_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in config.items() if k != "bos_token"}))
    names = {"bos_token": {"content": "<|endoftext|>", "special": True}}
    (byte_level_folder / "special_tokens_map.json").write_text(json.dumps(names))
    tokenizer = Tokenizer.load(byte_level_folder)
    assert tokenizer.piece(tokenizer.bos_id or 0) == b"<|endoftext|>"


def test_end_tokens_of_the_generation_config_count(byte_level_folder: Path) -> None:
    (byte_level_folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert {5, 6} < Tokenizer.load(byte_level_folder).eos_ids


def test_a_begin_token_written_by_the_post_processor_is_kept(byte_level_folder: Path) -> None:
    file = byte_level_folder / "tokenizer.json"
    backend = Backend.from_file(str(file))
    begin = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    backend.post_processor = processors.TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    backend.save(str(file))
    assert Tokenizer.load(byte_level_folder).encode("a")[0] == begin[1]
    change(byte_level_folder, add_bos_token=False)
    assert Tokenizer.load(byte_level_folder).encode("a")[0] != begin[1]


def test_a_length_limit_saved_with_the_tokenizer_is_not_ours(byte_level_folder: Path) -> None:
    file = byte_level_folder / "tokenizer.json"
    backend = Backend.from_file(str(file))
    backend.enable_truncation(max_length=2)
    backend.enable_padding(length=64)
    backend.save(str(file))
    tokenizer = Tokenizer.load(byte_level_folder)
    assert tokenizer.decode(tokenizer.encode("a long enough text")) == "a long enough text"


def test_bad_folders(byte_level_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(UnknownModel, match=r"no model at .*nowhere"):
        Tokenizer.load(byte_level_folder / "nowhere")
    with pytest.raises(TextError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path_factory.mktemp("empty"))
    (byte_level_folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(CorruptModel, match=r"tokenizer_config\.json is damaged"):
        Tokenizer.load(byte_level_folder)
    (byte_level_folder / "tokenizer.json").write_text("{}")
    with pytest.raises(CorruptModel, match=r"tokenizer\.json is damaged"):
        Tokenizer.load(byte_level_folder)


def test_a_tokenizer_of_another_kind_is_named(byte_level_folder: Path) -> None:
    file = byte_level_folder / "tokenizer.json"
    state = json.loads(file.read_text()) | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}
    file.write_text(json.dumps(state))
    with pytest.raises(TextError, match=r"WordPiece.*ByteLevel"):
        Tokenizer.load(byte_level_folder)


def test_a_sentencepiece_folder_and_file_agree(sentencepiece_folder: Path, tmp_path: Path) -> None:
    from_file = Tokenizer.load(write_gguf(tmp_path / "l.gguf", sentencepiece_facts()))
    from_folder = Tokenizer.load(sentencepiece_folder)
    assert [from_file.encode(t) for t in CORPUS] == [from_folder.encode(t) for t in CORPUS]


def test_files_that_may_not_be_read(byte_level_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(ModelError, match=r"^[^\n/]* cannot be read: Permission denied$"):
        Tokenizer.load(byte_level_folder)
    monkeypatch.setattr(Path, "exists", refuse)
    with pytest.raises(ModelError, match="cannot be read: Permission denied"):
        Tokenizer.load(byte_level_folder)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("continuing_subword_prefix", "é"),  # a panic of the tokenizers library
        ("unk_token", "nowhere"),  # shows when text is encoded
    ],
)
def test_a_fault_that_the_library_does_not_check(byte_level_folder: Path, field: str, value: str) -> None:
    file = byte_level_folder / "tokenizer.json"
    data = json.loads(file.read_text())
    data["model"][field] = value
    data["model"]["vocab"] = dict(list(data["model"]["vocab"].items())[-40:])
    data["model"]["merges"] = [["a", "b"]] if field == "continuing_subword_prefix" else []
    data["model"]["vocab"] |= {"a": 1000, "b": 1001, "ab": 1002}
    file.write_text(json.dumps(data))
    with pytest.raises(CorruptModel, match=r"^[^\n]* no usable tokenizer \([^\n]*\): fetch it again$"):
        Tokenizer.load(byte_level_folder)
