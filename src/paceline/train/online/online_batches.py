"""What was served, made into lessons: where guesses went wrong, and some of the other places.

A conversation that is held out to measure on is never learned from.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.config import LearnConfig
from paceline.heads.base import DraftHead
from paceline.trace.online import LEAST, TrainingSample
from paceline.train.data.conversations import Conversation
from paceline.train.data.held_out import held_out
from paceline.train.evaluate import Recorded
from paceline.train.losses.base import Loss, TrainBatch
from paceline.train.optim import optimizers_of
from paceline.train.recipe import TrainConfig
from paceline.train.train_decoder import TrainDecoder

WARM_UP: Final = 0.1  # share of the steps
CLIP: Final = 1.0
TELL_STEPS: Final = 8

Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Split:
    """Texts for each purpose, none of a conversation that is on the other side."""

    learned: list[TrainingSample]
    held_out: list[TrainingSample]

    def recorded(self) -> list[Recorded]:
        return [_recorded(text) for text in self.held_out]


@dataclass(frozen=True, slots=True)
class Batch:
    """What the target made of some texts, kept for all steps."""

    tokens: Tensor  # [b, n]
    mask: Tensor  # [b, n]: the target's own words
    wrong: Tensor  # [b, n]: a draft that began after this token was refused
    constrained: Tensor  # [b] bool: a grammar chose, too
    hidden: dict[int, Tensor]
    final: Tensor

    def lesson(self, others: float, generator: torch.Generator) -> TrainBatch:
        drawn = torch.rand(self.mask.shape, generator=generator).to(self.mask.device) < others
        return TrainBatch(
            self.tokens, self.mask, self.hidden, self.final, self.constrained, self.wrong | drawn
        )


def split(texts: Sequence[TrainingSample], config: LearnConfig) -> Split:
    """The latest on each side, as many as its number of tokens allows."""
    texts = [text for text in (text.first(config.max_len) for text in texts) if text.answered >= LEAST]
    talks = [Conversation(({"role": "user", "content": t.opening},)) for t in texts]
    kept = held_out(talks, config.held_out)
    sides: tuple[list[TrainingSample], list[TrainingSample]] = ([], [])
    room = [config.train_tokens, config.measure_tokens]
    for text, out in zip(reversed(texts), reversed(kept), strict=True):
        if len(text.tokens) <= room[out]:
            sides[out].append(text)
            room[out] -= len(text.tokens)
    return Split(*sides)


def _recorded(text: TrainingSample) -> Recorded:
    return Recorded(text.tokens, [at >= text.prompt_len for at in range(len(text.tokens))])


def learn(
    net: DraftHead,
    measure: Loss,
    lessons: Sequence[Batch],
    config: LearnConfig,
    generator: torch.Generator,
    tell: Tell = lambda _: None,
) -> None:
    """Trains the network in place, where guesses went wrong and at some of the other places."""
    optimizers = optimizers_of(dict(net.train().named_parameters()), TrainConfig(lr=config.lr))
    for step, batch in enumerate(_endless(lessons, config.steps, generator)):
        loss, _ = measure(batch.lesson(config.others, generator), 1.0, generator)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            if torch.isfinite(norm):  # a broken step changes nothing
                optimizers.step(min(1.0, (step + 1) / (WARM_UP * config.steps)))
            net.zero_grad(set_to_none=True)
        if (step + 1) % TELL_STEPS == 0 or step + 1 == config.steps:
            tell({"steps": step % TELL_STEPS + 1})


def _endless(lessons: Sequence[Batch], steps: int, generator: torch.Generator) -> Iterator[Batch]:
    done = 0
    while True:
        for i in torch.randperm(len(lessons), generator=generator).tolist():
            if done == steps:
                return
            done += 1
            yield lessons[i]


def batches(
    kind: str, taps: Sequence[int], model: TrainDecoder, texts: Sequence[TrainingSample], config: LearnConfig
) -> list[Batch]:
    """Texts of about the same length together."""
    groups: list[list[TrainingSample]] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if not groups or (len(groups[-1]) + 1) * len(text.tokens) > config.batch_tokens:
            groups.append([])
        groups[-1].append(text)
    return [_batch(group, kind, taps, model) for group in groups]


def _batch(texts: Sequence[TrainingSample], kind: str, taps: Sequence[int], model: TrainDecoder) -> Batch:
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask, wrong = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for i, text in enumerate(texts):
        tokens[i, : len(text.tokens)] = torch.tensor(text.tokens)
        mask[i, text.prompt_len : len(text.tokens)] = True
        wrong[i, list(text.wrong.get(kind, ()))] = True
    tokens = tokens.to(model.device)
    hidden, final = model.features(tokens, taps)
    constrained = torch.tensor([text.constrained for text in texts])
    mask, wrong, constrained = (part.to(model.device) for part in (mask, wrong, constrained))
    return Batch(tokens, mask, wrong, constrained, hidden, final)
