"""Requests that were not admitted, and why."""

from typing import Final

from paceline.errors import PacelineError
from paceline.web.api_errors import failure
from paceline.web.plumbing import kind_of

# By the word for what went wrong. What is not here, such as a fault of the server, is no refusal.
_REASONS: Final = {
    "server_busy": "queue_full",
    "cache_full": "cache_full",
    "rate_limit_exceeded": "key_limit",
    "timeout": "deadline",
    "shutting_down": "draining",
    "context_length_exceeded": "too_long",
    "invalid_api_key": "unauthorized",
    "model_not_found": "invalid",
    "invalid_constraint": "invalid",
    "invalid_request_error": "invalid",
}
REFUSALS: Final = frozenset(_REASONS.values())


def word_for(problem: BaseException) -> str:
    """One word for what went wrong."""
    return kind_of(failure(problem) if isinstance(problem, PacelineError) else problem)


def refusal(word: str) -> str | None:
    """Why a request was refused that never was in a pass; None: it was not, it failed."""
    return _REASONS.get(word)
