"""From rounds to an output: text, counts and times; and the figures that everybody else takes from it."""

from collections.abc import Sequence
from dataclasses import fields

import pytest
import torch

from paceline.config import SamplingParams, SpecConfig
from paceline.errors import CacheFull
from paceline.output import OutputParser, RequestOutput, Result, Stream, as_json
from paceline.text import FORMATS, CallDelta, ContentDelta
from paceline.trace.record import RequestRecord, RequestStats
from paceline.types import NO_DRAFT, Draft, Finish, Round, Seq


class Letters:
    """A detokenizer whose tokens are characters; the last one is held back until the next, or the end."""

    def __init__(self) -> None:
        self.held = ""

    def push(self, token: int) -> str:
        text, self.held = self.held, chr(token)
        return text

    def flush(self) -> str:
        text, self.held = self.held, ""
        return text


def output(tools: str | None = None) -> RequestOutput:
    seq = Seq("a", [1, 2, 3], 3, SamplingParams(seed=5), SpecConfig(("ngram",)))
    parser = OutputParser(tools=FORMATS[tools] if tools else None)
    return RequestOutput(seq, Letters(), parser)


def a_round(text: str = "", draft: Draft = NO_DRAFT, path: Sequence[int] = (), **more: object) -> Round:
    finish: Finish | None = more.get("finish")  # type: ignore[assignment]
    error: CacheFull | None = more.get("error")  # type: ignore[assignment]
    rows = int(bool(more.get("rows", 1)))
    tokens = tuple(map(ord, text))
    return Round("a", 3, ("ngram",), draft, tuple(path), tokens, len(draft), 1, rows, 100, 900, finish, error)


DRAFT = Draft(tuple(map(ord, "bcx")), None, ("ngram", "ngram", "suffix"), q=torch.zeros(3, 200))


def test_rounds_become_text_counts_and_times() -> None:
    taken = output()
    taken.take(a_round())  # a piece of the prompt
    assert taken.first_token_s is None
    first = taken.take(a_round("a"))
    assert (first.texts, first.deltas) == (("",), ())
    second = taken.take(a_round("bcd", DRAFT, (0, 1)))
    assert second.texts == ("a", "b", "c")
    last = taken.take(a_round("e", finish="length"))
    assert last.texts == ("de",)
    assert (taken.text, taken.content, taken.content_len) == ("abcde", "abcde", 5)
    assert taken.finish_reason == "length"
    stats = taken.stats(model="m", route="r", endpoint="/v1")
    assert (stats.passes, stats.output_tokens, stats.prompt_tokens) == (4, 5, 3)
    assert stats.drafted_by_source == {"ngram": 2, "suffix": 1}
    assert (stats.drafted_tokens, stats.accepted_tokens) == (3, 2)
    assert stats.accepted_by_source == {"ngram": 2}
    assert stats.first_token_s is not None
    assert 0 <= stats.queue_s <= stats.first_token_s <= stats.first_token_s + stats.decode_s <= stats.seconds


def test_no_round_keeps_a_tensor_alive() -> None:
    taken = output()
    taken.take(a_round("bcd", DRAFT, (0, 1)))
    assert [r.draft.q for r in taken.rounds] == [None]
    assert taken.rounds[0].draft.tokens == DRAFT.tokens


def test_text_that_was_held_back_comes_with_an_end_that_has_no_tokens() -> None:
    taken = output()
    taken.take(a_round("ab"))
    assert taken.take(a_round(finish="stop")).deltas == (ContentDelta("b"),)
    assert taken.text == "ab"


def test_a_result_has_the_text_of_each_token() -> None:
    taken = output()
    taken.take(a_round())  # a piece of the prompt
    taken.take(a_round("a"))
    taken.take(a_round("bcd", DRAFT, (0, 1)))
    assert taken.result().texts == ("", "a", "b", "c")
    taken.take(a_round(finish="stop"))
    result = taken.result()
    assert result.texts == ("", "a", "b", "cd")
    assert len(result.texts) == len(result.sources)
    assert "texts" not in as_json(result)


def test_a_request_that_ended_before_its_first_pass_had_none() -> None:
    taken = output()
    taken.take(a_round(finish="error", error=CacheFull("full"), rows=0))
    assert taken.stats().passes == 0
    assert taken.stats().first_token_s is None
    assert taken.stats().finish == "error"


def test_tool_calls_are_read_from_the_text() -> None:
    taken = output("hermes")
    written = 'Yes.<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>'
    taken.take(a_round(written, finish="stop"))
    assert taken.calls == [("get", '{"a": 1}')]
    assert taken.content.strip() == "Yes."
    assert taken.finish_reason == "tool_calls"
    assert {type(delta) for delta in taken.deltas} == {CallDelta, ContentDelta}
    assert [call.name for call in taken.result().tool_calls] == ["get"]


def test_the_text_of_a_call_that_was_cut_off_is_no_content() -> None:
    taken = output("hermes")
    written = 'Yes.<tool_call>\n{"name": "get", "arguments": {"a'
    taken.take(a_round(written, finish="length"))
    assert taken.result().content == taken.content
    assert taken.content.strip() == "Yes."
    assert taken.result().text == written


@pytest.mark.parametrize("finish", ["length", "cancelled", None])
def test_a_call_that_was_cut_off_before_its_arguments_is_none(finish: Finish | None) -> None:
    taken = output("harmony")
    taken.take(a_round("<|channel|>commentary to=functions.delete_all<|message|> ", finish=finish))
    assert (taken.calls, taken.result().tool_calls) == ([], ())
    assert taken.result().content == ""


class Pieces:
    """A detokenizer whose tokens number the pieces of a text."""

    def __init__(self, *pieces: str) -> None:
        self.pieces = pieces

    def push(self, token: int) -> str:
        return self.pieces[token]

    def flush(self) -> str:
        return ""


@pytest.mark.parametrize("size", [1, 2, 100])
def test_tokens_of_reasoning_are_counted_however_many_come_at_once(size: int) -> None:
    thought = ("<|channel|>", "analysis", "<|message|>", "Hm", "", "é <", "|.", "<|end|>")  # é: of two tokens
    answer = ("<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "4", "2")
    taken = output("harmony")
    taken.detokenizer = Pieces(*thought, *answer, *thought[:4])
    tokens = "".join(map(chr, range(19)))
    for at in range(0, len(tokens), size):
        taken.take(a_round(tokens[at : at + size], finish="length" if at + size >= len(tokens) else None))
    assert (taken.reasoning, taken.content) == ("Hmé <|.Hm", "42")
    assert taken.reasoning_tokens == 5


class Source:
    def __init__(self, *rounds: Round) -> None:
        self.rounds = list(rounds)
        self.cancelled: list[str] = []

    def next_round(self, seq_id: str) -> Round:
        return self.rounds.pop(0)

    def cancel(self, seq_id: str) -> None:
        self.cancelled.append(seq_id)


def test_a_stream_gives_a_piece_for_each_token() -> None:
    stream = Stream(Source(a_round("a"), a_round("bcd", DRAFT, (0, 1), finish="stop")), output())
    pieces = list(stream)
    assert [(p.text, chr(p.token_id), p.source) for p in pieces] == [
        ("", "a", "target"),
        ("a", "b", "ngram"),
        ("b", "c", "ngram"),
        ("cd", "d", "target"),
    ]
    assert stream.result.text == "abcd"


def test_an_error_ends_a_stream_and_cancels_nothing() -> None:
    source = Source(a_round("a"), a_round(error=CacheFull("full"), finish="error"))
    stream = Stream(source, output())
    with pytest.raises(CacheFull):
        list(stream)
    stream.close()
    assert stream.result.finish == "error"
    assert source.cancelled == []


def test_a_stream_that_is_closed_cancels_its_request_once() -> None:
    source = Source(a_round("a"))
    with Stream(source, output()) as stream:
        next(stream)
    stream.close()
    assert source.cancelled == ["a"]
    assert stream.result.finish == "cancelled"


def a_result() -> Result:
    taken = output()
    taken.take(a_round("bcd", DRAFT, (0, 1), finish="stop"))
    return taken.result()


def test_a_result_has_the_figures_under_their_names_and_the_old_ones() -> None:
    result = a_result()
    assert result.drafted is result.drafted_by_source
    assert result.accepted is result.accepted_by_source
    with pytest.warns(DeprecationWarning, match="now called Result.cached_tokens"):
        assert result.shared_tokens == result.cached_tokens
    with pytest.warns(DeprecationWarning, match="now called Result.first_token_s;"):
        assert result.first_token_seconds == result.first_token_s
    written = as_json(result)
    assert (written["drafted"], written["drafted_tokens"]) == (3, 3)
    assert (written["accepted"], written["accepted_tokens"]) == (2, 2)
    assert written["drafted_by_source"] == result.drafted_by_source
    assert "route" not in written


def test_a_record_takes_every_figure_that_it_has_a_field_for() -> None:
    stats = RequestStats(
        model="m",
        route="r",
        endpoint="/v1",
        prompt_tokens=1,
        cached_tokens=2,
        disk_tokens=1,
        output_tokens=3,
        passes=4,
        drafted_by_source={"ngram": 5},
        accepted_by_source={"ngram": 6},
        finish="stop",
        lossy=True,
        queue_s=7.0,
        first_token_s=8.0,
        seconds=9.0,
    )
    record = RequestRecord.of(stats, "id", 10.0, tenant="t")
    shared = {f.name for f in fields(RequestStats)} & {f.name for f in fields(RequestRecord)}
    assert len(shared) == 15
    assert all(getattr(record, name) == getattr(stats, name) for name in shared)
    assert (record.id, record.created, record.tenant, record.drafted, record.accepted) == (
        "id",
        10,
        "t",
        5,
        6,
    )
