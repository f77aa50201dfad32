"""The base of targets with a paged KV cache: everything but the forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from paceline.errors import PromptTooLong
from paceline.heads.head_checkpoint import StoredHead
from paceline.heads.runner import BlockRunner, HeadTarget
from paceline.target.kv.cache import PagedCache
from paceline.target.kv.preload import Preload
from paceline.types import CacheStats, Draft, Feed, LayerSkipTarget, Seq


class ModelTarget(HeadTarget, LayerSkipTarget, Protocol):
    """A model loaded from disk: every capability, and what `cost` needs to time its passes."""

    width: int  # of a hidden state
    timed_contexts: tuple[int, ...]  # tokens before the rows of a timed pass, ascending
    disk_tier: bool  # its cache can keep pages on the disk

    def memory(self) -> Mapping[str, int]:
        """Bytes by use."""

    def final_norm(self, rows: Tensor) -> Tensor:
        """The norm before the output matrix. rows: [n, width] float32, of the last layer."""

    def flush(self, seconds: float) -> bool:
        """Waits until what the cache keeps on the disk is written; False: not in time."""

    def noise(self, seq: Seq) -> AbstractContextManager[None]:
        """Inside, a sequence is open as if all but its last token were computed; its rows hold noise."""

    def make_ready(self) -> None:
        """Prepares for requests, without waiting. After the last `noise`, which may undo it."""

    def preload(self) -> Callable[[], bool] | None:
        """Loads one more page of what earlier processes used last, until it gives False. None: there is none.

        To be called by the engine's thread.
        """


@dataclass(frozen=True, slots=True)
class FeedRecord:
    """The feed of one sequence in the last pass."""

    base: int  # rows that were valid before
    tokens: Sequence[int]
    draft: Draft


F = TypeVar("F", bound=FeedRecord)


class PagedTarget(ABC, Generic[F]):
    """Opens, keeps and closes sequences. A subclass adds `forward`, which records its feeds in `_feeds`."""

    timed_contexts: tuple[int, ...] = (256,)
    disk_tier = False
    bytes_held: int

    def __init__(self, cache: PagedCache, max_context: int) -> None:
        self._cache = cache
        self._feeds: dict[str, F] = {}
        self.capacity = cache.blocks * cache.block
        self.max_context = min(max_context, self.capacity)

    @property
    def cache_stats(self) -> CacheStats:
        return self._cache.stats

    def memory(self) -> Mapping[str, int]:
        return {"weights": self.bytes_held}

    def open(self, seq: Seq) -> int:
        if len(seq.tokens) > self.max_context:
            raise PromptTooLong(
                f"the prompt has {len(seq.tokens)} tokens, the model and its cache hold {self.max_context}: "
                "shorten it or raise cache_mb"
            )
        return self._cache.open(
            seq.id, seq.tenant, seq.tokens, partial=not seq.anonymous, writes=seq.remember
        )

    def restore(self, seq_id: str, seconds: float) -> tuple[int, bool]:
        return self._cache.restore(seq_id, seconds)

    def flush(self, seconds: float) -> bool:
        return self._cache.disk is None or self._cache.disk.flush(seconds)

    def make_ready(self) -> None:
        return

    def preload(self) -> Callable[[], bool] | None:
        disk = self._cache.disk
        recent = disk.recent() if disk is not None else []
        return Preload(self._cache, recent).step if recent else None

    def block_runner(self, head: StoredHead) -> BlockRunner | None:
        return None

    @contextmanager
    def noise(self, seq: Seq) -> Iterator[None]:
        length = len(seq.tokens) - 1
        self._cache.open(seq.id, seq.tenant, seq.tokens[:1])
        try:
            self._cache.extend(seq.id, length)
            self._fill_with_noise(self._cache.slots(seq.id, 0, length))
            self._cache.append(seq.id, seq.tokens[:length])
            yield
        finally:
            self.close(seq.id)
            self.forget(seq.tenant)
            if self._cache.stats.free == self._cache.blocks:
                self._release_memory()

    def keep(self, seq_id: str, length: int, path: Sequence[int] = ()) -> None:
        fed = self._feeds.pop(seq_id, None)
        if fed is None or length < fed.base:
            self._cache.truncate(seq_id, length)
            return
        end = fed.base + len(fed.tokens)
        if length > end or (path and length < end):
            raise ValueError(f"{seq_id!r} has {end} rows before its draft, cannot keep {length} of them")
        if path:
            self._move_draft(seq_id, end, path, fed)
        nodes = [fed.draft.tokens[node] for node in path]
        self._cache.append(seq_id, [*fed.tokens[: length - fed.base], *nodes])

    def forget(self, tenant: str) -> None:
        self._cache.clear(tenant)

    def _reserve_skip_rows(self, feeds: Sequence[Feed], starts: Sequence[int]) -> None:
        """Reserves room after the valid rows for those of `skip_forward`, which the cache does not record."""
        for feed, start in zip(feeds, starts, strict=True):
            held = self._cache.length(feed.seq_id)
            if start < held:
                raise ValueError(
                    f"{feed.seq_id!r} holds {held} rows: skip_forward from {start} on would overwrite some"
                )
            self._cache.extend(feed.seq_id, start + len(feed.tokens) - held)

    def close(self, seq_id: str) -> None:
        self._feeds.pop(seq_id, None)
        self._cache.close(seq_id)

    def _fill_with_noise(self, slots: list[int]) -> None:
        """Writes these rows once, so that reading them costs what reading real ones costs."""
        return

    def _release_memory(self) -> None:
        """Gives the memory of an empty cache back to the system, where it is taken again on use."""
        return

    @abstractmethod
    def _move_draft(self, seq_id: str, start: int, path: Sequence[int], fed: F) -> None:
        """Moves the rows of these nodes to positions start, start + 1, ... unless they are there already."""


def check_layers(layers: Sequence[int], count: int) -> None:
    if not layers or not 0 <= layers[0] <= layers[-1] < count or list(layers) != sorted(set(layers)):
        raise ValueError(f"layers={list(layers)!r}: expected some of 0 to {count - 1}, ascending")
