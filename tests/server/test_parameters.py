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
