"""The engine for asyncio: AsyncEngine runs requests on EngineThread and yields their outputs' deltas.

As vLLM's v1/engine/async_llm.py. One thread runs the engine; everybody else talks to it through a queue.
"""

import asyncio
import contextvars
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Protocol, TypeVar, cast

from paceline import __version__
from paceline.config import SamplingParams, SpecConfig
from paceline.constraints import OutputSpec
from paceline.errors import PacelineError, ShuttingDown
from paceline.llm import LLM, EncodedPrompt, Prompt
from paceline.log import log_error
from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.estimates_saver import EstimatesSaver
from paceline.server.telemetry.metrics import Metrics
from paceline.types import Round, Seq

log = logging.getLogger("paceline.server")

T = TypeVar("T")

MAX_PREPARING: Final = 32  # requests at once; more than may wait for a grammar

Deliver = Callable[[Round], None]  # called in the engine's thread; must not block
Inbox = asyncio.Queue[tuple[RequestOutput, Round]]

ADMITTED: Final = OutputDelta((), (), (), (), None)  # comes before all others where calls were predicted


@dataclass(frozen=True, slots=True)
class GenerateParams:
    """One prompt and how to answer it; the `n` answers differ in `params.choice`."""

    prompt: Prompt
    params: SamplingParams
    output: OutputSpec
    spec: SpecConfig | None
    n: int
    prediction: str | Sequence[int]  # a text, or the index that another prompt of the request has
    template: Mapping[str, Any] = field(default_factory=dict)  # variables of the chat template
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    prefill: bool = False  # the prompt is read into the cache, and nothing is generated
    embedded: bool = False  # the prompt is read, and its hidden states are pooled to a vector


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt as tokens, with its first choice, of which the others are copies."""

    first: RequestOutput
    n: int


class AsyncEngine:
    """A model, the thread that runs its engine, and the metrics that count its rounds."""

    def __init__(
        self, llm: LLM, thread: "EngineThread", metrics: Metrics, saver: EstimatesSaver | None = None
    ) -> None:
        self.llm = llm
        self.thread = thread
        self.metrics = metrics
        self._saver = saver
        self._pool = ThreadPoolExecutor(MAX_PREPARING, "paceline-prepare")
        self._large = ThreadPoolExecutor(1, "paceline-large")

    def start(self) -> None:
        self.thread.start()
        if self._saver is not None:
            self._saver.start()

    def stop(self, timeout: float) -> None:
        """Requests that still run end with an error."""
        self.thread.stop(timeout)
        if self._saver is not None:
            self._saver.close(timeout)

    def close(self, timeout: float) -> None:
        """Stops, for good: the memory of the model is free once nobody holds this object."""
        self.stop(timeout)
        self.llm.target.flush(timeout)
        for pool in (self._pool, self._large):
            pool.shutdown(wait=False)

    @property
    def nbytes(self) -> int:
        """Of the weights and the cache in memory."""
        return self.llm.target.bytes_held + (self.llm.engine.config.cache_mb << 20)

    async def in_thread(self, call: Callable[[], T], large: bool = False) -> T:
        """As asyncio.to_thread, with threads of our own: some wait for large grammars, the others go on.

        large: for work that grows with a large body. Such calls wait for one another: many at once would take
        Python's lock from the engine's thread, and its cores.
        """
        context, pool = contextvars.copy_context(), self._large if large else self._pool
        return await asyncio.get_running_loop().run_in_executor(pool, context.run, call)

    @property
    def drafters(self) -> dict[str, str]:
        """The loaded drafters, by each name that a request may give them."""
        return {**self.llm.trained, **{name: name for name in self.llm.drafters}}

    @property
    def fingerprint(self) -> str:
        """Names the model, its weights and the engine."""
        return f"{self.llm.name}-{self.llm.target.fingerprint[:12]}-paceline-{__version__}"

    async def prepare(
        self, context: RequestContext, params: GenerateParams, first_index: int = 0
    ) -> PreparedPrompt:
        """Renders a prompt and compiles its grammar, in threads. first_index: that of the first choice."""
        encoded = await self.in_thread(partial(self._encode, params), context.large)
        context.check_prompt_length(len(encoded.tokens))
        return await self.in_thread(partial(self._prepare, context, encoded, params, first_index))

    def max_usage(self, prepared: PreparedPrompt) -> int:
        """The tokens that a prompt and all its choices may use."""
        seq = prepared.first.seq
        room = max(0, self.llm.target.max_context - seq.prompt_len)
        return seq.prompt_len + (0 if seq.prefill else prepared.n * min(seq.params.max_tokens, room))

    async def generate(
        self, context: RequestContext, prepared: PreparedPrompt
    ) -> AsyncGenerator[tuple[RequestOutput, OutputDelta], None]:
        """Answers one prompt: the deltas of all its choices as they come.

        Each output is in `context.outputs` from its admission on. The first choice reads the prompt; the
        others begin once that is in the prefix cache. Predicted tool calls are announced by ADMITTED, before
        the prompt is read.
        """
        inbox: Inbox = asyncio.Queue()
        outputs: list[RequestOutput] = []  # those submitted
        choices = 1
        every = await self.in_thread(partial(self._choices, prepared))
        try:
            while True:
                while len(outputs) < choices:
                    output = every[len(outputs)]
                    self.metrics.set_route(output.seq.id, context.route.name)
                    outputs.append(output)
                    context.outputs.append(output)
                    # The first output of a request needs slots for all of them.
                    slots = 0 if output.index else prepared.n
                    if (error := await self._submit(output, slots, inbox)) is not None:
                        outputs.remove(output)
                        context.outputs.remove(output)
                        raise error
                    if output.index == 0 and context.tool_prediction is not None:
                        yield output, ADMITTED
                output, r = await inbox.get()
                delta = output.take(r)
                if r.error is not None:
                    raise r.error
                yield output, delta
                if outputs[0].token_ids or outputs[0].finish:
                    choices = prepared.n
                if len(outputs) == prepared.n and all(output.finish for output in outputs):
                    return
        finally:
            for output in outputs:
                if output.finish is None:
                    self.thread.cancel(output.seq.id)
                if output.seq.reader is not None:
                    self.thread.between_passes(partial(self.llm.forget_embedded, output))

    def _encode(self, params: GenerateParams) -> EncodedPrompt:
        if params.embedded:
            return self.llm.encode_embedded(cast(str | Sequence[int], params.prompt))
        return self.llm.encode(
            params.prompt,
            params.output,
            template=params.template,
            add_generation_prompt=params.add_generation_prompt,
            continue_final_message=params.continue_final_message,
            prefix=params.prefill,
        )

    def _prepare(
        self, context: RequestContext, prompt: EncodedPrompt, params: GenerateParams, first_index: int
    ) -> PreparedPrompt:
        whose: Any = {"tenant": context.tenant, "remember": context.remember}
        if params.embedded:
            first = self.llm.prepare_embedding(prompt, **whose)
        elif params.prefill:
            first = self.llm.prepare_prefill(prompt, params.params, **whose)
        else:
            first = self.llm.prepare(
                prompt,
                params.params,
                params.output,
                spec=params.spec,
                prediction=params.prediction,
                **whose,
            )
        first.seq.route = context.route.name
        first.seq.client, first.seq.anonymous = context.client, context.anonymous
        first.seq.priority, first.seq.deadline = context.priority, context.deadline
        first.index, first.started = first_index, context.arrived
        return PreparedPrompt(first, params.n)

    def _choices(self, prepared: PreparedPrompt) -> list[RequestOutput]:
        first = prepared.first
        others = [self.llm.another_choice(first, choice) for choice in range(1, prepared.n)]
        for index, output in enumerate(others, first.index + 1):
            output.index, output.started = index, first.started
        return [first, *others]

    async def _submit(self, output: RequestOutput, slots: int, inbox: Inbox) -> PacelineError | None:
        """Why the engine refused it, or None."""
        loop = asyncio.get_running_loop()
        admitted: asyncio.Future[PacelineError | None] = loop.create_future()

        def deliver(r: Round) -> None:
            _call_soon(loop, lambda: inbox.put_nowait((output, r)))

        def answer(error: PacelineError | None) -> None:
            _call_soon(loop, lambda: None if admitted.done() else admitted.set_result(error))

        self.thread.submit(output.seq, deliver, answer, slots)
        return await admitted


def _call_soon(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    """From the engine's thread; a loop that is closed has nobody left to call."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)


class Engine(Protocol):
    """The part of an engine that its thread uses."""

    @property
    def busy(self) -> bool: ...
    @property
    def running(self) -> int: ...
    @property
    def waiting(self) -> int: ...
    @property
    def idle_s(self) -> float: ...
    def submit(self, seq: Seq, slots: int = 1) -> None: ...
    def cancel(self, seq_id: str) -> None: ...
    def step(self) -> list[Round]: ...
    def give_up(self, error: PacelineError) -> list[Round]: ...


@dataclass(frozen=True, slots=True)
class _Submit:
    seq: Seq
    deliver: Deliver
    answer: Callable[[PacelineError | None], None]  # called once: why it was refused, or None
    slots: int


@dataclass(frozen=True, slots=True)
class _Cancel:
    seq_id: str


@dataclass(frozen=True, slots=True)
class _Call:
    call: Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Stop:
    pass


class PassTurns:
    """Passes of several models, one at a time, in the order they are asked for: each has all the cores.

    Threads of two passes at once would take the cores from one another in the middle of their products.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._asked = self._ended = 0

    def __enter__(self) -> None:
        with self._changed:
            turn = self._asked
            self._asked += 1
            self._changed.wait_for(lambda: self._ended == turn)

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._ended += 1
            self._changed.notify_all()


class EngineThread:
    """Runs passes while there is work, and sleeps while there is none."""

    def __init__(self, engine: Engine, turns: AbstractContextManager[None] | None = None) -> None:
        """turns: held during each pass; None: no other model runs any."""
        self._engine = engine
        self._turns = turns or nullcontext()
        self._inbox: SimpleQueue[_Submit | _Cancel | _Call | _Stop] = SimpleQueue()
        self._delivers: dict[str, Deliver] = {}
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="paceline-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def running(self) -> int:
        return self._engine.running

    @property
    def waiting(self) -> int:
        return self._engine.waiting + self._inbox.qsize()

    def submit(
        self, seq: Seq, deliver: Deliver, answer: Callable[[PacelineError | None], None], slots: int = 1
    ) -> None:
        """`answer` is called once with the engine's refusal or None; then `deliver` gets every round."""
        self._inbox.put(_Submit(seq, deliver, answer, slots))
        if self._ended:  # the thread may have read its inbox for the last time before this
            self._refuse_all()

    def cancel(self, seq_id: str) -> None:
        self._inbox.put(_Cancel(seq_id))

    def between_passes(self, call: Callable[[], None]) -> None:
        """Runs a call in the engine's thread; it must be quick."""
        self._inbox.put(_Call(call))

    def stop(self, timeout: float) -> None:
        """Ends the thread; requests that still run end with an error."""
        self._inbox.put(_Stop())
        self._thread.join(timeout)

    def _run(self) -> None:
        while True:
            while not self._engine.busy or not self._inbox.empty():
                if not self._take(self._inbox.get()):
                    return
            if (idle_s := self._engine.idle_s) > 0:  # any message ends the wait
                with suppress(Empty):
                    if not self._take(self._inbox.get(timeout=idle_s)):
                        return
                continue
            try:
                with self._turns:
                    rounds = self._engine.step()
            except Exception as problem:
                log_error(log, "a pass failed; the requests in it end", problem)
                rounds = self._engine.give_up(PacelineError(f"internal error: {type(problem).__name__}"))
            self._deliver_rounds(rounds)

    def _take(self, message: _Submit | _Cancel | _Call | _Stop) -> bool:
        if isinstance(message, _Stop):
            self._deliver_rounds(self._engine.give_up(ShuttingDown()))
            self._ended = True
            self._refuse_all()
            return False
        if isinstance(message, _Cancel):
            self._delivers.pop(message.seq_id, None)
            self._engine.cancel(message.seq_id)
        elif isinstance(message, _Call):
            self._call(message.call)
        else:
            self._admit(message)
        return True

    def _admit(self, message: _Submit) -> None:
        try:
            self._engine.submit(message.seq, message.slots)
        except PacelineError as error:
            message.answer(error)
        except Exception as problem:
            log_error(log, "a request could not be admitted", problem)
            message.answer(PacelineError(f"internal error: {type(problem).__name__}"))
        else:
            self._delivers[message.seq.id] = message.deliver
            message.answer(None)

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as problem:
            log_error(log, "a change between passes failed", problem)

    def _refuse_all(self) -> None:
        """Nobody waits forever for a thread that has ended."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            if isinstance(message, _Submit):
                message.answer(ShuttingDown())

    def _deliver_rounds(self, rounds: list[Round]) -> None:
        for r in rounds:
            deliver = self._delivers.get(r.request)
            if r.finish is not None:
                self._delivers.pop(r.request, None)
            if deliver is not None:
                deliver(r)
