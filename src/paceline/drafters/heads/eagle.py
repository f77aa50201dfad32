"""A single layer goes on from the target's hidden states, a guess at a time; see heads/eagle.py.

It keeps what the layer made of each token of the text. All guesses of one length, of all sequences, are one
pass, and what was made of a guess is remembered while the text stays as it is. Rows over the whole vocabulary
are made only where one is asked for: most chains need no more than the best guess of each place.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from paceline.drafters.heads.head_cache import DEFAULT_POSITIONS, HeadCache
from paceline.drafters.heads.tree_growth import Position, grow
from paceline.drafters.support.draft_sampling import needs_q
from paceline.drafters.support.grammar_filter import unforced
from paceline.heads.eagle import EagleHead, Rows
from paceline.sampling import Floats
from paceline.sampling.distribution import penalises
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, HiddenRows, Seq

Path = tuple[int, ...]  # guesses after the text


@dataclass(slots=True)
class _Guessed:
    """What the net made of the last token of a path."""

    hidden: Tensor  # [width], fed back
    chain: Tensor  # [len(path), 2, kv_heads, head_dim]
    logits: Tensor  # [draft_vocab], of what follows
    best: int  # the likeliest token to follow
    chance: float  # of it, as if drawn at temperature 1
    row: Floats | None = None  # the logits over the target's vocabulary, once they were asked for


@dataclass(slots=True)
class _Ahead:
    """What is known of the places after a text."""

    hidden: Tensor  # [width], the target's, fused, at the last token but one
    length: int = 0  # of the text
    guessed: dict[Path, _Guessed] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Texts:
    """What the texts of some sequences are to their guesses, side by side."""

    ids: tuple[str, ...]
    last: Tensor  # [b, 1], the position of the last row of each
    positions: Tensor  # [b, n], -1 for padding
    rows: Tensor  # [b, n, 2, kv_heads, head_dim]


class EagleDrafter(Drafter):
    """The network stays where it is: it should be where the target is."""

    name = "eagle"

    def __init__(self, net: EagleHead, remembered: int = DEFAULT_POSITIONS) -> None:
        shape = net.shape
        self.net = net.eval()
        self.taps = shape.taps
        self._ids = net.draft_ids.numpy(force=True)
        row = (2, shape.kv_heads, shape.head_dim)
        self._kept = HeadCache(row, remembered, ahead=1, like=net.fc.weight.detach())
        self._ahead: dict[str, _Ahead] = {}
        self._texts: _Texts | None = None  # of the pass before, while texts stay as they are

    def begin(self, seq: Seq) -> None:
        self._kept.begin(seq)

    def end(self, seq: Seq) -> None:
        self._kept.end(seq)
        self._ahead.pop(seq.id, None)

    @torch.inference_mode()
    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        self._texts = None
        parts = [s.hidden for s in hidden_rows]
        sizes = [len(part[self.taps[0]]) for part in parts]
        hidden = {tap: torch.cat([part[tap] for part in parts]).to(self._device) for tap in self.taps}
        fused = self.net.fused(hidden)
        spans = [(s, range(s.start, s.start + n)) for s, n in zip(hidden_rows, sizes, strict=True)]
        positions = self._ints([p for _, span in spans for p in span])
        tokens = self._ints([s.seq.tokens[p + 1] for s, span in spans for p in span])
        made = self.net.rows(tokens[None], fused[None], positions[None]).keys_values[0]
        for s, rows, states in zip(
            hidden_rows, torch.split(made, sizes), torch.split(fused, sizes), strict=True
        ):
            self._kept.append(s.seq.id, s.start, rows)
            self._ahead[s.seq.id] = _Ahead(states[-1].clone(), s.start + len(rows) + 1)

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self._ready(ask.seq)]
        simple = [ask for ask in ready if _is_simple(ask)]
        others = [ask for ask in ready if not _is_simple(ask)]
        drafts = [
            *self._chains(simple),
            *grow(others, self._look, self.name, self.net.shape.vocab, self._foresee),
        ]
        self._texts = None
        of = {ask.seq.id: draft for ask, draft in zip([*simple, *others], drafts, strict=True)}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _chains(self, asks: Sequence[Ask]) -> list[Draft]:
        """What `grow` would give, without rows over the whole vocabulary."""
        paths, scores = [ask.after for ask in asks], [list[float]() for _ in asks]
        ends = [min(len(ask.after) + ask.budget, self.net.shape.block) for ask in asks]
        while going := [i for i, path in enumerate(paths) if len(path) < ends[i]]:
            self._know([(asks[i].seq, paths[i]) for i in going])
            for i in going:
                found = self._ahead[asks[i].seq.id].guessed[paths[i]]
                paths[i] = (*paths[i], found.best)
                scores[i].append(unforced(found.chance))
        return [
            Draft(path[len(ask.after) :], None, (self.name,) * len(own), tuple(own))
            for ask, path, own in zip(asks, paths, scores, strict=True)
        ]

    def _ready(self, seq: Seq) -> bool:
        known = self._ahead.get(seq.id)
        return known is not None and known.length == len(seq.tokens)

    def _look(self, spots: Sequence[Position]) -> list[tuple[Floats | None, None]]:
        self._foresee(spots)
        return [(self._row(spot), None) for spot in spots]

    def _foresee(self, spots: Sequence[Position]) -> None:
        self._know([(s.ask.seq, s.written) for s in spots if len(s.written) < self.net.shape.block])

    def _know(self, near: Sequence[tuple[Seq, Path]]) -> None:
        """What follows these paths, and what follows those that lead there."""
        for depth in range(max((len(path) for _, path in near), default=-1) + 1):
            paths = {(seq.id, path[:depth]): seq for seq, path in near if len(path) >= depth}
            new = [(seq, path) for (name, path), seq in paths.items() if not self._known(name, path)]
            if new:
                self._step(new, depth)

    def _known(self, seq_id: str, path: Path) -> bool:
        return path in self._ahead[seq_id].guessed

    def _row(self, spot: Position) -> Floats | None:
        """Logits over the target's vocabulary."""
        found = self._ahead[spot.ask.seq.id].guessed.get(spot.written)
        if found is not None and found.row is None:
            found.row = np.full(self.net.shape.vocab, -np.inf, np.float32)
            found.row[self._ids] = found.logits.numpy(force=True)
        return None if found is None else found.row

    def _step(self, new: Sequence[tuple[Seq, Path]], depth: int) -> None:
        """One pass for paths of `depth` guesses; those before are known."""
        hidden = torch.stack([self._before(seq, path) for seq, path in new])
        tokens = self._ints([path[-1] if path else seq.tokens[-1] for seq, path in new])
        positions = self._ints([len(seq.tokens) - 2 + depth for seq, _ in new])
        rows = self.net.rows(tokens[None], hidden[None], positions[None])
        chains = self._with_own(new, rows.keys_values[0])
        states = self._forward(new, rows, chains)
        logits = self.net.logits(states)
        chances, best = logits.softmax(-1).max(-1)
        said = zip(self.net.draft_ids[best].tolist(), chances.tolist(), strict=True)
        for (seq, path), state, chain, row, (token, chance) in zip(
            new, states, chains, logits, said, strict=True
        ):
            self._ahead[seq.id].guessed[path] = _Guessed(state, chain, row, token, chance)

    def _before(self, seq: Seq, path: Path) -> Tensor:
        known = self._ahead[seq.id]
        return known.guessed[path[:-1]].hidden if path else known.hidden

    def _with_own(self, new: Sequence[tuple[Seq, Path]], own: Tensor) -> Tensor:
        """[len(new), depth, ...]: what each of these paths sees of itself; () is of the text."""
        before = [self._ahead[seq.id].guessed[path[:-1]].chain for seq, path in new if path]
        if not before:
            return own[:, None][:, :0]
        return torch.cat((torch.stack(before), own[:, None]), 1)

    def _forward(self, new: Sequence[tuple[Seq, Path]], rows: Rows, chains: Tensor) -> Tensor:
        """[len(new), width]; paths of one sequence stand beside one another, repeated where there are few."""
        seqs = {seq.id: seq for seq, _ in new}
        members: dict[str, list[int]] = {name: [] for name in seqs}
        for i, (seq, _) in enumerate(new):
            members[seq.id].append(i)
        most = max(map(len, members.values()))
        grid = [own + own[:1] * (most - len(own)) for own in members.values()]
        where = {i: row * most + n for row, own in enumerate(members.values()) for n, i in enumerate(own)}
        pick = self._ints(grid)
        texts = self._side_by_side(list(seqs.values()))
        beside = Rows(*(part[0][pick] for part in (rows.hidden, rows.queries, rows.keys_values)))
        sees = self.net.sees(texts.last.expand(-1, most), texts.positions) & (texts.positions >= 0)[:, None]
        out: Tensor = self.net(beside, texts.rows, sees, chains[pick])
        return out.flatten(0, 1)[self._ints([where[i] for i in range(len(new))])]

    def _side_by_side(self, seqs: Sequence[Seq]) -> _Texts:
        ids = tuple(seq.id for seq in seqs)
        if self._texts is not None and self._texts.ids == ids:
            return self._texts
        lasts = [len(seq.tokens) - 2 for seq in seqs]
        parts = [
            self._kept.since(name, last - self.net.shape.window + 1)
            for name, last in zip(ids, lasts, strict=True)
        ]
        longest = max(count for _, _, _, count in parts)
        positions = torch.full((len(seqs), longest), -1)
        rows = parts[0][1].new_zeros(len(seqs), longest, *parts[0][1].shape[1:])
        for i, (at, own, first, count) in enumerate(parts):
            positions[i, :count] = torch.from_numpy(np.array(at[first : first + count], np.int64))
            rows[i, :count] = own[first : first + count]
        self._texts = _Texts(ids, self._ints(lasts)[:, None], positions.to(self._device), rows)
        return self._texts

    @property
    def _device(self) -> torch.device:
        return self.net.draft_ids.device

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _is_simple(ask: Ask) -> bool:
    """Whether its draft is a chain of the likeliest tokens."""
    params, spec = ask.seq.params, ask.seq.spec
    if params.temperature > 0 or ask.cursor is not None or spec.tree_width > 1 or needs_q(ask.seq):
        return False
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0  # of which their chances are told
    return not (cut or penalises(params) or params.logit_bias)
