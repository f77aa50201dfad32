"""The memory of past sequences: an index for each tenant, bounded over all of them, saved to one file."""

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
from paceline.drafters.suffix.index import SuffixIndex
from paceline.drafters.suffix.native import new_index, restored_index
from paceline.errors import (
    CorruptModel,
    DrafterMismatch,
    ModelError,
    PacelineError,
    SettingError,
    UnknownModel,
)

STRIDE: Final = 32  # tokens from one prefix hash to the next
FORMAT: Final = "paceline suffix memory 1"
Arrays: TypeAlias = dict[str, NDArray[Any]]


class TenantMemory:
    """One tenant's documents. Prefix hashes every STRIDE tokens tell which prefixes are known."""

    def __init__(self, depth: int) -> None:
        self.index = new_index(depth)
        self.hashes: deque[list[int]] = deque()  # of each document, oldest first
        self.holders: dict[int, int] = {}  # hash -> number of the latest document that holds it
        self.evicted = 0  # documents; the oldest one left has this number

    def known(self, marks: Sequence[int]) -> int:
        """How many of a sequence's prefix hashes, from its start, are held."""
        return next((i for i, mark in enumerate(marks) if mark not in self.holders), len(marks))

    def add(self, context: Sequence[int], tokens: Sequence[int], marks: list[int]) -> None:
        self.index.open(context)
        self.index.extend(tokens)
        self.hold(marks)

    def hold(self, marks: list[int]) -> None:
        """Records the prefix hashes of the document added last."""
        self.holders.update(dict.fromkeys(marks, self.evicted + len(self.hashes)))
        self.hashes.append(marks)

    def evict(self) -> None:
        self.index.evict()
        for mark in self.hashes.popleft():
            if self.holders[mark] == self.evicted:
                del self.holders[mark]
        self.evicted += 1


class Memory:
    """Agents send their whole history every turn; only the new part of a sequence is indexed."""

    def __init__(self, max_tokens: int, depth: int) -> None:
        self.max_tokens = max_tokens
        self.depth = depth
        self.tenants: dict[str, TenantMemory] = {}
        self.order: deque[str] = deque()  # the tenant of each document, oldest first
        self.held = 0

    def __len__(self) -> int:
        """Tokens held, of all tenants."""
        return self.held

    def index(self, tenant: str) -> SuffixIndex | None:
        of_tenant = self.tenants.get(tenant)
        return of_tenant.index if of_tenant else None

    def known(self, tenant: str, tokens: Sequence[int]) -> int:
        """How many tokens from the start of a sequence are indexed already."""
        of_tenant = self.tenants.get(tenant)
        return STRIDE * of_tenant.known(prefix_hashes(tokens)) if of_tenant else 0

    def learn(self, tenant: str, tokens: Sequence[int]) -> None:
        of_tenant = self.tenants.get(tenant) or TenantMemory(self.depth)
        marks = prefix_hashes(tokens)
        known = of_tenant.known(marks)
        start, room = known * STRIDE, self.max_tokens - 2  # a separator and the last token of the context
        if len(tokens) - start > room:
            start, marks = len(tokens) - room, []
        if start >= len(tokens):
            return
        self.tenants[tenant] = of_tenant
        before = of_tenant.index.held
        of_tenant.add(tokens[max(0, start - self.depth) : start], tokens[start:], marks[known:])
        self.held += of_tenant.index.held - before
        self.order.append(tenant)
        self.shrink()

    def shrink(self) -> None:
        """Forgets the oldest documents until the rest fit."""
        while self.held > self.max_tokens:
            tenant = self.order.popleft()
            of_tenant = self.tenants[tenant]
            self.held -= of_tenant.index.held
            of_tenant.evict()
            self.held += of_tenant.index.held
            if not of_tenant.hashes:
                del self.tenants[tenant]


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
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
        raise ModelError(f"cannot write {path}: {reason}; choose another path or make room") from error


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
    names = list(memory.tenants)
    header = {"format": FORMAT, "tokenizer": tokenizer, "depth": memory.depth, "tenants": names}
    number = {tenant: i for i, tenant in enumerate(names)}
    arrays: Arrays = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "order": np.array([number[tenant] for tenant in memory.order], np.int64),
    }
    for i, of_tenant in enumerate(memory.tenants.values()):
        log, positions, spans = of_tenant.index.snapshot()
        arrays |= {f"log.{i}": log, f"places.{i}": positions, f"spans.{i}": spans}
        arrays[f"marks.{i}"] = np.array([mark for marks in of_tenant.hashes for mark in marks], np.uint64)
        arrays[f"counts.{i}"] = np.array([len(marks) for marks in of_tenant.hashes], np.int64)
    return arrays


def _unpack(arrays: Arrays, tenants: list[str], memory: Memory) -> None:
    for i, tenant in enumerate(tenants):
        snapshot = arrays[f"log.{i}"], arrays[f"places.{i}"], arrays[f"spans.{i}"]
        of_tenant = TenantMemory(memory.depth)
        of_tenant.index = restored_index(memory.depth, snapshot)
        ends = np.cumsum(arrays[f"counts.{i}"])[:-1]
        for marks in np.split(arrays[f"marks.{i}"], ends):
            of_tenant.hold(marks.tolist())
        memory.tenants[tenant] = of_tenant
        memory.held += of_tenant.index.held
    memory.order = deque(tenants[i] for i in arrays["order"].tolist())
    documents = {tenant: of_tenant.index.documents for tenant, of_tenant in memory.tenants.items()}
    marked = {tenant: len(of_tenant.hashes) for tenant, of_tenant in memory.tenants.items()}
    if not Counter(memory.order) == documents == marked:
        raise ValueError("documents are missing or doubled")
