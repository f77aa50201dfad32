"""Runs requests on the engine's thread and hands their rounds to whoever awaits them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace

from paceline import __version__
from paceline.errors import PacelineError
from paceline.llm import LLM, Prepared
from paceline.server.choice import Choice, Piece
from paceline.server.openai.params import GenerateParams
from paceline.server.worker import EngineThread
from paceline.types import Round
from paceline.web.api_errors import ApiError, failure


@dataclass(frozen=True, slots=True)
class Caller:
    """On whose behalf a request runs, and with which rights."""

    tenant: str = ""
    priority: int = 0
    deadline: float | None = None  # by time.monotonic
    learn: bool = True
    admitted: bool = False  # with an earlier prompt of the same request


class AsyncEngine:
    """A model, its engine's thread, and the answers in flight."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.worker = EngineThread(llm.engine)

    @property
    def fingerprint(self) -> str:
        """Names the model, its weights and the engine."""
        return f"{self.llm.name}-{self.llm.target.fingerprint[:12]}-paceline-{__version__}"

    async def answer(
        self,
        asked: GenerateParams,
        caller: Caller,
        opened: list[Choice],
        check: Callable[[Choice], None] = lambda _: None,
        failed: Callable[[PacelineError], ApiError] = failure,
    ) -> AsyncGenerator[tuple[Choice, Piece], None]:
        """Pieces of all choices as they come; `opened` gets each that `check` and the engine let pass.

        The first choice reads the prompt; the others begin once that is in the cache. `failed` says what the
        client hears of an error before the first pass; it may take its time.
        """
        inbox: asyncio.Queue[tuple[Choice, Round]] = asyncio.Queue()
        wanted = 1
        try:
            while True:
                for index in range(len(opened), wanted):
                    choice = Choice(
                        index, await asyncio.to_thread(self._prepare, asked, caller, index, failed)
                    )
                    check(choice)
                    opened.append(choice)
                    try:
                        await self._submit(choice, inbox, failed)
                    except ApiError:
                        opened.pop()
                        raise
                choice, r = await inbox.get()
                piece = choice.take(r)
                if r.error is not None:
                    raise failure(r.error)
                yield choice, piece
                if opened[0].tally.tokens:
                    wanted = asked.n
                if len(opened) == asked.n and all(choice.finish for choice in opened):
                    return
        finally:
            for choice in opened:
                if choice.finish is None:
                    self.worker.cancel(choice.made.seq.id)

    def _prepare(
        self, asked: GenerateParams, caller: Caller, index: int, failed: Callable[[PacelineError], ApiError]
    ) -> Prepared:
        try:
            made = self.llm.prepare(
                asked.prompt,
                replace(asked.params, choice=index),
                asked.wanted,
                spec=asked.spec,
                prediction=asked.prediction,
                tenant=caller.tenant,
                learn=caller.learn,
                template=asked.template,
            )
        except PacelineError as error:
            raise failed(error) from error
        made.seq.priority, made.seq.deadline = caller.priority, caller.deadline
        made.seq.places = 0 if index or caller.admitted else asked.n
        return made

    async def _submit(
        self,
        choice: Choice,
        inbox: "asyncio.Queue[tuple[Choice, Round]]",
        failed: Callable[[PacelineError], ApiError],
    ) -> None:
        loop = asyncio.get_running_loop()
        let_in: asyncio.Future[PacelineError | None] = loop.create_future()

        def deliver(r: Round) -> None:
            _soon(loop, lambda: inbox.put_nowait((choice, r)))

        def answer(error: PacelineError | None) -> None:
            _soon(loop, lambda: None if let_in.done() else let_in.set_result(error))

        self.worker.submit(choice.made.seq, deliver, answer)
        if (error := await let_in) is not None:
            raise await asyncio.to_thread(failed, error)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """A loop that is closed has nobody left to hear it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
