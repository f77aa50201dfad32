"""Loads the prefixes that were used last from the disk, before anybody asks for them.

As databases refill their buffer pool after a restart (InnoDB's dump and load, PostgreSQL's autoprewarm). The
tokens of the prefixes are in a small file. Pages are found by them as for any request, and checked as they
are read, so a prefix that is wrong in the file finds nothing.
"""

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Final

from paceline.target.kv.cache import PagedCache
from paceline.target.kv.disk_cache import Prefix

SHARE: Final = 0.25  # of the cache's blocks, at most
SECONDS: Final = 5.0  # of loading, at most
UNTIL_S: Final = 60.0  # after the start: what was used before it is old by then
_SEQUENCE: Final = "\0preload"

log = logging.getLogger("paceline")


class Preload:
    """Loads one page at a time, for the thread that owns the cache: between two of them requests may come.

    No page is held meanwhile: whoever needs the memory takes it.
    """

    def __init__(self, cache: PagedCache, prefixes: Sequence[Prefix]) -> None:
        """prefixes: the one used last first."""
        self._cache = cache
        self._left = list(reversed(prefixes))
        self._loading: Prefix | None = None
        self._loaded: list[Prefix] = []  # the one used last first
        self._least_free = cache.stats.free - int(SHARE * cache.blocks)  # blocks
        self._rows = self._pages = 0
        self._seconds, self._until = 0.0, perf_counter() + UNTIL_S

    def step(self) -> bool:
        """False: there is nothing more to do."""
        began = perf_counter()
        if began > self._until:
            self._left, self._loading, self._loaded = [], None, []
        if self._loading is not None:
            self._load(self._loading)
        elif self._left and self._seconds < SECONDS:
            self._begin(self._left.pop())
        elif self._loaded:
            self._use(self._loaded.pop())
        else:
            log.info(
                "%d pages of the KV cache (%.1f MB) are loaded from the disk, in %.0f ms",
                self._pages,
                self._cache.page_bytes(self._rows) / 1e6,
                1000 * self._seconds,
            )
            return False
        self._seconds += perf_counter() - began
        return True

    def _begin(self, prefix: Prefix) -> None:
        needed = -(-len(prefix.tokens) // self._cache.block)
        if self._cache.stats.free - needed >= self._least_free:
            self._loading = prefix

    def _load(self, prefix: Prefix) -> None:
        self._open(prefix)
        before = self._cache.length(_SEQUENCE)
        rows, more = self._cache.restore(_SEQUENCE, 0)
        self._cache.close(_SEQUENCE)
        self._rows += rows - before
        self._pages += rows > before
        if more and rows > before and self._seconds < SECONDS:
            return
        self._loading = None
        if rows:
            self._loaded.append(prefix)

    def _use(self, prefix: Prefix) -> None:
        """In the end of each, the one used last at the end: what was used longest ago is given up first."""
        self._open(prefix)
        self._cache.close(_SEQUENCE)

    def _open(self, prefix: Prefix) -> None:
        tokens = [*prefix.tokens, 0]  # the last one is never found
        self._cache.open(_SEQUENCE, prefix.tenant, tokens, partial=False, counts=False)
