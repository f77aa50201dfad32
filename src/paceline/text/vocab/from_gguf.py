"""Builds a tokenizer from the `tokenizer.ggml.*` keys of a GGUF file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from paceline.errors import CorruptModel, TextError
from paceline.gguf_header import read_header
from paceline.text.vocab.vocabulary import SPACE_MARK, Vocabulary, end_tokens

Merges = list[tuple[str, str]]

# token_type values
_UNKNOWN: Final = 2
_CONTROL: Final = 3
_USER_DEFINED: Final = 4
_UNUSED: Final = 5
_BYTE: Final = 6

_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED_WORDS: Final = "|".join(  # o200k: a word ends where capitals begin, and takes its contraction along
    (
        *(
            rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]{first}[{_LOWER}]{then}(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
            for first, then in ("*+", "+*")
        ),
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _words(pattern: str) -> Callable[[], pre_tokenizers.PreTokenizer]:
    def build() -> pre_tokenizers.PreTokenizer:
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )

    return build


# tokenizer.ggml.pre -> how text is cut before merging, as in the models' own tokenizer.json
PRE_TOKENIZERS: Final[Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _single_digits,
    "qwen2": _words(_WORDS % ""),
    "llama-bpe": _words(_WORDS % "{1,3}"),
    "llama3": _words(_WORDS % "{1,3}"),
    "llama-v3": _words(_WORDS % "{1,3}"),
    "gpt-4o": _words(_CASED_WORDS),
}
_NFC: Final = ("qwen2",)  # whose tokenizer.json composes characters first
_LLAMA3: Final = ("llama-bpe", "llama3", "llama-v3")  # begins every prompt with BOS
_WHOLE_WORDS: Final = (*_LLAMA3, "gpt-4o")  # a word that is a token is not merged from parts


def vocabulary_from_gguf(path: Path) -> Vocabulary:
    keys = read_header(path).metadata
    facts = {k.removeprefix("tokenizer.ggml."): v for k, v in keys.items() if k.startswith("tokenizer.ggml.")}
    if facts.get("model") not in ("gpt2", "llama"):
        raise TextError(f"{path} has a tokenizer of type {facts.get('model')!r}: known are gpt2, llama")
    try:
        return _build(path, keys, facts)
    except (TypeError, ValueError, IndexError, AttributeError) as problem:
        raise CorruptModel(f"{path} describes no usable tokenizer ({problem}): pull it again") from problem


def _build(path: Path, keys: Mapping[str, Any], facts: Mapping[str, Any]) -> Vocabulary:
    tokens, types = _tokens(path, facts)
    if facts["model"] == "gpt2":
        backend = _byte_level(path, facts, tokens, types)
    else:
        tokens = [_respell(t, y) for t, y in zip(tokens, types, strict=True)]
        backend = _sentencepiece(path, facts, tokens, types, str(keys.get("general.architecture", "")))
    _add_whole_tokens(backend, tokens, types)
    return _describe(backend, keys, facts, tokens, types)


def _tokens(path: Path, facts: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = facts.get("tokens")
    if not isinstance(tokens, list) or not tokens:
        raise CorruptModel(f"{path} holds no vocabulary (tokenizer.ggml.tokens): pull it again")
    types = facts.get("token_type") or [1] * len(tokens)
    if len(types) != len(tokens):
        raise CorruptModel(f"{path} has {len(tokens)} tokens but {len(types)} token types: pull it again")
    return tokens, types


def _byte_level(path: Path, facts: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int]) -> Backend:
    name = str(facts.get("pre", "default"))
    if name not in PRE_TOKENIZERS:
        raise TextError(f"{path} asks for the pre-tokenizer {name!r}: known are {', '.join(PRE_TOKENIZERS)}")
    merges = [_pair(path, line) for line in facts.get("merges", ())]
    model = _bpe(path, _ids(tokens, types), merges, ignore_merges=name in _WHOLE_WORDS)
    backend = Backend(model)
    if name in _NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[name]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    path: Path, facts: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], architecture: str
) -> Backend:
    gemma = architecture.startswith("gemma")
    scores = facts.get("scores") or [0.0] * len(tokens)
    unknown = _id(facts, "unknown", len(tokens))
    merges = _merges_by_id(tokens, types) if gemma else _merges_by_score(tokens, types, scores)
    unk_token = None if unknown is None else tokens[unknown]
    model = _bpe(path, _ids(tokens, types), merges, byte_fallback=True, fuse_unk=True, unk_token=unk_token)
    backend = Backend(model)
    if gemma:
        backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
        backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        prefix = "first" if facts.get("add_space_prefix", True) else "never"
        backend.pre_tokenizer = pre_tokenizers.Metaspace(SPACE_MARK, prepend_scheme=prefix, split=False)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _bpe(path: Path, ids: dict[str, int], merges: Merges, **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab=ids, merges=merges, **options)
    except Exception as problem:  # the library raises bare exceptions
        raise CorruptModel(
            f"{path} has merges that do not fit its vocabulary ({problem}): pull it again"
        ) from None


def _ids(tokens: Sequence[str], types: Sequence[int]) -> dict[str, int]:
    return {t: i for i, (t, y) in enumerate(zip(tokens, types, strict=True)) if y != _UNUSED}


def _id(facts: Mapping[str, Any], name: str, size: int) -> int | None:
    """A special token's id; writers say "none" with a number that is no token's."""
    stated = facts.get(f"{name}_token_id")
    return stated if isinstance(stated, int) and 0 <= stated < size else None


def _pair(path: Path, line: str) -> tuple[str, str]:
    left, space, right = line.partition(" ")
    if not space:
        raise CorruptModel(f"{path} has a merge that is not a pair ({line!r}): pull it again")
    return left, right


def _respell(token: str, kind: int) -> str:
    """GGUF stores user-defined tokens with real spaces; the vocabulary spells them with marks."""
    return token.replace(" ", SPACE_MARK) if kind == _USER_DEFINED else token


def _splits(tokens: Sequence[str], types: Sequence[int]) -> list[tuple[int, str, str]]:
    """Every way plain text can join two tokens into one: (id, left, right), by id, then by length."""
    known = set(tokens)
    bare = (_UNKNOWN, _CONTROL, _UNUSED, _BYTE)
    return [
        (i, left, right)
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind not in bare
        for k in range(1, len(token))
        if (left := token[:k]) in known and (right := token[k:]) in known
    ]


def _merges_by_id(tokens: Sequence[str], types: Sequence[int]) -> Merges:
    """Gemma's order, by id and then by the left part's length: its scores do not rank every token."""
    return [(left, right) for _, left, right in _splits(tokens, types)]


def _merges_by_score(tokens: Sequence[str], types: Sequence[int], scores: Sequence[float]) -> Merges:
    ids = {t: i for i, t in enumerate(tokens)}
    splits = sorted(_splits(tokens, types), key=lambda s: (-scores[s[0]], ids[s[1]], ids[s[2]]))
    return [(left, right) for _, left, right in splits]


def _add_whole_tokens(backend: Backend, tokens: Sequence[str], types: Sequence[int]) -> None:
    whole = [
        (t, y) for t, y in zip(tokens, types, strict=True) if t and y in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]
    backend.add_special_tokens([AddedToken(t, normalized=False) for t, y in whole if y != _USER_DEFINED])
    backend.add_tokens(
        [AddedToken(t, normalized=False, special=False) for t, y in whole if y == _USER_DEFINED]
    )


def _describe(
    backend: Backend,
    keys: Mapping[str, Any],
    facts: Mapping[str, Any],
    tokens: Sequence[str],
    types: Sequence[int],
) -> Vocabulary:
    sentencepiece = facts["model"] == "llama"
    control = frozenset(i for i, y in enumerate(types) if y in (_UNKNOWN, _CONTROL))
    ids = {n: _id(facts, n, len(tokens)) for n in ("bos", "eos", "eot", "eom", "unknown", "padding")}
    titles = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    template = keys.get("tokenizer.chat_template")
    return Vocabulary(
        backend=backend,
        spelling="sentencepiece" if sentencepiece else "byte-level",
        size=len(tokens),
        control=control,
        added=control | {i for i, y in enumerate(types) if y == _USER_DEFINED},
        bos_id=ids["bos"],
        adds_bos=bool(facts.get("add_bos_token", sentencepiece or facts.get("pre") in _LLAMA3)),
        eos_ids=end_tokens(backend, control, (ids["eos"], ids["eot"], ids["eom"])),
        strips_first_space=sentencepiece and bool(facts.get("add_space_prefix", True)),
        names={title: tokens[i] for n, title in titles.items() if (i := ids[n]) is not None},
        templates={"default": template} if template else {},
        end_id=ids["eos"] if facts.get("add_eos_token") else None,
    )
