"""Speculative tool execution (PASTE, arXiv 2603.18897) on the client's side.

A server that was sent `predict_tool_calls` says early which calls an answer will probably hold. Calls of
tools marked safe begin then, beside the model. Those that nobody predicted begin as soon as their arguments
are written, while the model writes on, side by side. Four rules make a run with prefetching equal to one
without:

- only tools that have no effects run ahead of time;
- of an answer's calls, none begins as it is written behind one that is not safe;
- a result is used once, by the very call that was begun: same name, same arguments as JSON;
- results that were not used are dropped when the next answer begins; with `keep_s`, from then on once their
  call began so long ago; and in any case when a tool that is not safe runs.

An error of a tool that ran ahead of time is nobody's: the call runs again when it is needed.
"""

import asyncio
import contextvars
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from threading import Lock
from time import monotonic
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar

from paceline.errors import SettingError

Tool = Callable[..., Any]  # called with the arguments by name
Arguments = str | Mapping[str, Any]  # a JSON object, as text or as read

_Key = tuple[str, str]  # a call: its name and its arguments' JSON
_Running = TypeVar("_Running")  # a future or a task

MAX_RUNNING: Final = 4
FIELD: Final = "predicted_tool_calls"


@dataclass(slots=True)
class PrefetchStats:
    """What became of predicted calls, and of those that began as they were written."""

    started: int = 0
    used: int = 0  # each is a call that did not have to be waited for, or not as long
    written: int = 0  # not predicted, and begun as soon as they were written
    dropped: int = 0  # predicted or written, and nobody had them in time
    failed: int = 0  # needed, and run again because of an error
    skipped: int = 0  # not started: too many were running


def read_only_tools(tools: Iterable[Any]) -> list[str]:
    """The names of tools with `annotations.readOnlyHint`: MCP's objects, or OpenAI's with that field."""
    names = []
    for tool in tools:
        function = _member(tool, "function") or tool
        hints = _member(tool, "annotations") or _member(function, "annotations")
        name = _member(function, "name")
        if isinstance(name, str) and hints is not None and _member(hints, "readOnlyHint") is True:
            names.append(name)
    return names


@dataclass(frozen=True, slots=True)
class _Call:
    name: str
    arguments: dict[str, Any]
    key: _Key  # equal for calls whose arguments are equal as JSON; 1 and 1.0 differ

    @staticmethod
    def of(name: str, arguments: Arguments) -> "_Call":
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(value, Mapping):
            raise ValueError(f"the arguments of a tool call are a JSON object, not {type(value).__name__}")
        return _Call(name, dict(value), (name, json.dumps(value, sort_keys=True)))


@dataclass(frozen=True, slots=True)
class _Begun(Generic[_Running]):
    """A call that runs ahead of time, or has run."""

    at: float  # seconds of the monotonic clock
    answer: int  # its number
    predicted: bool  # or written
    running: _Running


class _WrittenCalls:
    """The calls of one answer, each as soon as its arguments are whole.

    Of several choices, those of the first.
    """

    def __init__(self, safe: Collection[str]) -> None:
        self._safe = safe
        self._names: dict[Any, str] = {}  # by index
        self._arguments: dict[Any, str] = {}
        self._ended = False  # behind a call that is not safe

    def safe_calls(self, chunk: Any) -> Iterator[_Call]:
        """Those that this chunk of a chat, or this event of /v1/responses, completes."""
        if _member(chunk, "type") == "response.output_item.done":
            item = _member(chunk, "item")
            if _member(item, "type") == "function_call":
                yield from self._completed(None, _member(item, "name"), _member(item, "arguments"))
            return
        for choice in _list(_member(chunk, "choices")):
            if not _member(choice, "index"):
                for part in _list(_member(_member(choice, "delta"), "tool_calls")):
                    function, index = _member(part, "function"), _member(part, "index")
                    name, arguments = _member(function, "name"), _member(function, "arguments")
                    yield from self._completed(index, name, arguments)

    def _completed(self, index: Any, name: Any, arguments: Any) -> Iterator[_Call]:
        """index: None: the call is whole."""
        known = "" if index is None else self._names.get(index, "")
        name = self._names[index] = known + (name if isinstance(name, str) else "")
        self._ended = self._ended or name not in self._safe
        if self._ended or not isinstance(arguments, str):
            return
        text = self._arguments[index] = ("" if index is None else self._arguments.get(index, "")) + arguments
        if text.rstrip().endswith("}"):  # a JSON object that can be read is one that cannot go on
            with suppress(ValueError, RecursionError):
                yield _Call.of(name, text)


class _Plan(ABC):
    """What both clients share: which tools may run ahead of time, and the fields of a request."""

    def __init__(
        self,
        tools: Mapping[str, Tool],
        safe: Collection[str],
        max_running: int = MAX_RUNNING,
        min_probability: float | None = None,
        keep_s: float = 0.0,
    ) -> None:
        """safe: tools without effects, see `read_only_tools`. min_probability: None: the server's default.

        keep_s: seconds for which a result may wait for a later answer's call. 0: it is for one answer.
        """
        unknown = sorted(set(safe) - set(tools))
        if unknown:
            raise SettingError(
                "safe", unknown, f"some of {sorted(tools)}", "give a function for each safe tool"
            )
        if max_running < 1:
            raise SettingError("max_running", max_running, "1 or more")
        if not keep_s >= 0:
            raise SettingError("keep_s", keep_s, "0 or more seconds")
        self._tools = dict(tools)
        self._safe = frozenset(safe)
        self._max_running = max_running
        self._min_probability = min_probability
        self._keep_s = keep_s
        self._answer = 0  # the number of the answer that began last
        self.stats = PrefetchStats()
        self._prepare()

    @abstractmethod
    def _prepare(self) -> None:
        """Makes what the calls of this client run in."""

    @property
    def extra_body(self) -> dict[str, Any]:
        """Fields for a request, a chat's or /v1/responses'; the openai package takes them as `extra_body`."""
        wish: dict[str, Any] = {"safe_tools": sorted(self._safe)}
        if self._min_probability is not None:
            wish["min_probability"] = self._min_probability
        return {"predict_tool_calls": wish}

    def _begun(self, running: _Running, predicted: bool) -> _Begun[_Running]:
        return _Begun(monotonic(), self._answer, predicted, running)

    def _old(self, ahead: Mapping[_Key, _Begun[Any]]) -> list[_Key]:
        """The calls of earlier answers whose results may wait no longer."""
        before = monotonic() - self._keep_s
        return [key for key, call in ahead.items() if call.answer != self._answer and call.at <= before]

    def _wanted(self, predicted: Iterable[Any]) -> Iterator["_Call"]:
        """Predicted calls that may run."""
        for call in predicted:
            function = _member(call, "function")
            name, arguments = _member(function, "name"), _member(function, "arguments")
            if not isinstance(name, str) or name not in self._safe:  # whatever the server says
                continue
            try:
                yield _Call.of(name, arguments)
            except (TypeError, ValueError):
                continue


class Prefetch(_Plan):
    """Runs predicted calls in threads.

    with Prefetch({"get_order": get_order, "cancel": cancel}, safe=["get_order"]) as prefetch:
        stream = client.chat.completions.create(..., stream=True, extra_body=prefetch.extra_body)
        for chunk in prefetch.watch(stream): ...   # the chunks as they are
        result = prefetch.run(name, arguments)     # for each call of the answer, in its order
    """

    def _prepare(self) -> None:
        self._pool = ThreadPoolExecutor(self._max_running, "prefetch")
        self._written_pool = ThreadPoolExecutor(self._max_running, "written")  # waits for no predicted call
        self._lock = Lock()
        self._ahead: dict[_Key, _Begun[Future[Any]]] = {}
        self._busy = 0  # threads with predicted calls, also with those that were dropped

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drops what is left; does not wait for it."""
        self.drop()
        for pool in (self._pool, self._written_pool):
            pool.shutdown(wait=False, cancel_futures=True)

    def watch(self, stream: Iterable[Any]) -> Iterator[Any]:
        """The chunks or events of one answer as they come: dicts, or objects of the openai package."""
        with self._lock:
            self._answer += 1
            self._drop(self._old(self._ahead))
        written = _WrittenCalls(self._safe)
        for chunk in stream:
            if predicted := _list(_member(chunk, FIELD)):
                self.start(predicted)
            for call in written.safe_calls(chunk):
                self._start_written(call)
            yield chunk

    def start(self, predicted: Iterable[Any]) -> None:
        """Begins predicted calls, those that are safe and not yet begun."""
        for call in self._wanted(predicted):
            with self._lock:
                self._drop(self._old(self._ahead))
                if call.key in self._ahead:
                    continue
                if self._busy >= self._max_running:
                    self.stats.skipped += 1
                    continue
                self._busy += 1
                self.stats.started += 1
                future = self._pool.submit(self._in_thread, self._prepared(call))
                self._ahead[call.key] = self._begun(future, predicted=True)

    def _start_written(self, call: _Call) -> None:
        with self._lock:
            if call.key not in self._ahead:
                self.stats.written += 1
                future = self._written_pool.submit(self._prepared(call))
                self._ahead[call.key] = self._begun(future, predicted=False)

    def _prepared(self, call: _Call) -> Callable[[], Any]:
        return partial(contextvars.copy_context().run, self._tools[call.name], **call.arguments)

    def _in_thread(self, run: Callable[[], Any]) -> Any:
        try:
            return run()
        finally:
            with self._lock:
                self._busy -= 1

    def run(self, name: str, arguments: Arguments) -> Any:
        """The result of a call that the model wrote: begun ahead of time, or run now."""
        tool, call = self._tools[name], _Call.of(name, arguments)
        if name not in self._safe:
            self.drop()
        with self._lock:
            self._drop(self._old(self._ahead))
            begun = self._ahead.pop(call.key, None)
            if begun is not None and begun.running.cancel():  # it still waits for others
                self._busy -= begun.predicted
                begun = None
        if begun is not None:
            try:
                result = begun.running.result()
            except Exception:
                self.stats.failed += 1
            else:
                self.stats.used += begun.predicted
                return result
        return tool(**call.arguments)

    def drop(self) -> None:
        """Forgets all results that were not used."""
        with self._lock:
            self._drop(list(self._ahead))

    def _drop(self, keys: Sequence[_Key]) -> None:
        """The caller holds the lock."""
        self.stats.dropped += len(keys)
        for key in keys:
            begun = self._ahead.pop(key)
            if begun.running.cancel() and begun.predicted:  # it had no thread yet
                self._busy -= 1


class AsyncPrefetch(_Plan):
    """For asyncio: `async for chunk in prefetch.watch(stream)`, `await prefetch.run(name, arguments)`.

    Tools may be coroutine functions; plain functions run in threads.
    """

    def _prepare(self) -> None:
        self._ahead: dict[_Key, _Begun[asyncio.Task[Any]]] = {}
        self._running: set[asyncio.Task[Any]] = set()  # predicted, also those that were dropped
        self._turns = asyncio.Semaphore(self._max_running)  # for written calls

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.drop()

    async def watch(self, stream: AsyncIterator[Any]) -> AsyncIterator[Any]:
        self._answer += 1
        self._drop(self._old(self._ahead))
        written = _WrittenCalls(self._safe)
        async for chunk in stream:
            if predicted := _list(_member(chunk, FIELD)):
                self.start(predicted)
            for call in written.safe_calls(chunk):
                self._start_written(call)
            yield chunk

    def start(self, predicted: Iterable[Any]) -> None:
        self._drop(self._old(self._ahead))
        for call in self._wanted(predicted):
            if call.key in self._ahead:
                continue
            if len(self._running) >= self._max_running:
                self.stats.skipped += 1
                continue
            self.stats.started += 1
            task = asyncio.ensure_future(_awaited(self._tools[call.name], call.arguments))
            self._ahead[call.key] = self._begun(task, predicted=True)
            self._running.add(task)
            task.add_done_callback(self._ended)

    def _start_written(self, call: _Call) -> None:
        if call.key not in self._ahead:
            self.stats.written += 1
            task = asyncio.ensure_future(self._in_turn(call))
            self._ahead[call.key] = self._begun(task, predicted=False)
            task.add_done_callback(self._ended)

    async def _in_turn(self, call: _Call) -> Any:
        async with self._turns:
            return await _awaited(self._tools[call.name], call.arguments)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved: asyncio would report it

    async def run(self, name: str, arguments: Arguments) -> Any:
        tool, call = self._tools[name], _Call.of(name, arguments)
        if name not in self._safe:
            self.drop()
        self._drop(self._old(self._ahead))
        begun = self._ahead.pop(call.key, None)
        if begun is not None:
            task = begun.running
            await asyncio.wait([task])
            if not task.cancelled() and task.exception() is None:
                self.stats.used += begun.predicted
                return task.result()
            self.stats.failed += 1
        return await _awaited(tool, call.arguments)

    def drop(self) -> None:
        """Forgets all results that were not used, and cancels calls that still run."""
        self._drop(list(self._ahead))

    def _drop(self, keys: Sequence[_Key]) -> None:
        self.stats.dropped += len(keys)
        for key in keys:
            self._ahead.pop(key).running.cancel()


async def _awaited(tool: Tool, arguments: Mapping[str, Any]) -> Any:
    if inspect.iscoroutinefunction(tool):
        return await tool(**arguments)
    result = await asyncio.to_thread(tool, **arguments)
    return await result if inspect.isawaitable(result) else result


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _member(value: Any, name: str) -> Any:
    """Of a dict or an object; None where there is none."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
