"""Parts of a request's way that all endpoints share. The way itself is in chat.py, top to bottom."""

from abc import abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from paceline.errors import ConstraintError, PacelineError, PromptTooLong, SettingError, TextError
from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import Admission, RequestContext
from paceline.server.async_engine import ADMITTED, AsyncEngine, GenerateParams, PreparedPrompt
from paceline.server.model_pool import ModelPool
from paceline.server.openai.params import chat_params
from paceline.server.openai.protocol import ChatRequest, GenerationRequest, StreamOptions
from paceline.server.openai.rounds import round_report
from paceline.server.request_log import RequestLog
from paceline.server.tool_prediction import PredictionRequest, ToolPrediction, predicted_field
from paceline.text import CallDelta, Tokenizer
from paceline.types import TokenLogprob
from paceline.web.api_errors import ApiError, api_error, log_and_convert
from paceline.web.request_body import off_loop
from paceline.web.streaming import (
    DONE,
    cancelled_by_disconnect,
    event,
    gather_limited,
    merged,
    streaming_response,
)

MAX_BODY: Final = 8 << 20  # bytes
MAX_PARALLEL: Final = 16
KEEP_ALIVE_S: Final = 5.0
_PROMPTS: Final = ("messages", "prompt", "input")
_RENAMED: Final = {"stop_tokens": "stop_token_ids"}  # settings and OpenAI's names for them
_CONSTRAINT_PARAMS: Final = ("tools", "response_format", "text", "structured_outputs")
_RESPONSES: Final = (  # names of a chat's parameters, and those of /v1/responses
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    (".function.parameters", ".parameters"),
)

# Waits for the model of a request, and reads what the request wants of it.
ReadParams = Callable[[], Awaitable[Sequence[GenerateParams]]]


@dataclass(frozen=True, slots=True)
class Serving:
    """The base of an endpoint that generates text."""

    models: ModelPool
    admission: Admission
    log: RequestLog
    max_body: int = MAX_BODY  # bytes
    max_parallel: int = MAX_PARALLEL  # outputs at once of a request with many prompts
    keep_alive_s: float = KEEP_ALIVE_S  # without an event before a stream gets a comment; 0: none

    async def load(self, context: RequestContext) -> AsyncEngine:
        """The engine of the request's model, which stays loaded until the end of the request is recorded.

        Awaited where a client that leaves cancels it, and where a stream gets its comments meanwhile.
        """
        loaded = await self.models.acquire(context.model, context.deadline)
        return context.hold(loaded, partial(self.models.release, context.model))

    @contextmanager
    def recorded(self, context: RequestContext) -> Iterator[None]:
        """Records an error in its body as the end of the request. An engine error gets its parameter."""
        try:
            yield
        except PacelineError as error:
            named = request_error(error, context.body)
            self.log.finished(context, named)
            raise named from error
        except BaseException as error:
            self.log.finished(context, error)
            raise

    def limited(self, context: RequestContext, params: GenerateParams) -> GenerateParams:
        """The parameters within the limits of the route. The span gets them too."""
        limit = context.route.max_tokens
        if limit is not None and params.params.max_tokens > limit:
            fewest = min(params.params.min_tokens, limit)
            params = replace(params, params=replace(params.params, max_tokens=limit, min_tokens=fewest))
        context.span.set_request(params.params, params.n, context.request.streams)
        return params

    async def read_chat(
        self, http: Request, context: RequestContext, request: ChatRequest
    ) -> list[GenerateParams]:
        engine = await self.load(context)
        template = engine.llm.tokenizer.template
        read = partial(chat_params, request, engine.spec(context.route), engine.drafters, template)
        params = self.limited(context, await off_loop(http, read))
        if not request.prefill:
            await self._predict_tool_calls(context, request)
        return [params]

    async def _predict_tool_calls(self, context: RequestContext, request: ChatRequest) -> None:
        """Where the request wants it."""
        options = request.predict_tool_calls
        if options is None:
            return
        wanted = PredictionRequest.of(
            request.messages,
            request.tools or (),
            request.tool_choice,
            options.safe_tools or (),
            options.min_probability,
            options.max_calls,
        )
        tenant = None if context.anonymous else context.tenant
        context.tool_prediction = await self.log.predictions.predict(wanted, tenant, context.remember)

    async def prepare(
        self, context: RequestContext, params: Sequence[GenerateParams]
    ) -> list[PreparedPrompt]:
        """Tokenizes all prompts, and charges the key for all that they may use, before any of them runs."""
        engine = context.engine
        prepared = [await engine.prepare(context, params[0])]
        prediction = prepared[0].first.seq.prediction  # indexed once for all prompts
        for i, one in enumerate(params[1:], 1):
            one = replace(one, prediction=prediction)
            prepared.append(await engine.prepare(context, one, i * one.n))
        context.charge(sum(map(engine.max_usage, prepared)))
        return prepared

    async def run(self, http: Request, context: RequestContext, read: ReadParams) -> None:
        """Answers all prompts of a request that does not stream, and records its end."""
        with self.recorded(context):
            async with cancelled_by_disconnect(http):
                params = await read()
                prepared = await self.prepare(context, params)
                jobs = [self._run_one(context, one) for one in prepared]
                await gather_limited(jobs, max(1, self.max_parallel // params[0].n))
        context.outputs.sort(key=lambda output: output.index)
        self.log.finished(context)

    async def read_ahead(self, http: Request, context: RequestContext, read: ReadParams) -> dict[str, Any]:
        """Reads the prompts into the prefix cache, behind all requests that generate; returns the usage."""

        async def read_prefill() -> list[GenerateParams]:
            if context.request.streams:
                raise ApiError(400, "a prefill has no text to stream: leave stream out", param="stream")
            return [replace(one, prefill=True, n=1, prediction="") for one in await read()]

        await self.run(http, context, read_prefill)
        return usage(context.outputs)

    async def _run_one(self, context: RequestContext, prepared: PreparedPrompt) -> None:
        async with aclosing(context.engine.generate(context, prepared)) as deltas:
            async for _ in deltas:
                pass

    async def event_stream(
        self,
        http: Request,
        context: RequestContext,
        events: AsyncGenerator[bytes, None],
        failure: Callable[[ApiError], bytes],
    ) -> Response:
        """failure: the last events of a stream that had begun when the error came."""

        def failed(error: Exception) -> bytes:
            return failure(log_and_convert(error, context.endpoint))

        return await streaming_response(http, events, self.keep_alive_s, failed)


class ChunkServing(Serving):
    """The base of the two endpoints whose streams are chunks that end with DONE."""

    @abstractmethod
    def head(self, context: RequestContext) -> dict[str, Any]:
        """The fields that all chunks share."""

    @abstractmethod
    def first_chunk(self, context: RequestContext, output: RequestOutput) -> dict[str, Any]: ...

    @abstractmethod
    def chunks(
        self, context: RequestContext, output: RequestOutput, delta: OutputDelta
    ) -> Iterator[dict[str, Any]]:
        """The chunks of one round."""

    async def stream(self, http: Request, context: RequestContext, read: ReadParams) -> Response:
        return await self.event_stream(
            http, context, self._events(context, read), lambda error: event(error.body) + DONE
        )

    async def _events(self, context: RequestContext, read: ReadParams) -> AsyncGenerator[bytes, None]:
        """The chunks of each round as they come, whatever its prompt; the usage if requested; DONE."""
        assert isinstance(context.request, GenerationRequest)
        options = context.request.stream_options or StreamOptions()
        begun: set[int] = set()
        with self.recorded(context):
            params = await read()
            prepared = await self.prepare(context, params)
            streams = [context.engine.generate(context, one) for one in prepared]
            async with aclosing(merged(streams, max(1, self.max_parallel // params[0].n))) as deltas:
                async for output, delta in deltas:
                    if output.index not in begun:
                        begun.add(output.index)
                        unused = {"usage": None} if options.include_usage else {}
                        yield event(self.first_chunk(context, output) | unused)
                    if options.include_rounds and delta.tokens:
                        tokenizer = context.engine.llm.tokenizer
                        report = {"choices": [], "round": round_report(tokenizer, output)}
                        yield event(self.head(context) | report | usage_so_far(options, context.outputs))
                    for chunk in self.chunks(context, output, delta):
                        yield event(chunk | usage_so_far(options, context.outputs))
        context.outputs.sort(key=lambda output: output.index)
        self.log.finished(context)
        if options.include_usage:
            end = {"choices": [], "usage": usage(context.outputs)}
            yield event(self.head(context) | end | self.log.response_metrics(context))
        yield DONE


def newly_predicted(prediction: ToolPrediction, delta: OutputDelta) -> Iterator[dict[str, Any]]:
    """Fields of events: first before the prompt is read, then once a call's name is written."""
    calls = [prediction.calls] if delta is ADMITTED else []
    names = (part.name for part in delta.deltas if isinstance(part, CallDelta) and part.name is not None)
    calls += [prediction.given_name(name) for name in names]
    yield from (predicted_field(predicted) for predicted in calls if predicted)


def token_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """OpenAI's objects for tokens with their alternatives, in chats and responses."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        piece = tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(piece)}

    return [
        {**entry(t.token, t.logprob), "top_logprobs": [entry(token, p) for token, p in t.top]}
        for t in logprobs
    ]


def usage(outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """OpenAI's usage object; each prompt counts once."""
    prompts = [output.seq for output in outputs if output.seq.params.choice == 0]
    prompt_tokens = sum(seq.prompt_len for seq in prompts)
    output_tokens = sum(len(output.token_ids) for output in outputs)
    drafted = sum(output.drafted["prediction"] for output in outputs)
    accepted = sum(output.accepted["prediction"] for output in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(seq.cached for seq in prompts)},
        "completion_tokens_details": {
            "reasoning_tokens": sum(output.reasoning_tokens for output in outputs),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def usage_so_far(options: StreamOptions, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The `usage` field of a chunk that is not the last."""
    if options.continuous_usage_stats:
        return {"usage": usage(outputs)}
    return {"usage": None} if options.include_usage else {}


def request_error(error: PacelineError, body: Mapping[str, Any]) -> ApiError:
    """The API error for an error of the engine, with the parameter of this body that it is about."""
    if isinstance(error, ConstraintError):
        return api_error(ConstraintError(error.reason, _constraint_param(error.param, body)))
    if isinstance(error, SettingError):
        renamed = {**_RENAMED, "prompt": _prompt_param(body) or "prompt"}
        return api_error(error.renamed(renamed.get(error.setting, error.setting)))
    about_prompt = isinstance(error, TextError | PromptTooLong)
    return api_error(error, _prompt_param(body) if about_prompt else None)


def _prompt_param(body: Mapping[str, Any]) -> str | None:
    """The name of a request's prompt."""
    return next((name for name in _PROMPTS if body.get(name) is not None), None)


def _constraint_param(param: str | None, body: Mapping[str, Any]) -> str | None:
    if param is None:  # the only part that shapes the answer, if there is one
        shaping = [name for name in _CONSTRAINT_PARAMS if body.get(name) is not None]
        return shaping[0] if len(shaping) == 1 else None
    if "input" in body:
        for chat, responses in _RESPONSES:
            param = param.replace(chat, responses)
    return param
