"""The process beside a server that trains its drafters: bound to the server's life first, then the work."""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
LOOK_S: Final = 1.0  # between two looks at whether the server lives


def main(server: int) -> None:
    """server: the process that began this one."""
    _end_with(server)
    from paceline.train.online import refresh  # takes seconds, in which nothing may leave it behind

    refresh.main()


def _end_with(server: int) -> None:
    """Whoever takes in orphans here. A stopped process is ended, too, where the kernel does it (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    _leave_without(server)  # it may have ended before that was said
    threading.Thread(target=_watch, args=(server,), daemon=True).start()


def _watch(server: int) -> None:
    while True:
        _leave_without(server)
        time.sleep(LOOK_S)


def _leave_without(server: int) -> None:
    if os.getppid() != server:
        os._exit(0)  # nobody is left to hear of it


if __name__ == "__main__":
    main(int(sys.argv[1]))
