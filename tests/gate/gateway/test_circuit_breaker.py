"""The breaker's states and the budget's arithmetic, on a clock of the test's own."""

from paceline.gate.gateway.circuit_breaker import CircuitBreaker, RetryBudget


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failures_in_a_row_open_it_and_a_success_between_them_does_not() -> None:
    breaker = CircuitBreaker(3, 10, Clock())
    for _ in range(5):
        for report in (breaker.failure, breaker.failure, breaker.success):
            assert breaker.allow()
            report()
    for _ in range(3):
        assert breaker.allow()
        breaker.failure()
    assert breaker.state == "open"
    assert not breaker.allow()


def test_half_open_lets_one_request_decide() -> None:
    clock = Clock()
    breaker = CircuitBreaker(1, 10, clock)
    breaker.failure()
    clock.now = 9.9
    assert not breaker.allow()
    clock.now = 10
    assert breaker.state == "half_open"
    assert breaker.allow()
    assert not breaker.allow()  # while the first is on its way
    breaker.neither()  # its client left
    assert breaker.allow()
    breaker.failure()
    assert breaker.retry_after_s == 10
    clock.now = 20
    assert breaker.allow()
    breaker.success()
    assert not breaker.retry_after_s
    assert breaker.allow()
    assert breaker.allow()


def test_retries_are_a_share_of_requests_besides_a_steady_income() -> None:
    clock = Clock()
    budget = RetryBudget(0.25, 0, clock)
    assert not budget.withdraw()
    for _ in range(8):
        budget.request()
    assert [budget.withdraw() for _ in range(3)] == [True, True, False]
    steady = RetryBudget(0, 0.5, clock)
    assert [steady.withdraw() for _ in range(6)] == [True] * 5 + [False]  # ten seconds' worth
    clock.now = 2
    assert [steady.withdraw() for _ in range(2)] == [True, False]
