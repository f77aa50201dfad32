"""How well the gate's groundedness score tells grounded answers from hallucinated ones, on public sets."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.workload import data_folder
from bench.workload import lines as json_lines
from paceline.gate.evaluators import Reference, groundedness, words
from paceline.gate.pair import Leg

Scores = NDArray[np.float64]


def lines() -> Iterator[str]:
    folder = data_folder()
    if folder is None:
        yield "groundedness: the public sets are not here; PACELINE_DATA names their folder"
        return
    yield from _halueval(folder / "rag" / "halueval_qa.jsonl")
    yield from _ragtruth(folder / "rag" / "ragtruth_qa.jsonl")


def auroc(right: Scores, wrong: Scores) -> float:
    """The chance that a right answer scores more than a wrong one, ties counting half."""
    difference = right[:, None] - wrong[None, :]
    return float((difference > 0).mean() + (difference == 0).mean() / 2)


def _halueval(path: Path) -> Iterator[str]:
    records = list(json_lines(path))
    right = np.array([_score(r["knowledge"], r, r["right_answer"]) for r in records])
    wrong = np.array([_score(r["knowledge"], r, r["hallucinated_answer"]) for r in records])
    lengths = np.array([[len(words(r[k])) for k in ("right_answer", "hallucinated_answer")] for r in records])
    by_length = auroc(-lengths[:, 0].astype(float), -lengths[:, 1].astype(float))
    alike = np.abs(lengths[:, 0] - lengths[:, 1]) <= 1
    yield (
        f"groundedness, HaluEval QA, {len(records)} questions: AUROC {auroc(right, wrong):.2f}, "
        f"of {alike.sum()} with answers of equal length {auroc(right[alike], wrong[alike]):.2f}; "
        f"'shorter is right' alone {by_length:.2f}"
    )


def _ragtruth(path: Path) -> Iterator[str]:
    records = list(json_lines(path))
    scores = np.array([_score(r["context"], r, r["response"]) for r in records])
    wrong = np.array([bool(r["hallucinated"]) for r in records])
    found = auroc(scores[~wrong], scores[wrong])
    yield f"groundedness, RAGTruth QA, {len(records)} answers: AUROC {found:.2f}"


def _score(context: str, record: Mapping[str, Any], answer: str) -> float:
    request = {"messages": [{"role": "user", "content": record["question"]}]}
    return groundedness(request, Leg(status=200, text=answer), Reference(context=context)) or 0.0
