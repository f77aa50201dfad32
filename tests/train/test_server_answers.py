"""Answers by a server that takes and returns token ids, as vLLM's does."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from paceline.cli import main
from paceline.errors import DataError, SettingError
from paceline.gate.pair import Leg, Pair
from paceline.gate.store import GateStore
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig, plan_answers
from paceline.train.data.conversations import read
from paceline.train.data.prompts import Prompt
from paceline.train.data.rollout import Job, Rollout
from paceline.train.data.server_answers import server_answers
from support.training import user
from support.vllm_stand_in import serving

ROLLOUT = Rollout(max_new=8)
END = 99


class Letters:
    """Token 65 is "A"; END has no text."""

    vocab_size = 100

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i) for i in ids if i != END)


LETTERS = cast(Tokenizer, Letters())


def upper(body: dict[str, Any], **wrong: Any) -> dict[str, Any]:
    """Answers with the prompt's letters and the end token."""
    ids = [*body["prompt"], END]
    choice = {"text": LETTERS.decode(ids), "token_ids": ids, "prompt_token_ids": body["prompt"]}
    return {"choices": [choice | wrong]}


def plans(count: int) -> list[Job]:
    prompts = [Prompt((65 + i, 66), False, (user(str(i)),)) for i in range(count)]
    return plan_answers(prompts, AnswersConfig(greedy=0.5, rollout=ROLLOUT))


@pytest.mark.slow
def test_answers_come_in_order_with_the_planned_sampling() -> None:
    planned = plans(20)
    with serving(upper) as (url, bodies):
        answers = server_answers(url, LETTERS, planned, ROLLOUT)
    assert answers == [[*plan.prompt.tokens, END] for plan in planned]
    assert 0 < sum(plan.sampled for plan in planned) < 20
    by_seed = {body["seed"]: body for body in bodies}
    for plan in planned:
        body = by_seed[plan.seed]
        assert (body["prompt"], body["max_tokens"]) == ([*plan.prompt.tokens], ROLLOUT.max_new)
        assert body["temperature"] == (ROLLOUT.temperature if plan.sampled else 0.0)
        assert body["return_token_ids"]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"token_ids": None}, "no `token_ids`"),
        ({"prompt_token_ids": [1]}, "another prompt"),
        ({"token_ids": [70, 71]}, "another tokenizer"),
        ({"token_ids": [500]}, "another tokenizer"),
    ],
)
def test_answers_that_cannot_be_the_targets_are_refused(wrong: dict[str, Any], reason: str) -> None:
    with serving(lambda body: upper(body, **wrong)) as (url, _), pytest.raises(DataError, match=reason):
        server_answers(url, LETTERS, plans(1), ROLLOUT)


def test_an_answer_may_end_within_a_character() -> None:
    with serving(lambda body: upper(body, text="A\ufffd")) as (url, _):
        assert server_answers(url, LETTERS, plans(1), ROLLOUT) == [[65, 66, END]]


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(DataError, match=r"127.0.0.1:9/v1/completions gave no answer"):
        server_answers("http://127.0.0.1:9", LETTERS, plans(1), ROLLOUT)
    with pytest.raises(SettingError, match="http://host:port"):
        server_answers("localhost:8000", LETTERS, plans(1), ROLLOUT)


def test_pairs_of_the_gate_are_conversations(tmp_path: Path) -> None:
    body = {"messages": [user("Hi"), {"role": "assistant", "content": "Yes?"}, user("Go on.")]}
    pair = Pair(id="p", created=0.0, baseline=Leg(text="Well."), candidate=Leg(text="Well."), request=body)
    lines = [pair.to_json(), pair.without_text().to_json()]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    rejected: Counter[str] = Counter()
    (found,) = read([tmp_path / "pairs.jsonl"], rejected)
    assert found.messages == tuple(body["messages"])
    assert [len(history) for history, _ in found.histories()] == [3]  # the earlier turn is a pair of its own
    assert rejected == {"no text was recorded": 1}


def test_a_pair_that_had_to_call_a_tool_is_known_as_such(tmp_path: Path) -> None:
    body = {"messages": [user("Hi")], "tools": [{"type": "function"}], "tool_choice": "required"}
    pair = Pair(id="p", created=0.0, baseline=Leg(), candidate=Leg(), request=body)
    free = replace(pair, request={**body, "tool_choice": "auto"})
    (tmp_path / "pairs.jsonl").write_text(f"{pair.to_json()}\n{free.to_json()}")
    rejected: Counter[str] = Counter()
    assert [talk.called for talk in read([tmp_path / "pairs.jsonl"], rejected)] == [True, False]


def test_the_gates_store_exports_pairs_to_train_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"sqlite:///{tmp_path}/gate.db"
    store = GateStore.open(url)
    body = {"messages": [user("Hi")]}
    pair = Pair(id="p", created=1.0, baseline=Leg(), candidate=Leg(), request=body, experiment="one")
    store.save_pair(pair)
    store.save_pair(replace(pair, id="q", experiment="two"))
    store.close()
    with pytest.raises(SystemExit):
        main(["gate", "export", "one", "--store", url])
    (tmp_path / "pairs.jsonl").write_text(capsys.readouterr().out)
    rejected: Counter[str] = Counter()
    (found,) = read([tmp_path / "pairs.jsonl"], rejected)
    assert found.opening == "Hi"
