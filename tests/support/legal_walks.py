"""Random texts that a constraint allows."""

import random
from collections.abc import Callable, Iterator, Sequence

import llguidance
import numpy as np

from paceline.constraints import Constraint
from paceline.constraints.compiler import byte_matcher
from paceline.constraints.cursor import Grammar, GrammarCursor
from paceline.types import Bits, Cursor

BYTES = llguidance.LLTokenizer("byte")  # each byte of a text is a token
CLOSING = ('"', "]", "}")


def byte_cursor(constraint: Constraint) -> GrammarCursor:
    return GrammarCursor(Grammar(lambda: byte_matcher(constraint), BYTES))


def walked(
    cursor: Cursor, eos: frozenset[int], seed: int, most: int, phrases: Sequence[list[int]], vocab: int
) -> list[int] | None:
    """A random output without its end; None if it was not complete after `most` steps.

    Phrases are taken as often as other tokens wherever they may come, so that most walks come to an end.
    """
    chance = random.Random(seed)
    tokens: list[int] = []
    for _ in range(most):
        if cursor.finished:
            return tokens
        allowed = _allowed(cursor, vocab)
        free = [token for token in allowed if token not in eos]
        if not free or (len(free) < len(allowed) and chance.random() < 0.3):
            return tokens
        phrase = chance.choice(phrases) if chance.random() < 0.5 else []
        fork = cursor.fork()
        if not phrase or not all(fork.advance(token) for token in phrase):
            fork, phrase = cursor.fork(), [chance.choice(free)]
            assert fork.advance(phrase[0])
        tokens += phrase
        cursor = fork
    return None


def _allowed(cursor: Cursor, vocab: int) -> list[int]:
    row: Bits = np.zeros((vocab + 31) // 32, np.uint32)
    cursor.fill(row)
    found: list[int] = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found


def legal_texts(
    constraint: Constraint, seeds: int, most: int = 120, phrases: Sequence[str] = CLOSING
) -> Iterator[str]:
    """Those of so many walks that are complete, byte by byte; not all of them are."""
    eos = frozenset(BYTES.eos_tokens)
    spelled = [list(phrase.encode()) for phrase in phrases]
    for seed in range(seeds):
        tokens = walked(byte_cursor(constraint), eos, seed, most, spelled, BYTES.vocab_size)
        if tokens is not None:
            yield bytes(tokens).decode()


def all_parse(constraint: Constraint, parse: Callable[[str], object], seeds: int, least: int) -> list[object]:
    values = [parse(text) for text in legal_texts(constraint, seeds)]
    assert len(values) >= least
    return values
