"""Conversations to train on, and a training that is killed once and goes on."""

import gzip
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

import pytest

from paceline.config import EngineConfig
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig
from paceline.train.data.dataset import Answers, Batch
from paceline.train.data.held_out import is_held_out
from paceline.train.data.rollout import Rollout
from paceline.train.head_pipeline import ANSWERS, PipelineProgress
from paceline.train.trainer import Batches, take_steps

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": {"type": "string"}},
            "required": ["town"],
        },
    },
}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def called(town: str, id: str = "call_0") -> dict[str, Any]:
    function = {"name": "weather", "arguments": json.dumps({"town": town})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": id, "type": "function", "function": function}],
    }


def result(text: str, id: str = "call_0") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": text}


def record(*messages: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": list(messages), "tools": [WEATHER], **more}


def write(path: Path, records: Iterable[dict[str, Any]], *raw: str) -> Path:
    text = "\n".join([*map(json.dumps, records), *raw]) + "\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


J = TypeVar("J")
C = TypeVar("C")
TOWNS = ("Oslo", "Rome", "Lima", "Bonn", "Cairo", "Delhi", "Paris", "Tokyo", "Quito", "Riga", "Kyiv", "Bern")
SHARE = 0.25
HELD_OUT = [town for town in TOWNS if is_held_out(town, SHARE)]
KILLED_AT = 2  # steps
ASKED = AnswersConfig(
    required=1.0,
    greedy=1.0,
    held_out=SHARE,
    rollout=Rollout(max_new=24),
    engine=EngineConfig("cpu", cache_mb=64),
)


class Killed(Exception):
    pass


@dataclass(slots=True)
class Done(Generic[J, C]):
    job: J
    card: C
    told: list[list[PipelineProgress]]  # of each run
    taught: list[str]  # every text in a training batch


def ask(town: str) -> str:
    return f"What is the weather in {town}?"


def talks(home: Path) -> Path:
    return write(home / "talks.jsonl", [record(user(ask(t)), called(t), group=t) for t in TOWNS])


def killed_once(
    job: J,
    again: J,
    run: Callable[[J, Callable[[PipelineProgress], None]], C],
    trainer: ModuleType,
    tokenizer: Tokenizer,
) -> Done[J, C]:
    """again: the same job, which may save less often. trainer: the module whose steps are watched.

    tokenizer: of what is trained.
    """
    told: list[list[PipelineProgress]] = [[], []]
    taught: list[str] = []

    def kill(t: PipelineProgress) -> None:
        told[0].append(t)
        if steps_of([t]) == [KILLED_AT]:
            raise Killed

    def watched(learner: Any, batches: Batches, *others: Any, **named: Any) -> Any:
        def seen(seed: int) -> Iterator[Batch]:
            for batch in batches(seed):
                taught.extend(tokenizer.decode(row.tolist()) for row in batch.tokens)
                yield batch

        return take_steps(learner, seen, *others, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer, "take_steps", watched)
        with pytest.raises(Killed):
            run(job, kill)
        card = run(again, told[1].append)
    return Done(again, card, told, taught)


def steps_of(told: Iterable[PipelineProgress]) -> list[int]:
    return [int(t.note.split()[1].rstrip(",")) for t in told if t.stage == "training"]


def check_it_went_on(done: Done[Any, Any], steps: int) -> None:
    first, second = done.told
    assert steps_of(first) == list(range(1, KILLED_AT + 1))
    assert steps_of(second) == list(range(KILLED_AT, steps + 1))  # the last step was not saved yet
    assert "answers" in {t.stage for t in first}
    assert "answers" not in {t.stage for t in second}


def check_held_out_is_never_taught(done: Done[Any, Any]) -> None:
    assert 2 <= len(HELD_OUT) <= 6
    assert len(Answers.load(done.job.folder / ANSWERS).which("held out")) == len(HELD_OUT)
    assert {town for town in TOWNS if any(town in text for text in done.taught)} == {*TOWNS} - {*HELD_OUT}


def copied(done: Done[Any, Any], folder: Path) -> Path:
    """A folder with the same answers."""
    for name in (ANSWERS, "answers.json"):
        shutil.copy(done.job.folder / name, folder / name)
    return folder
