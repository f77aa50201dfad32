"""Failing upstreams: a circuit breaker for each, and a retry budget for each route.

The breaker has the three states of Nygard's "Release It!": closed, open after failures in a row, half-open
after a while, when one request decides. The budget is Finagle's: every request deposits a fraction of a
retry, so that retries stay a fraction of the load when an upstream fails, and cannot multiply it.
"""

import time
from collections.abc import Callable
from typing import Final, Literal

State = Literal["closed", "half_open", "open"]
STATES: Final[tuple[State, ...]] = ("closed", "half_open", "open")
Clock = Callable[[], float]

RESERVE_S: Final = 10.0  # seconds of a budget's steady income that it can hold


class CircuitBreaker:
    """Whoever is allowed to send must report one of success, failure and neither."""

    def __init__(self, failures: int, open_s: float, clock: Clock = time.monotonic) -> None:
        self.max_failures, self.open_s = failures, open_s
        self._clock = clock
        self._failed = 0  # in a row
        self._opened_at: float | None = None
        self._probing = False

    @property
    def state(self) -> State:
        if self._opened_at is None:
            return "closed"
        return "half_open" if self.retry_after_s <= 0 else "open"

    @property
    def retry_after_s(self) -> float:
        """Until a request may try; 0: now."""
        if self._opened_at is None:
            return 0.0
        return max(0.0, self._opened_at + self.open_s - self._clock())

    @property
    def available(self) -> bool:
        """A request would be allowed."""
        return self.state == "closed" or (self.state == "half_open" and not self._probing)

    def allow(self) -> bool:
        if not self.available:
            return False
        self._probing = self.state == "half_open"
        return True

    def success(self) -> None:
        self._failed, self._opened_at, self._probing = 0, None, False

    def failure(self) -> None:
        self._failed += 1
        if self._probing or self._failed >= self.max_failures:
            self._opened_at = self._clock()
        self._probing = False

    def neither(self) -> None:
        """The request ended without telling anything: its client left, or it was at fault itself."""
        self._probing = False


class RetryBudget:
    """share: retries per request. min_per_s: retries per second that are there in any case."""

    def __init__(self, share: float, min_per_s: float, clock: Clock = time.monotonic) -> None:
        self.share, self.min_per_s = share, min_per_s
        self._clock, self._at = clock, clock()
        self._reserve = min_per_s * RESERVE_S
        self._deposited = 0.0

    def request(self) -> None:
        """A new request, no retry."""
        self._deposited = min(self._deposited + self.share, max(1.0, 100 * self.share))

    def withdraw(self) -> bool:
        """Takes one retry, if there is one."""
        now = self._clock()
        income = (now - self._at) * self.min_per_s
        self._reserve = min(self.min_per_s * RESERVE_S, self._reserve + income)
        self._at = now
        if self._deposited >= 1:
            self._deposited -= 1
        elif self._reserve >= 1:
            self._reserve -= 1
        else:
            return False
        return True
