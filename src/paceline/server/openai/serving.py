"""Parts of a request's way that all endpoints share. The way itself is in chat.py, top to bottom."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from paceline.errors import PacelineError
from paceline.output import RequestOutput
from paceline.server.admission import Admission, RequestContext
from paceline.server.async_engine import AsyncEngine
from paceline.server.openai.error_param import request_error
from paceline.server.openai.params import GenerateParams
from paceline.server.openai.protocol import StreamOptions
from paceline.server.request_log import RequestLog
from paceline.web.sse import MEDIA_TYPE, with_keep_alive
from paceline.web.tasks import cancelled_by_disconnect, gather_limited

MAX_BODY: Final = 8 << 20  # bytes
MAX_PARALLEL: Final = 16
KEEP_ALIVE_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Serving:
    """The base of an endpoint that generates text."""

    engine: AsyncEngine
    admission: Admission
    log: RequestLog
    max_body: int = MAX_BODY  # bytes
    max_parallel: int = MAX_PARALLEL  # outputs at once of a request with many prompts
    keep_alive_s: float = KEEP_ALIVE_S  # without an event before a stream gets a comment; 0: none

    @property
    def drafters(self) -> dict[str, str]:
        """The loaded drafters, by each name that a request may give them."""
        llm = self.engine.llm
        return {**llm.trained, **{name: name for name in llm.drafters}}

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
        """Within the limits of the route, as the span shows them."""
        limit = context.route.max_tokens
        if limit is not None and params.params.max_tokens > limit:
            params = replace(params, params=replace(params.params, max_tokens=limit))
        context.span.set_request(params.params, params.n, bool(context.request.stream))
        return params

    async def run(self, http: Request, context: RequestContext, params: Sequence[GenerateParams]) -> None:
        """Answers all prompts of a request that does not stream, and records its end."""
        with self.recorded(context):
            async with cancelled_by_disconnect(http):
                jobs = [self._run_one(context, one, i * one.n) for i, one in enumerate(params)]
                await gather_limited(jobs, max(1, self.max_parallel // params[0].n))
        context.outputs.sort(key=lambda output: output.index)
        self.log.finished(context)

    async def _run_one(self, context: RequestContext, params: GenerateParams, first_index: int) -> None:
        async with aclosing(self.engine.generate(context, params, first_index)) as deltas:
            async for _ in deltas:
                pass

    async def event_stream(self, http: Request, events: AsyncGenerator[bytes, None]) -> Response:
        """Waits for the first event, so that an error before it has its own status."""
        async with cancelled_by_disconnect(http):
            first = await anext(events)
        return StreamingResponse(with_keep_alive(first, events, self.keep_alive_s), media_type=MEDIA_TYPE)


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
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def usage_so_far(options: StreamOptions, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
    """The `usage` field of a chunk that is not the last."""
    if options.continuous_usage_stats:
        return {"usage": usage(outputs)}
    return {"usage": None} if options.include_usage else {}
