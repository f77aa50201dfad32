"""Rate limits of an API key: token buckets for requests and tokens per minute, and a concurrency limit.

A request enters before its body is read. Before it runs it is charged all the tokens that it may use, and at
its end it gets back those that it did not. A bucket falls into debt only through a request that may use more
than a minute's worth.
"""

from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from paceline.web.api_errors import KEY_LIMIT, ApiError
from paceline.web.api_keys import Key, KeyLimits

# A bucket's level is in units of 1/MINUTE of a request or token, and time in nanoseconds, so that a limit per
# minute refills by `limit` units each nanosecond: whole numbers, exact however long the server runs.
MINUTE: Final = 60 * 10**9
_MILLISECOND: Final = 10**6
_CONCURRENCY_RETRY_S: Final = 1.0  # when a running request ends is not known


@dataclass(frozen=True, slots=True)
class Rejection:
    retry_after_s: float
    reason: str


@dataclass(slots=True)
class TokenBucket:
    """A token bucket: holds a minute's worth, refills steadily, and is in debt below 0."""

    per_minute: int
    level: int
    at: int  # ns

    def refill(self, per_minute: int, at: int) -> None:
        self.level += self.per_minute * max(0, at - self.at)
        self.at = max(self.at, at)
        self.per_minute = per_minute  # may have changed with the keys file
        self.level = min(self.level, per_minute * MINUTE)

    def wait(self, amount: int) -> int:
        """Nanoseconds until the amount is there. More than a minute's worth needs a full bucket."""
        missing = min(amount, self.per_minute) * MINUTE - self.level
        return max(0, -(-missing // self.per_minute))

    def take(self, amount: int) -> None:
        """A negative amount is given back; an overflow is cut at the next refill."""
        self.level -= amount * MINUTE


@dataclass(slots=True)
class _Account:
    running: int = 0
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None

    def refill(self, limits: KeyLimits, at: int) -> None:
        self.requests = _refilled(self.requests, limits.requests_per_minute, at)
        self.tokens = _refilled(self.tokens, limits.tokens_per_minute, at)


def _refilled(bucket: TokenBucket | None, per_minute: int | None, at: int) -> TokenBucket | None:
    if per_minute is None:
        return None
    bucket = bucket or TokenBucket(per_minute, per_minute * MINUTE, at)
    bucket.refill(per_minute, at)
    return bucket


@dataclass(slots=True)
class Ticket:
    """One admitted request. Its holder must call `leave` once; further calls do nothing."""

    _limiter: "RateLimiter"
    _key: Key
    _charged: int
    _left: bool = field(default=False, init=False)

    def charge(self, tokens: int, now: float) -> Rejection | None:
        """Charges the tokens that the request may use, or changes nothing."""
        with self._limiter._lock:
            rejection = self._limiter._charge(self._key, tokens, now)
            if rejection is None:
                self._charged += tokens
            return rejection

    def leave(self, tokens: int, now: float, refused: bool = False) -> None:
        """tokens: the true number, prompt and output. refused: it does not count as a request either."""
        with self._limiter._lock:
            if not self._left:
                self._left = True
                self._limiter._settle(self._key, max(0, tokens) - self._charged, -int(refused), now)


class RateLimiter:
    """The accounts of all keys, by name. `now`: seconds on any clock that does not go backwards."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._lock = Lock()

    def enter(self, key: Key, tokens: int, now: float) -> Ticket | Rejection:
        """Admits a request and charges it these tokens, or changes nothing."""
        tokens = max(0, tokens)
        with self._lock:
            account = self._accounts.setdefault(key.name, _Account())
            account.refill(key.limits, _nanoseconds(now))
            if rejection := _rejection(account, key.limits, tokens):
                return rejection
            account.running += 1
            if account.requests:
                account.requests.take(1)
            if account.tokens:
                account.tokens.take(tokens)
        return Ticket(self, key, tokens)

    def admit(self, key: Key, now: float) -> Ticket:
        """A request whose tokens are not known yet, or an ApiError."""
        entry = self.enter(key, 0, now)
        if isinstance(entry, Rejection):
            raise over_limit(entry)
        return entry

    def _charge(self, key: Key, tokens: int, now: float) -> Rejection | None:
        bucket = self._accounts[key.name].tokens
        if bucket is None:
            return None
        bucket.refill(bucket.per_minute, _nanoseconds(now))
        if wait := bucket.wait(tokens):
            return _too_many(bucket, "tokens", wait)
        bucket.take(tokens)
        return None

    def _settle(self, key: Key, tokens: int, requests: int, now: float) -> None:
        account = self._accounts[key.name]
        account.running -= 1
        for bucket, amount in ((account.tokens, tokens), (account.requests, requests)):
            if bucket:
                bucket.refill(bucket.per_minute, _nanoseconds(now))
                bucket.take(amount)


def over_limit(rejection: Rejection, more: str = "") -> ApiError:
    return ApiError(
        429,
        f"{rejection.reason} for this key: try again in {rejection.retry_after_s:.0f} s{more}",
        "rate_limit_error",
        code="rate_limit_exceeded",
        retry_after=rejection.retry_after_s,
        refusal=KEY_LIMIT,
    )


def _too_many(bucket: TokenBucket, unit: str, wait_ns: int) -> Rejection:
    return Rejection(_seconds(wait_ns), f"more than {bucket.per_minute:,} {unit} a minute")


def _rejection(account: _Account, limits: KeyLimits, tokens: int) -> Rejection | None:
    if limits.concurrent is not None and account.running >= limits.concurrent:
        return Rejection(_CONCURRENCY_RETRY_S, f"more than {limits.concurrent:,} requests at once")
    charges = (("requests", account.requests, 1), ("tokens", account.tokens, tokens))
    waits = [
        _too_many(bucket, unit, wait)
        for unit, bucket, amount in charges
        if bucket is not None and (wait := bucket.wait(amount))
    ]
    return max(waits, key=lambda rejection: rejection.retry_after_s, default=None)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _seconds(nanoseconds: int) -> float:
    """Rounded up to a millisecond, so that a retry never comes too early."""
    return (nanoseconds // _MILLISECOND + 1) / 1000
