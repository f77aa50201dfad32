"""From feeds to the rows of passes.

A group holds at most 64 rows of any sequences. A pass has one group or, where many sequences are expected, up
to four; more rows become several passes. Rows of a chain and of a tree's first path go to the slots of their
positions, the nodes of side branches to spare slots until they are kept.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from paceline.errors import CacheFull
from paceline.target.cuda.arguments import KEY_CHUNK, MAX_DEPTH, MAX_GROUPS, MAX_ROWS
from paceline.types import Draft, Sampler

ROWS_PER_SEQUENCE: Final = 4  # that a pass has room for


def pass_groups(max_batch: int) -> int:
    """Groups of rows in a pass, at most."""
    return min(MAX_GROUPS, -(-ROWS_PER_SEQUENCE * max_batch // MAX_ROWS))


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


@dataclass(slots=True)
class FeedRows:
    """All rows of one feed: its tokens, then the nodes of its draft."""

    seq_id: str
    tokens: Sequence[int]
    positions: Sequence[int]
    slots: list[int]
    parents: Sequence[int]  # row of the feed; -1: a cached one
    chain: int  # leading rows that every later row follows, all in the slots of their positions
    fed: int  # rows before those of the draft
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
        own = slots(start, start + count)
        return FeedRows(seq_id, everything, positions, own, parents, count, fed, scored_from, sampler)
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
        fed,
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
    """The rows of one sequence in a group."""

    seq_id: str
    first_row: int
    row_count: int
    length: int  # keys found through the page table
    last_position: int
    paths: Sequence[Sequence[int]]  # the slots of positions length, length + 1, ...
    scored_row: int = 0  # the first that gets logits
    sampler: Sampler | None = None  # chooses the tokens from that row on
    index_shift: int = 0  # from a row's position to the place of its token in the output


@dataclass(slots=True)
class PassRows:
    """One group of rows of a pass."""

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)  # among the sequence's paths
    part: list[int] = field(default_factory=list)  # first partial result of attention
    sequence: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)  # row of the draft's token before; -1: none
    scored: list[int] = field(default_factory=list)  # rows that get logits
    sequences: list[SequenceRows] = field(default_factory=list)
    parts: int = 0
    chosen: int = 0  # scored rows that have a sampler

    @property
    def all_chosen(self) -> bool:
        """Whether every scored row has a sampler."""
        return self.chosen == len(self.scored)

    def room(self, feed: FeedRows, first: int, max_parts: int) -> int:
        """How many rows of the feed, from `first` on, fit in."""
        limit = min(len(feed.tokens) - first, MAX_ROWS - len(self.tokens))
        if limit <= 0:
            return 0
        each = max(feed.positions[first : first + limit]) // KEY_CHUNK + 1
        return min(limit, (max_parts - self.parts) // each)

    def add(self, feed: FeedRows, first: int, end: int) -> None:
        row, count, positions = len(self.tokens), end - first, feed.positions[first:end]
        rows_end, last = row + count, max(positions)
        self.tokens += feed.tokens[first:end]
        self.positions += positions
        self.slots += feed.slots[first:end]
        self.sequence += [len(self.sequences)] * count
        parts = last // KEY_CHUNK + 1  # of every row, though earlier ones may need fewer
        self.part += range(self.parts, self.parts + count * parts, parts)
        self.parts += count * parts
        known = min(first, feed.chain)  # rows of the feed that the page table finds
        if end <= feed.chain:
            self.path += [0] * count
            paths: Sequence[Sequence[int]] = (feed.slots[known:end],)
        else:
            numbers, paths = _paths(feed, first, end)
            self.path += numbers
        if max(map(len, paths)) > MAX_DEPTH:
            raise CacheFull(f"a tree deeper than {MAX_DEPTH} after its first branch: draft less at once")
        added = SequenceRows(feed.seq_id, row, count, feed.positions[0] + known, last, paths)
        self.sequences.append(added)
        parents = [-1] * count
        if feed.scored_from < end:
            added.scored_row = row + max(0, feed.scored_from - first)
            self.scored += range(added.scored_row, rows_end)
            sampler = feed.sampler
            if sampler is not None and sampler.sees_draft:
                if first > feed.scored_from or end < len(feed):  # not all of the draft is in this pass
                    sampler = None
                elif sampler.penalises:
                    parents = [
                        row + feed.parents[i] - first if i >= feed.fed else -1 for i in range(first, end)
                    ]
            if sampler is not None:
                added.sampler, added.index_shift = sampler, sampler.index - feed.positions[feed.scored_from]
                self.chosen += rows_end - added.scored_row
        self.parents += parents


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


def chain_pass(feed: FeedRows, max_parts: int) -> PassRows | None:
    """The pass of one chain alone, as most passes are; None: it needs more than one."""
    count = len(feed.tokens)
    start, last = feed.positions[0], feed.positions[-1]
    parts = last // KEY_CHUNK + 1
    if feed.chain < count or count > MAX_ROWS or count * parts > max_parts:
        return None
    only = SequenceRows(feed.seq_id, 0, count, start, last, (feed.slots,))
    rows = PassRows(
        list(feed.tokens),
        list(feed.positions),
        feed.slots,
        [0] * count,
        list(range(0, count * parts, parts)),
        [0] * count,
        [-1] * count,
        sequences=[only],
        parts=count * parts,
    )
    first = feed.scored_from
    if first < count:
        only.scored_row, rows.scored = first, list(range(first, count))
        sampler = feed.sampler
        if sampler is not None:
            only.sampler, only.index_shift = sampler, sampler.index - start - first
            rows.chosen = count - first
            if sampler.penalises:
                rows.parents = [feed.parents[i] if i >= feed.fed else -1 for i in range(count)]
    return rows


def _is_whole(feed: FeedRows) -> bool:
    """True for a draft that may not be cut: the kernels choose its tokens and need all of it."""
    sampler = feed.sampler
    return sampler is not None and sampler.sees_draft and len(feed) <= MAX_ROWS


def passes(feeds: Sequence[FeedRows], max_parts: int) -> Iterator[PassRows]:
    """Fills group after group. A feed that is cut goes on in the next one and finds its rows in the cache.

    Those whose tokens depend on their drafts are cut only if they need more than one: the tokens of a cut one
    would have to be chosen on the host.
    """
    if len(feeds) == 1 and (alone := chain_pass(feeds[0], max_parts)) is not None:
        yield alone
        return
    current = PassRows()
    for feed in feeds:
        first = 0
        if _is_whole(feed) and feed.scored_from < current.room(feed, 0, max_parts) < len(feed):
            yield current
            current = PassRows()
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
