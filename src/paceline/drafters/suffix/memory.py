"""What past sequences said, kept apart by tenant, bounded over all of them, saved to one file."""

import json
from array import array
from collections import Counter, deque
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from paceline.atomic import replacing
from paceline.drafters.suffix.index import ContextIndex
from paceline.errors import (
    CorruptModel,
    DrafterMismatch,
    ModelError,
    PacelineError,
    SettingError,
    UnknownModel,
)

STRIDE: Final = 32  # tokens from one mark to the next
FORMAT: Final = "paceline suffix memory 1"
Arrays: TypeAlias = dict[str, NDArray[Any]]


class Shelf:
    """One tenant's documents. A mark is a hash of everything up to it, so equal marks mean equal pasts."""

    def __init__(self, depth: int) -> None:
        self.index = ContextIndex(depth)
        self.marks: deque[list[int]] = deque()  # of each document, oldest first
        self.holders: dict[int, int] = {}  # mark -> number of the latest document that holds it
        self.evicted = 0  # documents; the oldest one left has this number

    def known(self, marks: Sequence[int]) -> int:
        """How many of a sequence's marks, from its start, are held."""
        return next((i for i, mark in enumerate(marks) if mark not in self.holders), len(marks))

    def add(self, context: Sequence[int], tokens: Sequence[int], marks: list[int]) -> None:
        self.index.open(context)
        self.index.extend(tokens)
        self.hold(marks)

    def hold(self, marks: list[int]) -> None:
        """Notes the marks of the document added last."""
        self.holders.update(dict.fromkeys(marks, self.evicted + len(self.marks)))
        self.marks.append(marks)

    def evict(self) -> None:
        self.index.evict()
        for mark in self.marks.popleft():
            if self.holders[mark] == self.evicted:
                del self.holders[mark]
        self.evicted += 1


class Memory:
    """Agents send their whole history every turn; only what a sequence adds to it is learnt again."""

    def __init__(self, max_tokens: int, depth: int) -> None:
        self.max_tokens = max_tokens
        self.depth = depth
        self.shelves: dict[str, Shelf] = {}
        self.order: deque[str] = deque()  # whose document each one is, oldest first
        self.held = 0

    def __len__(self) -> int:
        """Tokens held, of all tenants."""
        return self.held

    def index(self, tenant: str) -> ContextIndex | None:
        shelf = self.shelves.get(tenant)
        return shelf.index if shelf else None

    def known(self, tenant: str, tokens: Sequence[int]) -> int:
        """How many tokens from the start of a sequence need not be learnt again."""
        shelf = self.shelves.get(tenant)
        return STRIDE * shelf.known(marks_of(tokens)) if shelf else 0

    def learn(self, tenant: str, tokens: Sequence[int]) -> None:
        shelf = self.shelves.get(tenant) or Shelf(self.depth)
        marks = marks_of(tokens)
        known = shelf.known(marks)
        start, room = known * STRIDE, self.max_tokens - 2  # a separator and the last token of the context
        if len(tokens) - start > room:
            start, marks = len(tokens) - room, []
        if start >= len(tokens):
            return
        self.shelves[tenant] = shelf
        before = shelf.index.held
        shelf.add(tokens[max(0, start - self.depth) : start], tokens[start:], marks[known:])
        self.held += shelf.index.held - before
        self.order.append(tenant)
        self.shrink()

    def shrink(self) -> None:
        """Forgets the oldest documents until the rest fit."""
        while self.held > self.max_tokens:
            tenant = self.order.popleft()
            shelf = self.shelves[tenant]
            self.held -= shelf.index.held
            shelf.evict()
            self.held += shelf.index.held
            if not shelf.marks:
                del self.shelves[tenant]


def marks_of(tokens: Sequence[int]) -> list[int]:
    raw, size, marks, past = array("I", tokens).tobytes(), STRIDE * 4, [], b""
    for end in range(size, len(raw) + 1, size):
        past = blake2b(past + raw[end - size : end], digest_size=8).digest()
        marks.append(int.from_bytes(past, "little"))
    return marks


def save(memory: Memory, path: Path, tokenizer: str) -> None:
    """All or nothing: a file that was there stays until the new one is whole. Only its owner can read it."""
    try:
        with replacing(path, mode=0o600) as fresh, fresh.open("wb") as file:
            np.savez(file, allow_pickle=False, **_pack(memory, tokenizer))
    except OSError as error:
        reason = error.strerror or error
        raise ModelError(f"cannot write {path}: {reason}; choose another place or make room") from error


def load(path: Path, tokenizer: str, max_tokens: int, depth: int) -> Memory:
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = dict(file)
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError("unknown format")
        _check(header, path, tokenizer, depth)
        memory = Memory(max_tokens, depth)
        _unpack(arrays, header["tenants"], memory)
    except PacelineError:
        raise
    except FileNotFoundError as error:
        raise UnknownModel(f"{path}: no such file; expected a memory written by save()") from error
    except Exception as error:  # damage makes zipfile, numpy and json raise nearly everything
        raise CorruptModel(
            f"{path} is damaged or no suffix memory: {error}; delete it to start anew"
        ) from error
    memory.shrink()
    return memory


def _check(header: dict[str, Any], path: Path, tokenizer: str, depth: int) -> None:
    if header["tokenizer"] != tokenizer:
        raise DrafterMismatch(
            f"{path} was learnt with tokenizer {header['tokenizer']}, this target has {tokenizer}; "
            "load a memory of this target"
        )
    if header["depth"] != depth:
        raise SettingError("max_depth", depth, str(header["depth"]), f"{path} was written with it")


def _pack(memory: Memory, tokenizer: str) -> Arrays:
    tenants = list(memory.shelves)
    header = {"format": FORMAT, "tokenizer": tokenizer, "depth": memory.depth, "tenants": tenants}
    number = {tenant: i for i, tenant in enumerate(tenants)}
    arrays: Arrays = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "order": np.array([number[tenant] for tenant in memory.order], np.int64),
    }
    for i, shelf in enumerate(memory.shelves.values()):
        log, places, spans = shelf.index.snapshot()
        arrays |= {f"log.{i}": log, f"places.{i}": places, f"spans.{i}": spans}
        arrays[f"marks.{i}"] = np.array([mark for marks in shelf.marks for mark in marks], np.uint64)
        arrays[f"counts.{i}"] = np.array([len(marks) for marks in shelf.marks], np.int64)
    return arrays


def _unpack(arrays: Arrays, tenants: list[str], memory: Memory) -> None:
    for i, tenant in enumerate(tenants):
        snapshot = arrays[f"log.{i}"], arrays[f"places.{i}"], arrays[f"spans.{i}"]
        shelf = Shelf(memory.depth)
        shelf.index = ContextIndex.restore(memory.depth, snapshot)
        ends = np.cumsum(arrays[f"counts.{i}"])[:-1]
        for marks in np.split(arrays[f"marks.{i}"], ends):
            shelf.hold(marks.tolist())
        memory.shelves[tenant] = shelf
        memory.held += shelf.index.held
    memory.order = deque(tenants[i] for i in arrays["order"].tolist())
    documents = {tenant: shelf.index.documents for tenant, shelf in memory.shelves.items()}
    marked = {tenant: len(shelf.marks) for tenant, shelf in memory.shelves.items()}
    if not Counter(memory.order) == documents == marked:
        raise ValueError("documents are missing or doubled")
