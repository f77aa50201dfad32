"""The target's text in another tokenizer's tokens: exact, and told anew only near its end."""

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

from paceline.drafters.draft_model.exact_encoder import ExactEncoder, without_partial_char
from paceline.drafters.draft_model.retokenizer import REWRITE_BYTES, IncrementalRetokenizer
from paceline.drafters.draft_model.vocab_mapping import TokenizerPair
from paceline.text import Tokenizer
from paceline.text.vocab.vocabulary import Vocabulary
from paceline.types import common_prefix
from support.tokenizers import PASSAGE, pair

TWO = pair()
END, START, STOP, ODD = (TWO.target.vocab_size - 4 + i for i in range(4))

REAL = [
    pytest.param("smollm2", marks=pytest.mark.model),
    pytest.param("qwen", marks=pytest.mark.large),
    pytest.param("gemma", marks=pytest.mark.gemma),
]

words = st.text("abehtn .,;\n\t \u00e9\u3000漢👍", max_size=9)
anything = st.one_of(words, words.map(lambda w: " " + w), st.text(max_size=6)).map(
    lambda text: TWO.target_encoder.encode(text.encode())
)
broken = st.binary(min_size=1, max_size=3).map(TWO.target_encoder.encode)
marks = st.sampled_from([[END], [START], [STOP], [ODD]])
pieces = st.lists(st.one_of(anything, anything, anything, broken, marks), max_size=12)


def target_bytes(words: TokenizerPair, tokens: list[int]) -> bytes:
    """The text without marks that have a mark of the draft model's."""
    return b"".join(words.target.piece(t) for t in tokens if t not in words.specials)


def draft_bytes(words: TokenizerPair, ids: list[int]) -> bytes:
    return b"".join(words.draft.piece(t) for t in ids if t not in words.draft.control)


@given(pieces, st.integers(0, 99))
def test_no_byte_is_lost_whatever_comes_and_goes(pieces: list[list[int]], seed: int) -> None:
    rng, transcript, tokens = random.Random(seed), IncrementalRetokenizer(TWO), list[int]()
    for piece in pieces:
        tokens = [*tokens[: rng.choice([len(tokens), rng.randint(0, len(tokens))])], *piece]
        ids = transcript.update(tokens)
        assert draft_bytes(TWO, ids) == target_bytes(TWO, tokens)
        wanted = [TWO.bos[0], *(TWO.specials[t][0] for t in tokens if t in TWO.specials)]
        assert [t for t in ids if t in TWO.draft.control] == wanted


@given(st.lists(anything, max_size=12), st.integers(0, 99))
def test_text_in_pieces_is_retokenized_as_text_at_once(pieces: list[list[int]], seed: int) -> None:
    """Wherever words end within reach; some pieces are taken back and said again."""
    rng, transcript, tokens = random.Random(seed), IncrementalRetokenizer(TWO), list[int]()
    for piece in pieces:
        tokens += [*piece, *TWO.target_encoder.encode(b"n ")]
        if rng.random() < 0.3:
            transcript.update(tokens[: rng.randint(0, len(tokens))])
        assert transcript.update(tokens) == IncrementalRetokenizer(TWO).update(tokens)


@given(pieces, st.sampled_from([b"", b"x" * 200, "漢字".encode() * 60]), anything)
def test_only_the_end_is_retokenized_again(pieces: list[list[int]], long: bytes, more: list[int]) -> None:
    tokens = [t for piece in pieces for t in piece] + TWO.target_encoder.encode(long)
    transcript = IncrementalRetokenizer(TWO)
    before = transcript.update(tokens)
    after = transcript.update([*tokens, *more])
    again = before[common_prefix(before, after) :]
    assert sum(len(TWO.draft.piece(t)) for t in again) <= REWRITE_BYTES + 16
    assert transcript.update(tokens) == before or len(long) > REWRITE_BYTES  # no word ends within reach


@pytest.mark.parametrize("spaces", range(1, 9))
def test_a_word_takes_the_last_of_the_spaces_before_it(spaces: int) -> None:
    transcript, before = IncrementalRetokenizer(TWO), TWO.target_encoder.encode(b"a" + b" " * spaces)
    transcript.update(before)
    tokens = [*before, *TWO.target_encoder.encode(b"he")]
    assert transcript.update(tokens) == IncrementalRetokenizer(TWO).update(tokens)


def test_marks_are_read_as_the_draft_models_own() -> None:
    tokens = [START, *TWO.target_encoder.encode(b"the cat"), STOP, END, ODD]
    ids = IncrementalRetokenizer(TWO).update(tokens)
    own = [TWO.draft.piece(t) for t in ids]
    assert own[:2] == [b"<bos>", b"<start_of_turn>"]
    assert b"".join(own[2:]) == b"the cat<end_of_turn><eos><|odd|>"
    assert own.count(b"<|odd|>") == 0  # nothing like it: read as text
    assert TWO.target_special == {
        TWO.specials[START][0]: START,
        TWO.specials[STOP][0]: STOP,
        TWO.specials[END][0]: END,
    }


def test_a_begin_that_the_draft_model_does_not_have_is_not_read() -> None:
    back = TokenizerPair(TWO.target, TWO.draft)
    tokens = [*TWO.bos, *TWO.draft_encoder.encode(b"the cat")]
    assert draft_bytes(back, IncrementalRetokenizer(back).update(tokens)) == b"the cat"
    assert IncrementalRetokenizer(back).update(TWO.bos) == []


def test_a_tokenizer_without_bytes_says_what_it_can() -> None:
    few = pair(b"abcdehimnrst ,")
    target_bytes = few.draft_encoder.encode("the cat sat\u00e9 at".encode())
    assert draft_bytes(few, target_bytes) == b"the cat sat at"
    assert target_bytes[:2] == few.draft.encode("the cat", special=False)  # the other words stay whole


@given(st.text("the cat\u00e9", max_size=12))
def test_a_tokenizer_that_puts_a_space_before_a_text(text: str) -> None:
    """In the manner of Llama 2, which reads a text in the middle of another without that space."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"theca", "th", "the", "\u2581the"]
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the")]
    vocab = {name: i for i, name in enumerate(names)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="first", split=False)
    none = frozenset[int]()
    encoder = ExactEncoder(
        Tokenizer(
            Vocabulary(backend, "sentencepiece", len(names), none, none, None, False, none, True, {}, {})
        )
    )
    target_bytes = b"".join(
        names[t].replace("\u2581", " ").encode() for t in encoder.encode(text.encode()) if t > 255
    )
    assert target_bytes == text.replace("\u00e9", "").encode()
    assert encoder.encode(b"the") == [vocab["the"]]
    assert encoder.encode(b" the") == [vocab["\u2581the"]]


@given(st.text(max_size=4), st.integers(0, 3))
def test_a_cut_letter_is_left_out(text: str, cut: int) -> None:
    whole = text.encode()
    kept = without_partial_char(whole[: len(whole) - cut])
    assert kept == kept.decode().encode()
    assert whole.startswith(kept)
    assert len(whole) - len(kept) < 4 + cut


@pytest.fixture(scope="module", params=REAL)
def spelled(request: pytest.FixtureRequest) -> tuple[Tokenizer, ExactEncoder]:
    path: Path = request.getfixturevalue(f"{request.param}_path")
    tokenizer = Tokenizer.load(path)
    return tokenizer, ExactEncoder(tokenizer)


@given(st.one_of(st.text(max_size=30), st.just("e\u0301 A\u030a \u212b ﬁ")), st.binary(max_size=3))
def test_real_tokenizers_spell_every_byte(
    spelled: tuple[Tokenizer, ExactEncoder], text: str, noise: bytes
) -> None:
    tokenizer, encoder = spelled
    sayable = {byte for byte in range(256) if encoder.encode(bytes([byte]))}
    assert sayable >= {*range(32, 127), *range(128, 240)} - {192, 193}
    for data in (text.encode(), text.encode() + noise, noise + text.encode() + PASSAGE):
        ids, ends = encoder.encode_with_ends(data)
        assert b"".join(map(tokenizer.piece, ids)) == bytes(byte for byte in data if byte in sayable)
        assert all(data[:end].endswith(tokenizer.piece(t)) for t, end in zip(ids, ends, strict=True))
