"""The thread pool of native passes, shared by a target and its draft head."""

import atexit
import os
import threading
import weakref
from typing import Final

from paceline.errors import ModelError
from paceline.target.native import library


class ThreadPool:
    """One pass at a time, in the process that made it."""

    def __init__(self, path: str, threads: int) -> None:
        self.path = path
        self.lib = library.load(path)
        self.handle = self.lib.paceline_pool_open(threads)
        if not self.handle:
            raise ModelError("the native engine could not start its threads: give fewer of them")
        weakref.finalize(self, self.lib.paceline_pool_close, self.handle).atexit = False
        self.held: object = None  # the weights that idle threads prefetch
        self._process = os.getpid()
        self._one_at_a_time = threading.Lock()
        _POOLS.add(self)

    def busy(self) -> threading.Lock:
        """To be held during a pass."""
        if os.getpid() != self._process:
            raise ModelError(
                "the process was forked after this model was loaded: load it again in the new one"
            )
        return self._one_at_a_time

    def stop_prefetching(self) -> None:
        if os.getpid() == self._process:  # in a forked one its threads are not there
            self.lib.paceline_pool_stop_prefetching(self.handle)


_POOLS: Final = weakref.WeakSet[ThreadPool]()


@atexit.register
def _before_weights_are_freed() -> None:
    """Threads outlive every object of the interpreter: one may still be inside a pass, so none is ended."""
    for pool in list(_POOLS):
        pool.stop_prefetching()
