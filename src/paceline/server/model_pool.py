"""The models of a server: loaded when a request names them, unloaded when another one needs the room.

As Ollama and llama-swap do it. Requests for a model that is not loaded wait, up to a bound. Loads come one at
a time, in the order in which they were first asked for. To make room, models without requests go first, of
those the one used least recently; where all have some, the one used least recently gets no further requests
until those it has have ended. So neither of two busy models keeps the other one out.
"""

import asyncio
import gc
import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar

from paceline.errors import Busy, PacelineError, SettingError, ShuttingDown, TimedOut, UsageError, short
from paceline.log import log_error
from paceline.server.telemetry.metrics import Metrics
from paceline.target.hardware import trim_heap
from paceline.types import CacheStats
from paceline.web.api_errors import NOT_LOADED, ApiError

if TYPE_CHECKING:
    from paceline.engine.engine_thread import EngineThread
    from paceline.llm import LLM
    from paceline.server.async_engine import AsyncEngine

log = logging.getLogger("paceline.server")

T = TypeVar("T")
State = Literal["unloaded", "loading", "loaded", "failed"]

RETRY_LOAD_S: Final = 10.0  # what a client is told after a load that failed
UNLOAD_S: Final = 10.0  # for the threads of a model to end
MB: Final = 1 << 20


@dataclass(slots=True, eq=False)
class ServedModel:
    """One model of the server; its metrics outlive its engine."""

    names: tuple[str, ...]  # the first is its id
    metrics: Metrics
    nbytes: int = 0  # of weights and cache: an estimate until it is loaded
    engine: "AsyncEngine | None" = None  # while it is loaded
    max_model_len: int | None = None  # None: it was never loaded
    state: State = "unloaded"
    requests: int = 0  # that have its engine
    leaving: bool = False  # it gets no further requests, since another model needs its room
    used: float = 0.0  # when a request came or ended, by time.monotonic
    waiting: "list[asyncio.Future[AsyncEngine]]" = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def running(self) -> int:
        """Outputs being written."""
        return 0 if self.engine is None else self.engine.thread.running

    @property
    def queued(self) -> int:
        """Outputs that wait for a place, and requests that wait for the model."""
        return len(self.waiting) + (0 if self.engine is None else self.engine.thread.waiting)

    @property
    def cache(self) -> CacheStats | None:
        return None if self.engine is None else self.engine.llm.target.cache_stats


@dataclass(frozen=True, slots=True)
class PoolLimits:
    """Bounds on the models in memory. 0: none."""

    max_loaded: int = 0
    memory_mb: int = 0  # of weights and caches together
    max_waiting: int = 256  # requests that wait for models to be loaded

    def __post_init__(self) -> None:
        for name in ("max_loaded", "memory_mb", "max_waiting"):
            if getattr(self, name) < 0:
                raise SettingError(name, getattr(self, name), "0 or more")


class ModelPool:
    """All models of a server, on the event loop.

    load: reads a model and makes its engine. size: the bytes it will take; an error if it cannot be read,
    for which no other model has to go. Both are called in threads of their own.
    """

    def __init__(
        self,
        models: Sequence[ServedModel],
        load: "Callable[[ServedModel], AsyncEngine]",
        limits: PoolLimits | None = None,
        size: Callable[[ServedModel], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.models = tuple(models)
        self.limits = limits or PoolLimits()
        self._load, self._size, self._clock = load, size, clock
        self._by_name = {name: model for model in models for name in model.names}
        self._wanted: list[ServedModel] = []  # to be loaded, in this order
        self._loader: asyncio.Task[None] | None = None  # while there are any
        self._changed = asyncio.Event()  # a model has no requests any more, or a request waits no longer
        self._closed = False
        self._check()

    def _check(self) -> None:
        names = [name for model in self.models for name in model.names]
        if twice := [name for name in names if names.count(name) > 1]:
            raise UsageError(f"two models are called {twice[0]!r}: give one of them another name")
        for model in self.models:
            if 0 < self.limits.memory_mb * MB < model.nbytes:
                raise UsageError(
                    f"{model.name} needs about {model.nbytes // MB:,} MB with its cache, and the models may "
                    f"have {self.limits.memory_mb:,} together: raise --models-memory-mb or lower --cache-mb"
                )

    @property
    def default(self) -> ServedModel:
        """The one that a request without a name gets."""
        return self.models[0]

    @property
    def loaded(self) -> "list[tuple[ServedModel, AsyncEngine]]":
        return [(model, model.engine) for model in self.models if model.engine is not None]

    def find(self, name: str | None) -> ServedModel:
        if name is None:
            return self.default
        if name not in self._by_name:
            served = ", ".join(repr(model.name) for model in self.models)
            be = "is" if len(self.models) == 1 else "are"
            message = f"the model {short(name)} is not served here; {served} {be}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return self._by_name[name]

    def load_default(self) -> "tuple[LLM, EngineThread]":
        """Before the event loop runs: a model that cannot be loaded shows at once."""
        engine = self._load(self.default)
        self._loaded(self.default, engine)
        return engine.llm, engine.thread

    def start(self) -> None:
        for _, engine in self.loaded:
            engine.start()

    def end_requests(self) -> None:
        """Those that still run, or wait for a model, end with an error."""
        self._closed = True
        for model in self.models:
            _refuse(model, ShuttingDown)
        self._changed.set()
        for _, engine in self.loaded:
            engine.thread.stop(0.0)

    async def stop(self, timeout: float) -> None:
        """As `end_requests`, and waits for the threads."""
        self.end_requests()
        for _, engine in self.loaded:
            try:
                await asyncio.to_thread(engine.stop, timeout)
            except RuntimeError:  # no memory for a thread
                engine.stop(timeout)

    def try_acquire(self, model: ServedModel) -> "AsyncEngine | None":
        """Keeps a model loaded until `release`; None: it is not, and `acquire` waits for that."""
        if model.engine is None or model.leaving:
            return None
        self._enter(model)
        return model.engine

    async def acquire(self, model: ServedModel, deadline: float | None = None) -> "AsyncEngine":
        """Waits until the model is loaded, and keeps it so until `release`. deadline: by time.monotonic."""
        if (engine := self.try_acquire(model)) is not None:
            return engine
        if self._closed:
            raise ShuttingDown
        waiting = sum(len(other.waiting) for other in self.models)
        if 0 < self.limits.max_waiting <= waiting:
            raise Busy(f"{waiting} requests wait for models to be loaded already: try again later")
        future: asyncio.Future[AsyncEngine] = asyncio.get_running_loop().create_future()
        model.waiting.append(future)
        self._want(model)
        try:
            async with asyncio.timeout(None if deadline is None else max(0.0, deadline - self._clock())):
                return await future
        except BaseException as error:
            if future in model.waiting:
                model.waiting.remove(future)
                self._changed.set()  # it may have been the last one
            elif future.done() and not future.cancelled() and future.exception() is None:
                self.release(model)  # it was let in while its client left
            if isinstance(error, TimeoutError):
                raise TimedOut("the request's time is up: its model was not loaded by then") from None
            raise

    def release(self, model: ServedModel) -> None:
        model.requests -= 1
        model.used = self._clock()
        if not model.requests:
            self._changed.set()

    def _enter(self, model: ServedModel) -> None:
        model.requests += 1
        model.used = self._clock()

    def _want(self, model: ServedModel) -> None:
        if model not in self._wanted:
            self._wanted.append(model)
        if self._loader is None:
            self._loader = asyncio.create_task(self._load_wanted())

    async def _load_wanted(self) -> None:
        try:
            while self._wanted and not self._closed:
                model = self._wanted[0]
                if model.waiting:  # else those who asked for it have left
                    await self._load_one(model)
                self._wanted.remove(model)
        finally:
            self._loader = None

    async def _load_one(self, model: ServedModel) -> None:
        try:
            if model.engine is None:
                if self._size is not None:
                    model.nbytes = await _in_thread(partial(self._size, model), "paceline-size")
                await self._make_room(model)
            if self._closed or not model.waiting:
                return
            if model.engine is None:
                started, model.state = self._clock(), "loading"
                engine = await _in_thread(partial(self._load, model), f"paceline-load-{model.name}")
                if self._closed:
                    return
                engine.start()
                self._loaded(model, engine)
                model.metrics.model_load("loaded")
                log.info("%s is loaded, in %.1f s", model.name, self._clock() - started)
        except Exception as problem:
            model.state = "failed"
            model.metrics.model_load("failed")
            if isinstance(problem, PacelineError):
                log.error("%s could not be loaded: %s", model.name, problem)
            else:
                log_error(log, f"{model.name} could not be loaded", problem)
            _refuse(model, lambda: _load_failed(model))
        else:
            self._admit(model)

    def _loaded(self, model: ServedModel, engine: "AsyncEngine") -> None:
        model.engine, model.state, model.used = engine, "loaded", self._clock()
        model.max_model_len = engine.llm.target.max_context
        model.nbytes = max(model.nbytes, engine.nbytes)

    def _admit(self, model: ServedModel) -> None:
        """Lets in those that wait for a model, now that it is loaded."""
        waiting, model.waiting = model.waiting, []
        for future in waiting:
            if not future.done() and model.engine is not None:
                self._enter(model)
                future.set_result(model.engine)

    async def _make_room(self, model: ServedModel) -> None:
        """Unloads others until this one fits, or none is left: then the load itself will tell.

        Not for a model that nobody waits for any more.
        """
        try:
            while model.waiting and self.loaded and not self._closed and not self._fits(model):
                leaving = min(
                    (other for other, _ in self.loaded),
                    key=lambda other: (other.requests > 0, not other.leaving, other.used),
                )
                leaving.leaving = True
                if leaving.requests:
                    self._changed.clear()
                    await self._changed.wait()
                else:
                    await self._unload(leaving)
        finally:
            for other, _ in self.loaded:  # another one went instead
                if other.leaving:
                    other.leaving = False
                    self._admit(other)

    def _fits(self, model: ServedModel) -> bool:
        others, limits = [other for other, _ in self.loaded], self.limits
        if 0 < limits.max_loaded <= len(others):
            return False
        needed = model.nbytes + sum(other.nbytes for other in others)
        return not limits.memory_mb or needed <= limits.memory_mb * MB

    async def _unload(self, model: ServedModel) -> None:
        engine, model.engine = model.engine, None
        model.state, model.leaving = "unloaded", False
        assert engine is not None
        await _in_thread(partial(engine.close, UNLOAD_S), f"paceline-unload-{model.name}")
        del engine
        await _in_thread(_free_memory, "paceline-free")
        model.metrics.model_load("unloaded")
        log.info("%s is unloaded", model.name)


def _free_memory() -> None:
    gc.collect()  # a model and its drafters refer to one another
    trim_heap()


def _refuse(model: ServedModel, error: Callable[[], Exception]) -> None:
    waiting, model.waiting = model.waiting, []
    for future in waiting:
        if not future.done():
            future.set_exception(error())


def _load_failed(model: ServedModel) -> ApiError:
    return ApiError(
        503,
        f"the model {model.name!r} could not be loaded: the server's log says why",
        "server_error",
        "model",
        "model_not_loaded",
        RETRY_LOAD_S,
        NOT_LOADED,
    )


async def _in_thread(call: Callable[[], T], name: str) -> T:
    """As asyncio.to_thread, in a thread that the end of the process does not wait for."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(outcome: Callable[[], None]) -> None:
        if not future.done():
            outcome()

    def run() -> None:
        try:
            outcome = partial(future.set_result, call())
        except BaseException as problem:
            # No future can hold a StopIteration.
            holds = isinstance(problem, Exception) and not isinstance(problem, StopIteration)
            error = problem if holds else RuntimeError(type(problem).__name__)
            outcome = partial(future.set_exception, error)
        with suppress(RuntimeError):  # the loop is closed: nobody is left to tell
            loop.call_soon_threadsafe(settle, outcome)

    threading.Thread(target=run, name=name, daemon=True).start()
    return await future
