"""From feeds to the rows of passes.

A pass holds at most 32 rows of any sequences; more rows become several passes of the same kernels, which
changes no bit. Rows of a chain and of a tree's first path go to the slots of their positions, the nodes of
side branches to spare slots until they are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from paceline.errors import CacheFull
from paceline.target.cuda.arguments import KEY_CHUNK, MAX_DEPTH, MAX_ROWS
from paceline.types import Draft, Sampler


class SpareSlots:
    """Slots that belong to no sequence, handed out anew for every forward pass."""

    def __init__(self, first: int, count: int) -> None:
        self._first, self._count, self._taken = first, count, 0

    def reset(self) -> None:
        self._taken = 0

    def take(self) -> int:
        if self._taken == self._count:
            raise CacheFull(f"trees of drafts need more than {self._count} spare slots: draft less at once")
        self._taken += 1
        return self._first + self._taken - 1


@dataclass(frozen=True, slots=True)
class FeedRows:
    """All rows of one feed: its tokens, then the nodes of its draft."""

    seq_id: str
    tokens: Sequence[int]
    positions: Sequence[int]
    slots: Sequence[int]
    parents: Sequence[int]  # row of the feed; -1: a cached one
    chain: int  # leading rows that every later row follows, all in the slots of their positions
    scored_from: int  # rows from here on get logits
    sampler: Sampler | None = None  # chooses the tokens of the scored rows

    def __len__(self) -> int:
        return len(self.tokens)


def feed_rows(
    seq_id: str,
    tokens: Sequence[int],
    draft: Draft,
    start: int,
    slots: Callable[[int, int], list[int]],
    spare: SpareSlots,
    scored_from: int,
    sampler: Sampler | None = None,
) -> FeedRows:
    """start: position of the first token; slots(a, b): those of the positions [a, b)."""
    fed = len(tokens)
    if draft.parents is None or is_chain(draft):
        count = fed + len(draft)
        everything = (*tokens, *draft.tokens)
        positions, parents = range(start, start + count), range(-1, count - 1)
        return FeedRows(
            seq_id, everything, positions, slots(start, start + count), parents, count, scored_from, sampler
        )
    depths: list[int] = []
    for node in range(len(draft)):
        parent = draft.parent(node)
        depths.append(0 if parent < 0 else depths[parent] + 1)
    first_path = min(draft.paths())
    own = slots(start, start + fed + len(first_path))
    on_first_path = set(first_path)
    places = [own[fed + depth] if n in on_first_path else spare.take() for n, depth in enumerate(depths)]
    return FeedRows(
        seq_id,
        (*tokens, *draft.tokens),
        [*range(start, start + fed), *(start + fed + depth for depth in depths)],
        [*own[:fed], *places],
        [*range(-1, fed - 1), *(fed + draft.parent(node) for node in range(len(draft)))],
        fed + _trunk(draft),
        scored_from,
        sampler,
    )


def is_chain(draft: Draft) -> bool:
    return all(draft.parent(node) == node - 1 for node in range(len(draft)))


def _trunk(draft: Draft) -> int:
    """How many leading nodes form a chain from which all other nodes descend."""
    branches = (draft.parent(node) + 1 for node in range(len(draft)) if draft.parent(node) != node - 1)
    return min(branches, default=len(draft))


@dataclass(slots=True)
class SequenceRows:
    """The rows of one sequence in a pass."""

    seq_id: str
    first_row: int
    row_count: int
    length: int  # keys found through the page table
    last_position: int
    paths: list[list[int]]  # the slots of positions length, length + 1, ...


@dataclass(frozen=True, slots=True)
class RowChoices:
    """Rows of a pass whose tokens are chosen by one sampler."""

    sampler: Sampler
    first_row: int
    end_row: int
    position: int  # of the row whose token has the sampler's index


@dataclass(slots=True)
class PassRows:
    """One pass."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # among the sequence's paths
    part: list[int] = field(default_factory=list)  # first partial result of attention
    scored: list[int] = field(default_factory=list)  # rows that get logits
    sequences: list[SequenceRows] = field(default_factory=list)
    choices: list[RowChoices] = field(default_factory=list)
    parts: int = 0

    @property
    def all_chosen(self) -> bool:
        """Whether every scored row has a sampler."""
        return sum(choice.end_row - choice.first_row for choice in self.choices) == len(self.scored)

    def room(self, feed: FeedRows, first: int, max_parts: int) -> int:
        """How many rows of the feed, from `first` on, fit in."""
        parts, count = self.parts, 0
        limit = min(len(feed) - first, MAX_ROWS - len(self.tokens))
        while count < limit:
            parts += feed.positions[first + count] // KEY_CHUNK + 1
            if parts > max_parts:
                break
            count += 1
        return count

    def add(self, feed: FeedRows, first: int, end: int) -> None:
        row = len(self.tokens)
        self.tokens += feed.tokens[first:end]
        self.positions += feed.positions[first:end]
        self.slots += feed.slots[first:end]
        for position in feed.positions[first:end]:
            self.part.append(self.parts)
            self.parts += position // KEY_CHUNK + 1
        scored, rows_end = row + max(0, feed.scored_from - first), row + end - first
        self.scored += range(scored, rows_end)
        if feed.sampler is not None and scored < rows_end:
            self.choices.append(RowChoices(feed.sampler, scored, rows_end, feed.positions[feed.scored_from]))
        known = min(first, feed.chain)  # rows of the feed that the page table finds
        length = feed.positions[0] + known
        numbers, paths = (
            ([0] * (end - first), [feed.slots[known:end]]) if end <= feed.chain else _paths(feed, first, end)
        )
        if max(map(len, paths)) > MAX_DEPTH:
            raise CacheFull(f"a tree deeper than {MAX_DEPTH} after its first branch: draft less at once")
        self.path += numbers
        last = max(feed.positions[first:end])
        self.sequences.append(
            SequenceRows(feed.seq_id, row, end - first, length, last, [list(p) for p in paths])
        )


def _paths(feed: FeedRows, first: int, end: int) -> tuple[list[int], list[list[int]]]:
    """Of the rows [first, end): each one's path, and the slots of each path after the known rows."""
    known = min(first, feed.chain)

    def ancestors(row: int) -> list[int]:
        found = []
        while row >= known:
            found.append(row)
            row = feed.parents[row]
        return found[::-1]

    inner = {feed.parents[row] for row in range(first, end)}
    numbers: dict[int, int] = {}
    paths: list[list[int]] = []
    for leaf in (row for row in range(first, end) if row not in inner):
        path = ancestors(leaf)
        for row in path:
            numbers.setdefault(row, len(paths))
        paths.append([feed.slots[row] for row in path])
    return [numbers[row] for row in range(first, end)], paths


def passes(feeds: Sequence[FeedRows], max_parts: int) -> Iterator[PassRows]:
    """Fills pass after pass. A feed that is cut goes on in the next one and finds its rows in the cache."""
    current = PassRows()
    for feed in feeds:
        first = 0
        while first < len(feed):
            count = current.room(feed, first, max_parts)
            if count:
                current.add(feed, first, first + count)
                first += count
            if first < len(feed):
                yield current
                current = PassRows()
    if current.tokens:
        yield current
