"""The Python API for asyncio: `AsyncLLM`."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Self

from paceline import hub
from paceline.batches import Batch, Batches, Outcome, window
from paceline.config import SamplingParams
from paceline.engine.engine_thread import EngineThread, submit
from paceline.errors import PacelineError, ShuttingDown, UsageError
from paceline.llm import LLM, embedding
from paceline.output import Piece, PieceQueue, RequestOutput, Result
from paceline.text import Prompt
from paceline.tool_loop import AsyncTurns, Run, ToolLoop, ToolRuns
from paceline.types import Round


class AsyncLLM(
    ToolRuns[AsyncTurns, Coroutine[Any, Any, Run]],
    Batches[Coroutine[Any, Any, list[Result]], Coroutine[Any, Any, list[Outcome]]],
):
    """A loaded model for asyncio: the methods of `LLM`, awaited.

    Requests of any number of tasks share passes of the target, which run in a thread. A task that is
    cancelled cancels its request. The calls of a turn of `run` and `turns` run at once: functions in threads,
    coroutines in the loop.

    model: as for `LLM`, or an `LLM`, which nobody else may use meanwhile. settings: as for `LLM`.

    Loading a model takes time: `await asyncio.to_thread(AsyncLLM, "smollm2-135m")` leaves the loop running.

    Attributes: `llm`, the LLM inside.
    """

    def __init__(self, model: str | LLM = hub.DEFAULT_MODEL, **settings: Any) -> None:
        if isinstance(model, LLM) and settings:
            raise UsageError(f"{', '.join(settings)}: settings belong to the LLM that is given")
        self.llm = model if isinstance(model, LLM) else LLM(model, **settings)
        self.llm.check_unused()
        self._thread = self.llm.thread = EngineThread(self.llm.engine, closed=_closed)
        self._thread.start()
        weakref.finalize(self, self._thread.stop, 0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Ends the thread; requests that still run end with an error."""
        await asyncio.to_thread(self._thread.stop, None)

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> "AsyncStream":
        """An answer that begins when it is first awaited; options as for `LLM.stream`."""
        return AsyncStream(self, partial(self.llm.request, prompt, params, **options))

    async def generate(self, prompt: Prompt, params: SamplingParams | None = None, **options: Any) -> Result:
        """The whole answer at once; options as for `LLM.stream`."""
        return await self.stream(prompt, params, **options).read()

    async def prefill(self, prompt: Prompt, **options: Any) -> Result:
        """As `LLM.prefill`."""
        return await AsyncStream(self, partial(self.llm.prefill_request, prompt, **options)).read()

    async def embed(
        self, texts: str | Sequence[str] | Sequence[Sequence[int]], *, tenant: str = ""
    ) -> list[list[float]]:
        """As `LLM.embed`."""
        requests = await asyncio.to_thread(self.llm.embedding_requests, texts, tenant=tenant)
        return await asyncio.gather(*(self._embedding(request) for request in requests))

    async def _embedding(self, request: RequestOutput) -> list[float]:
        try:
            await AsyncStream(self, lambda: request).read()
        finally:
            self._thread.between_passes(partial(self.llm.forget_embedded, request))
        return embedding(request)

    if not TYPE_CHECKING:  # which would lose the parameters' types; these make coroutine functions of both

        @wraps(ToolRuns.run)
        async def run(self, *arguments, **options):
            return await super().run(*arguments, **options)

        @wraps(Batches.batch)
        async def batch(self, *arguments, **options):
            return await super().batch(*arguments, **options)

    async def _batch(self, batch: Batch) -> list[Outcome]:
        numbered, outcomes = enumerate(batch.prompts), dict[int, Outcome]()

        async def work(report: Callable[[Outcome], None]) -> None:
            for number, prompt in numbered:  # of which every worker takes the next
                try:
                    outcomes[number] = await self.generate(prompt, **batch.options)
                except PacelineError as error:
                    outcomes[number] = error
                report(outcomes[number])

        with batch.progress_bar() as report:
            workers = [asyncio.create_task(work(report)) for _ in range(window(self.llm.engine.config))]
            try:
                await asyncio.gather(*workers)
            finally:
                for worker in workers:
                    worker.cancel()
        return batch.in_order(outcomes)

    def _turns(self, loop: ToolLoop, options: Mapping[str, Any]) -> AsyncTurns:
        return AsyncTurns(loop, partial(self.generate, **options))


class AsyncStream(AsyncIterator[Piece]):
    """As Stream, for `async for`. Closing it, or cancelling the task that reads it, cancels the request."""

    def __init__(self, llm: AsyncLLM, prepare: Callable[[], RequestOutput]) -> None:
        self._llm = llm  # whose thread ends when nobody refers to it
        self._thread = llm._thread
        self._prepare = prepare
        self._inbox: asyncio.Queue[Round] = asyncio.Queue()
        self._queue: PieceQueue | None = None  # None: not begun
        self._closed = False

    async def __anext__(self) -> Piece:
        if self._closed:
            raise StopAsyncIteration
        try:
            queue = self._queue or await self._begin()
            while not queue.pieces:
                if queue.ended:
                    raise StopAsyncIteration
                queue.take(await self._inbox.get())
        except asyncio.CancelledError:
            self._cancel()
            raise
        return queue.pieces.popleft()

    async def _begin(self) -> PieceQueue:
        self._queue = PieceQueue(await asyncio.to_thread(self._prepare))
        output = self._queue.output
        try:
            await submit(self._thread, output.seq, self._inbox.put_nowait)
        except PacelineError:
            output.finish = "error"
            raise
        return self._queue

    async def read(self) -> Result:
        """Waits for the rest."""
        async for _ in self:
            pass
        return self.result

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        self._cancel()

    def __del__(self) -> None:
        self._cancel()

    def _cancel(self) -> None:
        self._closed = True
        if self._queue is not None:
            self._queue.close(self._thread.cancel)

    @property
    def rounds(self) -> Sequence[Round]:
        """Those so far: each with its draft, the accepted part of it, and its tokens."""
        return tuple(self._output.rounds)

    @property
    def result(self) -> Result:
        return self._output.result()

    @property
    def _output(self) -> RequestOutput:
        if self._queue is None:
            raise UsageError("the stream has not begun: read a piece of it first")
        return self._queue.output


def _closed() -> PacelineError:
    return ShuttingDown("the AsyncLLM was closed: make another one")
