"""Test doubles: a target and a cursor that check their callers, and coins that enumerate every outcome."""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from typing import TypeVar

import numpy as np
import torch

from paceline.heads.base import TargetEmbeddings
from paceline.heads.head_checkpoint import StoredHead
from paceline.heads.runner import BlockRunner
from paceline.sampling import Doubles, gumbel, noise_key
from paceline.types import Bits, CacheStats, Cursor, Draft, Feed, Scores, Seq

T = TypeVar("T")


class ToyTarget:
    """A target whose logits follow from the last `memory` tokens of the rows in its own cache.

    It checks on every call that its cache holds exactly the committed text, so that a wrong truncation, a
    stale row or a wrong position fails at once. `blur` mixes in other logits, which makes a draft model; so
    does each layer that `skip_forward` skips. The hidden state of layer n is n + 1 times the row's logits.
    """

    layers = 4
    layer_share = 0.2

    def __init__(self, vocab_size: int = 24, memory: int = 2, seed: int = 0, blur: float = 0.0) -> None:
        self.vocab_size = vocab_size
        self.max_context = 4096
        self.capacity = 64 * 4096
        self.invariant_rows = 1024
        self.bytes_held = 0
        self.fingerprint = f"toy {vocab_size} {memory} {seed} {blur}"
        self.passes = 0
        self._memory = memory
        self._seed = seed
        self._blur = blur
        self._seqs: dict[str, Seq] = {}
        self._rows: dict[str, list[int]] = {}  # the tokens of the cached rows
        self._loose: dict[str, tuple[list[int], Draft]] = {}  # rows of the last pass, before `keep`
        self._scratch: dict[str, list[int]] = {}  # tokens of skip_forward since the last pass

    def open(self, seq: Seq) -> int:
        assert seq.id not in self._seqs, f"{seq.id} is open already"
        self._seqs[seq.id] = seq
        self._rows[seq.id] = []
        return 0

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        return len(self._rows[seq_id]), False

    def forward(self, feeds: Sequence[Feed], taps: Sequence[int] = ()) -> Scores:
        self.passes += 1
        rows: list[Doubles] = []
        inner: list[Doubles] = []
        starts, first_rows = [], []
        for feed in feeds:
            starts.append(len(rows))
            first_rows.append(len(inner))
            before = self._checked(feed)
            self._scratch.pop(feed.seq_id, None)
            text = [*before, *feed.tokens]
            after = [[*text, *self._path_tokens(feed.draft, i)] for i in range(len(feed.draft))]
            if feed.scored:
                rows.extend(self.logits(t) for t in (text, *after))
            if taps:
                fed = (text[: len(before) + i + 1] for i in range(len(feed.tokens)))
                inner.extend(self.logits(t) for t in (*fed, *after))
            self._loose[feed.seq_id] = (list(feed.tokens), feed.draft)
        hidden = {tap: self._tensor(inner) * (tap + 1) for tap in taps}
        return Scores(self._tensor(rows), tuple(starts), tuple(first_rows), hidden)

    def skip_forward(self, feeds: Sequence[Feed], starts: Sequence[int], layers: Sequence[int]) -> Scores:
        rows = []
        for feed, start in zip(feeds, starts, strict=True):
            held, scratch = self._rows[feed.seq_id], self._scratch.get(feed.seq_id, [])
            assert feed.seq_id not in self._loose, f"{feed.seq_id}: a pass was not followed by keep"
            assert feed.tokens, f"{feed.seq_id}: an empty feed"
            assert len(held) <= start <= len(held) + len(scratch), f"{feed.seq_id}: drafted too far"
            self._scratch[feed.seq_id] = [*scratch[: start - len(held)], *feed.tokens]
            text = [*held, *self._scratch[feed.seq_id]]
            rows.append(self._blurred(text, self._blur + 0.3 * (self.layers - len(layers))))
        logits = torch.from_numpy(np.array(rows, np.float32))
        return Scores(logits, tuple(range(len(feeds))))

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        fed, draft = self._loose.pop(seq_id, ([], Draft()))
        rows = self._rows[seq_id] + fed
        assert length <= len(rows), f"{seq_id}: {length} rows to keep, {len(rows)} held"
        assert not path or length == len(rows), f"{seq_id}: a draft can only follow all rows fed"
        assert tuple(path) == (draft.path(path[-1]) if path else ()), f"{seq_id}: {path} is not a path"
        self._rows[seq_id] = rows[:length] + [draft.tokens[i] for i in path]

    def forget(self, tenant: str) -> None:
        return  # no prefix is cached

    @property
    def cache_stats(self) -> CacheStats:
        live = sum(-(-len(rows) // 64) for rows in self._rows.values())
        return CacheStats(4096, 4096 - live, 0, live, 0, 0, 0)

    def describe(self) -> str:
        return "a toy"

    def embeddings(self) -> TargetEmbeddings:
        """The hidden state of a row is its logits, so all matrices are the identity."""
        same = torch.eye(self.vocab_size)
        return TargetEmbeddings(same, same, torch.ones(self.vocab_size), self.fingerprint)

    def block_runner(self, head: StoredHead) -> BlockRunner | None:
        return None

    def close(self, seq_id: str) -> None:
        del self._seqs[seq_id], self._rows[seq_id]
        self._loose.pop(seq_id, None)
        self._scratch.pop(seq_id, None)

    def logits(self, text: Sequence[int]) -> Doubles:
        """The logits after this text, as a pure function."""
        return self._blurred(text, self._blur)

    def _blurred(self, text: Sequence[int], blur: float) -> Doubles:
        context = 0
        for token in text[-self._memory :]:
            context = (context * 1_000_003 + token + 1) % (1 << 40)
        ids = np.arange(self.vocab_size)
        own = gumbel(noise_key(self._seed, 0, 5, context), ids)
        if blur:
            own = own + blur * gumbel(noise_key(self._seed, 1, 5, context), ids)
        return own * 1.5

    def _tensor(self, rows: Sequence[Doubles]) -> torch.Tensor:
        return torch.from_numpy(np.array(rows, np.float32).reshape(len(rows), self.vocab_size))

    def _path_tokens(self, draft: Draft, node: int) -> list[int]:
        return [draft.tokens[i] for i in draft.path(node)]

    def _checked(self, feed: Feed) -> list[int]:
        seq, rows = self._seqs[feed.seq_id], self._rows[feed.seq_id]
        assert feed.seq_id not in self._loose, f"{feed.seq_id}: a pass was not followed by keep"
        assert feed.tokens, f"{feed.seq_id}: an empty feed"
        assert rows == seq.tokens[: len(rows)], f"{feed.seq_id}: the cache holds rows of another text"
        fed = list(feed.tokens)
        assert seq.tokens[len(rows) : len(rows) + len(fed)] == fed, f"{feed.seq_id}: fed at a wrong position"
        return rows


class ToyCursor(Cursor):
    """A grammar given by a function from the output to the tokens that may follow; None: any token.

    It checks that it is not used past its end. `filled` has every output a mask was computed for, by this
    cursor and all its forks.
    """

    def __init__(
        self,
        allowed: Callable[[tuple[int, ...]], set[int] | None],
        eos: int | None = None,
        canonical: Callable[[tuple[int, ...]], Sequence[int]] = lambda _: (),
    ) -> None:
        self.tokens: tuple[int, ...] = ()
        self.filled: list[tuple[int, ...]] = []
        self._allowed = allowed
        self._eos = eos
        self._canonical = canonical

    @property
    def finished(self) -> bool:
        return self._next() == set()

    def fill(self, row: Bits) -> bool:
        assert not self.finished, f"a mask was computed after the end, {self.tokens}"
        self.filled.append(self.tokens)
        allowed = self._next()
        if allowed is None:
            return False
        row[:] = 0
        for token in allowed:
            row[token // 32] |= np.uint32(1 << token % 32)
        return True

    def advance(self, token: int) -> bool:
        assert not self.finished, f"{token} was given after the end, {self.tokens}"
        allowed = self._next()
        if allowed is not None and token not in allowed:
            return False
        self.tokens = (*self.tokens, token)
        return True

    def forced(self) -> list[int]:
        ahead = self.fork()
        while (allowed := ahead._next()) is not None and len(allowed) == 1:
            ahead.tokens = (*ahead.tokens, *allowed)
        return list(ahead.tokens[len(self.tokens) :])

    def canonical(self) -> list[int]:
        return list(self._canonical(self.tokens))

    def fork(self) -> "ToyCursor":
        return copy(self)

    def _next(self) -> set[int] | None:
        ended = self._eos is not None and self.tokens[-1:] == (self._eos,)
        return set() if ended else self._allowed(self.tokens)


class BranchCoins:
    """Coins that replay a list of outcomes and record the probability of each; see `every_outcome`."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.taken: list[int] = []
        self.open: list[list[int]] = []  # outcomes still to be tried at each flip
        self.chance = 1.0

    def _throw(self, chances: Sequence[float]) -> int:
        possible = [i for i, c in enumerate(chances) if c > 0]
        at = len(self.taken)
        outcome = self._script[at] if at < len(self._script) else possible[0]
        self.taken.append(outcome)
        self.open.append([i for i in possible if i > outcome])
        self.chance *= chances[outcome]
        return outcome

    def flip(self, p: float) -> bool:
        return self._throw([1 - p, p]) == 1

    def pick(self, p: Doubles) -> int:
        return self._throw([float(x) for x in p / p.sum()])


def every_outcome(run: Callable[[BranchCoins], T]) -> Iterator[tuple[float, T]]:
    """Runs a function of coins once for every outcome: (probability, result), exact, nothing sampled."""
    script: list[int] = []
    while True:
        coins = BranchCoins(script)
        result = run(coins)
        yield coins.chance, result
        while coins.open and not coins.open[-1]:
            coins.open.pop()
            coins.taken.pop()
        if not coins.open:
            return
        script = [*coins.taken[:-1], coins.open[-1][0]]
