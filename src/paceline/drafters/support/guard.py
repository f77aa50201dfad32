"""A drafter that fails costs what it would have guessed, and nothing else."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from paceline.log import log_problem
from paceline.types import NO_DRAFT, Ask, Draft, Drafter

log: Final = logging.getLogger("paceline")


@contextmanager
def forgiven(drafter: Drafter, request: str) -> Iterator[None]:
    try:
        yield
    except Exception as problem:
        log_problem(log, f"drafter {drafter.name} failed; the request {request}", problem)


def drafts_of(drafter: Drafter, asks: Sequence[Ask]) -> list[Draft]:
    """One for each ask, whatever the drafter does."""
    try:
        drafts = drafter.draft(asks)
    except Exception as problem:
        log_problem(log, f"drafter {drafter.name} failed; this round goes on without its guesses", problem)
        return [NO_DRAFT] * len(asks)
    if len(drafts) != len(asks):
        log.error("drafter %s gave %d drafts for %d requests", drafter.name, len(drafts), len(asks))
        return [NO_DRAFT] * len(asks)
    return drafts
