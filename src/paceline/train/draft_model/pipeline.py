"""Trains a draft model: answers of the target, fine-tuning, evaluation, and a folder that can be served."""

import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline import hub
from paceline.atomic import rename
from paceline.convert.hf_model import require_writable, write_model
from paceline.drafters.draft_model import drafter_for
from paceline.drafters.draft_model.vocab_mapping import Retokenizer, SameVocab, TextRetokenizer, TokenizerPair
from paceline.errors import PacelineError, SettingError, UsageError
from paceline.heads.local_heads import DRAFT_CARD
from paceline.loading import draft_model_path
from paceline.target.eager.target import placement
from paceline.target.load import load_draft
from paceline.target.weights.reader import canonical_tensors, load, open_checkpoint
from paceline.target.weights.tensors import fingerprint
from paceline.text import Tokenizer
from paceline.train.data.answer_plan import AnswersConfig
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.text_kind import TextKind, text_kinds
from paceline.train.draft_model.card import DraftCard, read_draft_card, save_card
from paceline.train.draft_model.finetune import FinetuneConfig, finetune
from paceline.train.draft_model.model import TrainableDraftModel
from paceline.train.evaluate import (
    Acceptance,
    DraftOutcome,
    RecordedText,
    acceptance,
    by_text_kind,
    held_out_texts,
    replay,
)
from paceline.train.head_pipeline import CANDIDATE, PipelineProgress, Report, answers_in, report_step
from paceline.train.train_decoder import TrainDecoder
from paceline.types import common_prefix

EVAL_DRAFT: Final = 5  # tokens in a draft, in the card's figures
REPLAY_BATCH: Final = 4  # texts: one KV cache must hold them all


@dataclass(frozen=True, slots=True)
class DraftJob:
    target: str
    draft: str  # the model to fine-tune, with any tokenizer
    sources: tuple[Source, ...]
    folder: Path  # of the model, its answers and its checkpoints
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    finetune: FinetuneConfig = field(default_factory=FinetuneConfig)
    measured: int = 24  # held-out answers that the card's figures are from, at most
    replace: bool = False  # use the new model even if it measures worse than the old


def run(job: DraftJob, report: Report = lambda _: None) -> DraftCard:
    """Does what is left to do: answers that exist are not made again, and a training resumes.

    The new model is in the folder CANDIDATE of the job's folder if there is a reason to hold it.
    """
    pair = _ModelPair(job)
    answers, facts = answers_in(job.folder, job.target, job.sources, job.answers, report)
    pair.require_answers_of_target(answers)
    texts = held_out_texts(answers, 1 << 20, job.measured)
    report(PipelineProgress("measuring", 0, 2))
    before, _ = pair.measure(pair.draft_path, texts)
    in_use = {"in_use": asdict(pair.measure(job.folder, texts)[0])} if _is_draft_model(job.folder) else {}
    report(PipelineProgress("measuring", 1, 2))
    candidate = job.folder / CANDIDATE
    shutil.rmtree(candidate, ignore_errors=True)
    dataset = pair.train(answers, candidate, report)
    after, drafts = pair.measure(candidate, texts)
    report(PipelineProgress("measuring", 2, 2))
    data = {
        **facts,
        "answers": len(answers),
        "answer_tokens": len(answers.answer_tokens("training")),
        "held_out_answers": len(answers.which("held out")),
        "unreadable": len(answers) - len(dataset),
        "same_tokenizer": pair.same,
        "training": asdict(job.finetune),
        "by_kind_of_text": pair.by_kind(drafts, texts),
        **in_use,
    }
    names = Path(job.draft).name, Path(job.target).name
    card = DraftCard(*names, answers.target, job.finetune.lora, before, after, data)
    save_card(candidate, card)
    if job.replace or not reason_to_hold(card):
        _take(candidate, job.folder)
    return card


def reason_to_hold(card: DraftCard) -> str:
    """The reason not to use the new model; "" if there is none."""
    if not card.after.anchors:
        unknown = "it could not be compared with the one in use: nothing was measured"
        return unknown if "in_use" in card.data else ""
    olds = {f"{card.draft}, which it started from": card.before}
    if "in_use" in card.data:
        olds["the one in use"] = Acceptance.of_table(card.data["in_use"])
    new = card.after.tokens_per_pass[-1]
    for name, old in olds.items():
        if new < old.tokens_per_pass[-1]:
            rates = f"{new:.2f} tokens per pass against {old.tokens_per_pass[-1]:.2f}"
            return f"it measures worse than {name}: {rates} on the same held-out answers"
    return ""


def _is_draft_model(folder: Path) -> bool:
    try:
        read_draft_card(folder)
        open_checkpoint(folder)
    except (PacelineError, OSError):  # there is none, or none that could be used
        return False
    return True


def _take(candidate: Path, folder: Path) -> None:
    for file in sorted(candidate.iterdir(), key=lambda file: file.name == DRAFT_CARD):  # the card last
        rename(file, folder / file.name)
    candidate.rmdir()


class _ModelPair:
    """Draft model and target; weights are loaded only where they are needed."""

    def __init__(self, job: DraftJob) -> None:
        self._job = job
        self._target_path, self.draft_path = hub.resolve(job.target), draft_model_path(job.draft)
        if self.draft_path.resolve() == job.folder.resolve():
            raise UsageError(f"{job.folder.name} is the draft model itself: give another folder")
        self._target, self._draft = Tokenizer.load(self._target_path), Tokenizer.load(self.draft_path)
        shapes = [open_checkpoint(path).shape for path in (self.draft_path, self._target_path)]
        require_writable(shapes[0])
        self._sizes = [shape.vocab_size for shape in shapes]
        self.same = same_tokenizer(self._draft, self._target)
        if job.finetune.distill and not self.same:
            why = f"{job.draft} and {job.target} have different tokenizers: no distributions to compare"
            raise SettingError("distill", job.finetune.distill, "0", why)

    def require_answers_of_target(self, answers: Answers) -> None:
        checkpoint = open_checkpoint(self._target_path)
        if answers.target != fingerprint(checkpoint.identity, canonical_tensors(checkpoint)):
            raise UsageError(
                f"{self._job.folder.name} holds answers of another target than {self._job.target}: "
                "give another folder"
            )

    def measure(self, model: Path, texts: Sequence[RecordedText]) -> tuple[Acceptance, list[DraftOutcome]]:
        """Through the drafter that serves."""
        drafter = drafter_for(
            load_draft(model, self._job.answers.engine), self._draft, self._target, self._sizes[1]
        )
        drafts = replay(drafter, None, texts, EVAL_DRAFT, batch=REPLAY_BATCH)
        return acceptance(drafts, texts, EVAL_DRAFT), drafts

    def train(self, answers: Answers, folder: Path, report: Report) -> Answers:
        """Writes the trained model into `folder`; returns the answers it was trained on."""
        job, config = self._job, self._job.finetune
        retokenizer = retokenizer_for(self._draft, self._target, *self._sizes)
        dataset = retokenize(answers, retokenizer, self._sizes[0], self._draft.fingerprint)
        device, dtype = placement(job.answers.engine)
        weights = load(self.draft_path)
        net = TrainableDraftModel(weights, device, config.lora, config.scale, config.seed)
        teacher = TrainDecoder(load(self._target_path, dtype), device, dtype) if config.distill else None
        max_len = min(config.max_len, weights.shape.max_context)
        batches = partial(dataset.batches, tokens_per_batch=config.tokens_per_batch, max_len=max_len)
        finetune(net, batches, config, job.folder, partial(report_step, report), teacher)
        write_model(folder, self.draft_path, weights.shape, net.weights())
        return dataset

    def by_kind(self, drafts: Sequence[DraftOutcome], texts: Sequence[RecordedText]) -> dict[str, Any]:
        kinds = [text_kinds(self._target, text.tokens) for text in texts]

        def kind_at(text: int, position: int) -> str:
            return TextKind(int(kinds[text][position])).name.lower()

        results = by_text_kind(drafts, texts, EVAL_DRAFT, kind_at)
        return {kind: asdict(figures) for kind, figures in results.items()}


def same_tokenizer(draft: Tokenizer, target: Tokenizer) -> bool:
    """True if draft model and target share a tokenizer."""
    return draft.fingerprint == target.fingerprint


def retokenizer_for(draft: Tokenizer, target: Tokenizer, draft_size: int, target_size: int) -> Retokenizer:
    """The retokenizer that the drafter `model` uses for this pair."""
    if same_tokenizer(draft, target):
        return SameVocab(draft_size, target_size)
    return TextRetokenizer(TokenizerPair(draft, target))


def retokenize(answers: Answers, retokenizer: Retokenizer, draft_size: int, tokenizer: str) -> Answers:
    """Retokenized answers; an answer with a token that the draft model lacks is left out.

    tokenizer: the draft model's fingerprint.
    """
    pairs = [_one(answers, i, retokenizer) for i in range(len(answers))]
    readable = [
        i
        for i, (prompt, answer) in enumerate(pairs)
        if prompt and answer and _fit(prompt, answer, draft_size)
    ]
    if not readable:
        raise UsageError("the draft model can read none of the answers: use another draft model")
    return Answers.of(
        [pairs[i][0] for i in readable],
        [pairs[i][1] for i in readable],
        sampled=answers.sampled[readable].tolist(),
        held_out=answers.held_out[readable].tolist(),
        constrained=answers.constrained[readable].tolist(),
        always=(),
        vocab_size=draft_size,
        target=answers.target,
        tokenizer=tokenizer,
    )


def _one(answers: Answers, i: int, retokenizer: Retokenizer) -> tuple[list[int], list[int]]:
    """Prompt and answer, retokenized token by token, as the answer grows while it is served."""
    text, seq = answers.prompt(i).tolist(), f"answer {i}"
    prompt = tokens = retokenizer.retokenize(seq, text)
    for token in answers.answer(i).tolist():
        text.append(token)
        tokens = retokenizer.retokenize(seq, text)
    retokenizer.forget(seq)
    same = common_prefix(prompt, tokens)
    start = same if same == len(prompt) else same + 1  # no draft begins inside a token that spans both
    return tokens[:start], tokens[start:]


def _fit(prompt: list[int], answer: list[int], size: int) -> bool:
    return max(max(prompt), max(answer)) < size
