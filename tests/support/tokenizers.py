"""Small vocabularies, a corpus that tokenizers trip over, and pairs of tokenizers."""

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from hypothesis import strategies as st
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from paceline.drafters.draft_model.vocab_mapping import TokenizerPair
from paceline.sampling import Doubles, gumbel, noise_key
from paceline.testing import ToyTarget
from paceline.text import Tokenizer
from paceline.text.vocab.vocabulary import Vocabulary, byte_alphabet
from support.tiny_gguf import add_fact

CORPUS = [
    "",
    " ",
    "Hello, world!",
    "  leading and trailing  ",
    "tabs\tand\t\ttabs\r\nCRLF\r\n\r\nlines\n\n\n\nblank\n",
    "a\u00a0b\u2003c\u200bd\u3000e\ufeff",
    " " * 7 + "x" + " " * 40 + "\n" * 37 + "\t" * 35 + "y",
    "0 12 345 6789 1234567 3.14159 1e-9 0x1F ٣٤٥ ²³ Ⅷ ½ 第12章",
    "I'm you're HE'S they'LL d'accord ’tis 'quoted'",
    "def f(x: int) -> list[int]:\n    return [i ** 2 for i in range(x)]  # squares\n\n\nclass A:\n\tpass\n",
    '{"name": "search", "arguments": {"q": "a \\"b\\"", "n": [1, 2.5, null]}}',
    "<div class='x'>&nbsp;</div> https://example.org/a?b=c#d user@example.org",
    "中文分词测试。日本語のテキスト、カタカナ。한국어 띄어쓰기",
    "שלום עולם ‏مرحبا بالعالم‎ नमस्ते ไทย",
    "e\u0301 é A\u030a Å n\u0303 \u1e9b\u0323 \u212b ﬁ",
    "👍🏽 👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇫🇷 ☃️ 𝔘𝔫𝔦 🤦🏼‍♂️",
    "▁marks▁ ▁▁ Ġ and Ċ <0x0A> literally",
    "<|im_start|>user\nHi<|im_end|>\n<|endoftext|> <tool_call>{}</tool_call>",
    "<bos><eos><start_of_turn> <s> </s> <unk>",
    "x<|im_end|>y <|im_end|> z  <|im_end|>",
    "x</s>y <s>z  </s>",
    "!!!??? ... --- === *** ((())) [[]] {{}} $%^&~`|\\",
    "aaaaaaaaaaaaaaaaaaaaaaaa hahahahahaha abababababab",
    "ﷺ \u0000 \u0007 \x1b[31m \ufffd \U0010ffff",
]

_LEARNED = [line for line in CORPUS if "<|" not in line and "<s>" not in line]  # no special token as a word
_words = [word for line in CORPUS for word in line.split(" ")]
texts = st.one_of(
    st.text(max_size=60),
    st.lists(st.sampled_from([*_words, " ", "  ", "\n", "7"]), max_size=12).map(" ".join),
)


@lru_cache(maxsize=1)
def byte_level_vocabulary() -> tuple[list[str], list[str]]:
    """Tokens and merges learned without cutting text first, so that every pre-tokenizer shows."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(_LEARNED * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    return tokens, [" ".join(pair) for pair in model["merges"]]


@lru_cache(maxsize=1)
def sentencepiece_vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and types in the manner of Llama 2: three control tokens, all bytes, pieces by rank."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True)
    trainer = trainers.BpeTrainer(vocab_size=400, show_progress=False, limit_alphabet=120)
    backend.train_from_iterator(_LEARNED * 3, trainer)
    model = json.loads(backend.to_str())["model"]
    pieces = ["".join(pair) for pair in model["merges"]]
    letters = sorted({c for piece in pieces for c in piece} | {"▁"})
    ranked = [*dict.fromkeys(p for p in pieces if len(p) > 1), *letters]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *ranked]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(ranked))]
    return tokens, scores, [2, 3, 3] + [6] * 256 + [1] * len(ranked)


def write_gguf(path: Path, facts: Mapping[str, Any], architecture: str = "llama", template: str = "") -> Path:
    """A GGUF file with a tokenizer and no tensors; `facts` are the keys after `tokenizer.ggml.`."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in facts.items():
        add_fact(writer, f"tokenizer.ggml.{name}", value)
    if template:
        writer.add_chat_template(template)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def byte_level_facts(
    pre: str, special: Sequence[str] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
) -> dict[str, Any]:
    tokens, merges = byte_level_vocabulary()
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": [*tokens, *special, "<tool_call>"],
        "token_type": [1] * len(tokens) + [3] * len(special) + [4],
        "merges": merges,
        "eos_token_id": len(tokens) + len(special) - 1,
        "bos_token_id": len(tokens) + 1,
    }


def sentencepiece_facts() -> dict[str, Any]:
    tokens, scores, types = sentencepiece_vocabulary()
    return {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


PASSAGE = b"the cat sat on the mat, then the hat ran at a rat; hens heat ten teas. "
WORDS = r" ?[a-z]+| ?[^\sa-z]+|\s+(?!\S)|\s+"
TARGET_WORDS = ("th", "he", "at", "the", " the", "en", ", ", "cat", " s", "ten", " ten", "ea", "hea")
DRAFT_WORDS = ("at", "he", " he", "the", " c", " cat", "an", "te", "ten", " s", "hat", "mat", "  ", "   ")


def tokenizer(
    words: Sequence[str],
    marks: Sequence[str],
    letters: bytes = bytes(range(256)),
    bos: str | None = None,
    cuts_words: bool = True,
) -> Tokenizer:
    """These bytes, these words, each two tokens without it, and these marks; `bos` begins every prompt."""
    spelled = {byte: letter for letter, byte in byte_alphabet().items()}
    names = [spelled[byte] for byte in letters]
    merges: list[tuple[str, str]] = []
    for word in words:
        name = "".join(spelled[byte] for byte in word.encode())
        known = models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=merges)
        left, right = (token.value for token in known.tokenize(name))
        merges.append((left, right))
        names.append(name)
    ids = {name: i for i, name in enumerate((*names, *marks))}
    backend = Backend(models.BPE(vocab=ids, merges=merges))
    by_word = pre_tokenizers.Split(Regex(WORDS), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([by_word, to_bytes]) if cuts_words else to_bytes
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(marks))
    control = frozenset(ids[mark] for mark in marks)
    return Tokenizer(
        Vocabulary(
            backend=backend,
            spelling="byte-level",
            size=len(ids),
            control=control,
            added=control,
            bos_id=None if bos is None else ids[bos],
            adds_bos=bos is not None,
            eos_ids=frozenset({ids[marks[0]]}),
            strips_first_space=False,
            names={},
            templates={},
        )
    )


def pair(letters: bytes = bytes(range(256))) -> TokenizerPair:
    """A draft tokenizer and the target's: other words, other marks, other ids."""
    target = tokenizer(TARGET_WORDS, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|odd|>"), letters)
    marks = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")
    return TokenizerPair(tokenizer(DRAFT_WORDS, marks, letters[::-1], "<bos>"), target)


class Reader(ToyTarget):
    """Knows a passage: the longest token that goes on with it is the likeliest, whatever the vocabulary."""

    def __init__(self, tokens: Tokenizer, passage: bytes = PASSAGE, seed: int = 0) -> None:
        super().__init__(tokens.vocab_size)
        self._tokens = tokens
        self._passage = passage
        self._noise = seed

    def logits(self, text: Sequence[int]) -> Doubles:
        read = sum(len(self._tokens.piece(t)) for t in text if t not in self._tokens.control)
        at = read % len(self._passage)
        ahead = (self._passage * 2)[at : at + 16]
        pieces = [self._tokens.piece(token) for token in range(self.vocab_size)]
        known = [6.0 + 2 * len(p) if p and ahead.startswith(p) else 0.0 for p in pieces]
        return np.array(known) + 0.7 * gumbel(noise_key(self._noise, 0, 5, read), np.arange(self.vocab_size))
