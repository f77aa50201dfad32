"""Random texts that a constraint allows, and where its fixed text is certain."""

import random
from collections.abc import Callable, Iterator

import llguidance
import numpy as np

from paceline.constraints import Constraint
from paceline.constraints.compiler import bytewise
from paceline.constraints.cursor import GrammarCursor, Walker
from paceline.types import Bits, Cursor

BYTES = llguidance.LLTokenizer("byte")  # each byte of a text is a token


def byte_cursor(constraint: Constraint) -> GrammarCursor:
    return GrammarCursor(Walker(bytewise(constraint), BYTES))


def walked(cursor: Cursor, vocab: int, eos: frozenset[int], seed: int, most: int) -> list[int] | None:
    """A random output without its end; None if it was not complete after `most` tokens."""
    chance = random.Random(seed)
    tokens: list[int] = []
    while not cursor.finished:
        row: Bits = np.zeros((vocab + 31) // 32, np.uint32)
        cursor.fill(row)
        allowed = np.unpackbits(row.view(np.uint8), bitorder="little").nonzero()[0].tolist()
        ending = [token for token in allowed if token in eos]
        if ending and (len(allowed) == len(ending) or chance.random() < 0.3):
            return tokens
        if len(tokens) == most:
            return None
        token = _likely(chance, [token for token in allowed if token not in eos])
        assert cursor.advance(token)
        tokens.append(token)
    return tokens


def _likely(chance: random.Random, allowed: list[int]) -> int:
    """Marks that end strings and lists are taken more often, so that most walks come to an end."""
    closing = [token for token in allowed if token in b'"]}']
    return chance.choice(closing if closing and chance.random() < 0.4 else allowed)


def legal_texts(constraint: Constraint, seeds: int, most: int = 120) -> Iterator[str]:
    """Those of so many walks that are complete, byte by byte; not all of them are."""
    eos = frozenset(BYTES.eos_tokens)
    for seed in range(seeds):
        tokens = walked(byte_cursor(constraint), BYTES.vocab_size, eos, seed, most)
        if tokens is not None:
            yield bytes(tokens).decode()


def all_parse(constraint: Constraint, parse: Callable[[str], object], seeds: int, least: int) -> list[object]:
    values = [parse(text) for text in legal_texts(constraint, seeds)]
    assert len(values) >= least
    return values
