"""Serves EAGLE heads (arXiv 2401.15077; EAGLE-3, arXiv 2503.01840): one autoregressive layer.

It continues from the target's hidden states, a token at a time. Paths of one length, of all sequences, are
one pass, and their states stay while the text is the same. Logits over the target's vocabulary are made only
where needed: most chains use just the best token of each position.
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
from paceline.heads.eagle import DraftRows, EagleHead
from paceline.sampling import Floats
from paceline.sampling.distribution import penalises
from paceline.types import NO_DRAFT, Ask, Draft, Drafter, HiddenRows, Seq

Path = tuple[int, ...]  # drafted tokens after the text


@dataclass(slots=True)
class _Node:
    """The state of the head after a path."""

    hidden: Tensor  # [width], the input of the next step
    keys_values: Tensor  # [len(path), 2, kv_heads, head_dim], of the path
    logits: Tensor  # [draft_vocab], of the next token
    best: int  # the most likely next token
    chance: float  # of it, at temperature 1
    row: Floats | None = None  # [vocab], made when first used


@dataclass(slots=True)
class _Paths:
    """The paths computed after a text."""

    hidden: Tensor  # [width], the target's, fused, at the last token but one
    length: int = 0  # of the text
    nodes: dict[Path, _Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Contexts:
    """The cache rows of some sequences, padded to one batch."""

    ids: tuple[str, ...]
    last: Tensor  # [b, 1], position of the last row of each
    positions: Tensor  # [b, n], -1 for padding
    rows: Tensor  # [b, n, 2, kv_heads, head_dim]


class EagleDrafter(Drafter):
    """The head stays on its device, which should be the target's."""

    name = "eagle"

    def __init__(self, net: EagleHead, cached_positions: int = DEFAULT_POSITIONS) -> None:
        shape = net.shape
        self.net = net.eval()
        self.taps = shape.taps
        self._ids = net.draft_ids.numpy(force=True)
        row = (2, shape.kv_heads, shape.head_dim)
        self._cache = HeadCache(row, cached_positions, ahead=1, like=net.fc.weight.detach())
        self._paths: dict[str, _Paths] = {}
        self._contexts: _Contexts | None = None  # of the last pass, while the texts are the same

    def begin(self, seq: Seq) -> None:
        self._cache.begin(seq)

    def end(self, seq: Seq) -> None:
        self._cache.end(seq)
        self._paths.pop(seq.id, None)

    @torch.inference_mode()
    def on_hidden(self, hidden_rows: Sequence[HiddenRows]) -> None:
        self._contexts = None
        parts = [part.hidden for part in hidden_rows]
        sizes = [len(part[self.taps[0]]) for part in parts]
        hidden = {tap: torch.cat([part[tap] for part in parts]).to(self._device) for tap in self.taps}
        fused = self.net.fuse_taps(hidden)
        spans = [(s, range(s.start, s.start + n)) for s, n in zip(hidden_rows, sizes, strict=True)]
        positions = self._ints([p for _, span in spans for p in span])
        tokens = self._ints([s.seq.tokens[p + 1] for s, span in spans for p in span])
        made = self.net.rows(tokens[None], fused[None], positions[None]).keys_values[0]
        for s, rows, states in zip(
            hidden_rows, torch.split(made, sizes), torch.split(fused, sizes), strict=True
        ):
            self._cache.append(s.seq.id, s.start, rows)
            self._paths[s.seq.id] = _Paths(states[-1].clone(), s.start + len(rows) + 1)

    @torch.inference_mode()
    def draft(self, asks: Sequence[Ask]) -> list[Draft]:
        ready = [ask for ask in asks if self.ready(ask.seq)]
        plain = [ask for ask in ready if _is_greedy_chain(ask)]
        others = [ask for ask in ready if not _is_greedy_chain(ask)]
        drafts = [
            *self._chains(plain),
            *grow(others, self._logits_at, self.name, self.net.shape.vocab, self._prefetch),
        ]
        self._contexts = None
        of = {ask.seq.id: draft for ask, draft in zip([*plain, *others], drafts, strict=True)}
        return [of.get(ask.seq.id, NO_DRAFT) for ask in asks]

    def _chains(self, asks: Sequence[Ask]) -> list[Draft]:
        """The drafts that `grow` would give, without logits over the target's vocabulary."""
        paths, scores = [ask.after for ask in asks], [list[float]() for _ in asks]
        ends = [min(len(ask.after) + ask.budget, self.net.shape.block) for ask in asks]
        while active := [i for i, path in enumerate(paths) if len(path) < ends[i]]:
            self._compute([(asks[i].seq, paths[i]) for i in active])
            for i in active:
                node = self._paths[asks[i].seq.id].nodes[paths[i]]
                paths[i] = (*paths[i], node.best)
                scores[i].append(unforced(node.chance))
        return [
            Draft(path[len(ask.after) :], None, (self.name,) * len(own), tuple(own))
            for ask, path, own in zip(asks, paths, scores, strict=True)
        ]

    def ready(self, seq: Seq) -> bool:
        known = self._paths.get(seq.id)
        return known is not None and known.length == len(seq.tokens)

    def _logits_at(self, positions: Sequence[Position]) -> list[tuple[Floats | None, None]]:
        self._prefetch(positions)
        return [(self._row(position), None) for position in positions]

    def _prefetch(self, positions: Sequence[Position]) -> None:
        self._compute([(p.ask.seq, p.written) for p in positions if len(p.written) < self.net.shape.block])

    def _compute(self, paths: Sequence[tuple[Seq, Path]]) -> None:
        """The nodes of these paths and of all their prefixes."""
        for depth in range(max((len(path) for _, path in paths), default=-1) + 1):
            level = {(seq.id, path[:depth]): seq for seq, path in paths if len(path) >= depth}
            new = [(seq, path) for (name, path), seq in level.items() if not self._is_known(name, path)]
            if new:
                self._step(new, depth)

    def _is_known(self, seq_id: str, path: Path) -> bool:
        return path in self._paths[seq_id].nodes

    def _row(self, position: Position) -> Floats | None:
        """Logits over the target's vocabulary."""
        node = self._paths[position.ask.seq.id].nodes.get(position.written)
        if node is not None and node.row is None:
            node.row = np.full(self.net.shape.vocab, -np.inf, np.float32)
            node.row[self._ids] = node.logits.numpy(force=True)
        return None if node is None else node.row

    def _step(self, new: Sequence[tuple[Seq, Path]], depth: int) -> None:
        """One pass for paths of `depth` tokens; their prefixes are known."""
        hidden = torch.stack([self._input_hidden(seq, path) for seq, path in new])
        tokens = self._ints([path[-1] if path else seq.tokens[-1] for seq, path in new])
        positions = self._ints([len(seq.tokens) - 2 + depth for seq, _ in new])
        rows = self.net.rows(tokens[None], hidden[None], positions[None])
        chains = self._keys_values(new, rows.keys_values[0])
        states = self._forward(new, rows, chains)
        logits = self.net.logits(states)
        chances, best = logits.softmax(-1).max(-1)
        best_tokens = zip(self.net.draft_ids[best].tolist(), chances.tolist(), strict=True)
        for (seq, path), state, chain, row, (token, chance) in zip(
            new, states, chains, logits, best_tokens, strict=True
        ):
            self._paths[seq.id].nodes[path] = _Node(state, chain, row, token, chance)

    def _input_hidden(self, seq: Seq, path: Path) -> Tensor:
        known = self._paths[seq.id]
        return known.nodes[path[:-1]].hidden if path else known.hidden

    def _keys_values(self, new: Sequence[tuple[Seq, Path]], own: Tensor) -> Tensor:
        """[len(new), depth, ...]: the keys and values of each path; those of () belong to the text."""
        before = [self._paths[seq.id].nodes[path[:-1]].keys_values for seq, path in new if path]
        if not before:
            return own[:, None][:, :0]
        return torch.cat((torch.stack(before), own[:, None]), 1)

    def _forward(self, new: Sequence[tuple[Seq, Path]], rows: DraftRows, chains: Tensor) -> Tensor:
        """[len(new), width]; the paths of a sequence share a batch row, repeated where there are few."""
        seqs = {seq.id: seq for seq, _ in new}
        members: dict[str, list[int]] = {name: [] for name in seqs}
        for i, (seq, _) in enumerate(new):
            members[seq.id].append(i)
        widest = max(map(len, members.values()))
        grid = [own + own[:1] * (widest - len(own)) for own in members.values()]
        where = {i: row * widest + n for row, own in enumerate(members.values()) for n, i in enumerate(own)}
        pick = self._ints(grid)
        contexts = self._batched_contexts(list(seqs.values()))
        beside = DraftRows(*(part[0][pick] for part in (rows.hidden, rows.queries, rows.keys_values)))
        sees = (
            self.net.visible(contexts.last.expand(-1, widest), contexts.positions)
            & (contexts.positions >= 0)[:, None]
        )
        out: Tensor = self.net(beside, contexts.rows, sees, chains[pick])
        return out.flatten(0, 1)[self._ints([where[i] for i in range(len(new))])]

    def _batched_contexts(self, seqs: Sequence[Seq]) -> _Contexts:
        ids = tuple(seq.id for seq in seqs)
        if self._contexts is not None and self._contexts.ids == ids:
            return self._contexts
        lasts = [len(seq.tokens) - 2 for seq in seqs]
        parts = [
            self._cache.since(name, last - self.net.shape.window + 1)
            for name, last in zip(ids, lasts, strict=True)
        ]
        longest = max(count for _, _, _, count in parts)
        positions = torch.full((len(seqs), longest), -1)
        rows = parts[0][1].new_zeros(len(seqs), longest, *parts[0][1].shape[1:])
        for i, (at, own, first, count) in enumerate(parts):
            positions[i, :count] = torch.from_numpy(np.array(at[first : first + count], np.int64))
            rows[i, :count] = own[first : first + count]
        self._contexts = _Contexts(ids, self._ints(lasts)[:, None], positions.to(self._device), rows)
        return self._contexts

    @property
    def _device(self) -> torch.device:
        return self.net.draft_ids.device

    def _ints(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _is_greedy_chain(ask: Ask) -> bool:
    """True if its draft is a chain of the most likely tokens."""
    params, spec = ask.seq.params, ask.seq.spec
    if params.temperature > 0 or ask.cursor is not None or spec.tree_width > 1 or needs_q(ask.seq):
        return False
    cut = params.top_k > 0 or params.top_p < 1 or params.min_p > 0  # which the scores must reflect
    return not (cut or penalises(params) or params.logit_bias)
