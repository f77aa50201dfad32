"""Real vocabularies and chat templates, against transformers.

The references are transformers' own tokenizer classes, given the file's tokens and merges. transformers also
reads a GGUF by itself, but that way (5.22) does not know `smollm`, so digits stay together, and leaves out
Qwen's NFC and Gemma's tokens of several marks (▁▁): where those matter it is no reference.
"""

import json
import threading
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import AddedToken, pre_tokenizers
from transformers import GemmaTokenizer, GPT2Tokenizer, Qwen2Tokenizer
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.tokenization_utils_base import generate_merges

from paceline.errors import TextError
from paceline.text import Detokenizer, Tokenizer, ToolCall, parse_tool_calls
from support import examples
from support.tokenizers import CORPUS, texts

Pair = tuple[Tokenizer, Any]
CONTROL, USER_DEFINED, UNUSED = 3, 4, 5

SMOLLM2 = pytest.param("smollm2", marks=pytest.mark.model)
QWEN = pytest.param("qwen", marks=pytest.mark.large)
GEMMA = pytest.param("gemma", marks=pytest.mark.gemma)


def smollm2(tokens: dict[str, int], merges: list[tuple[str, ...]]) -> Any:
    tokenizer = GPT2Tokenizer(vocab=tokens, merges=merges)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def qwen(tokens: dict[str, int], merges: list[tuple[str, ...]]) -> Any:
    return Qwen2Tokenizer(vocab=tokens, merges=merges)


def gemma(tokens: dict[str, int], merges: list[tuple[str, ...]]) -> Any:
    tokenizer = GemmaTokenizer(vocab=tokens, merges=generate_merges(tokens))
    tokenizer.add_bos_token = True
    return tokenizer


BUILDERS: dict[str, Callable[[dict[str, int], list[tuple[str, ...]]], Any]] = {
    "smollm2": smollm2,
    "qwen": qwen,
    "gemma": gemma,
}


load = lru_cache(Tokenizer.load)


@lru_cache
def reference(kind: str, path: Path) -> Any:
    _, facts, config = get_gguf_tokenizer(str(path))
    marked = [t.replace(" ", "▁") if kind == "gemma" else t for t in facts["tokens"]]
    typed = list(zip(marked, facts["token_type"], strict=True))
    tokens = {token: i for i, (token, kind_) in enumerate(typed) if kind_ != UNUSED}
    tokenizer = BUILDERS[kind](tokens, [tuple(m.split(" ")) for m in facts.get("merges", ())])
    added = [
        AddedToken(t, normalized=False, special=y == CONTROL)
        for t, y in typed
        if y in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    tokenizer.chat_template = config.get("chat_template")
    return tokenizer


@pytest.fixture(scope="module", params=[SMOLLM2, QWEN, GEMMA])
def pair(request: pytest.FixtureRequest) -> Pair:
    path = request.getfixturevalue(f"{request.param}_path")
    return load(path), reference(request.param, path)


def test_the_corpus_is_tokenized_equally(pair: Pair) -> None:
    ours, theirs = pair
    for text in CORPUS:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.encode(text, bos=False) == theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, special=False, bos=True) == theirs.encode(text, split_special_tokens=True)


def test_the_corpus_is_decoded_equally(pair: Pair) -> None:
    ours, theirs = pair
    for text in CORPUS:
        ids = ours.encode(text)
        assert ours.decode(ids) == theirs.decode(ids)
        assert ours.decode(ids, skip_special=True) == theirs.decode(ids, skip_special_tokens=True)
        assert b"".join(map(ours.piece, ids)).decode() == ours.decode(ids)


@settings(max_examples=examples(150))
@given(text=texts)
def test_any_text_is_tokenized_and_decoded_equally(pair: Pair, text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text)
    assert ids == theirs.encode(text)
    assert ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize("kind", [SMOLLM2, QWEN, GEMMA])
def test_transformers_reading_the_same_file_agrees(kind: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(f"{kind}_path")
    architecture, facts, _ = get_gguf_tokenizer(str(path))
    theirs, _ = convert_gguf_tokenizer(architecture, facts)
    same = {
        "smollm2": lambda text: not any(c.isnumeric() for c in text),
        "qwen": lambda text: unicodedata.is_normalized("NFC", text),
        "gemma": lambda text: "▁▁" not in text,
    }
    for text in filter(same[kind], CORPUS):
        assert load(path).encode(text, bos=False) == theirs.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize(
    ("kind", "bos", "ends", "size"),
    [
        pytest.param("smollm2", 1, {0, 2}, 49152, marks=pytest.mark.model),
        pytest.param("qwen", 151643, {151643, 151645}, 151936, marks=pytest.mark.large),
        pytest.param("gemma", 2, {1, 106}, 262144, marks=pytest.mark.gemma),
    ],
)
def test_the_special_tokens(
    kind: str, bos: int, ends: set[int], size: int, request: pytest.FixtureRequest
) -> None:
    tokenizer = load(request.getfixturevalue(f"{kind}_path"))
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.vocab_size) == (bos, frozenset(ends), size)
    assert tokenizer.adds_bos is (kind == "gemma")


CALL = {"name": "add", "arguments": {"a": 1, "b": "zwei — ☃ <&>"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds, über alles: <b> & 'c'.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}
PLAIN_CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  spaced \n"}],
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<|im_end|> b"},
        {"role": "user", "content": ""},
    ],
]
TOOL_CHATS: list[list[dict[str, Any]]] = [
    *PLAIN_CHATS,
    [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
        {"role": "tool", "name": "add", "content": "2"},
        {"role": "tool", "name": "add", "content": "zwei"},
        {"role": "assistant", "content": "Two.", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "3"},
    ],
]


@pytest.fixture(scope="module", params=[SMOLLM2, QWEN])
def chat_pair(request: pytest.FixtureRequest) -> Pair:
    path = request.getfixturevalue(f"{request.param}_path")
    return load(path), reference(request.param, path)


@pytest.mark.parametrize("prompted", [True, False])
def test_chats_are_rendered_equally(chat_pair: Pair, prompted: bool) -> None:
    ours, theirs = chat_pair
    for chat in PLAIN_CHATS:
        expected = theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompted)
        assert ours.render(chat, add_generation_prompt=prompted) == expected
        ids = theirs.apply_chat_template(chat, add_generation_prompt=prompted)["input_ids"]
        assert ours.encode_chat(chat, add_generation_prompt=prompted) == ids


@pytest.mark.large
@pytest.mark.parametrize("tools", [None, [], [TOOL], [TOOL, TOOL["function"]]])
def test_qwens_tool_chats_are_rendered_equally(qwen_path: Path, tools: list[dict[str, Any]] | None) -> None:
    ours, theirs = load(qwen_path), reference("qwen", qwen_path)
    for chat in TOOL_CHATS:
        expected = theirs.apply_chat_template(chat, tools=tools, tokenize=False, add_generation_prompt=True)
        assert ours.render(chat, tools) == expected


@pytest.mark.large
def test_qwens_calls_are_read_back(qwen_path: Path) -> None:
    tokenizer = load(qwen_path)
    text = json.dumps(CALL["arguments"])
    calls = [{"type": "function", "function": {"name": "add", "arguments": text}}] * 2
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    reply = tokenizer.render(chat, [TOOL], add_generation_prompt=False).split("<|im_start|>assistant\n")[1]
    call = ToolCall("add", {"a": 1, "b": "zwei — ☃ <&>"})
    assert tokenizer.tool_format.name == "hermes"
    ids = tokenizer.encode(reply.removesuffix("<|im_end|>\n"), special=False)
    stream = Detokenizer(tokenizer, keep=tokenizer.tool_marks)
    shown = "".join([*map(stream.push, ids), stream.flush()])
    assert parse_tool_calls(shown, tokenizer.tool_format) == ("", [call, call], [])


@pytest.mark.model
def test_smollm2_reads_tools_in_the_system_text(smollm2_path: Path) -> None:
    tokenizer = load(smollm2_path)
    text = tokenizer.render(TOOL_CHATS[-1], tools=[TOOL])
    assert text.startswith("<|im_start|>system\nYou are an expert in composing functions.")
    assert '<tools>[{"name": "add", "description": "Adds, über alles: <b> & \'c\'."' in text
    assert '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": "zwei — ☃ <&>"}}]</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n")


@pytest.mark.gemma
def test_a_model_without_a_template_says_so(gemma_path: Path) -> None:
    with pytest.raises(TextError, match="no chat template: use a plain prompt"):
        load(gemma_path).render([{"role": "user", "content": "Hi"}])


@pytest.mark.model
def test_other_threads_run_while_a_long_text_is_encoded(smollm2_path: Path) -> None:
    tokenizer, done, ticks = load(smollm2_path), threading.Event(), 0

    def tick() -> None:
        nonlocal ticks
        while not done.wait(0.001):
            ticks += 1

    thread = threading.Thread(target=tick)
    thread.start()
    before = ticks
    tokenizer.encode("All of one long text. " * 50_000)
    seen = ticks - before
    done.set()
    thread.join()
    assert seen > 10  # a thread that is kept out makes none, or one on each side


@pytest.mark.model
def test_threads_that_want_control_tokens_and_threads_that_do_not(smollm2_path: Path) -> None:
    tokenizer, text = load(smollm2_path), "one <|im_end|> two " * 300
    wanted = {special: tokenizer.encode(text, special=special) for special in (True, False)}
    assert wanted[True] != wanted[False]
    with ThreadPoolExecutor(4) as pool:
        modes = [True, False] * 20
        found = pool.map(lambda special: tokenizer.encode(text, special=special), modes)
    assert list(found) == [wanted[special] for special in modes]


@pytest.mark.model
def test_the_longest_piece(smollm2_path: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_path)
    longest = tokenizer.longest_piece
    assert not tokenizer._pieces  # none is kept for having been looked at
    assert longest == max(len(tokenizer.piece(i)) for i in range(tokenizer.vocab_size)) > 16
