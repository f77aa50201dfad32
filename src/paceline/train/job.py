"""The whole way of a drafter: answers of the target, training, measuring, a folder that is served."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from paceline import models
from paceline.errors import SettingError
from paceline.heads import folder as drafter_folder
from paceline.heads.folder import Card
from paceline.heads.net import Net
from paceline.target.load import load
from paceline.target.torch_target import placement
from paceline.text import Tokenizer
from paceline.train.answers import make_answers
from paceline.train.asks import AnswersConfig
from paceline.train.buckets import Bucket, buckets
from paceline.train.calibrate import calibrate
from paceline.train.conversations import Source
from paceline.train.dataset import Answers, Part
from paceline.train.dense import DenseModel
from paceline.train.evaluate import Acceptance, Guess, Recorded, acceptance, by_bucket, replay
from paceline.train.loop import Progress, train
from paceline.train.recipe import Recipe, TrainConfig, pieces_of, recipe

ANSWERS: Final = "answers.npz"
MEASURED: Final = 5  # guesses in a draft, in the figures of the card
_LOOK: Final = 12  # held-out answers that are looked at while training


@dataclass(frozen=True, slots=True)
class TrainJob:
    target: str
    sources: tuple[Source, ...]
    folder: Path  # where all of it goes
    start: Path | None = None  # a trained drafter to go on from
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    measured: int = 96  # held-out answers the card's figures are from, at most


@dataclass(frozen=True, slots=True)
class Told:
    """How far a job is."""

    what: str
    done: float
    of: float
    note: str = ""


Report = Callable[[Told], None]


def run(job: TrainJob, report: Report = lambda _: None) -> Card:
    """Does what is left to do: answers that are there are not written again, a training goes on."""
    path = models.resolve(job.target)
    tokenizer = Tokenizer.load(path)
    answers, told = _answers(job, report)
    device, dtype = placement(job.answers.engine)
    model = DenseModel(load(path, dtype), device, dtype)
    if answers.target != model.fingerprint:
        raise SettingError(
            f"{job.folder.name} holds answers of another target than {job.target}: give another folder"
        )
    made = _recipe(job, model, answers)
    before = _measure(made, model, answers, tokenizer, job.measured) if job.start else None
    _train(job, made, model, answers, report)
    report(Told("measuring", 0, 1))
    card = _card(job, made, model, answers, tokenizer, told)
    if before is not None:
        card = replace(card, data={**card.data, "before": asdict(before[0])})
    drafter_folder.save_card(job.folder, card)
    report(Told("measuring", 1, 1))
    return card


def _answers(job: TrainJob, report: Report) -> tuple[Answers, dict[str, Any]]:
    file, notes = job.folder / ANSWERS, job.folder / "answers.json"
    if file.exists() and notes.exists():
        return Answers.load(file), json.loads(notes.read_text())
    job.folder.mkdir(parents=True, exist_ok=True)
    made = make_answers(
        job.target, job.sources, job.answers, lambda what, done, of: report(Told(what, done, of))
    )
    told = {
        "sources": [Path(str(source)).name for source in job.sources],
        "prompts": len(made.prompts.prompts),
        "prompts_cut": made.prompts.cut,
        "refused": dict(made.prompts.refused),
        "unanswered": made.unanswered,
    }
    made.answers.save(file)
    notes.write_text(json.dumps(told))
    return made.answers, told


def _recipe(job: TrainJob, model: DenseModel, answers: Answers) -> Recipe:
    if job.start is None:
        return recipe(job.train, model, torch.from_numpy(answers.draft_ids(job.train.draft_vocab).ids))
    loaded = drafter_folder.load(job.start, pieces_of(model))
    if loaded.card.kind != job.train.kind:
        raise SettingError(f"{job.start.name} is a {loaded.card.kind} drafter: give kind={loaded.card.kind}")
    made = recipe(job.train, model, loaded.net.draft_ids)
    drafter_folder.fill(made.net, loaded.net.state_dict())
    return made


def _train(job: TrainJob, made: Recipe, model: DenseModel, answers: Answers, report: Report) -> None:
    looked = recorded(answers, "held out", job.train.max_len, _LOOK)

    def look() -> float:
        guesses = replay(made.drafter(None), model, looked, MEASURED)
        return acceptance(guesses, looked, MEASURED).tokens_per_pass[-1]

    def tell(p: Progress) -> None:
        held_out = "" if p.held_out is None else f", held out {p.held_out:.2f} tokens per pass"
        note = f"step {p.step}, loss {p.loss:.3f}{held_out}"
        report(Told("training", p.seconds, p.seconds + p.seconds_left, note))

    batches = partial(answers.batches, tokens_per_batch=job.train.tokens_per_batch, max_len=job.train.max_len)
    shaped = lambda seed: ((b.tokens, b.lengths, b.loss_mask) for b in batches(seed))  # noqa: E731
    train(made, model, shaped, job.train, job.folder, tell, look if looked else None)


def recorded(answers: Answers, part: Part, max_len: int, most: int) -> list[Recorded]:
    """Greedy answers: of a sampled one nobody knows how the target would go on."""
    chosen = [int(i) for i in answers.usable(part, max_len) if not answers.sampled[i]][:most]
    texts = []
    for i in chosen:
        tokens = answers.tokens[answers.offsets[i] : answers.offsets[i + 1]][:max_len].tolist()
        own = np.arange(len(tokens)) >= answers.prompt_lens[i]
        texts.append(Recorded(tokens, own.tolist()))
    return texts


def _measure(
    made: Recipe, model: DenseModel, answers: Answers, tokenizer: Tokenizer, most: int
) -> tuple[Acceptance, dict[str, Acceptance], list[Guess]]:
    """On held-out answers, through the drafter that serves."""
    texts = recorded(answers, "held out", 1 << 20, most)
    guesses = replay(made.drafter(None), model, texts, made.net.shape.block, batch=48)
    kinds = [buckets(tokenizer, text.tokens) for text in texts]
    numbers = {id(text.tokens): i for i, text in enumerate(texts)}

    def bucket(tokens: Sequence[int], place: int) -> str:
        return Bucket(int(kinds[numbers[id(tokens)]][place])).name.lower()

    found = by_bucket(guesses, texts, MEASURED, bucket)
    return acceptance(guesses, texts, made.net.shape.block), found, guesses


def _card(
    job: TrainJob,
    made: Recipe,
    model: DenseModel,
    answers: Answers,
    tokenizer: Tokenizer,
    told: dict[str, Any],
) -> Card:
    """Saves the network, reads it back as it will be served, and measures that."""
    name = Path(job.target).name
    card = Card(made.kind, made.net.shape, name, model.fingerprint)
    drafter_folder.save(job.folder, card, made.net)
    _serve_as_stored(made.net, job.folder, model)
    found, kinds, guesses = _measure(made, model, answers, tokenizer, job.measured)
    fit = calibrate(guesses, made.net.shape.block)
    data = {
        **told,
        "answers": len(answers),
        "answer_tokens": len(answers.said("training")),
        "held_out_answers": len(answers.which("held out")),
        "draft_vocabulary_covers": answers.draft_ids(len(made.net.draft_ids)).coverage,
        "measured_at": found.anchors,
        "by_kind_of_text": {kind: asdict(figures) for kind, figures in kinds.items()},
        "confidence_off_by": {"before": fit.before, "after": fit.after},
        "training": asdict(job.train),
    }
    return Card(
        made.kind,
        made.net.shape,
        name,
        model.fingerprint,
        calibration=fit.calibration,
        acceptance=found.by_place,
        tokens_per_pass=found.tokens_per_pass,
        data=data,
    )


def _serve_as_stored(net: Net, folder: Path, model: DenseModel) -> None:
    stored = drafter_folder.load(folder, pieces_of(model)).net
    net.load_state_dict(stored.state_dict())
