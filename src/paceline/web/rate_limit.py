"""How much one API key may ask for: requests and tokens per minute, and requests at once."""

from dataclasses import dataclass, field
from threading import Lock
from typing import Final

from paceline.web.api_keys import Key, KeyLimits

# A bucket's level is in units of 1/MINUTE of a request or token, and time in nanoseconds, so that a limit per
# minute refills by `limit` units each nanosecond: whole numbers, exact however long the server runs.
MINUTE: Final = 60 * 10**9
_MILLISECOND: Final = 10**6
_TRY_AGAIN_S: Final = 1.0  # when somebody leaves cannot be known


@dataclass(frozen=True, slots=True)
class Refused:
    retry_after_s: float
    reason: str


@dataclass(slots=True)
class _Bucket:
    """Holds a minute's worth at most, and refills steadily; below 0 it is in debt."""

    per_minute: int
    level: int
    at: int  # ns

    def refill(self, per_minute: int, at: int) -> None:
        self.level += self.per_minute * max(0, at - self.at)
        self.at = max(self.at, at)
        self.per_minute = per_minute  # may have changed with the keys file
        self.level = min(self.level, per_minute * MINUTE)

    def wait(self, wanted: int) -> int:
        """Nanoseconds until so many fit. What is more than a minute's worth needs a full bucket."""
        missing = min(wanted, self.per_minute) * MINUTE - self.level
        return max(0, -(-missing // self.per_minute))

    def take(self, taken: int) -> None:
        """Less than 0: gives back. What is too much runs over when it is refilled next."""
        self.level -= taken * MINUTE


@dataclass(slots=True)
class _Account:
    running: int = 0
    requests: _Bucket | None = None
    tokens: _Bucket | None = None

    def refill(self, limits: KeyLimits, at: int) -> None:
        self.requests = _refilled(self.requests, limits.requests_per_minute, at)
        self.tokens = _refilled(self.tokens, limits.tokens_per_minute, at)


def _refilled(bucket: _Bucket | None, per_minute: int | None, at: int) -> _Bucket | None:
    if per_minute is None:
        return None
    bucket = bucket or _Bucket(per_minute, per_minute * MINUTE, at)
    bucket.refill(per_minute, at)
    return bucket


@dataclass(slots=True)
class Ticket:
    """One request that was let in. Whoever holds it must leave, once; leaving again does nothing."""

    _limits: "Limits"
    _key: Key
    _estimated: int
    _left: bool = field(default=False, init=False)

    def leave(self, tokens: int, now: float, refused: bool = False) -> None:
        """`tokens`: how many it took after all, prompt and answer. refused: it is no request either."""
        with self._limits._lock:
            if not self._left:
                self._left = True
                self._limits._settle(self._key, max(0, tokens) - self._estimated, -int(refused), now)


class Limits:
    """The accounts of all keys, by name. `now`: seconds on any clock that does not go backwards."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._lock = Lock()

    def enter(self, key: Key, estimated_tokens: int, now: float) -> Ticket | Refused:
        """Lets a request in and charges its estimate, or changes nothing."""
        estimated = max(0, estimated_tokens)
        with self._lock:
            account = self._accounts.setdefault(key.name, _Account())
            account.refill(key.limits, _nanoseconds(now))
            if refused := _refusal(account, key.limits, estimated):
                return refused
            account.running += 1
            if account.requests:
                account.requests.take(1)
            if account.tokens:
                account.tokens.take(estimated)
        return Ticket(self, key, estimated)

    def _settle(self, key: Key, tokens: int, requests: int, now: float) -> None:
        account = self._accounts[key.name]
        account.running -= 1
        for bucket, taken in ((account.tokens, tokens), (account.requests, requests)):
            if bucket:
                bucket.refill(bucket.per_minute, _nanoseconds(now))
                bucket.take(taken)


def _refusal(account: _Account, limits: KeyLimits, estimated: int) -> Refused | None:
    if limits.concurrent is not None and account.running >= limits.concurrent:
        return Refused(_TRY_AGAIN_S, f"more than {limits.concurrent:,} requests at once")
    asked = (("requests", account.requests, 1), ("tokens", account.tokens, estimated))
    waits = [
        (bucket.wait(wanted), f"more than {bucket.per_minute:,} {what} a minute")
        for what, bucket, wanted in asked
        if bucket is not None
    ]
    longest, reason = max(waits, default=(0, ""))
    return Refused(_seconds(longest), reason) if longest else None


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _seconds(nanoseconds: int) -> float:
    """The next millisecond: never too early, whatever is lost in adding it to a large time."""
    return (nanoseconds // _MILLISECOND + 1) / 1000
