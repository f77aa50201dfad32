"""Entry point of the trainer process: ties its lifetime to the server's, then starts training."""

import ctypes
import os
import signal
import sys
import threading
import time
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
POLL_S: Final = 1.0  # between two checks that the server lives


def main(server: int) -> None:
    """server: the pid of the parent process."""
    _end_with(server)
    from paceline.train.online import refresh  # takes seconds; the server may die meanwhile

    refresh.main()


def _end_with(server: int) -> None:
    """Exits with its parent. On Linux the kernel ends it even while it is stopped."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
    _leave_without(server)  # it may have ended before the call above
    threading.Thread(target=_watch, args=(server,), daemon=True).start()


def _watch(server: int) -> None:
    while True:
        _leave_without(server)
        time.sleep(POLL_S)


def _leave_without(server: int) -> None:
    if os.getppid() != server:
        os._exit(0)  # nobody is left to report to


if __name__ == "__main__":
    main(int(sys.argv[1]))
