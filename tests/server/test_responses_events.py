"""The items of a response, from the pieces of an answer: no model needed."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.output import OutputDelta
from paceline.server.openai.responses_events import Items, TextLogprobs
from paceline.text import FORMATS, CallDelta, ContentDelta, Delta, ReasoningDelta, ToolStream
from paceline.types import TokenLogprob
from support import examples

ANSWER: list[Delta] = [
    ReasoningDelta("Hm, "),
    ReasoningDelta("well."),
    ContentDelta("Let me "),
    ContentDelta("see."),
    CallDelta(0, "find", ""),
    CallDelta(0, None, '{"a": '),
    CallDelta(0, None, "1}"),
    CallDelta(1, "find", "{}"),
    ContentDelta("Done."),
]


def events_of(deltas: Sequence[Delta], status: str = "completed") -> tuple[Items, list[dict[str, Any]]]:
    items = Items("resp_1")
    events = [event for delta in deltas for event in items.take(delta, FORMATS["hermes"])]
    return items, events + items.close(status)


def test_texts_and_calls_become_items() -> None:
    items, _ = events_of(ANSWER, "incomplete")
    thought, first, one, two, last = items.done
    assert (thought["type"], thought["summary"]) == ("reasoning", [])
    assert thought["content"] == [{"type": "reasoning_text", "text": "Hm, well."}]
    assert first["content"][0]["text"] == "Let me see."
    assert (one["name"], one["arguments"]) == ("find", '{"a": 1}')
    assert (two["name"], two["arguments"]) == ("find", "{}")
    assert last["content"][0]["text"] == "Done."
    assert [item["status"] for item in items.done] == ["completed"] * 4 + ["incomplete"]
    assert len({item["id"] for item in items.done}) == 5
    assert one["call_id"] != two["call_id"]


def test_the_events_rebuild_the_items() -> None:
    items, events = events_of(ANSWER)
    grown: list[str] = []
    for event in events:
        kind, index = event["type"], event["output_index"]
        if kind == "response.output_item.added":
            assert index == len(grown)
            grown.append("")
        elif kind.endswith(".delta"):
            assert index == len(grown) - 1
            grown[index] += event["delta"]
        elif kind == "response.output_item.done":
            assert event["item"] == items.done[index]
    assert grown == ["Hm, well.", "Let me see.", '{"a": 1}', "{}", "Done."]
    for event in events:
        if "item_id" in event:
            assert event["item_id"] == items.done[event["output_index"]]["id"]


def test_events_keep_their_content() -> None:
    """A later delta changes no event that was already made."""
    _, events = events_of(ANSWER)
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [item["status"] for item in added] == ["in_progress"] * 5
    assert [item.get("arguments", item.get("content")) for item in added] == [[], [], "", "", []]


def test_an_empty_answer_is_an_empty_message() -> None:
    items, events = events_of([])
    assert items.done[0]["content"][0]["text"] == ""
    assert [event["type"].removeprefix("response.") for event in events] == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_the_same_answer_has_the_same_ids() -> None:
    assert events_of(ANSWER)[0].done == events_of(ANSWER)[0].done


def round_of(texts: Sequence[str], first: int, *deltas: Delta) -> OutputDelta:
    tokens = tuple(range(first, first + len(texts)))
    logprobs = tuple(TokenLogprob(token, -1.0, ()) for token in tokens)
    return OutputDelta(tuple(texts), deltas, tokens, logprobs, None)


def test_log_probabilities_go_with_the_text_of_their_tokens() -> None:
    """Those of calls, of what follows and of the end go nowhere; those of held-back text come with it."""
    rounds = [
        round_of(["", "é", "t", "<tool"], 0, ContentDelta("ét")),  # half a character, a text, half a mark
        round_of(["_call>", "{}"], 4, CallDelta(0, "f", "{}")),
        round_of(["a", "b"], 6, ContentDelta("a")),
        round_of([""], 8, ContentDelta("b")),
    ]
    queue, taken = TextLogprobs(), []
    for delta in rounds:
        queue.push(delta)
        taken.append([[one.token for one in queue.take(part)] for part in delta.deltas])
    assert taken == [[[0, 1, 2]], [[]], [[]], [[]]]


PIECES = [
    "Sure",
    ", x <",
    " y",
    "<tool",
    "_call>",
    '\n{"name": "f", "arg',
    'uments": {"a": ',
    "1}}",
    "\n</tool_call>",
]
AFTER = ["\n", "Do", "ne <", "b", ""]


@settings(max_examples=examples(60))
@given(st.data(), st.sampled_from([PIECES + AFTER, PIECES[:3] + AFTER, AFTER, PIECES]))
def test_log_probabilities_do_not_depend_on_how_tokens_come_in_rounds(
    data: st.DataObject, texts: list[str]
) -> None:
    def handed_out(sizes: Sequence[int]) -> list[int]:
        queue, stream, taken, first = TextLogprobs(), ToolStream(FORMATS["hermes"]), list[int](), 0
        for size in sizes:
            part = texts[first : first + size]
            deltas = stream.push("".join(part)) + (stream.flush() if first + size >= len(texts) else [])
            queue.push(delta := round_of(part, first, *deltas))
            taken += [one.token for part in delta.deltas for one in queue.take(part)]
            first += size
        return taken

    sizes = data.draw(st.lists(st.integers(1, 6), min_size=1).filter(lambda sizes: sum(sizes) >= len(texts)))
    assert handed_out(sizes) == handed_out([1] * len(texts))
