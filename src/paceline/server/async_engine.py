"""The engine for asyncio: AsyncEngine runs requests on EngineThread and yields their outputs' deltas."""

import asyncio
import contextvars
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar, cast

from paceline import __version__
from paceline.config import SamplingParams, SpecConfig
from paceline.constraints import OutputSpec
from paceline.engine.engine_thread import EngineThread, submit
from paceline.errors import PacelineError
from paceline.llm import LLM, EncodedPrompt
from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.estimates_saver import EstimatesSaver
from paceline.server.routes import Route
from paceline.server.telemetry.metrics import Metrics
from paceline.text import Prompt
from paceline.types import Round

T = TypeVar("T")

MAX_PREPARING: Final = 32  # requests at once; more than may wait for a grammar

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
        self,
        llm: LLM,
        thread: EngineThread,
        metrics: Metrics,
        saver: EstimatesSaver | None = None,
        compiled: Callable[[OutputSpec], None] | None = None,
    ) -> None:
        """compiled: is told of what was compiled for requests that may be remembered."""
        self.llm = llm
        self.thread = thread
        self.metrics = metrics
        self._saver = saver
        self._compiled = compiled
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

    def spec(self, route: Route) -> SpecConfig:
        """How requests of a route speculate. It may be for several models: not each has all its drafters."""
        return route.spec(self.llm.spec, self.llm.drafters)

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
        inbox: asyncio.Queue[tuple[RequestOutput, Round]] = asyncio.Queue()
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
                    try:
                        await submit(self.thread, output.seq, partial(_put, inbox, output), slots)
                    except PacelineError:
                        outputs.remove(output)
                        context.outputs.remove(output)
                        raise
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
            if self._compiled is not None and context.remember:
                self._compiled(params.output)
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


def _put(inbox: asyncio.Queue[tuple[RequestOutput, Round]], output: RequestOutput, r: Round) -> None:
    inbox.put_nowait((output, r))
