"""Small grammars and their cursors."""

import random
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline.testing import ToyCursor
from paceline.text import Tokenizer
from paceline.text.vocab.vocabulary import Vocabulary, byte_alphabet

MERGES = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("a", "a")]
EOS = "<eos>"


def small_tokenizer(letters: str = "", merges: Sequence[tuple[str, str]] = MERGES) -> Tokenizer:
    """These letters or else all bytes, merged tokens, one end."""
    bytes_ = sorted(byte_alphabet(), key=lambda c: byte_alphabet()[c])
    names = [*(letters or bytes_), *(left + right for left, right in merges), EOS]
    ids = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=ids, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([EOS])
    end = frozenset({ids[EOS]})
    return Tokenizer(
        Vocabulary(
            backend=backend,
            spelling="byte-level",
            size=len(ids),
            control=end,
            added=end,
            bos_id=None,
            adds_bos=False,
            eos_ids=end,
            strips_first_space=False,
            names={},
            templates={},
        )
    )


VOCAB = 6


def sentence(*positions: set[int], eos: int | None = None) -> ToyCursor:
    """One set of tokens for each position of the output, then the end."""
    return ToyCursor(lambda tokens: positions[len(tokens)] if len(tokens) < len(positions) else set(), eos)


def random_rules(seed: int, longest: int = 6) -> Callable[[tuple[int, ...]], set[int]]:
    """Any tokens may follow any others, mostly few, often one; an output has at most `longest` tokens."""

    def allowed(tokens: tuple[int, ...]) -> set[int]:
        rng = random.Random(f"{seed} {tokens}")
        if len(tokens) == longest or (tokens and rng.random() < 0.1):
            return set()
        return set(rng.sample(range(VOCAB), rng.choice([1, 1, 2, 3, VOCAB])))

    return allowed


def permits(rules: Callable[[tuple[int, ...]], set[int]], tokens: tuple[int, ...]) -> bool:
    """By definition: each token is allowed after those before it."""
    return all(token in rules(tokens[:i]) for i, token in enumerate(tokens))
