"""`LLM.embed` against the hidden states of Transformers, and of one backend against another."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors

from paceline import LLM, EngineConfig, SpecConfig
from paceline.engine.pooling import Pooler
from paceline.errors import PromptTooLong, SettingError, UsageError
from paceline.types import HiddenRows, Seq
from support.models import save_reference, some_tokens
from support.native_targets import tiny_model
from support.servers import TEMPLATE
from support.tiny_gguf import Sizes
from support.tokenizers import byte_level_facts

VOCAB = 258  # the bytes, and the two special tokens
CONFIG = EngineConfig("cpu", "float32", cache_mb=16)
LENGTHS = (1, 5, 300)  # the last is read in two passes


def write_tokenizer(folder: Path, ends: bool = False) -> None:
    """Bytes. ends: a text by itself ends with the end token, as embedding models want."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>"])
    if ends:
        backend.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 257)])
    backend.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def saved(folder: Path, family: str, pooling: str | None = None) -> Any:
    """The reference, whose folder has the pooling that sentence-transformers would write."""
    reference = save_reference(family, folder, vocab_size=VOCAB)
    write_tokenizer(folder)
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({pooling: True, "word_embedding_dimension": 60})
        )
    return reference


@torch.inference_mode()
def expected(reference: Any, tokens: Sequence[int], pooling: str) -> torch.Tensor:
    states = reference.model(torch.tensor([list(tokens)])).last_hidden_state[0]
    pooled = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
    return torch.nn.functional.normalize(pooled, dim=0)


@pytest.mark.parametrize(
    ("family", "setting", "pooling"),
    [
        ("llama", "pooling_mode_mean_tokens", "mean"),
        ("gemma3_text", "pooling_mode_lasttoken", "last"),
        ("qwen3", "pooling_mode_cls_token", "cls"),
        ("qwen2", None, "last"),
    ],
)
def test_embeddings_are_the_hidden_states_of_transformers(
    family: str, setting: str | None, pooling: str, tmp_path: Path
) -> None:
    reference = saved(tmp_path, family, setting)
    llm = LLM(str(tmp_path), config=CONFIG)
    assert llm.pooling == pooling
    texts = [some_tokens(length, seed=length, vocab=VOCAB) for length in LENGTHS]
    llm.prefill(texts[-1])  # into the prefix cache, where only the last token's state may be left out
    for again in range(2):
        for tokens, found in zip(texts, llm.embed(texts), strict=True):
            assert torch.dist(torch.tensor(found), expected(reference, tokens, pooling)) < 1e-5, again
            assert np.linalg.norm(found) == pytest.approx(1, abs=1e-6)


def test_a_text_that_gave_its_place_back_is_pooled_once(tmp_path: Path) -> None:
    """Rows that are computed twice count once, and those found again in the cache are not missing."""
    reference = saved(tmp_path, "llama", "pooling_mode_mean_tokens")
    config = EngineConfig("cpu", "float32", cache_mb=16, prefill_chunk=64, max_batch=1)
    llm = LLM(str(tmp_path), config=config)
    tokens = some_tokens(300, vocab=VOCAB)
    request = llm.prepare_embedding(llm.encode_embedded(tokens))
    llm.engine.submit(request.seq)
    for _ in range(2):
        llm.engine.step()
    assert 0 < request.seq.computed < 300
    llm.generate([1, 2, 3], max_tokens=3)  # takes the only place
    assert request.seq.preemptions == 1
    while llm.engine.busy:
        llm.engine.step()
    found = request.seq.reader.vector()  # type: ignore[union-attr]
    assert torch.dist(found, expected(reference, tokens, "mean")) < 1e-5


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
def test_rows_that_come_twice_count_once(pooling: str) -> None:
    states = torch.arange(1.0, 13.0).view(6, 2)
    seq = Seq("s", [0] * 6, 6)
    pooler = Pooler(pooling, 3, lambda rows: rows)
    for start, end in ((0, 3), (1, 3), (2, 5), (5, 6), (0, 6)):
        pooler.on_hidden(HiddenRows(seq, start, {3: states[start:end]}))
    wanted = {"mean": states.mean(0), "last": states[-1], "cls": states[0]}[pooling]
    assert torch.allclose(pooler.vector(), torch.nn.functional.normalize(wanted, dim=0))


def test_a_stream_is_in_every_pass_while_a_text_is_read(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    llm = LLM(str(tmp_path), config=EngineConfig("cpu", "float32", cache_mb=16, prefill_chunk=64))
    plain: dict[str, Any] = {
        "max_tokens": 12,
        "ignore_eos": True,
        "spec": SpecConfig(("none",)),
        "temperature": 0,
    }
    alone = llm.generate([1, 2, 3], **plain)
    stream = llm.stream([1, 2, 3], **plain, remember=False)
    request = llm.prepare_embedding(llm.encode_embedded(some_tokens(500, vocab=VOCAB)))
    llm.engine.submit(request.seq)
    beside = stream.read()
    assert beside.token_ids == alone.token_ids
    assert beside.passes == alone.passes
    assert request.seq.computed > 64  # it was read in the same passes


def test_a_pooled_text_leaves_nothing_in_the_cache(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "pooling_mode_mean_tokens")
    llm = LLM(str(tmp_path), config=CONFIG)
    free = llm.target.cache_stats.free
    llm.embed([some_tokens(300, vocab=VOCAB)])
    assert llm.target.cache_stats.free == free
    assert llm.generate([1, 2, 3], max_tokens=2).cached_tokens == 0


def test_more_texts_than_may_wait_are_all_embedded(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    llm = LLM(str(tmp_path), config=replace(CONFIG, max_batch=1, max_waiting=1))
    texts = [[i, i + 1, i + 2] for i in range(1, 5)]
    assert llm.embed(texts) == [llm.embed([text])[0] for text in texts]


@pytest.mark.parametrize("number", [1, 3])
def test_the_native_engine_pools_the_same_states(number: int, tmp_path: Path) -> None:
    """Its activations have 8 bits in products, those of torch 24: vectors agree to about a hundredth."""
    facts = byte_level_facts("smollm")
    sizes = Sizes(2, 256, 4, 2, 64, 256, len(facts["tokens"]), 2048)
    path = tiny_model(tmp_path / "m.gguf", kind="Q8_0", sizes=sizes, tokenizer=facts, template=TEMPLATE)
    with_pooling(path, number)
    text = "The quick brown fox jumps over the lazy dog. " * 12
    native, dense = (
        LLM(str(path), config=EngineConfig("cpu", dtype, cache_mb=16)) for dtype in ("auto", "float32")
    )
    assert "native" in native.target.describe()
    assert native.pooling == dense.pooling == {1: "mean", 3: "last"}[number]
    one, other = np.array(native.embed(text)[0]), np.array(dense.embed(text)[0])
    assert np.linalg.norm(one - other) < 0.02
    assert np.linalg.norm(one - np.array(native.embed("Something else")[0])) > 0.1


def with_pooling(path: Path, number: int) -> None:
    """The same file with `llama.pooling_type`."""
    from gguf import GGUFReader, GGUFWriter

    reader = GGUFReader(path)
    writer = GGUFWriter(path.with_suffix(".new"), "llama")
    for name, field in reader.fields.items():
        if not name.startswith(("GGUF.", "general.architecture")):
            kind, *inner = field.types
            writer.add_key_value(name, field.contents(), kind, inner[0] if inner else None)
    writer.add_uint32("llama.pooling_type", number)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    path.with_suffix(".new").rename(path)


def test_a_text_ends_with_the_token_that_the_model_wants(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3")
    plain = LLM(str(tmp_path), config=CONFIG)
    write_tokenizer(tmp_path, ends=True)
    llm = LLM(str(tmp_path), config=CONFIG)
    tokens = plain.tokenizer.encode("a text")
    assert plain.encode_embedded("a text").tokens == tokens
    assert llm.encode_embedded("a text").tokens == [*tokens, 257]
    assert llm.encode_embedded(tokens).tokens == tokens  # tokens are taken as they are
    assert llm.embed("a text") == llm.embed([[*tokens, 257]])


def test_what_cannot_be_embedded_is_an_error(tmp_path: Path) -> None:
    saved(tmp_path, "llama", "pooling_mode_max_tokens")
    llm = LLM(str(tmp_path), config=CONFIG)
    with pytest.raises(UsageError, match="pools its embeddings by 'max', which is not supported"):
        llm.embed("a")
    llm.pooling = "last"
    with pytest.raises(SettingError, match="at least one token"):
        llm.embed("")
    with pytest.raises(PromptTooLong):
        llm.embed([some_tokens(5000, vocab=VOCAB)])
    with pytest.raises(SettingError, match="tokens below 258"):
        llm.embed([[1, 258]])
    with pytest.raises(SettingError, match="input=1 is not usable: expected a text, or a list of tokens"):
        llm.embed([1, 2])  # type: ignore[arg-type]
