"""The end of a request: metrics, span, trace, training sample, and the settled account of its key.

`speculative_metrics` and `request_timings` are the `metrics` object of a response, in vLLM's shape.
"""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from starlette.requests import Request

from paceline.output import RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.model_pool import ModelPool
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.openai.protocol import ChatRequest
from paceline.server.telemetry.metrics import MAX_IGNORED, ServerMetrics, draft_share, target_share
from paceline.server.telemetry.otel import NO_SPANS, Spans, SpecWork, input_messages, output_messages
from paceline.server.tool_prediction import PredictorFiles, ToolPredictions
from paceline.text import opening_text
from paceline.trace.online import TrainingSample, rejected_positions
from paceline.trace.record import RequestRecord, RequestStats
from paceline.trace.recorder import Recorder
from paceline.types import Round
from paceline.web.api_errors import CANCELLED, UNAUTHORIZED, api_error, error_code
from paceline.web.rate_limit import MINUTE, TokenBucket
from paceline.web.request_id import request_id

log = logging.getLogger("paceline.server")

REFUSED: Final = "refused"  # the `finish` of a request that was not admitted
REFUSED_TRACES_PER_MINUTE: Final = 60  # further ones are only counted: nobody can crowd out other traces

# Parameters that have fields of their own in a record, or that identify the user.
UNRECORDED: Final = frozenset(
    [
        "messages",
        "prompt",
        "input",
        "instructions",
        "tools",
        "user",
        "metadata",
        "prompt_cache_key",
        "cache_salt",
        "safety_identifier",
    ]
)


class RequestLog:
    """Records how requests ended. Everything but the models, with their metrics, is optional."""

    def __init__(
        self,
        models: ModelPool,
        recorder: Recorder | None = None,
        spans: Spans = NO_SPANS,
        trainer: OnlineTrainer | None = None,
        close_store: Callable[[], None] | None = None,
        predictor_files: PredictorFiles | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.metrics = ServerMetrics({model.name: model.metrics for model in models.models})
        self.predictions = ToolPredictions(predictor_files)
        self._only_model = models.default.name if len(models.models) == 1 else ""
        self._recorder = recorder
        self._close_store = close_store  # of the recorder
        self._clock_ns = clock_ns
        self._refused_traces = TokenBucket(
            REFUSED_TRACES_PER_MINUTE, REFUSED_TRACES_PER_MINUTE * MINUTE, clock_ns()
        )
        self._ignored: set[str] = set()  # parameters that the log has
        self._spans = spans
        self.trainer = trainer

    def start(self) -> None:
        if self.trainer is not None:
            self.trainer.start()

    def close(self, timeout: float) -> None:
        if self.trainer is not None:
            self.trainer.close(timeout)
        self.predictions.close(timeout)
        self._spans.close()
        if self._recorder is not None and self._recorder.close(timeout) and self._close_store:
            self._close_store()

    def refused(self, error: Exception, http: Request | None = None) -> None:
        """A request that ended before it was admitted. http: None: before its headers were read."""
        reason = api_error(error).refusal
        if reason is None:
            return
        self.metrics.refused(reason)
        if http is not None and reason != UNAUTHORIZED:  # a stranger writes nothing into the store
            key = getattr(http.state, "key", None)
            client = "" if key is None else key.name
            code = error_code(error)
            self._record_refusal(request_id(http.scope), time.time(), code, http.url.path, client=client)

    def ignored_parameter(self, name: str) -> None:
        """A lenient server ignored an unknown parameter of a request: the log has each name once."""
        self.metrics.ignored_parameter(name)
        if name not in self._ignored and len(self._ignored) < MAX_IGNORED:
            self._ignored.add(name)
            log.warning("the parameter %s is unknown, and ignored", name)

    def _record_refusal(
        self, id: str, created: float, code: str, endpoint: str, model: str | None = None, **about: str
    ) -> None:
        """model: None: the request was refused before it was known."""
        if self._recorder is None:
            return
        self._refused_traces.refill(REFUSED_TRACES_PER_MINUTE, self._clock_ns())
        if self._refused_traces.wait(1) == 0:
            self._refused_traces.take(1)
            stats = RequestStats(model=self._only_model if model is None else model, endpoint=endpoint)
            self._recorder.finished(RequestRecord.of(stats, id, created, finish=REFUSED, error=code, **about))

    def finished(self, context: RequestContext, error: BaseException | None = None) -> None:
        """Called once for every admitted request, whatever became of it."""
        code = context.error = None if error is None else error_code(error)
        for output in context.outputs:
            output.finish = output.finish or ("cancelled" if code in (None, CANCELLED) else "error")
        refusal = context.refusal = None if error is None else _refusal(context, error)
        try:
            self._report(context, code, refusal)
        finally:
            for call in context.at_end:
                call()
            if context.ticket is not None:
                retryable = error is not None and refusal is not None and api_error(error).retryable
                context.ticket.leave(_used_tokens(context.outputs), time.monotonic(), retryable)

    def _report(self, context: RequestContext, code: str | None, refusal: str | None) -> None:
        if refusal is not None:
            self.metrics.refused(refusal)
        if refusal is not None and not context.outputs:
            self._record_refusal(
                context.id,
                context.created,
                code or REFUSED,
                context.endpoint,
                context.model.name,
                route=context.route.name,
                tenant=context.tenant,
                client=context.client,
            )
        ended = [self.stats(context, output) for output in context.outputs]
        predicted = self._settle_tool_prediction(context)
        for output, stats in zip(context.outputs, ended, strict=True):
            if refusal is None:
                context.model.metrics.finished(stats)
                context.model.metrics.tool_calls(
                    len(output.calls), output.undeclared_calls, output.rejected_calls
                )
            self._record(context, output, stats, code, predicted if output.index == 0 else {})
            self._add_training_sample(context, output)
        if context.span.recording:
            self._end_span(context, ended, code)

    def stats(self, context: RequestContext, output: RequestOutput) -> RequestStats:
        now = time.perf_counter() - context.arrived
        about = {"route": context.route.name, "endpoint": context.endpoint}
        return output.stats(now, model=context.model.name, **about)

    def response_metrics(self, context: RequestContext) -> dict[str, Any]:
        """The response's `metrics`, where the request asks for them; null for several choices."""
        level = context.request.report
        if not level:
            return {}
        if len(context.outputs) != 1:
            return {"metrics": None}
        (output,) = context.outputs
        spec = speculative_metrics(output.rounds, level == "detailed", output.seq.spec.max_draft)
        timings = request_timings(self.stats(context, output))
        raw = {"raw_text": output.text} if level == "detailed" else {}
        return {"metrics": {**timings, "passes": output.passes, **raw, "speculative_decoding": spec}}

    def _record(
        self,
        context: RequestContext,
        output: RequestOutput,
        stats: RequestStats,
        code: str | None,
        predicted: Mapping[str, int],
    ) -> None:
        if self._recorder is None:
            return
        seq, prompt, request = output.seq, context.body.get("prompt"), context.request
        chat = request if isinstance(request, ChatRequest) else None
        record = RequestRecord.of(
            stats,
            id=context.id if output.index == 0 else f"{context.id}-{output.index}",
            created=context.created,
            tenant=context.tenant,
            client=context.client,
            conversation=context.conversation,
            drafters=seq.spec.drafters,
            accept=seq.spec.accept,
            params={name: value for name, value in context.body.items() if name not in UNRECORDED},
            finish=finish_of(output),
            error=code if stats.finish == "error" else None,
            metadata=request.metadata or {},
            predicted_calls=predicted,
            messages=chat.messages if chat else None,
            prompt=prompt if isinstance(prompt, str) else None,
            tools=chat.tools if chat else None,
            output=output.text,
            prompt_ids=tuple(seq.tokens[: seq.prompt_len]),
            output_ids=tuple(seq.output),
        )
        self._recorder.finished(record, seq.id, context.route.trace_text)

    def _add_training_sample(self, context: RequestContext, output: RequestOutput) -> None:
        """Unless the request, its route or the server opted out."""
        if self.trainer is None or output.finish not in ("stop", "length"):
            return
        allowed = (
            context.remember and context.route.trace_text is not False and context.body.get("store") is None
        )
        if not allowed or not isinstance(context.request, ChatRequest):
            return
        if opening := opening_text(context.request.messages):
            seq = output.seq
            wrong = rejected_positions(output.rounds)
            constrained = seq.cursor is not None
            self.trainer.add_sample(
                TrainingSample(tuple(seq.tokens), seq.prompt_len, wrong, opening, constrained)
            )

    def _settle_tool_prediction(self, context: RequestContext) -> Mapping[str, int]:
        """Compares predicted tool calls with those written, and learns from them where that is allowed.

        Returns their number by outcome.
        """
        prediction = context.tool_prediction
        if prediction is None:
            return {}
        output = context.outputs[0] if context.outputs else None
        complete = output is not None and output.finish == "stop"
        outcome = prediction.settle(output.calls if output is not None and complete else None)
        context.model.metrics.predicted_tool_calls(outcome)
        return outcome

    def _end_span(self, context: RequestContext, ended: Sequence[RequestStats], code: str | None) -> None:
        span, outputs = context.span, context.outputs
        if outputs and span.keeps_content and context.route.trace_text is not False:
            chat = context.request.messages if isinstance(context.request, ChatRequest) else None
            prompt = context.body.get("prompt", context.body.get("input"))
            span.set_content(input_messages(chat, prompt), output_messages(outputs))
        if code is not None or not ended:
            span.fail(code or "error")
        else:
            rounds = [r for output in outputs for r in output.rounds]
            span.end(ended, speculative_metrics(rounds, False), spec_work(rounds), context.id)


def finish_of(output: RequestOutput) -> str:
    """The end of an output, as traces and the access log name it."""
    return "tool_calls" if output.finish == "stop" and output.calls else output.finish or CANCELLED


def _used_tokens(outputs: Sequence[RequestOutput]) -> int:
    """Of prompts, each of which is read once for all its choices, and of answers."""
    begun = [output for output in outputs if output.passes]
    prompts = sum(output.seq.prompt_len for output in begun if output.seq.params.choice == 0)
    return prompts + sum(len(output.token_ids) for output in begun)


def _refusal(context: RequestContext, error: BaseException) -> str | None:
    """Why a request was refused; None: it was in a pass, its client left, or the server failed."""
    begun = any(output.passes for output in context.outputs)
    return None if begun or error_code(error) == CANCELLED else api_error(error).refusal


def speculative_metrics(rounds: Sequence[Round], detailed: bool, max_draft: int = 0) -> dict[str, Any]:
    """`metrics.speculative_decoding` of one output. A step is a round that had a draft.

    max_draft: the request's limit; forced tokens and trees may go beyond it.
    """
    steps = [r for r in rounds if len(r.draft)]
    drafted = [len(r.draft) for r in steps]
    accepted = [len(r.path) for r in steps]
    longest = max([max_draft, *drafted])
    histogram = [0] * (longest + 1)
    for count in accepted:
        histogram[count] += 1
    per_step = {"per_step_accepted": accepted, "per_step_drafted": drafted} if detailed else {}
    return {
        "mean_acceptance_length": 1 + _ratio(sum(accepted), len(steps)),
        "draft_acceptance_rate": _ratio(sum(accepted), sum(drafted)),
        "acceptance_histogram": histogram,
        "num_spec_steps": len(steps),
        "num_accepted_draft_tokens": sum(accepted),
        "num_draft_tokens": sum(drafted),
        "num_spec_tokens": longest,
        **per_step,
    }


def request_timings(stats: RequestStats) -> dict[str, float | None]:
    """The other fields of `metrics`; None where there were no tokens to measure.

    As with vLLM, the first token is timed from the request's first pass, not from its arrival.
    """
    working_s = None if stats.prefill_s is None else stats.prefill_s + stats.decode_s
    return {
        "time_to_first_token_ms": _ms(stats.prefill_s),
        "generation_time_ms": _ms(None if working_s is None else stats.decode_s),
        "queue_time_ms": _ms(stats.queue_s),
        "mean_itl_ms": _ms(stats.token_s),
        "tokens_per_second": stats.output_tokens / working_s if working_s else None,
    }


def spec_work(rounds: Sequence[Round]) -> SpecWork:
    method = "+".join(rounds[0].drafters) if rounds else ""
    return SpecWork(method, sum(map(draft_share, rounds)), sum(map(target_share, rounds)))


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
