"""The whole way of a drafter: answers of the target, training, measuring, a folder that is served."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from paceline import hub
from paceline.atomic import write_json
from paceline.drafters.heads.choose import drafter_of
from paceline.errors import DataError, DrafterMismatch, SettingError, UsageError
from paceline.heads import head_checkpoint as drafter_folder
from paceline.heads.base import DraftHead
from paceline.heads.draft_vocab import with_draft_vocab
from paceline.heads.head_checkpoint import WEIGHTS, Card, LoadedHead, read_card
from paceline.loading import model_fingerprint
from paceline.target.eager.target import placement
from paceline.target.weights.model_config import Weights
from paceline.target.weights.reader import load, open_checkpoint
from paceline.text import Tokenizer
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.plan import AnswersConfig
from paceline.train.data.target_answers import make_answers
from paceline.train.data.text_kind import Bucket, buckets
from paceline.train.evaluate import Acceptance, Recorded, acceptance, recorded, replay
from paceline.train.publish import MEASURED, TOGETHER, publish
from paceline.train.recipe import Recipe, TrainConfig, loss_of, pieces_of, recipe
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import Progress, train

ANSWERS: Final = "answers.npz"
ASKED: Final = "asked"
_TRAINED_ON: Final = (
    "began_from",
    "sources",
    "prompts",
    "prompts_made_up",
    "answers",
    "answer_tokens",
    "training",
)
_LOOK: Final = 12  # held-out answers that are looked at while training


@dataclass(frozen=True, slots=True)
class TrainJob:
    target: str
    sources: tuple[Source, ...]
    folder: Path  # where all of it goes
    start: Path | None = None  # a trained drafter to go on from; it keeps its shape, not its vocabulary
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
    path = hub.resolve(job.target)
    _check(job, path)
    tokenizer = Tokenizer.load(path)
    answers, told = answers_in(job.folder, job.target, job.sources, job.answers, report)
    device, dtype = placement(job.answers.engine)
    weights = load(path, dtype)
    model = TrainDecoder(weights, device, dtype)
    if answers.target != model.fingerprint:
        raise UsageError(
            f"{job.folder.name} holds answers of another target than {job.target}: give another folder"
        )
    before = drafter_folder.load(job.start, pieces_of(model)) if job.start is not None else None
    made = _recipe(job, model, answers, weights, before)
    data = {**told, **_facts(job, answers, made)}
    texts = recorded(answers, 1 << 20, job.measured)
    data["measured_answers"] = len(texts)
    if before is not None:
        data["began_from"] = _began_from(job, before.card)
        if texts:
            data["before"] = asdict(_acceptance(before.net, model, texts))
    _train(job, made, model, answers, report)
    report(Told("measuring", 0, 1))
    kinds = [buckets(tokenizer, text.tokens) for text in texts]

    def bucket(text: int, place: int) -> str:
        return Bucket(int(kinds[text][place])).name.lower()

    card = publish(job.folder, made, model, Path(job.target).name, texts, data, bucket=bucket)
    report(Told("measuring", 1, 1))
    return card


def _check(job: TrainJob, path: Path) -> None:
    """Before answers are written, which takes a while."""
    vocabulary = open_checkpoint(path).shape.vocab_size
    if job.train.draft_vocab > vocabulary:
        expected = f"at most the {vocabulary} tokens of {job.target}"
        raise SettingError("draft_vocab", job.train.draft_vocab, expected)
    if job.start is None:
        return
    card = read_card(job.start)
    if card.kind != job.train.kind:
        raise UsageError(f"{job.start.name} is a {card.kind} drafter: give kind={card.kind}")
    if card.fingerprint != model_fingerprint(path):
        raise DrafterMismatch(f"{job.start.name} was trained for {card.target}, not for {job.target}")


def _facts(job: TrainJob, answers: Answers, made: Recipe) -> dict[str, Any]:
    return {
        "answers": len(answers),
        "answer_tokens": len(answers.said("training")),
        "held_out_answers": len(answers.which("held out")),
        "training": asdict(job.train),
        **_coverage(answers, made),
    }


def _coverage(answers: Answers, made: Recipe) -> dict[str, float]:
    if not len(answers.which("held out")):
        return {}
    return {"draft_vocabulary_covers": answers.covered(made.net.draft_ids.numpy(force=True))}


def _began_from(job: TrainJob, card: Card) -> dict[str, Any]:
    """What the drafter it goes on from was trained on, and that one before it."""
    assert job.start is not None
    return {"name": job.start.name, **{name: card.data[name] for name in _TRAINED_ON if name in card.data}}


def answers_in(
    folder: Path, target: str, sources: Sequence[Source], config: AnswersConfig, report: Report
) -> tuple[Answers, dict[str, Any]]:
    """Those the folder has, or those made now; and what the card is to say of them."""
    file, notes = folder / ANSWERS, folder / "answers.json"
    asked = _asked(sources, config)
    if file.exists() and notes.exists():
        return Answers.load(file), _told(notes, asked)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be a folder: {error}; give another --out") from None
    made = make_answers(target, sources, config, lambda what, done, of: report(Told(what, done, of)))
    told = {
        "sources": [Path(str(source)).name for source in sources],
        "prompts": len(made.prompts.prompts),
        "prompts_cut": made.prompts.cut,
        "prompts_made_up": made.prompts.made_up,
        "refused": dict(made.prompts.refused),
        "unanswered": made.unanswered,
    }
    made.answers.save(file)
    write_json(notes, {**told, ASKED: asked})
    return made.answers, told


def _asked(sources: Sequence[Source], config: AnswersConfig) -> dict[str, Any]:
    """What the answers follow from, the machine apart."""
    settings = {name: value for name, value in asdict(config).items() if name != "engine"}
    found: dict[str, Any] = json.loads(json.dumps({"sources": list(map(str, sources)), **settings}))
    return found


def _told(notes: Path, asked: dict[str, Any]) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(notes.read_bytes())
        before = told.pop(ASKED)
    except (ValueError, TypeError, KeyError):
        raise DataError(
            f"{notes} is damaged: delete it and {ANSWERS} to have the answers made again"
        ) from None
    if before != asked:
        other = ", ".join(name for name in asked if before.get(name) != asked[name])
        raise UsageError(
            f"{notes.parent.name} holds answers that were asked for otherwise ({other}): give the same "
            f"again, or another --out, or delete its {ANSWERS} and training.pt"
        )
    return told


def _recipe(
    job: TrainJob, model: TrainDecoder, answers: Answers, weights: Weights, before: LoadedHead | None
) -> Recipe:
    """before: the drafter to go on from, if any. It learns to say what the answers say."""
    if before is None or job.start is None:
        ids = torch.from_numpy(answers.draft_ids(job.train.draft_vocab).ids)
        return recipe(job.train, model, ids, weights.tensors if job.train.from_target else None)
    known = before.net.draft_ids.numpy(force=True)
    ids = torch.from_numpy(answers.draft_ids(len(known), known).ids)
    net = with_draft_vocab(job.train.kind, before.net, pieces_of(model), ids)
    digest = hashlib.sha256((job.start / WEIGHTS).read_bytes()).hexdigest()
    loss = loss_of(net, model, job.train.anchors)
    return Recipe(job.train.kind, net, loss, before.card.calibration, digest)


def _train(job: TrainJob, made: Recipe, model: TrainDecoder, answers: Answers, report: Report) -> None:
    looked = recorded(answers, job.train.max_len, _LOOK)

    def look() -> float:
        return _acceptance(made.net, model, looked).tokens_per_pass[-1]

    def tell(p: Progress) -> None:
        held_out = "" if p.held_out is None else f", held out {p.held_out:.2f} tokens per pass"
        note = f"step {p.step}, loss {p.loss:.3f}{held_out}"
        report(Told("training", p.seconds, p.seconds + p.seconds_left, note))

    batches = partial(answers.batches, tokens_per_batch=job.train.tokens_per_batch, max_len=job.train.max_len)
    train(made, model, batches, job.train, job.folder, tell, look if looked else None)


def _acceptance(net: DraftHead, model: TrainDecoder, texts: Sequence[Recorded]) -> Acceptance:
    """Through the drafter that serves."""
    return acceptance(replay(drafter_of(net), model, texts, MEASURED, batch=TOGETHER), texts, MEASURED)
