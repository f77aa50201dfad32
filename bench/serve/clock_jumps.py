"""python -m bench.serve.clock_jumps serve ...: paceline's command line under a wall clock that jumps.

Only time.time and time.time_ns jump, as they do when a clock is set; time.monotonic never does.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

JUMPS_S: Final = (-3600.0, -60.0, -0.5, 0.5, 60.0, 3600.0, 86_400.0, -86_400.0)
EVERY_S: Final = 3.0


@contextmanager
def jumping_clock(seed: int = 0, every_s: float = EVERY_S) -> Iterator[None]:
    """Sets the clock of this process anew from time to time."""
    offset, rng, ended = [0.0], random.Random(seed), threading.Event()
    now, now_ns = time.time, time.time_ns

    def jump() -> None:
        while not ended.wait(every_s):
            offset[0] += rng.choice(JUMPS_S)

    time.time = lambda: now() + offset[0]
    time.time_ns = lambda: now_ns() + int(1e9 * offset[0])
    threading.Thread(target=jump, name="clock", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
        time.time, time.time_ns = now, now_ns


if __name__ == "__main__":
    with jumping_clock():
        from paceline.cli import main  # after the clock: modules may hold time.time by name

        main()
