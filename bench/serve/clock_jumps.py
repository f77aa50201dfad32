"""python -m bench.serve.clock_jumps serve ...: paceline's command line under a wall clock that jumps.

Only time.time and time.time_ns jump, as they do when a clock is set; time.monotonic never does.
"""

import random
import threading
import time
from typing import Final

JUMPS_S: Final = (-3600.0, -60.0, -0.5, 0.5, 60.0, 3600.0, 86_400.0, -86_400.0)
EVERY_S: Final = 3.0


def start(seed: int = 0, every_s: float = EVERY_S) -> None:
    """Replaces the clock of this process and sets it anew from time to time."""
    offset, rng, now, now_ns = [0.0], random.Random(seed), time.time, time.time_ns
    time.time = lambda: now() + offset[0]
    time.time_ns = lambda: now_ns() + int(1e9 * offset[0])

    def jump() -> None:
        while True:
            time.sleep(every_s)
            offset[0] += rng.choice(JUMPS_S)

    threading.Thread(target=jump, name="clock", daemon=True).start()


if __name__ == "__main__":
    start()
    from paceline.cli import main  # after the clock: modules may hold time.time by name

    main()
