"""Vocabulary: tokens, their bytes and their roles, from any file format."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from tokenizers import Tokenizer as Backend

# byte-level: every byte is spelled as one printable character (GPT-2, Llama 3, Qwen, SmolLM).
# sentencepiece: a space is spelled ▁, a byte outside the vocabulary <0x0A> (Llama 2, Mistral, Gemma).
Spelling = Literal["byte-level", "sentencepiece"]

SPACE_MARK: Final = "▁"
# Control tokens that end a turn, whatever the model's file names as its end of text.
END_NAMES: Final = frozenset(
    {
        "</s>",
        "<eos>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<end_of_turn>",
        "<|call|>",
    }
)
# Of OpenAI's harmony format: with these two, <|end|> ends a message, after which another one follows.
_HARMONY_ENDS: Final = frozenset({"<|return|>", "<|call|>"})


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens, their spelling, and the special ones among them."""

    backend: Backend
    spelling: Spelling
    size: int  # rows of the model's output, padding included
    control: frozenset[int]  # never text: begin, end, turn marks
    added: frozenset[int]  # matched whole in the text before anything else; holds `control`
    bos_id: int | None
    adds_bos: bool  # a prompt begins with bos_id
    eos_ids: frozenset[int]
    strips_first_space: bool  # encoding adds a space before the text, which decoding removes
    names: Mapping[str, str]  # bos_token, eos_token ...: variables of templates
    templates: Mapping[str, str]  # by name; "default" is the usual one
    end_id: int | None = None  # the last token of a text that is embedded, where the model wants one

    def piece(self, token: int) -> bytes:
        """The bytes of a token: none if it is padding."""
        spelled = self.backend.id_to_token(token) if 0 <= token < 1 << 32 else None
        if spelled is None:
            return b""
        if self.spelling == "sentencepiece":
            return _sentencepiece_bytes(spelled)
        return spelled.encode() if token in self.added else _byte_level_bytes(spelled)


def literal(backend: Backend) -> Backend:
    """A second backend on the same model for which control tokens are plain characters.

    The flag belongs to a backend: changing it would affect other threads that are encoding.
    """
    copy = Backend(backend.model)
    if backend.normalizer is not None:
        copy.normalizer = backend.normalizer
    if backend.pre_tokenizer is not None:
        copy.pre_tokenizer = backend.pre_tokenizer
    added = backend.get_added_tokens_decoder()
    copy.add_tokens([token for _, token in sorted(added.items())])
    if {i: token.content for i, token in copy.get_added_tokens_decoder().items()} != {
        i: token.content for i, token in added.items()
    }:
        copy = Backend.from_str(backend.to_str())  # ids with gaps between them, which adding cannot make
    copy.encode_special_tokens = True
    return copy


def end_tokens(backend: Backend, control: Iterable[int], stated: Iterable[int | None]) -> frozenset[int]:
    """The end tokens of the files, and the control tokens known to end a turn."""
    names = {i: backend.id_to_token(i) for i in control}
    known = {i for i, name in names.items() if name in END_NAMES}
    ends = known | {i for i in stated if i is not None}
    if set(names.values()) >= _HARMONY_ENDS:
        ends = {i for i in ends if names.get(i) != "<|end|>"}
    return frozenset(ends)


def _sentencepiece_bytes(spelled: str) -> bytes:
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        try:
            return bytes([int(spelled[3:5], 16)])
        except ValueError:
            pass
    return spelled.replace(SPACE_MARK, " ").encode()


def _byte_level_bytes(spelled: str) -> bytes:
    table = byte_alphabet()
    try:
        return bytes([table[c] for c in spelled])
    except KeyError:
        return spelled.encode()


@lru_cache(maxsize=1)
def byte_alphabet() -> dict[str, int]:
    """Byte-level BPE's alphabet: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
