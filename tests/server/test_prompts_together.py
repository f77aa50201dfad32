"""Several prompts in one request to /v1/completions."""

from typing import Any

import openai
import pytest
from openai.types import Completion

from paceline import EngineConfig
from paceline.types import Round
from support.servers import IDLE_S, Running, running, until

pytestmark = pytest.mark.model

PROMPTS = ["One two three", "INFO ready\nINFO", "def f(x):"]


def complete(server: Running, prompt: Any, **asked: Any) -> Completion:
    given = {"model": server.model, "temperature": 0, "max_tokens": 8, **asked}
    found: Completion = server.client().completions.create(prompt=prompt, **given)
    return found


def test_answers_come_in_the_order_of_the_prompts(server: Running) -> None:
    alone = [complete(server, prompt).choices[0].text for prompt in PROMPTS]
    found = complete(server, PROMPTS)
    assert [choice.text for choice in found.choices] == alone
    assert [choice.index for choice in found.choices] == [0, 1, 2]


def test_each_has_its_own_choices(server: Running) -> None:
    sampled: dict[str, Any] = {"n": 2, "temperature": 0.9, "seed": 3}
    alone = [choice.text for prompt in PROMPTS for choice in complete(server, prompt, **sampled).choices]
    found = complete(server, PROMPTS, **sampled)
    assert [choice.text for choice in found.choices] == alone
    assert [choice.index for choice in found.choices] == list(range(6))


def test_they_run_at_once(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, batches = server.app.engine.llm.engine, list[int]()
    step = engine.step

    def counted() -> list[Round]:
        rounds = step()
        batches.append(len({r.request for r in rounds}))
        return rounds

    monkeypatch.setattr(engine, "step", counted)
    complete(server, PROMPTS, max_tokens=20, extra_body={"ignore_eos": True})
    assert max(batches) == len(PROMPTS)


def test_one_that_fails_ends_them_all(server: Running) -> None:
    for prompt in ([*PROMPTS, "word " * 9000], ["word " * 9000, *PROMPTS]):
        with pytest.raises(openai.BadRequestError) as caught:
            complete(server, prompt, max_tokens=4000, extra_body={"ignore_eos": True})
        assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "prompt")
        assert until(lambda: server.in_flight == 0, IDLE_S)


def test_more_than_the_server_has_room_for_take_turns(smollm2_path: object) -> None:
    with running("smollm2-135m", EngineConfig(cache_mb=256, max_batch=2, max_waiting=2)) as server:
        found = complete(server, [f"{i}:" for i in range(9)], max_tokens=2)
        assert len(found.choices) == 9
        found = complete(server, ["a", "b"], max_tokens=2, n=2)
        assert len(found.choices) == 4
