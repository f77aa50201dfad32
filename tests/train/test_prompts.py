"""Recorded conversations become the prompts that are served, and what cannot is counted."""

from pathlib import Path
from typing import Any

import pytest

from paceline.errors import DataError, StoreError, UsageError
from paceline.text import Tokenizer
from paceline.trace.record import RequestRecord, without_text
from paceline.trace.store import Store
from paceline.train.data.prompts import Prompts, collect
from support.training import WEATHER, assistant, called, record, result, user, write

pytestmark = pytest.mark.model

SYSTEM = {"role": "system", "content": "You help."}
AGENT = record(
    SYSTEM,
    user("Rain in Oslo?"),
    called("Oslo"),
    result("wet"),
    assistant("Yes."),
    user("And Rome?"),
    called("Rome"),
)


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.load(smollm2_path)


def collected(tokenizer: Tokenizer, path: Path, *records: dict[str, Any], most: int = 2048) -> Prompts:
    return collect(tokenizer, [write(path, records)], most)


@pytest.mark.parametrize("name", ["talk.jsonl", "talk.jsonl.gz"])
def test_every_answer_gives_the_prompt_that_is_served(
    tokenizer: Tokenizer, tmp_path: Path, name: str
) -> None:
    found = collected(tokenizer, tmp_path / name, AGENT)
    history = AGENT["messages"]
    expected = [tuple(tokenizer.encode_chat(history[:n], tools=[WEATHER])) for n in (2, 4, 6)]
    assert [prompt.tokens for prompt in found.prompts] == expected
    assert [len(prompt.messages) for prompt in found.prompts] == [2, 4, 6]
    assert found.rejected == {}
    assert len({prompt.held_out for prompt in found.prompts}) == 1


def test_an_open_question_is_a_prompt(tokenizer: Tokenizer, tmp_path: Path) -> None:
    found = collected(tokenizer, tmp_path / "a.jsonl", record(user("Hello?")))
    assert [prompt.tokens for prompt in found.prompts] == [
        tuple(tokenizer.encode_chat([user("Hello?")], tools=[WEATHER]))
    ]


def test_long_prompts_lose_their_oldest_messages(tokenizer: Tokenizer, tmp_path: Path) -> None:
    long = "word " * 200
    steps = [m for i in range(4) for m in (called(f"T{i}", f"c{i}"), result(f"{i} {long}", f"c{i}"))]
    talk = record(SYSTEM, user("first " + long), assistant(long), user("second"), *steps)
    (_, *_, whole) = collected(tokenizer, tmp_path / "a.jsonl", talk, most=8000).prompts
    sizes = set()
    for most in (len(whole.tokens) - 1, 1100, 800, 550):
        found = collected(tokenizer, tmp_path / "a.jsonl", talk, most=most)
        last = found.prompts[-1]
        assert len(last.tokens) <= most
        assert last.tokens == tuple(tokenizer.encode_chat(last.messages, tools=[WEATHER]))
        assert last.messages[:2] == (SYSTEM, user("second"))
        assert last.messages[-1] == steps[-1]
        assert [m["role"] for m in last.messages[2:4]] == ["assistant", "tool"]
        assert found.cut > 0
        sizes.add(len(last.messages))
    assert len(sizes) >= 3


def test_what_cannot_be_used_is_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    records = [
        record(user("Fine?"), assistant("Yes.")),
        record(user("Fine?"), assistant("No.")),
        record(),
        {"messages": "text"},
        {"id": "nothing"},
        {"prompt": "plain"},
        {"messages": [user("x")], "tools": ["y"]},
        record(assistant("Hello.")),
        record(SYSTEM),
        record(picture),
        record(user("word " * 900)),
    ]
    path = write(
        tmp_path / "a.jsonl", records, "{not json", "[1]", "\ud83d".encode("utf-8", "ignore").decode()
    )
    found = collect(tokenizer, [path], 600)
    assert len(found.prompts) == 1
    assert found.rejected == {
        "the same prompt again": 1,
        "messages are not a list of objects": 2,
        "`messages` is missing": 1,
        "a prompt without messages": 1,
        "tools are not a list of objects": 1,
        "nothing to answer": 2,
        "content that is not text": 1,
        "longer than 600 tokens, whatever is left out": 1,
        "not JSON": 1,
        "not a JSON object": 1,
    }


def test_sources_without_any_prompt_are_an_error(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nothing to answer: 1"):
        collected(tokenizer, tmp_path / "a.jsonl", record(SYSTEM))
    with pytest.raises(DataError, match="does not exist"):
        collect(tokenizer, [tmp_path / "none.jsonl"], 100)
    (tmp_path / "broken.jsonl.gz").write_bytes(b"\x1f\x8b\x08 and no more")
    with pytest.raises(DataError, match="cannot be read"):
        collect(tokenizer, [tmp_path / "broken.jsonl.gz"], 100)


def record_of(id: str, *messages: dict[str, Any], choice: str = "auto") -> RequestRecord:
    return RequestRecord(
        id,
        1.0,
        "smollm2-135m",
        params={"tool_choice": choice},
        messages=list(messages),
        tools=[WEATHER],
        output="Yes.",
    )


def test_requests_of_a_store_give_one_prompt_each(tokenizer: Tokenizer, tmp_path: Path) -> None:
    url, talk = str(tmp_path / "traces.db"), AGENT["messages"]
    store = Store.open(url)
    for n in (2, 4, 6):
        store.save(record_of(f"r{n}", *talk[:n], choice="auto" if n == 4 else "required"), ())
    store.save(without_text(record_of("silent", *talk)), ())
    store.close()
    found = collect(tokenizer, [url], 2048)
    expected = collected(tokenizer, tmp_path / "a.jsonl", AGENT)
    assert found.prompts == expected.prompts
    assert [prompt.called for prompt in found.prompts] == [True, False, True]
    assert found.rejected == {"no text was recorded": 1}


def test_a_store_without_text_is_an_error_that_says_what_to_do(tokenizer: Tokenizer, tmp_path: Path) -> None:
    url = str(tmp_path / "traces.db")
    store = Store.open(url)
    store.save(without_text(record_of("silent", user("x"))), ())
    store.close()
    with pytest.raises(StoreError, match="--trace-text"):
        collect(tokenizer, [url], 2048)
    with pytest.raises(StoreError, match="there is no trace store"):
        collect(tokenizer, [str(tmp_path / "other.db")], 2048)
