"""A tokenizer of a few tokens, for tests that look at every one of them."""

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from paceline.text import Tokenizer
from paceline.text.vocab.vocabulary import Vocabulary, byte_alphabet

MERGES = [("a", "b"), ("b", "c"), ("ab", "c"), ("c", "a"), ("a", "a")]
EOS = "<eos>"


def small_tokenizer(letters: str = "") -> Tokenizer:
    """These letters or else all bytes, five merged tokens, one end."""
    bytes_ = sorted(byte_alphabet(), key=lambda c: byte_alphabet()[c])
    names = [*(letters or bytes_), *(left + right for left, right in MERGES), EOS]
    ids = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=ids, merges=MERGES))
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
