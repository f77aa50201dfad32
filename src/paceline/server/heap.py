"""Freed memory goes back to the system after large requests; glibc would keep it."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from paceline.target.hardware import trim_heap

QUIET_S: Final = 5.0  # after the last large request
MAX_DELAY_S: Final = 30.0  # after the first one, if they do not stop


class HeapTrimmer:
    """One trim for all large requests that end within a few seconds of each other, on a thread of the pool.

    malloc_trim(3) takes milliseconds, during which other threads wait if they allocate: it is not run often.
    """

    def __init__(
        self, trim: Callable[[], None] = trim_heap, quiet_s: float = QUIET_S, max_delay_s: float = MAX_DELAY_S
    ) -> None:
        self._trim, self._quiet_s, self._max_delay_s = trim, quiet_s, max_delay_s
        self._latest = 0.0  # the moment at which a pending trim runs in any case
        self._pending: asyncio.TimerHandle | None = None

    def request(self) -> None:
        """To be called on the event loop, when a large request has ended."""
        loop = asyncio.get_running_loop()
        if self._pending is None:
            self._latest = loop.time() + self._max_delay_s
        else:
            self._pending.cancel()
        self._pending = loop.call_at(min(loop.time() + self._quiet_s, self._latest), self._start, loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._pending = None
        with suppress(RuntimeError):  # no memory for a thread, or the loop is closing
            loop.run_in_executor(None, self._trim)
