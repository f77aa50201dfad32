"""What every target with a paged cache does between passes."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from paceline.errors import PromptTooLong
from paceline.target.kv.cache import CacheStats, PagedCache
from paceline.types import Draft, Feed, Seq


@dataclass(frozen=True, slots=True)
class Fed:
    """What one sequence put into the last pass."""

    base: int  # rows that were valid before
    tokens: Sequence[int]
    draft: Draft


F = TypeVar("F", bound=Fed)


class PagedTarget(ABC, Generic[F]):
    """Opens, keeps and closes sequences; a target adds the pass, which notes in `_fed` what it was given."""

    def __init__(self, cache: PagedCache, max_context: int) -> None:
        self._cache = cache
        self._fed: dict[str, F] = {}
        self.capacity = cache.blocks * cache.block  # positions of all sequences, ended ones included
        self.max_context = min(max_context, self.capacity)

    @property
    def cache_stats(self) -> CacheStats:
        return self._cache.stats

    def open(self, seq: Seq) -> int:
        if len(seq.tokens) > self.max_context:
            raise PromptTooLong(
                f"the prompt has {len(seq.tokens)} tokens, the model and its cache hold {self.max_context}: "
                "shorten it or raise cache_mb"
            )
        return self._cache.open(seq.id, seq.tenant, seq.tokens)

    def open_untold(self, seq: Seq) -> None:
        """Opens it as if all but the last token were computed, to measure with: its rows hold anything."""
        length = len(seq.tokens) - 1
        self._cache.open(seq.id, seq.tenant, seq.tokens[:1])
        self._cache.extend(seq.id, length)
        self._scribble(self._cache.slots(seq.id, 0, length))
        self._cache.append(seq.id, seq.tokens[:length])

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        fed = self._fed.pop(seq_id, None)
        if fed is None or length < fed.base:
            self._cache.truncate(seq_id, length)
            return
        end = fed.base + len(fed.tokens)
        if length > end or (path and length < end):
            raise ValueError(f"{seq_id!r} has {end} rows before its draft, cannot keep {length} of them")
        if path:
            self._place(seq_id, end, path, fed)
        nodes = [fed.draft.tokens[node] for node in path]
        self._cache.append(seq_id, [*fed.tokens[: length - fed.base], *nodes])

    def forget(self, tenant: str) -> None:
        """Drops what is cached for a tenant and held by no open sequence."""
        self._cache.clear(tenant)

    def _make_room(self, feeds: Sequence[Feed], starts: Sequence[int]) -> None:
        """For rows that no cache will know of, after the valid ones."""
        for feed, start in zip(feeds, starts, strict=True):
            held = self._cache.length(feed.seq_id)
            if start < held:
                raise ValueError(
                    f"{feed.seq_id!r} holds {held} rows: a sketch from {start} on would spoil some"
                )
            self._cache.extend(feed.seq_id, start + len(feed.tokens) - held)

    def close(self, seq_id: str) -> None:
        self._fed.pop(seq_id, None)
        self._cache.close(seq_id)

    def _scribble(self, slots: list[int]) -> None:
        """Makes these rows cost what real ones cost to read."""
        return

    @abstractmethod
    def _place(self, seq_id: str, start: int, path: Sequence[int], fed: F) -> None:
        """Brings the rows of these nodes to position `start` and on, if they are not there already."""


def check_layers(layers: Sequence[int], count: int) -> None:
    if not layers or not 0 <= layers[0] <= layers[-1] < count or list(layers) != sorted(set(layers)):
        raise ValueError(f"layers={list(layers)!r}: expected some of 0 to {count - 1}, ascending")
