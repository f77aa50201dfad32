"""Trains a draft head: answers of the target, training, evaluation, and a folder that can be served.

The new drafter is written beside the one that its name stands for. It takes the name over only if it measures
no worse on the same held-out answers, or if the caller asks for that.
"""

import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from paceline import hub
from paceline.atomic import rename, write_json
from paceline.drafters.heads import drafter_of
from paceline.errors import DataError, DrafterMismatch, PacelineError, SettingError, UsageError
from paceline.heads import head_checkpoint as drafter_folder
from paceline.heads.base import DraftHead
from paceline.heads.head_checkpoint import CARD, WEIGHTS, Card, LoadedHead, read_card
from paceline.heads.local_heads import available_heads, drafter_path
from paceline.heads.versions import current
from paceline.loading import model_fingerprint
from paceline.target.eager.target import placement
from paceline.target.weights.model_config import Weights
from paceline.target.weights.reader import load, open_checkpoint
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.target_answers import make_answers
from paceline.train.data.text_kind import TextKind, text_kinds
from paceline.train.evaluate import Acceptance, RecordedText, acceptance, held_out_texts, replay
from paceline.train.publish import EVAL_DRAFT, REPLAY_BATCH, publish
from paceline.train.recipe import Recipe, TrainConfig, loss_of, new_recipe, pieces_of, with_draft_vocab
from paceline.train.train_decoder import TrainDecoder, require_trainable
from paceline.train.trainer import TrainProgress, train
from paceline.train.vllm_decoder import VllmDecoder, server_layers

ANSWERS: Final = "answers.npz"
CANDIDATE: Final = "candidate"  # in the folder: a new drafter that is not in use
FEW_POSITIONS: Final = 400  # below that, a share is known to about 5 % at best
LITTLE_DATA: Final = 1_000_000  # tokens of answers: with fewer, continuing a trained drafter beats a new one
_PLAN: Final = "asked"  # in answers.json
# In older files, whose `rollout` also has settings that no longer exist.
_RENAMED: Final = {"made_up": "synthetic", "made_up_chats": "synthetic_chats"}
_TRAINED_ON: Final = (
    "began_from",
    "sources",
    "prompts",
    "prompts_made_up",
    "answers",
    "answer_tokens",
    "training",
)
_EVAL_TEXTS: Final = 12  # held-out answers of an evaluation during training

log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class TrainJob:
    target: str
    sources: tuple[Source, ...]
    folder: Path  # of the drafter, its answers and its checkpoints
    start: Path | None = None  # a trained drafter to continue; it keeps its shape, not its vocabulary
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    measured: int = 96  # held-out answers that the card's figures are from, at most
    replace: bool = False  # use the new drafter even if it measures worse than the one in use
    hidden_states_from: str = ""  # URL of a vLLM server that computes them; "": computed here


@dataclass(frozen=True, slots=True)
class PipelineProgress:
    stage: str
    done: float
    total: float
    note: str = ""


Report = Callable[[PipelineProgress], None]


def run(job: TrainJob, report: Report = lambda _: None) -> Card:
    """Does what is left to do: answers that exist are not made again, and a training resumes."""
    path = hub.resolve(job.target)
    in_use = drafter_in_use(job.folder)
    _check(job, path, in_use)
    tokenizer = Tokenizer.load(path)
    answers, data = answers_in(job.folder, job.target, job.sources, job.answers, report)
    model, weights = _load_target(job, path, answers)
    before = drafter_folder.load(job.start, pieces_of(model)) if job.start is not None else None
    recipe = _recipe(job, model, answers, weights, before)
    texts = held_out_texts(answers, 1 << 20, job.measured)
    data = {**data, **_facts(job, answers, recipe), "measured_answers": len(texts)}
    if advice := start_advice(job, data["answer_tokens"], model.fingerprint):
        log.warning("%s", advice)  # before the time is spent
    if before is not None:
        data["began_from"] = _began_from(job, before.card)
        if texts:
            data["before"] = asdict(_acceptance(before.net, model, texts))
    _train(job, recipe, model, answers, report)
    report(PipelineProgress("measuring", 0, 1))
    if in_use is not None:
        data["in_use"] = {"name": job.folder.name, **_figures_in_use(in_use, model, texts)}
    kinds = [text_kinds(tokenizer, text.tokens) for text in texts]

    def kind_at(text: int, position: int) -> str:
        return TextKind(int(kinds[text][position])).name.lower()

    candidate = job.folder / CANDIDATE
    shutil.rmtree(candidate, ignore_errors=True)
    card = publish(candidate, recipe, model, Path(job.target).name, texts, data, kind_at=kind_at)
    if job.replace or not reason_to_hold(card):
        _take(candidate, job.folder)
    report(PipelineProgress("measuring", 1, 1))
    return card


def drafter_in_use(folder: Path) -> Path | None:
    """The drafter in use under this name: the folder's own, or the package's of the same name."""
    root = drafter_path(folder)
    try:
        read_card(root)
        return current(root).folder
    except PacelineError:  # there is none, or none that could be used
        return None


def reason_to_hold(card: Card) -> str:
    """The reason to keep the drafter in use; "" if the new one should replace it, or if there is none."""
    in_use = card.data.get("in_use")
    if in_use is None:
        return ""
    if not card.tokens_per_pass or "tokens_per_pass" not in in_use:
        return "it could not be compared with the one in use: nothing was measured"
    old, new = in_use["tokens_per_pass"], card.tokens_per_pass
    length = min(len(old), len(new), EVAL_DRAFT)
    if new[length - 1] >= old[length - 1]:
        return ""
    rates = f"{new[length - 1]:.2f} tokens per pass against {old[length - 1]:.2f}"
    return f"it measures worse than the one in use: {rates} on the same held-out answers"


def start_advice(job: TrainJob, answer_tokens: int, fingerprint: str) -> str:
    """The hint to continue a trained drafter, where there is one and data is scarce; else ""."""
    if job.start is not None or answer_tokens >= LITTLE_DATA:
        return ""
    cards = {folder.name: _card_or_none(folder) for folder in available_heads() if folder != job.folder}
    for name, card in cards.items():
        if card is not None and (card.kind, card.fingerprint) == (job.train.kind, fingerprint):
            return (
                f"{answer_tokens:,} tokens of answers are little to train a new drafter on: "
                f"--start {name} continues a trained one instead (with another --out)"
            )
    return ""


def _card_or_none(folder: Path) -> Card | None:
    try:
        return read_card(folder)
    except PacelineError:
        return None


def _figures_in_use(folder: Path, model: TrainDecoder, texts: Sequence[RecordedText]) -> dict[str, Any]:
    try:
        head = drafter_folder.load(folder, pieces_of(model))
        return asdict(_acceptance(head.net, model, texts)) if texts else {}
    except PacelineError:
        return {}


def _take(candidate: Path, folder: Path) -> None:
    for name in (WEIGHTS, CARD):
        rename(candidate / name, folder / name)
    shutil.rmtree(candidate)


def _load_target(job: TrainJob, path: Path, answers: Answers) -> tuple[TrainDecoder, Weights]:
    device, dtype = placement(job.answers.engine)
    weights = load(path, dtype)
    url = job.hidden_states_from
    model = VllmDecoder(weights, device, dtype, url) if url else TrainDecoder(weights, device, dtype)
    if answers.target != model.fingerprint:
        raise UsageError(
            f"{job.folder.name} holds answers of another target than {job.target}: give another folder"
        )
    return model, weights


def _check(job: TrainJob, path: Path, in_use: Path | None) -> None:
    """Refuses what cannot work before answers are made, which takes a while."""
    shape = open_checkpoint(path).shape
    require_trainable(shape)
    vocabulary = shape.vocab_size
    if job.train.draft_vocab > vocabulary:
        expected = f"at most the {vocabulary} tokens of {job.target}"
        raise SettingError("draft_vocab", job.train.draft_vocab, expected)
    if job.start is not None:
        card = read_card(job.start)
        if card.kind != job.train.kind:
            raise UsageError(f"{job.start.name} is a {card.kind} drafter: give kind={card.kind}")
        if card.fingerprint != model_fingerprint(path):
            raise DrafterMismatch(f"{job.start.name} was trained for {card.target}, not for {job.target}")
        served = server_layers(shape.layers, job.train.taps)
        if job.hidden_states_from and not {tap + 1 for tap in card.shape.taps} <= set(served):
            raise DrafterMismatch(
                f"{job.start.name} reads layers that a server does not return: leave out hidden_states_from"
            )
    if in_use is not None and not job.replace:
        card = read_card(in_use)
        if (card.kind, card.fingerprint) != (job.train.kind, model_fingerprint(path)):
            raise UsageError(
                f"{job.folder.name} is the name of a {card.kind} drafter for {card.target}: give another "
                "--out, or --replace"
            )


def _facts(job: TrainJob, answers: Answers, recipe: Recipe) -> dict[str, Any]:
    return {
        "answers": len(answers),
        "answer_tokens": len(answers.answer_tokens("training")),
        "held_out_answers": len(answers.which("held out")),
        "training": asdict(job.train),
        **_coverage(answers, recipe),
    }


def _coverage(answers: Answers, recipe: Recipe) -> dict[str, float]:
    if not len(answers.which("held out")):
        return {}
    return {"draft_vocabulary_covers": answers.covered(recipe.net.draft_ids.numpy(force=True))}


def _began_from(job: TrainJob, card: Card) -> dict[str, Any]:
    """The training data of the drafter that is continued, and of those before it."""
    assert job.start is not None
    return {"name": job.start.name, **{name: card.data[name] for name in _TRAINED_ON if name in card.data}}


def answers_in(
    folder: Path, target: str, sources: Sequence[Source], config: AnswersConfig, report: Report
) -> tuple[Answers, dict[str, Any]]:
    """The answers in the folder, or new ones; and what the card is to say of them."""
    file, notes = folder / ANSWERS, folder / "answers.json"
    plan = _plan(sources, config)
    if file.exists() and notes.exists():
        return Answers.load(file), _read_notes(notes, plan)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{folder} cannot be a folder: {error}; give another --out") from None

    def progress(stage: str, done: int, total: int) -> None:
        report(PipelineProgress(stage, done, total))

    result = make_answers(target, sources, config, progress)
    facts = {
        "sources": [Path(str(source)).name for source in sources],
        "prompts": len(result.prompts.prompts),
        "prompts_cut": result.prompts.cut,
        "prompts_made_up": result.prompts.synthetic,
        "refused": dict(result.prompts.rejected),
        "unanswered": result.unanswered,
    }
    result.answers.save(file)
    write_json(notes, {**facts, _PLAN: plan})
    return result.answers, facts


def _plan(sources: Sequence[Source], config: AnswersConfig) -> dict[str, Any]:
    """All that the answers follow from, the machine apart."""
    settings = {name: value for name, value in asdict(config).items() if name != "engine"}
    if not config.answers_from:  # absent from plans made before it existed
        del settings["answers_from"]
    plan: dict[str, Any] = json.loads(json.dumps({"sources": list(map(str, sources)), **settings}))
    return plan


def _read_notes(notes: Path, plan: dict[str, Any]) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(notes.read_bytes())
        before = {_RENAMED.get(name, name): value for name, value in facts.pop(_PLAN).items()}
        before["rollout"] = {name: before["rollout"].get(name) for name in plan["rollout"]}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(
            f"{notes} is damaged: delete it and {ANSWERS} to have the answers made again"
        ) from None
    if before != plan:
        other = ", ".join(name for name in plan if before.get(name) != plan[name])
        raise UsageError(
            f"{notes.parent.name} holds answers that were made with other settings ({other}): give the same "
            f"again, or another --out, or delete its {ANSWERS} and training.pt"
        )
    return facts


def _recipe(
    job: TrainJob, model: TrainDecoder, answers: Answers, weights: Weights, before: LoadedHead | None
) -> Recipe:
    """before: the drafter to continue, if any; its draft vocabulary becomes that of the answers."""
    if before is None or job.start is None:
        ids = torch.from_numpy(answers.draft_ids(job.train.draft_vocab).ids)
        return new_recipe(job.train, model, ids, weights.tensors if job.train.from_target else None)
    known = before.net.draft_ids.numpy(force=True)
    ids = torch.from_numpy(answers.draft_ids(len(known), known).ids)
    net = with_draft_vocab(job.train.kind, before.net, pieces_of(model), ids)
    digest = hashlib.sha256((job.start / WEIGHTS).read_bytes()).hexdigest()
    loss = loss_of(job.train.kind, net, model, job.train.anchors)
    return Recipe(job.train.kind, net, loss, before.card.calibration, digest)


def _train(job: TrainJob, recipe: Recipe, model: TrainDecoder, answers: Answers, report: Report) -> None:
    texts = held_out_texts(answers, job.train.max_len, _EVAL_TEXTS)

    def evaluate() -> float:
        return _acceptance(recipe.net, model, texts).tokens_per_pass[-1]

    batches = partial(answers.batches, tokens_per_batch=job.train.tokens_per_batch, max_len=job.train.max_len)
    on_step = partial(report_step, report)
    train(recipe, model, batches, job.train, job.folder, on_step, evaluate if texts else None)


def report_step(report: Report, step: TrainProgress) -> None:
    held_out = "" if step.held_out is None else f", held out {step.held_out:.2f} tokens per pass"
    note = f"step {step.step}, loss {step.loss:.3f}{held_out}"
    report(PipelineProgress("training", step.seconds, step.seconds + step.seconds_left, note))


def _acceptance(net: DraftHead, model: TrainDecoder, texts: Sequence[RecordedText]) -> Acceptance:
    """Through the drafter that serves."""
    return acceptance(
        replay(drafter_of(net), model, texts, EVAL_DRAFT, batch=REPLAY_BATCH), texts, EVAL_DRAFT
    )
