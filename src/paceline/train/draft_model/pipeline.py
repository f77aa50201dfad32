"""The whole way of a draft model: answers of the target, training, measuring, a folder to serve."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

from paceline import hub
from paceline.convert.hf_model import write_model
from paceline.drafters.draft_model import drafter_for
from paceline.errors import SettingError, UsageError
from paceline.loading import draft_model_path
from paceline.target.eager.target import placement
from paceline.target.load import load_draft
from paceline.target.weights.reader import canonical_tensors, load, open_checkpoint
from paceline.target.weights.tensors import fingerprint
from paceline.text import Tokenizer
from paceline.train.data.conversations import Source
from paceline.train.data.dataset import Answers
from paceline.train.data.plan import AnswersConfig
from paceline.train.data.text_kind import TextKind, text_kinds
from paceline.train.draft_model.card import DraftCard, save_card
from paceline.train.draft_model.draft_dataset import retold, same_words, telling
from paceline.train.draft_model.finetune import TuneConfig, tune
from paceline.train.draft_model.model import DraftNet
from paceline.train.evaluate import (
    Acceptance,
    DraftOutcome,
    RecordedText,
    acceptance,
    by_text_kind,
    held_out_texts,
    replay,
)
from paceline.train.head_pipeline import PipelineProgress, Report, answers_in
from paceline.train.train_decoder import TrainDecoder
from paceline.train.trainer import TrainProgress

EVAL_DRAFT: Final = 5  # guesses in a draft, in the card's figures
REPLAY_BATCH: Final = 4  # texts that are played back beside one another: a cache must hold them all


@dataclass(frozen=True, slots=True)
class DraftJob:
    target: str
    draft: str  # the model that is to guess for it, of any tokenizer
    sources: tuple[Source, ...]
    folder: Path  # where all of it goes
    answers: AnswersConfig = field(default_factory=AnswersConfig)
    tune: TuneConfig = field(default_factory=TuneConfig)
    measured: int = 24  # held-out answers the card's figures are from, at most


def run(job: DraftJob, report: Report = lambda _: None) -> DraftCard:
    """Does what is left to do: answers that are there are not written again, a training goes on."""
    pair = _Pair(job)
    answers, told = answers_in(job.folder, job.target, job.sources, job.answers, report)
    pair.require_answers_of_target(answers)
    texts = held_out_texts(answers, 1 << 20, job.measured)
    report(PipelineProgress("measuring", 0, 2))
    before, _ = pair.measure(pair.draft_path, texts)
    report(PipelineProgress("measuring", 1, 2))
    taught = pair.train(answers, report)
    after, guesses = pair.measure(job.folder, texts)
    report(PipelineProgress("measuring", 2, 2))
    data = {
        **told,
        "answers": len(answers),
        "answer_tokens": len(answers.answer_tokens("training")),
        "held_out_answers": len(answers.which("held out")),
        "unreadable": len(answers) - len(taught),
        "same_tokenizer": pair.same,
        "training": asdict(job.tune),
        "by_kind_of_text": pair.by_kind(guesses, texts),
    }
    names = Path(job.draft).name, Path(job.target).name
    card = DraftCard(*names, answers.target, job.tune.lora, before, after, data)
    save_card(job.folder, card)
    return card


class _Pair:
    """The two models; nothing but tokenizers and shapes is held for long."""

    def __init__(self, job: DraftJob) -> None:
        self._job = job
        self._target_path, self.draft_path = hub.resolve(job.target), draft_model_path(job.draft)
        if self.draft_path.resolve() == job.folder.resolve():
            raise UsageError(f"{job.folder.name} is the draft model itself: give another folder")
        self._target, self._draft = Tokenizer.load(self._target_path), Tokenizer.load(self.draft_path)
        self._sizes = [open_checkpoint(p).shape.vocab_size for p in (self.draft_path, self._target_path)]
        self.same = same_words(self._draft, self._target)
        if job.tune.distill and not self.same:
            why = f"{job.draft} and {job.target} have different tokenizers: no distributions to compare"
            raise SettingError("distill", job.tune.distill, "0", why)

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
        guesses = replay(drafter, None, texts, EVAL_DRAFT, batch=REPLAY_BATCH)
        return acceptance(guesses, texts, EVAL_DRAFT), guesses

    def train(self, answers: Answers, report: Report) -> Answers:
        """Writes the trained model; gives what it was shown."""
        job, config = self._job, self._job.tune
        words = telling(self._draft, self._target, *self._sizes)
        shown = retold(answers, words, self._sizes[0], self._draft.fingerprint)
        device, dtype = placement(job.answers.engine)
        weights = load(self.draft_path)
        net = DraftNet(weights, device, config.lora, config.scale, config.seed)
        teacher = TrainDecoder(load(self._target_path, dtype), device, dtype) if config.distill else None
        max_len = min(config.max_len, weights.shape.max_context)
        batches = partial(shown.batches, tokens_per_batch=config.tokens_per_batch, max_len=max_len)
        tune(net, batches, config, job.folder, _telling(report), teacher)
        write_model(job.folder, self.draft_path, weights.shape, net.weights())
        return shown

    def by_kind(self, guesses: Sequence[DraftOutcome], texts: Sequence[RecordedText]) -> dict[str, Any]:
        kinds = [text_kinds(self._target, text.tokens) for text in texts]

        def kind_at(text: int, place: int) -> str:
            return TextKind(int(kinds[text][place])).name.lower()

        found = by_text_kind(guesses, texts, EVAL_DRAFT, kind_at)
        return {kind: asdict(figures) for kind, figures in found.items()}


def _telling(report: Report) -> Callable[[TrainProgress], None]:
    def tell(p: TrainProgress) -> None:
        note = f"step {p.step}, loss {p.loss:.3f}"
        report(PipelineProgress("training", p.seconds, p.seconds + p.seconds_left, note))

    return tell
