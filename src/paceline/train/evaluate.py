"""Acceptance of a drafter on recorded text of its target, through the code that serves.

Text is replayed: at each position the drafter gets the target's hidden states so far and is asked for a
draft, which is compared with the tokens that followed. No figure here comes from a training step.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from paceline.config import SamplingParams, SpecConfig
from paceline.train.data.dataset import Answers
from paceline.train.train_decoder import TrainDecoder
from paceline.types import Ask, Drafter, HiddenRows, Seq

CPU_ROWS: Final = 4096  # of texts in one batch: evaluation shares the memory of a server
TextKindAt = Callable[[int, int], str]  # index of a text, position in it -> kind of text there


@dataclass(frozen=True, slots=True)
class RecordedText:
    tokens: Sequence[int]
    own: Sequence[bool]  # the token is the target's own, chosen greedily

    def anchors(self) -> list[int]:
        """Positions of the target's tokens that another of them follows."""
        return [i for i in range(len(self.own) - 1) if self.own[i] and self.own[i + 1]]

    def rest(self, anchor: int, max_draft: int) -> Sequence[int]:
        """The target's tokens right after the anchor."""
        end = anchor + 1
        while end < min(len(self.tokens), anchor + 1 + max_draft) and self.own[end]:
            end += 1
        return self.tokens[anchor + 1 : end]


@dataclass(frozen=True, slots=True)
class DraftOutcome:
    """A draft at one position of a text, compared with the tokens that followed."""

    text: int
    anchor: int
    right: int  # tokens up to the first wrong one
    counted: int  # tokens of the draft that there was something to compare with
    scores: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Acceptance:
    anchors: int
    by_position: tuple[float, ...]  # share of tokens accepted where all before them in the draft are
    tokens_per_pass: tuple[float, ...]  # with drafts of at most one token, two tokens, and so on
    accepted: float = 0.0  # share of the tokens reached, with drafts of the full length
    counts: tuple[int, ...] = ()  # tokens that each share of by_position is of

    @classmethod
    def of_table(cls, table: Mapping[str, Any]) -> "Acceptance":
        """From a card; older ones say by_place, and no counts."""
        shares = table["by_position"] if "by_position" in table else table["by_place"]
        counts = tuple(int(n) for n in table.get("counts", ()))
        rates, accepted = table["tokens_per_pass"], float(table.get("accepted", 0.0))
        return cls(int(table["anchors"]), _floats(shares), _floats(rates), accepted, counts)


def _floats(values: Iterable[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)


def held_out_texts(answers: Answers, max_len: int, max_texts: int = 200) -> list[RecordedText]:
    """Held-out answers of greedy decoding, the first `max_len` tokens of each with its prompt."""
    greedy = [i for i in answers.usable("held out", max_len) if not answers.sampled[i]]
    some = np.random.default_rng(0).permutation(len(greedy))[:max_texts]  # of all sources, in any order
    texts: list[RecordedText] = []
    for i in (greedy[n] for n in sorted(some)):
        text = answers.tokens[answers.offsets[i] : answers.offsets[i + 1]][:max_len].tolist()
        own = [at >= answers.prompt_lens[i] for at in range(len(text))]
        texts.append(RecordedText(text, own))
    return texts


def replay(
    drafter: Drafter,
    model: TrainDecoder | None,
    texts: Sequence[RecordedText],
    max_draft: int,
    batch: int = 16,
) -> list[DraftOutcome]:
    """A draft of at most `max_draft` tokens at every anchor of these texts.

    model: the target; a drafter without taps needs none.
    """
    drafts = []
    rows = CPU_ROWS if model is not None and model.device.type == "cpu" else None
    for first, stop in _groups(texts, batch, rows):
        some = texts[first:stop]
        hidden = {} if model is None else _hidden(model, some, drafter.taps)
        drafts += _replay_batch(drafter, some, hidden, max_draft, first)
    return drafts


def _groups(texts: Sequence[RecordedText], batch: int, rows: int | None) -> Iterator[tuple[int, int]]:
    """Slices of the texts: at most `rows` rows each, padding included, unless a single text has more."""
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


def _hidden(model: TrainDecoder, texts: Sequence[RecordedText], taps: Sequence[int]) -> dict[int, Tensor]:
    longest = max(len(text.tokens) for text in texts)
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    for i, text in enumerate(texts):
        tokens[i, : len(text.tokens)] = torch.tensor(text.tokens)
    hidden, _ = model.features(tokens.to(model.device), taps)
    return hidden


@dataclass(slots=True)
class _Replay:
    index: int  # in its batch
    text: RecordedText
    seq: Seq
    anchors: Iterator[int]
    at: int = 0
    read: int = 0  # rows given to the drafter

    def advance(self) -> bool:
        self.at = next(self.anchors, -1)
        if self.at >= 0:
            self.seq.tokens.extend(self.text.tokens[len(self.seq.tokens) : self.at + 1])
        return self.at >= 0


def _replay_batch(
    drafter: Drafter, texts: Sequence[RecordedText], hidden: dict[int, Tensor], max_draft: int, first: int
) -> list[DraftOutcome]:
    active = []
    for i, text in enumerate(texts):
        anchors = text.anchors()
        start = anchors[0] if anchors else 0
        seq = Seq(f"replay {first + i}", list(text.tokens[:start]), start, _GREEDY, _SPEC, remember=False)
        active.append(_Replay(i, text, seq, iter(anchors)))
        drafter.begin(seq)
    outcomes, seqs = [], [p.seq for p in active]
    while active := [p for p in active if p.advance()]:
        if hidden:
            drafter.on_hidden([_hidden_rows(p, hidden) for p in active if p.read < p.at])
        drafts = drafter.draft([Ask(p.seq, max_draft) for p in active])
        for p, draft in zip(active, drafts, strict=True):
            p.read = p.at
            rest = p.text.rest(p.at, len(draft))
            right = next((i for i, t in enumerate(rest) if draft.tokens[i] != t), len(rest))
            outcomes.append(DraftOutcome(first + p.index, p.at, right, len(rest), draft.scores))
    for seq in seqs:
        drafter.end(seq)
    return outcomes


_GREEDY = SamplingParams(max_tokens=1 << 20)
_SPEC = SpecConfig(("trained",), adaptive=False)


def _hidden_rows(p: _Replay, hidden: dict[int, Tensor]) -> HiddenRows:
    rows = {layer: states[p.index, p.read : p.at].float() for layer, states in hidden.items()}
    return HiddenRows(p.seq, p.read, rows)


def acceptance(drafts: Sequence[DraftOutcome], texts: Sequence[RecordedText], max_draft: int) -> Acceptance:
    by_position, counts = [], []
    for position in range(max_draft):
        reached = [g for g in drafts if g.counted > position and g.right >= position]
        by_position.append(sum(g.right > position for g in reached) / max(1, len(reached)))
        counts.append(len(reached))
    at = {(g.text, g.anchor): g.right for g in drafts}
    walks = [list(_passes(at, texts, k)) for k in range(1, max_draft + 1)]
    rates = tuple(sum(n for *_, n in walk) / max(1, len(walk)) for walk in walks)
    accepted = _accepted(drafts, walks[-1], max_draft)
    return Acceptance(len(drafts), tuple(by_position), rates, accepted, tuple(counts))


def passes_by_text(
    drafts: Sequence[DraftOutcome], texts: Sequence[RecordedText], max_draft: int
) -> list[int]:
    """Passes that each text would have taken, with drafts of at most `max_draft` tokens."""
    at = {(g.text, g.anchor): g.right for g in drafts}
    counts = Counter(text for text, *_ in _passes(at, texts, max_draft))
    return [counts[text] for text in range(len(texts))]


def by_text_kind(
    drafts: Sequence[DraftOutcome], texts: Sequence[RecordedText], max_draft: int, kind_at: TextKindAt
) -> dict[str, Acceptance]:
    """An anchor counts for the kind of the token after it; a pass, for the kind where it begins."""
    of = {(g.text, g.anchor): kind_at(g.text, g.anchor + 1) for g in drafts}
    groups: dict[str, list[DraftOutcome]] = defaultdict(list)
    for g in drafts:
        groups[of[g.text, g.anchor]].append(g)
    at = {(g.text, g.anchor): g.right for g in drafts}
    walks = [list(_passes(at, texts, k)) for k in range(1, max_draft + 1)]
    by_kind = {}
    for name, group in sorted(groups.items()):
        own = [[n for text, anchor, n in walk if of[text, anchor] == name] for walk in walks]
        rates = tuple(sum(tokens) / max(1, len(tokens)) for tokens in own)
        own_figures = acceptance(group, texts, max_draft)
        accepted = _accepted(group, walks[-1], max_draft)
        by_kind[name] = replace(own_figures, tokens_per_pass=rates, accepted=accepted)
    return by_kind


def _accepted(
    drafts: Sequence[DraftOutcome], passes: Iterable[tuple[int, int, int]], max_draft: int
) -> float:
    taken = {(text, anchor) for text, anchor, _ in passes}
    drafts = [g for g in drafts if (g.text, g.anchor) in taken]
    reached = sum(min(g.right + 1, g.counted, max_draft) for g in drafts)
    return sum(min(g.right, max_draft) for g in drafts) / max(1, reached)


def _passes(
    right: dict[tuple[int, int], int], texts: Sequence[RecordedText], max_draft: int
) -> Iterator[tuple[int, int, int]]:
    """Text, anchor and tokens of every pass, with drafts of at most `max_draft` tokens."""
    for index, text in enumerate(texts):
        past = -1
        for anchor in text.anchors():
            if anchor >= past and (index, anchor) in right:
                tokens = len(text.rest(anchor, min(max_draft, right[index, anchor]) + 1))
                yield index, anchor, tokens
                past = anchor + tokens
