"""RateLimiter against a slow model that remembers everything, and what they promise."""

import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.web import rate_limit as rate_limit_module
from paceline.web.api_keys import Key, KeyLimits
from paceline.web.rate_limit import RateLimiter, Rejection, Ticket


def key(
    requests: int | None = None, tokens: int | None = None, concurrent: int | None = None, name: str = "k"
) -> Key:
    limits = KeyLimits(requests_per_minute=requests, tokens_per_minute=tokens, concurrent=concurrent)
    return Key(name=name, hash="0" * 64, limits=limits)


def entered(found: Ticket | Rejection) -> Ticket:
    assert isinstance(found, Ticket), found
    return found


def refused(found: Ticket | Rejection) -> Rejection:
    assert isinstance(found, Rejection)
    return found


@dataclass
class SlowBucket:
    """Every charge ever made; the level is computed anew from all of them."""

    per_minute: int | None
    charges: list[tuple[Fraction, int]] = field(default_factory=list)

    def level(self, now: Fraction) -> Fraction:
        assert self.per_minute is not None
        most = level = Fraction(self.per_minute)
        last = Fraction(0)
        for at, charge in [*self.charges, (now, 0)]:
            level = min(most, level + (at - last) * self.per_minute / 60)
            level = min(most, level - charge)
            last = at
        return level

    def fits(self, wanted: int, now: Fraction) -> bool:
        return self.per_minute is None or self.level(now) >= min(wanted, self.per_minute)


@dataclass
class SlowModel:
    concurrent: int | None
    requests: SlowBucket
    tokens: SlowBucket
    running: int = 0

    def enter(self, estimate: int, now: Fraction) -> bool:
        full = self.concurrent is not None and self.running >= self.concurrent
        if full or not self.requests.fits(1, now) or not self.tokens.fits(estimate, now):
            return False
        self.running += 1
        self.requests.charges.append((now, 1))
        self.tokens.charges.append((now, estimate))
        return True

    def leave(self, difference: int, now: Fraction) -> None:
        self.running -= 1
        self.tokens.charges.append((now, difference))


limit = st.none() | st.integers(1, 7)
steps = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "leave"]),
        st.integers(0, 40).map(lambda n: n / 4),  # seconds since the step before, exact as a float
        st.integers(0, 12),  # tokens
    ),
    max_size=40,
)


@given(limit, limit, limit, steps)
def test_as_the_slow_model_and_as_promised(
    requests: int | None, tokens: int | None, concurrent: int | None, steps: list[tuple[str, float, int]]
) -> None:
    limits, owner = RateLimiter(), key(requests, tokens, concurrent)
    model = SlowModel(concurrent, SlowBucket(requests), SlowBucket(tokens))
    running: list[tuple[Ticket, int]] = []
    admitted: list[tuple[float, int]] = []
    now = 0.0
    for step, passed, count in steps:
        now += passed
        if step == "enter":
            found = limits.enter(owner, count, now)
            assert isinstance(found, Ticket) == model.enter(count, Fraction(now))
            if isinstance(found, Ticket):
                running.append((found, count))
                admitted.append((now, count))
        elif running:
            ticket, estimate = running.pop(0)
            ticket.leave(count, now)
            model.leave(count - estimate, Fraction(now))
        assert concurrent is None or len(running) <= concurrent
    if requests is not None:
        _never_more_than_a_burst_and_the_refill(admitted, requests)


def _never_more_than_a_burst_and_the_refill(admitted: list[tuple[float, int]], per_minute: int) -> None:
    for i, (start, _) in enumerate(admitted):
        for j, (end, _) in enumerate(admitted[i:], start=1):
            assert j <= per_minute + per_minute * (end - start) / 60


@given(st.integers(1, 50), st.lists(st.tuples(st.integers(0, 40).map(lambda n: n / 4), st.integers(0, 80))))
def test_tokens_in_any_window_are_a_burst_and_the_refill(
    per_minute: int, steps: list[tuple[float, int]]
) -> None:
    limits, owner = RateLimiter(), key(tokens=per_minute)
    taken: list[tuple[float, int]] = []
    now = 0.0
    for passed, count in steps:
        now += passed
        if isinstance(found := limits.enter(owner, count, now), Ticket):
            found.leave(count, now)
            taken.append((now, count))
    for i, (start, _) in enumerate(taken):
        for j in range(i, len(taken)):
            end, last = taken[j]
            before = sum(count for _, count in taken[i:j])
            # A request for more than a minute's worth is let in by a full bucket, and paid for afterwards.
            assert before + min(last, per_minute) <= per_minute + per_minute * (end - start) / 60 + 1e-9


@given(limit, limit, steps, st.integers(0, 1000), st.sampled_from([0.0, 1.7e9]))
def test_a_request_after_retry_after_is_admitted(
    requests: int | None, tokens: int | None, steps: list[tuple[str, float, int]], wanted: int, start: float
) -> None:
    limits, owner, now = RateLimiter(), key(requests, tokens), start
    for step, passed, count in steps:
        now += passed
        found = limits.enter(owner, count, now)
        if isinstance(found, Ticket) and step == "leave":
            found.leave(count * 3, now)
    if isinstance(found := limits.enter(owner, wanted, now), Rejection):
        assert found.retry_after_s > 0
        entered(limits.enter(owner, wanted, now + found.retry_after_s))


def test_the_wait_is_not_longer_than_needed() -> None:
    limits, owner = RateLimiter(), key(requests=60)
    for _ in range(60):
        entered(limits.enter(owner, 0, 5.0))
    found = refused(limits.enter(owner, 0, 5.25))
    assert found.retry_after_s == pytest.approx(0.75, abs=0.002)
    assert found.reason == "more than 60 requests a minute"
    refused(limits.enter(owner, 0, 5.99))
    entered(limits.enter(owner, 0, 6.0))


def test_an_estimate_is_settled_when_the_request_leaves() -> None:
    limits, owner = RateLimiter(), key(tokens=100)
    ticket = entered(limits.enter(owner, 90, 0.0))
    assert refused(limits.enter(owner, 20, 0.0)).reason == "more than 100 tokens a minute"
    ticket.leave(10, 0.0)
    cheap = entered(limits.enter(owner, 90, 0.0))
    cheap.leave(390, 0.0)  # 300 in debt
    assert refused(limits.enter(owner, 0, 0.0)).retry_after_s == pytest.approx(180, abs=0.01)
    refused(limits.enter(owner, 0, 179.0))
    entered(limits.enter(owner, 0, 180.01))


def test_a_request_is_charged_before_it_runs_and_settled_after() -> None:
    limits, owner = RateLimiter(), key(tokens=100)
    first, second = (entered(limits.enter(owner, 0, 0.0)) for _ in range(2))
    assert first.charge(80, 0.0) is None
    rejection = second.charge(30, 0.0)
    assert rejection == Rejection(
        rejection.retry_after_s if rejection else 0, "more than 100 tokens a minute"
    )
    assert rejection.retry_after_s == pytest.approx(6, abs=0.01)
    first.leave(10, 0.0)
    assert second.charge(90, 0.0) is None
    second.leave(90, 0.0)
    assert refused(limits.enter(owner, 1, 0.0)).retry_after_s == pytest.approx(0.6, abs=0.01)


jobs = st.lists(
    st.tuples(
        st.integers(0, 40).map(lambda n: n / 4),  # seconds since the step before
        st.integers(0, 30),  # tokens that the request may use
        st.floats(0, 1),  # the part of them that it uses
        st.integers(0, 5),  # requests that begin before it ends
    ),
    max_size=40,
)


@given(st.integers(10, 50), jobs)
def test_what_requests_may_use_together_never_exceeds_a_burst_and_the_refill(
    per_minute: int, jobs: list[tuple[float, int, float, int]]
) -> None:
    """However many run at once: requests within a minute's worth never bring a bucket into debt."""
    limits, owner, now = RateLimiter(), key(tokens=per_minute), 0.0
    used: list[tuple[float, int]] = []
    running: list[tuple[int, Ticket, int]] = []
    for passed, size, part, lasts in jobs:
        now += passed
        running = [(left - 1, ticket, tokens) for left, ticket, tokens in running]
        for _, ticket, tokens in [job for job in running if job[0] < 0]:
            ticket.leave(tokens, now)
        running = [job for job in running if job[0] >= 0]
        found = limits.enter(owner, 0, now)
        size = min(size, per_minute)
        if isinstance(found, Ticket) and found.charge(size, now) is None:
            used.append((now, tokens := int(size * part)))  # all at once when it begins: the worst case
            running.append((lasts, found, tokens))
        elif isinstance(found, Ticket):
            found.leave(0, now, refused=True)
    for i, (start, _) in enumerate(used):
        for j in range(i, len(used)):
            within = sum(tokens for _, tokens in used[i : j + 1])
            assert within <= per_minute + per_minute * (used[j][0] - start) / 60 + 1e-9


def test_refunds_never_exceed_one_minute_of_tokens() -> None:
    limits, owner = RateLimiter(), key(tokens=100)
    ticket = entered(limits.enter(owner, 100, 0.0))
    ticket.leave(0, 600.0)
    entered(limits.enter(owner, 100, 600.0))
    refused(limits.enter(owner, 1, 600.0))


def test_who_is_refused_is_charged_nothing() -> None:
    limits, owner = RateLimiter(), key(requests=2, tokens=10, concurrent=1)
    ticket = entered(limits.enter(owner, 4, 0.0))
    for _ in range(5):
        found = refused(limits.enter(owner, 4, 0.0))
        assert (found.retry_after_s, found.reason) == (1.0, "more than 1 requests at once")
    ticket.leave(4, 0.0)
    refused(limits.enter(owner, 7, 0.0))
    entered(limits.enter(owner, 6, 0.0)).leave(6, 0.0)
    assert refused(limits.enter(owner, 0, 0.0)).reason == "more than 2 requests a minute"


def test_leaving_twice_is_leaving_once() -> None:
    limits, owner = RateLimiter(), key(tokens=10, concurrent=2)
    first, _ = entered(limits.enter(owner, 5, 0.0)), entered(limits.enter(owner, 5, 0.0))
    first.leave(0, 0.0)
    first.leave(0, 0.0)
    entered(limits.enter(owner, 5, 0.0))
    assert refused(limits.enter(owner, 0, 0.0)).reason == "more than 2 requests at once"


def test_a_clock_that_steps_back_gives_nothing() -> None:
    limits, owner = RateLimiter(), key(requests=1)
    entered(limits.enter(owner, 0, 100.0))
    refused(limits.enter(owner, 0, 10.0))
    refused(limits.enter(owner, 0, 100.0))
    entered(limits.enter(owner, 0, 160.0))


def test_keys_do_not_share() -> None:
    limits = RateLimiter()
    entered(limits.enter(key(requests=1, name="a"), 0, 0.0))
    entered(limits.enter(key(requests=1, name="b"), 0, 0.0))
    refused(limits.enter(key(requests=1, name="a"), 0, 0.0))


def test_a_key_without_limits_is_never_refused() -> None:
    limits = RateLimiter()
    for _ in range(1000):
        entered(limits.enter(key(), 10**9, 0.0))


def test_limits_may_change_while_requests_run() -> None:
    limits = RateLimiter()
    ticket = entered(limits.enter(key(requests=100, tokens=100), 50, 0.0))
    refused(limits.enter(key(concurrent=1), 0, 0.0))  # who entered before there was a limit counts
    entered(limits.enter(key(requests=1), 0, 0.0))
    refused(limits.enter(key(requests=1), 0, 0.0))  # the larger bucket's level was cut
    ticket.leave(10, 0.0)
    entered(limits.enter(key(concurrent=2), 0, 0.0))


def test_threads_never_exceed_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    judge = rate_limit_module._rejection

    def slow_judge(*of: Any) -> Rejection | None:
        found = judge(*of)
        time.sleep(0)  # lets another thread run between the look and the charge
        return found

    monkeypatch.setattr(rate_limit_module, "_rejection", slow_judge)
    limits, owner = RateLimiter(), key(requests=200, concurrent=3)
    lock, counts = threading.Lock(), {"now": 0, "most": 0, "admitted": 0}

    def work() -> None:
        for _ in range(300):
            found = limits.enter(owner, 1, 0.0)
            if isinstance(found, Ticket):
                with lock:
                    counts["now"] += 1
                    counts["admitted"] += 1
                    counts["most"] = max(counts["most"], counts["now"])
                with lock:
                    counts["now"] -= 1
                found.leave(1, 0.0)

    workers = [threading.Thread(target=work) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert counts["most"] <= 3
    assert counts["admitted"] == 200


def test_nobody_leaves_while_another_enters() -> None:
    limits = RateLimiter()
    ticket = entered(limits.enter(key(), 0, 0.0))
    leaver = threading.Thread(target=ticket.leave, args=(0, 0.0))
    with limits._lock:
        leaver.start()
        leaver.join(0.05)
        assert leaver.is_alive()
    leaver.join()
