"""How well a drafter guesses text of its target, through the very code that serves.

Recorded text is played back: at each place the drafter reads what the target made of the text so far, is
asked for a draft, and the draft is compared with what came. No figure here comes from a training step.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from paceline.config import SamplingParams, SpecConfig
from paceline.train.data.dataset import Answers
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Ask, Drafter, HiddenRows, Seq

CPU_ROWS: Final = 4096  # of texts beside one another: a server shares its memory with what is measured
BucketAt = Callable[[int, int], str]  # the number of a text and a place in it -> what stands there


@dataclass(frozen=True, slots=True)
class Recorded:
    tokens: Sequence[int]
    own: Sequence[bool]  # the target's own words, and how greedy decoding would go on after them

    def anchors(self) -> list[int]:
        """Every place that one of its words follows another from."""
        return [i for i in range(len(self.own) - 1) if self.own[i] and self.own[i + 1]]

    def rest(self, anchor: int, most: int) -> Sequence[int]:
        """The target's words after the anchor, without a break."""
        end = anchor + 1
        while end < min(len(self.tokens), anchor + 1 + most) and self.own[end]:
            end += 1
        return self.tokens[anchor + 1 : end]


@dataclass(frozen=True, slots=True)
class Guess:
    """A draft at one place of a text."""

    text: int
    anchor: int
    right: int  # guesses up to the first wrong one
    counted: int  # guesses that there was something to compare with
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Acceptance:
    anchors: int
    by_place: tuple[float, ...]  # how often a guess is right if those before it are
    tokens_per_pass: tuple[float, ...]  # with one guess at most, with two, and so on
    accepted: float = 0.0  # share of the guesses that are reached, where a pass has as many as it may


def recorded(answers: Answers, max_len: int, most: int = 200) -> list[Recorded]:
    """Held-out answers of greedy decoding, the first `max_len` tokens of each with its prompt."""
    greedy = [i for i in answers.usable("held out", max_len) if not answers.sampled[i]]
    drawn = np.random.default_rng(0).permutation(len(greedy))[:most]  # of all sources, whatever their order
    texts: list[Recorded] = []
    for i in (greedy[n] for n in sorted(drawn)):
        text = answers.tokens[answers.offsets[i] : answers.offsets[i + 1]][:max_len].tolist()
        own = [at >= answers.prompt_lens[i] for at in range(len(text))]
        texts.append(Recorded(text, own))
    return texts


def replay(
    drafter: Drafter, model: TrainDecoder | None, texts: Sequence[Recorded], most: int, batch: int = 16
) -> list[Guess]:
    """What the drafter guesses, `most` tokens at most, wherever it might be asked in these texts.

    model: the target; a drafter that reads none of its layers needs none.
    """
    guesses = []
    rows = CPU_ROWS if model is not None and model.device.type == "cpu" else None
    for first, stop in _groups(texts, batch, rows):
        some = texts[first:stop]
        hidden = {} if model is None else _hidden(model, some, drafter.taps)
        guesses += _played(drafter, some, hidden, most, first)
    return guesses


def _groups(texts: Sequence[Recorded], batch: int, rows: int | None) -> Iterator[tuple[int, int]]:
    """From where to where; no more than `rows` rows with those that fill up short texts, if one fits."""
    first = 0
    while first < len(texts):
        stop, longest = first + 1, len(texts[first].tokens)
        while stop < min(first + batch, len(texts)):
            longest = max(longest, len(texts[stop].tokens))
            if rows is not None and longest * (stop + 1 - first) > rows:
                break
            stop += 1
        yield first, stop
        first = stop


def _hidden(model: TrainDecoder, texts: Sequence[Recorded], taps: Sequence[int]) -> dict[int, Tensor]:
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    for i, text in enumerate(texts):
        tokens[i, : len(text.tokens)] = torch.tensor(text.tokens)
    hidden, _ = model.features(tokens.to(model.device), taps)
    return hidden


@dataclass(slots=True)
class _Playing:
    number: int  # among its batch
    text: Recorded
    seq: Seq
    anchors: Iterator[int]
    at: int = 0
    read: int = 0  # rows

    def move(self) -> bool:
        self.at = next(self.anchors, -1)
        if self.at >= 0:
            self.seq.tokens.extend(self.text.tokens[len(self.seq.tokens) : self.at + 1])
        return self.at >= 0


def _played(
    drafter: Drafter, texts: Sequence[Recorded], hidden: dict[int, Tensor], most: int, first: int
) -> list[Guess]:
    playing = []
    for i, text in enumerate(texts):
        anchors = text.anchors()
        start = anchors[0] if anchors else 0
        seq = Seq(f"replay {first + i}", list(text.tokens[:start]), start, _GREEDY, _SPEC, remember=False)
        playing.append(_Playing(i, text, seq, iter(anchors)))
        drafter.begin(seq)
    guesses, seqs = [], [p.seq for p in playing]
    while playing := [p for p in playing if p.move()]:
        if hidden:
            drafter.on_hidden([_seen(p, hidden) for p in playing if p.read < p.at])
        drafts = drafter.draft([Ask(p.seq, most) for p in playing])
        for p, draft in zip(playing, drafts, strict=True):
            p.read = p.at
            rest = p.text.rest(p.at, len(draft))
            right = next((i for i, t in enumerate(rest) if draft.tokens[i] != t), len(rest))
            guesses.append(Guess(first + p.number, p.at, right, len(rest), draft.scores))
    for seq in seqs:
        drafter.end(seq)
    return guesses


_GREEDY = SamplingParams(max_tokens=1 << 20)
_SPEC = SpecConfig(("trained",), adaptive=False)


def _seen(p: _Playing, hidden: dict[int, Tensor]) -> HiddenRows:
    rows = {layer: states[p.number, p.read : p.at].float() for layer, states in hidden.items()}
    return HiddenRows(p.seq, p.read, rows)


def acceptance(guesses: Sequence[Guess], texts: Sequence[Recorded], most: int) -> Acceptance:
    by_place = []
    for place in range(most):
        reached = [g for g in guesses if g.counted > place and g.right >= place]
        by_place.append(sum(g.right > place for g in reached) / max(1, len(reached)))
    at = {(g.text, g.anchor): g.right for g in guesses}
    walks = [list(_passes(at, texts, k)) for k in range(1, most + 1)]
    rates = tuple(sum(n for *_, n in walk) / max(1, len(walk)) for walk in walks)
    return Acceptance(len(guesses), tuple(by_place), rates, _accepted(guesses, walks[-1], most))


def passes_by_text(guesses: Sequence[Guess], texts: Sequence[Recorded], most: int) -> list[int]:
    """How many passes each text would have taken, `most` guesses in each."""
    at = {(g.text, g.anchor): g.right for g in guesses}
    counts = Counter(text for text, *_ in _passes(at, texts, most))
    return [counts[text] for text in range(len(texts))]


def by_bucket(
    guesses: Sequence[Guess], texts: Sequence[Recorded], most: int, bucket: BucketAt
) -> dict[str, Acceptance]:
    """Each place counts for what stands right after it; a pass counts where it begins."""
    of = {(g.text, g.anchor): bucket(g.text, g.anchor + 1) for g in guesses}
    groups: dict[str, list[Guess]] = defaultdict(list)
    for g in guesses:
        groups[of[g.text, g.anchor]].append(g)
    at = {(g.text, g.anchor): g.right for g in guesses}
    walks = [list(_passes(at, texts, k)) for k in range(1, most + 1)]
    found = {}
    for name, group in sorted(groups.items()):
        own = [[n for text, anchor, n in walk if of[text, anchor] == name] for walk in walks]
        rates = tuple(sum(tokens) / max(1, len(tokens)) for tokens in own)
        by_place = acceptance(group, texts, most).by_place
        found[name] = Acceptance(len(group), by_place, rates, _accepted(group, walks[-1], most))
    return found


def _accepted(guesses: Sequence[Guess], passes: Iterable[tuple[int, int, int]], most: int) -> float:
    taken = {(text, anchor) for text, anchor, _ in passes}
    drafts = [g for g in guesses if (g.text, g.anchor) in taken]
    reached = sum(min(g.right + 1, g.counted, most) for g in drafts)
    return sum(min(g.right, most) for g in drafts) / max(1, reached)


def _passes(
    right: dict[tuple[int, int], int], texts: Sequence[Recorded], most: int
) -> Iterator[tuple[int, int, int]]:
    """Text, anchor and tokens of every pass that speculation would have taken, `most` guesses in each."""
    for number, text in enumerate(texts):
        past = -1
        for anchor in text.anchors():
            if anchor >= past and (number, anchor) in right:
                tokens = len(text.rest(anchor, min(most, right[number, anchor]) + 1))
                yield number, anchor, tokens
                past = anchor + tokens
