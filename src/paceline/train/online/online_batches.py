"""Training batches from served traffic: positions after which a draft was rejected, and some of the others.

A conversation that is held out for evaluation is never trained on.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from paceline.heads.base import DraftHead
from paceline.trace.online import MIN_ANSWER_TOKENS, OnlineTrainingConfig, TrainingSample
from paceline.train.data.conversations import Conversation
from paceline.train.data.held_out import held_out
from paceline.train.evaluate import RecordedText
from paceline.train.losses.base import Loss, TrainBatch
from paceline.train.optim import optimizers_of
from paceline.train.recipe import TrainConfig
from paceline.train.train_decoder import TrainDecoder

WARM_UP: Final = 0.1  # share of the steps
CLIP: Final = 1.0
REPORT_STEPS: Final = 8

Report = Callable[[dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class Split:
    """Samples for each purpose. No conversation has samples on both sides."""

    training: list[TrainingSample]
    held_out: list[TrainingSample]

    def recorded(self) -> list[RecordedText]:
        return [_recorded(text) for text in self.held_out]


@dataclass(frozen=True, slots=True)
class OnlineBatch:
    """Samples with the target's hidden states, computed once for all steps."""

    tokens: Tensor  # [b, n]
    mask: Tensor  # [b, n] bool: the token is the target's own output
    rejected: Tensor  # [b, n] bool: a draft that began after this token was rejected
    constrained: Tensor  # [b] bool: sampled under a grammar
    hidden: dict[int, Tensor]
    final: Tensor

    def sample(self, accepted_share: float, generator: torch.Generator) -> TrainBatch:
        """The rejected positions, and a random share of the others."""
        sampled = torch.rand(self.mask.shape, generator=generator).to(self.mask.device) < accepted_share
        return TrainBatch(
            self.tokens, self.mask, self.hidden, self.final, self.constrained, self.rejected | sampled
        )


def split(texts: Sequence[TrainingSample], config: OnlineTrainingConfig) -> Split:
    """The latest samples on each side, within its budget of tokens."""
    texts = [
        text
        for text in (text.truncate(config.max_len) for text in texts)
        if text.answer_len >= MIN_ANSWER_TOKENS
    ]
    talks = [Conversation(({"role": "user", "content": t.opening},)) for t in texts]
    out_flags = held_out(talks, config.held_out)
    sides: tuple[list[TrainingSample], list[TrainingSample]] = ([], [])
    room = [config.train_tokens, config.eval_tokens]
    for text, out in zip(reversed(texts), reversed(out_flags), strict=True):
        if len(text.tokens) <= room[out]:
            sides[out].append(text)
            room[out] -= len(text.tokens)
    return Split(*sides)


def _recorded(text: TrainingSample) -> RecordedText:
    return RecordedText(text.tokens, [at >= text.prompt_len for at in range(len(text.tokens))])


def train_online(
    net: DraftHead,
    measure: Loss,
    cached: Sequence[OnlineBatch],
    config: OnlineTrainingConfig,
    generator: torch.Generator,
    report: Report = lambda _: None,
) -> None:
    """Trains the network in place."""
    optimizers = optimizers_of(dict(net.train().named_parameters()), TrainConfig(lr=config.lr))
    for step, batch in enumerate(_endless(cached, config.steps, generator)):
        loss, _ = measure(batch.sample(config.accepted_share, generator), 1.0, generator)
        if loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            if torch.isfinite(norm):  # a broken step changes nothing
                optimizers.step(min(1.0, (step + 1) / (WARM_UP * config.steps)))
            net.zero_grad(set_to_none=True)
        if (step + 1) % REPORT_STEPS == 0 or step + 1 == config.steps:
            report({"steps": step % REPORT_STEPS + 1})


def _endless(cached: Sequence[OnlineBatch], steps: int, generator: torch.Generator) -> Iterator[OnlineBatch]:
    done = 0
    while True:
        for i in torch.randperm(len(cached), generator=generator).tolist():
            if done == steps:
                return
            done += 1
            yield cached[i]


def batches(
    kind: str,
    taps: Sequence[int],
    model: TrainDecoder,
    texts: Sequence[TrainingSample],
    config: OnlineTrainingConfig,
) -> list[OnlineBatch]:
    """Samples of about the same length together."""
    groups: list[list[TrainingSample]] = []
    for text in sorted(texts, key=lambda text: len(text.tokens)):
        if not groups or (len(groups[-1]) + 1) * len(text.tokens) > config.batch_tokens:
            groups.append([])
        groups[-1].append(text)
    return [_batch(group, kind, taps, model) for group in groups]


def _batch(
    texts: Sequence[TrainingSample], kind: str, taps: Sequence[int], model: TrainDecoder
) -> OnlineBatch:
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    mask, rejected = torch.zeros_like(tokens, dtype=torch.bool), torch.zeros_like(tokens, dtype=torch.bool)
    for i, text in enumerate(texts):
        tokens[i, : len(text.tokens)] = torch.tensor(text.tokens)
        mask[i, text.prompt_len : len(text.tokens)] = True
        rejected[i, list(text.rejected.get(kind, ()))] = True
    tokens = tokens.to(model.device)
    hidden, final = model.features(tokens, taps)
    constrained = torch.tensor([text.constrained for text in texts])
    mask, rejected, constrained = (part.to(model.device) for part in (mask, rejected, constrained))
    return OnlineBatch(tokens, mask, rejected, constrained, hidden, final)
