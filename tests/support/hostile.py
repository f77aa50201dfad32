"""Constraints that are made to hold up or break an engine, each tried in turn; run as a script.

python hostile.py MODEL [NAME ...]     one line of JSON for each
"""

import json
import random
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from paceline.constraints import Compiler, Constraint, Json, Lark, Regex
from paceline.errors import ConstraintError
from paceline.text import Tokenizer

STEPS = 60  # tokens of a walk
WALKS = 4


def nested(depth: int) -> str:
    """As text: data that deep cannot be written by json.dumps."""
    return '{"type": "object", "required": ["a"], "properties": {"a": ' * depth + "{}" + "}}" * depth


def optional(count: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"property_{i}": {"type": "string"} for i in range(count)},
        "additionalProperties": False,
    }


def required(count: int) -> dict[str, Any]:
    names = [f"p{i}" for i in range(count)]
    return {"type": "object", "properties": {name: {} for name in names}, "required": names}


def crossed(pairs: int) -> dict[str, Any]:
    """Two to the power of so many combinations."""
    either = [
        {"anyOf": [{"properties": {f"p{i}": {"type": kind}}} for kind in ("string", "number")]}
        for i in range(pairs)
    ]
    return {"type": "object", "allOf": either}


def patterns(count: int) -> dict[str, Any]:
    return {"type": "object", "patternProperties": {f"^x{i}_[a-z]+$": {} for i in range(count)}}


def bulky(size: int) -> str:
    entry = {"type": "string", "description": "x" * 400}
    count = size // (len(json.dumps(entry)) + len('"property_1000": , '))
    return json.dumps({"type": "object", "properties": {f"property_{i:04}": entry for i in range(count)}})


def rules(depth: int) -> str:
    inner = "\n".join(f'r{i}: "a" r{i + 1} "b"' for i in range(depth))
    return f'start: r0\n{inner}\nr{depth}: "c"'


MUTUAL = {
    "$ref": "#/$defs/a",
    "$defs": {
        "a": {"type": "object", "properties": {"b": {"$ref": "#/$defs/b"}}, "additionalProperties": False},
        "b": {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}, "additionalProperties": False},
    },
}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
ITSELF = {"type": "object", "properties": {"next": {"$ref": "#"}}, "required": ["next"]}

CASES: dict[str, Callable[[], Constraint]] = {
    "nested 100 deep": lambda: Json(nested(100)),
    "nested 10,000 deep": lambda: Json(nested(10_000)),
    "500 optional properties": lambda: Json.of(optional(500)),
    "4,000 optional properties": lambda: Json.of(optional(4000)),
    "9,000 optional properties": lambda: Json.of(optional(9000)),
    "30,000 required properties": lambda: Json.of(required(30_000)),
    "100 patterns of properties": lambda: Json.of(patterns(100)),
    "enum of 20,000": lambda: Json.of({"enum": [f"value number {i}" for i in range(20_000)]}),
    "maxLength 100,000": lambda: Json.of({"type": "string", "maxLength": 100_000}),
    "minLength 100,000": lambda: Json.of({"type": "string", "minLength": 100_000}),
    "maxItems 100,000": lambda: Json.of({"type": "array", "maxItems": 100_000, "items": {"type": "integer"}}),
    "minItems 100,000": lambda: Json.of({"type": "array", "minItems": 100_000, "items": {"type": "integer"}}),
    "anyOf under allOf, 2^14": lambda: Json.of(crossed(14)),
    "pattern (a+)+b": lambda: Json.of({"type": "string", "pattern": "^(a+)+b$"}),
    "regex (a+)+b": lambda: Regex("(a+)+b"),
    "regex (a|a)*b": lambda: Regex("(a|a)*b"),
    "regex [ab]*a[ab]{25}": lambda: Regex("[ab]*a[ab]{25}"),
    "regex ((x{1,100}){1,100}){1,100}": lambda: Regex("((x{1,100}){1,100}){1,100}"),
    "regex with look-ahead": lambda: Regex("(?=a)[ab]+"),
    "regex with back-reference": lambda: Regex(r"(a|b)\1"),
    "ambiguous grammar": lambda: Lark('start: s\ns: s s | "a"'),
    "grammar that is empty in many ways": lambda: Lark('start: s\ns: s s s | "a" | ""'),
    "rules nested 200 deep": lambda: Lark(rules(200)),
    "reference loop": lambda: Json.of(LOOP),
    "schema without end": lambda: Json.of(ITSELF),
    "mutual references": lambda: Json.of(MUTUAL),
    "schema of 900 kB": lambda: Json(bulky(900_000)),
    "schema of 2 MB": lambda: Json(bulky(2_000_000)),
    "reference to elsewhere": lambda: Json.of({"$ref": "https://example.com/schema.json"}),
    "reference to a file": lambda: Json.of({"$ref": "file:///etc/passwd"}),
    "false": lambda: Json.of(False),
}


def walk(compiler: Compiler, constraint: Constraint, vocab: int, rng: random.Random) -> int:
    """How many tokens a random legal output had, at most STEPS."""
    cursor = compiler.cursor(constraint)
    for step in range(STEPS):
        if cursor.finished:
            return step
        row = np.zeros((vocab + 31) // 32, np.uint32)
        cursor.fill(row)
        cursor.forced()
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")[:vocab])
        if not cursor.advance(int(rng.choice(allowed))):
            raise AssertionError("the grammar allowed a token and then could not take it")
    return STEPS


def attempt(name: str, compiler: Compiler, vocab: int) -> dict[str, Any]:
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found: dict[str, Any] = {"name": name, "tokens": None, "refused": None, "crashed": None}
    try:
        constraint = CASES[name]()
        walks = [walk(compiler, constraint, vocab, random.Random(seed)) for seed in range(WALKS)]
        found["tokens"] = max(walks)
    except ConstraintError as error:
        found["refused"] = str(error)
    except Exception as error:
        found["crashed"] = repr(error)
    found["cpu_seconds"] = time.process_time() - started
    found["megabytes"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return found


def main(model: str, names: list[str]) -> None:
    tokenizer = Tokenizer.load(Path(model))
    compiler = Compiler(tokenizer, tokenizer.vocab_size)
    compiler.cursor(Regex("a"))  # builds the tokenizer's tables
    for name in names or CASES:
        print(json.dumps(attempt(name, compiler, tokenizer.vocab_size)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
