"""Parameters as other servers' clients send them."""

from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from support.servers import Running

pytestmark = pytest.mark.model

ASKED: list[Any] = [{"role": "user", "content": "Name three colours of the rainbow."}]


def chat(server: Running, **asked: Any) -> ChatCompletion:
    given = {"model": server.model, "messages": ASKED, "temperature": 0, "max_completion_tokens": 20, **asked}
    found: ChatCompletion = server.client().chat.completions.create(**given)
    return found


def text(found: ChatCompletion) -> str:
    return found.choices[0].message.content or ""


def test_no_top_k_in_vllms_notation(server: Running) -> None:
    sampled: dict[str, Any] = {"temperature": 0.9, "seed": 4}
    assert text(chat(server, **sampled, extra_body={"top_k": -1})) == text(chat(server, **sampled))


def test_a_prediction_is_used_beside_the_drafters_that_are_named(server: Running) -> None:
    whole = text(chat(server))
    spec = {"drafters": ["ngram"], "max_draft": 16, "adaptive": False}
    asked: dict[str, Any] = {"extra_body": {"speculative_config": spec, "remember": False}}
    found = chat(server, prediction={"type": "content", "content": whole}, **asked)
    assert found.usage is not None
    assert found.usage.completion_tokens_details is not None
    assert (found.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 10


def test_names_of_other_servers_and_of_before_are_taken(server: Running) -> None:
    def spec_tokens(**body: Any) -> Any:
        found = chat(server, extra_body={**body, "metrics": True}).model_extra or {}
        return found["metrics"]["speculative_decoding"]["num_spec_tokens"]

    ours = {"drafters": ["ngram"], "max_draft": 3, "threshold": 0.5}
    theirs = {"drafters": ["ngram"], "num_speculative_tokens": 3, "acceptance_threshold": 0.5}
    assert spec_tokens(speculative_config=ours, remember=False) == 3
    assert spec_tokens(speculative_config=theirs, learn=False) == 3


def test_a_template_variable_that_nobody_reads_is_ignored_with_one_warning(
    server: Running, caplog: pytest.LogCaptureFixture
) -> None:
    plain = text(chat(server))
    for _ in range(2):
        assert text(chat(server, extra_body={"chat_template_kwargs": {"unread_by_all": True}})) == plain
    assert [r.getMessage() for r in caplog.records if "unread_by_all" in r.getMessage()] == [
        "chat_template_kwargs: the chat template does not read 'unread_by_all': ignored"
    ]


def test_models_were_made_when_the_server_began(server: Running) -> None:
    found = server.client().models.retrieve(server.model)
    assert found.created > 1_700_000_000
    assert found.created <= chat(server, max_completion_tokens=1).created


def test_an_answer_that_is_continued_ends_as_it_would_have_ended(server: Running) -> None:
    whole = text(chat(server, max_completion_tokens=40))
    words = whole.split(" ")
    for n in (1, 3, len(words) // 2):
        begun = {"role": "assistant", "content": " ".join(words[:n])}
        body = {"continue_final_message": True, "add_generation_prompt": False}
        rest = text(chat(server, messages=[*ASKED, begun], max_completion_tokens=40, extra_body=body))
        assert (begun["content"] + rest).startswith(whole)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_shortest_length_gives_the_same_text_with_and_without_drafts(
    server: Running, temperature: float
) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "Say: hi"}], "seed": 5}
    asked |= {"temperature": temperature, "max_completion_tokens": 100}
    short = chat(server, **asked)
    assert short.usage is not None
    assert short.choices[0].finish_reason == "stop"
    fewest = short.usage.completion_tokens + 10
    bodies = [
        {"min_tokens": fewest, "speculative_config": spec}
        for spec in (
            {"disabled": True},
            {"drafters": ["suffix", "ngram"], "adaptive": False},
            {"drafters": ["suffix"], "adaptive": False, "tree_width": 4},
        )
    ]
    plain, *drafted = (chat(server, **asked, extra_body=body) for body in bodies)
    assert plain.usage is not None
    assert plain.usage.completion_tokens >= fewest
    assert {text(found) for found in drafted} == {text(plain)}


def test_an_end_is_not_searched_for_before_the_shortest_length(server: Running) -> None:
    asked: dict[str, Any] = {"stop": [" "], "max_completion_tokens": 30}
    assert " " not in text(chat(server, **asked))
    longer = chat(server, **asked, extra_body={"min_tokens": 12})
    assert longer.usage is not None
    assert longer.usage.completion_tokens > 12
    assert longer.choices[0].finish_reason == "stop"
