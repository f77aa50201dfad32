"""suffix.cpp, called from Python: the same matches and drafts as ContextIndex, a tenth of the time."""

import ctypes
import logging
from array import array
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from paceline.drafters.suffix import index as reference
from paceline.drafters.suffix.index import ContextIndex, Snapshot, SuffixIndex, check_snapshot
from paceline.drafters.suffix.vote import VOTERS, Match, Nodes, columns, elect
from paceline.errors import NotCompiled
from paceline.native_build import Sources, Unit, load
from paceline.types import Cursor

SOURCES: Final = Sources("suffix", [Unit(Path(__file__).parent / "csrc" / "suffix.cpp")])


def new_index(depth: int) -> SuffixIndex:
    """The fastest there is on this machine."""
    library = _library()
    return ContextIndex(depth) if library is None else NativeIndex(depth, library)


def restored_index(depth: int, snapshot: Snapshot) -> SuffixIndex:
    """Raises ValueError where the parts do not make an index."""
    library = _library()
    if library is None:
        return ContextIndex.restore(depth, snapshot)
    return NativeIndex.restore(depth, snapshot, library)


class NativeIndex(SuffixIndex):
    """A log of documents in C++. A call keeps the interpreter's lock: getting it back could take longer."""

    def __init__(self, depth: int, library: "_Library") -> None:
        self.depth = depth
        self._library = library
        self._handle = library.new(depth, reference.BLOCK, reference.SLACK)
        if not self._handle:
            raise MemoryError
        self._sizes = (ctypes.c_int64 * 4)()
        self._make_room(8)

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.delete(handle)

    def __len__(self) -> int:
        return self._size(0)

    @property
    def documents(self) -> int:
        return self._size(1)

    @property
    def held(self) -> int:
        return self._size(2)

    def _size(self, which: int) -> int:
        self._library.sizes(self._handle, self._sizes)
        return self._sizes[which]

    def open(self, context: Sequence[int] = ()) -> None:
        words = array("I", context)
        _check(self._library.open(self._handle, words.buffer_info()[0], len(words)))

    def extend(self, tokens: Sequence[int]) -> None:
        words = array("I", tokens)
        _check(self._library.extend(self._handle, words.buffer_info()[0], len(words)))

    def evict(self) -> None:
        _check(self._library.evict(self._handle))

    def snapshot(self) -> Snapshot:
        self._library.trim(self._handle)
        log = np.empty(self._size(3), np.uint32)
        positions = np.empty(len(self), np.uint32)
        spans = np.empty((self.documents, 2), np.int64)
        self._library.copy(self._handle, log.ctypes.data, positions.ctypes.data, spans.ctypes.data)
        return log, positions, spans

    @classmethod
    def restore(cls, depth: int, snapshot: Snapshot, library: "_Library") -> "NativeIndex":
        check_snapshot(depth, snapshot)
        log, positions = (np.ascontiguousarray(part, np.uint32) for part in snapshot[:2])
        spans = np.ascontiguousarray(snapshot[2], np.int64)
        index = cls(depth, library)
        in_order = library.restore(
            index._handle,
            *(log.ctypes.data, len(log), positions.ctypes.data, len(positions)),
            *(spans.ctypes.data, len(spans)),
        )
        if not _check(in_order):
            raise ValueError("positions are out of order")
        return index

    def draft(
        self,
        tokens: Sequence[int],
        past: Any,
        after: Sequence[int],
        budget: int,
        width: int,
        min_chance: float,
        cursor: Cursor | None = None,
    ) -> Nodes | None:
        words, more = array("I", tokens), array("I", after)
        if cursor is not None:
            self.extend(tokens)
            matches = self._matches(past, more, budget)
            return columns(elect(matches, budget, width, min_chance, cursor)) if matches else None
        if budget > self._room:
            self._make_room(2 * budget)
        request = self._request
        request.budget, request.width, request.min_chance = budget, width, min_chance
        count = self._library.draft(
            self._handle,
            None if past is None else past._handle,
            words.buffer_info()[0],
            len(words),
            more.buffer_info()[0],
            len(more),
            self._request_at,
        )
        if count <= 0:
            _check(count)
            return None
        return tuple(self._tokens[:count]), tuple(self._parents[:count]), tuple(self._chances[:count])

    def _make_room(self, budget: int) -> None:
        self._room = budget
        self._tokens = (ctypes.c_uint32 * budget)()
        self._parents = (ctypes.c_int32 * budget)()
        self._chances = (ctypes.c_double * budget)()
        where = (ctypes.addressof(part) for part in (self._tokens, self._parents, self._chances))
        self._request = _Request(0, 0, 0.0, *where)
        self._request_at = ctypes.addressof(self._request)

    def _matches(self, past: Any, after: "array[int]", budget: int) -> list[Match]:
        """The best ones, each with a log of its own that holds what follows it."""
        lengths, following = (ctypes.c_int64 * VOTERS)(), array("I", bytes(4 * VOTERS * budget))
        count = self._library.matches(
            self._handle,
            None if past is None else past._handle,
            after.buffer_info()[0],
            len(after),
            budget,
            lengths,
            following.buffer_info()[0],
        )
        logs = [following[i * budget : (i + 1) * budget] for i in range(_check(count))]
        return [(length, 0, 0, log) for length, log in zip(lengths, logs, strict=False)]


class _Request(ctypes.Structure):
    """Field by field what suffix.cpp calls Request."""

    _fields_ = (
        ("budget", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("min_chance", ctypes.c_double),
        ("tokens", ctypes.c_void_p),
        ("parents", ctypes.c_void_p),
        ("chances", ctypes.c_void_p),
    )


def _check(count: int) -> int:
    if count < 0:
        raise MemoryError("no memory for the suffix index")
    return count


class _Library:
    """The functions of suffix.cpp."""

    def __init__(self, library: ctypes.CDLL) -> None:
        handle, number = ctypes.c_void_p, ctypes.c_int64
        quick = ctypes.PyDLL(library._name, handle=library._handle)

        def function(name: str, *types: Any, result: Any = number) -> Any:
            made = getattr(quick, f"paceline_suffix_{name}")
            made.argtypes, made.restype = types, result
            return made

        self.new = function("new", number, number, number, result=handle)
        self.delete = function("delete", handle, result=None)
        self.open = function("open", handle, handle, number)
        self.extend = function("extend", handle, handle, number)
        self.evict = function("evict", handle)
        self.sizes = function("sizes", handle, handle, result=None)
        self.trim = function("trim", handle, result=None)
        self.copy = function("copy", handle, handle, handle, handle, result=None)
        self.restore = function("restore", handle, handle, number, handle, number, handle, number)
        self.matches = function("matches", handle, handle, handle, number, number, handle, handle)
        self.draft = function("draft", handle, handle, handle, number, handle, number, handle)


@cache
def _library() -> _Library | None:
    try:
        return _Library(load(*SOURCES))
    except NotCompiled as error:
        logging.getLogger("paceline").info("%s", error)  # whoever loads a model has warned already
        return None
