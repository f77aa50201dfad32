"""Streaming: any cut of the bytes into tokens gives the same text, and stop strings never show."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.text import Detokenizer, IncrementalDecoder, StopChecker, Tokenizer
from support import examples
from support.tokenizers import CORPUS, byte_level_facts, sentencepiece_facts, texts, write_gguf


class Cut:
    """A tokenizer whose token i is the i-th part of some bytes."""

    strips_first_space = False

    def __init__(self, data: bytes, cuts: list[int]) -> None:
        ends = sorted(c % (len(data) + 1) for c in cuts)
        self.parts = [data[a:b] for a, b in zip([0, *ends], [*ends, len(data)], strict=True)]

    def shown(self, token: int, skip_special: bool) -> bytes:
        return self.parts[token]


cuts = st.lists(st.integers(0, 500), max_size=30)
# Few letters, so that stop strings, their beginnings and overlaps are common.
noisy = st.text(st.sampled_from("abcé👍🏽\u200d"), max_size=40)
stops = st.lists(st.text(st.sampled_from("abcé👍"), min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stop: list[str]) -> str:
    """The text up to the stop string that is complete first; the longer of two that end together."""
    for end in range(len(text) + 1):
        ending = [s for s in stop if text[:end].endswith(s)]
        if ending:
            return text[: end - max(map(len, ending))]
    return text


@pytest.fixture(scope="module", params=["byte-level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    facts = byte_level_facts("qwen2") if request.param == "byte-level" else sentencepiece_facts()
    return Tokenizer.load(write_gguf(tmp_path_factory.mktemp("t") / "t.gguf", facts))


def pieces_of(stream: IncrementalDecoder | Detokenizer, tokens: list[int]) -> list[str]:
    return [*(stream.push(token) for token in tokens), stream.flush()]


@settings(max_examples=examples(200))
@given(data=st.data())
def test_pieces_join_to_decode_for_any_tokens(tokenizer: Tokenizer, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    skip = data.draw(st.booleans())
    assert "".join(pieces_of(IncrementalDecoder(tokenizer, skip), tokens)) == tokenizer.decode(tokens, skip)


@settings(max_examples=examples(200))
@given(text=texts, where=cuts)
def test_no_half_character_ever_gets_out(text: str, where: list[int]) -> None:
    cut = Cut(text.encode(), where)
    pieces = pieces_of(IncrementalDecoder(cut), list(range(len(cut.parts))))
    assert "".join(pieces) == text
    assert "".join(pieces).count("\ufffd") == text.count("\ufffd")
    assert pieces[-1] == ""
    sent, shown = b"", ""
    for part, piece in zip(cut.parts, pieces, strict=False):
        sent, shown = sent + part, shown + piece
        assert shown == sent.decode(errors="ignore")  # nothing that could be shown is held back


def test_the_corpus_streams_through_real_tokens(tokenizer: Tokenizer) -> None:
    for text in CORPUS:
        ids = tokenizer.encode(text, special=False)
        pieces = pieces_of(IncrementalDecoder(tokenizer), ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        assert "\ufffd" in text or not any("\ufffd" in piece for piece in pieces)


def test_unfinished_bytes_become_a_replacement_only_at_the_end(tokenizer: Tokenizer) -> None:
    ids = [i for i in range(tokenizer.vocab_size) if tokenizer.piece(i) == b"\xf0"][:1]
    stream = IncrementalDecoder(tokenizer)
    assert (stream.push(ids[0]), stream.flush()) == ("", "\ufffd")
    assert tokenizer.decode(ids) == "\ufffd"


@settings(max_examples=examples(500))
@given(text=noisy, where=cuts, stop=stops)
def test_any_cut_stops_at_the_same_position(text: str, where: list[int], stop: list[str]) -> None:
    cut = Cut(text.encode(), where)
    shown = "".join(pieces_of(Detokenizer(cut, stop), list(range(len(cut.parts)))))
    assert shown == expected(text, stop)
    assert not any(s in shown for s in stop)


@settings(max_examples=examples(500))
@given(text=noisy, where=cuts, stop=stops)
def test_what_was_shown_is_never_taken_back(text: str, where: list[int], stop: list[str]) -> None:
    cut = Cut(text.encode(), where)
    stream, shown, final = Detokenizer(cut, stop), "", expected(text, stop)
    sent = b""
    for token, part in enumerate(cut.parts):
        shown += stream.push(token)
        sent += part
        assert final.startswith(shown)
        held = len(sent.decode(errors="ignore")) - len(shown)
        assert stream.stopped or held < max(map(len, stop))  # holds no more than could begin a stop string


@settings(max_examples=examples(300))
@given(text=noisy, where=cuts, stop=stops)
def test_stop_strings_speak_up_at_the_first_token_that_completes_one(
    text: str, where: list[int], stop: list[str]
) -> None:
    cut = Cut(text.encode(), where)
    told, sent = StopChecker(cut, stop), b""
    for token, part in enumerate(cut.parts):
        sent += part
        assert told(token) is any(s in sent.decode(errors="ignore") for s in stop)


@settings(max_examples=examples(300))
@given(text=noisy, where=cuts, stop=stops, first=st.integers(1, 6))
def test_stop_strings_count_only_after_the_shortest_length(
    text: str, where: list[int], stop: list[str], first: int
) -> None:
    cut = Cut(text.encode(), where)
    stream, checker = Detokenizer(cut, stop, min_tokens=first), StopChecker(cut, stop, min_tokens=first)
    tokens = list(range(len(cut.parts)))
    begin = b"".join(cut.parts[:first]).decode(errors="ignore")
    shown = "".join(pieces_of(stream, tokens))
    assert shown == begin + expected(text[len(begin) :], stop)
    stopped = [checker(token) for token in tokens]
    assert not any(stopped[:first])
    assert any(stopped) == stream.stopped


def test_control_tokens_are_not_shown_and_do_not_part_a_stop_string(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_gguf(tmp_path / "t.gguf", byte_level_facts("smollm")))
    ids = tokenizer.encode("one ST<|im_end|>OP two")
    assert "".join(pieces_of(Detokenizer(tokenizer), ids)) == "one STOP two"
    assert "".join(pieces_of(Detokenizer(tokenizer, ["STOP"]), ids)) == "one "
    kept = pieces_of(Detokenizer(tokenizer, ["STOP"], skip_special=False), ids)
    assert "".join(kept) == "one ST<|im_end|>OP two"


def test_nothing_follows_a_stop(tmp_path: Path) -> None:
    cut = Cut(b"aXbXc", [1, 2, 3, 4])
    stream = Detokenizer(cut, ["X"])
    assert [stream.push(i) for i in range(5)] == ["a", "", "", "", ""]
    assert (stream.stopped, stream.flush()) == (True, "")
