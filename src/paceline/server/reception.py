"""Who may ask, by which route, and what is noted of it: keys, routes, limits, metrics, spans, traces."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from paceline.llm import LLM
from paceline.server.async_engine import Caller
from paceline.server.choice import Choice
from paceline.server.finished import RequestStats
from paceline.server.online.online_trainer import OnlineTrainer
from paceline.server.openai.error_param import prompt_param
from paceline.server.openai.params import GenerateParams
from paceline.server.openai.protocol import ChatRequest, Sampling
from paceline.server.routes import Route, RouteFile, RouteRequest, Routes
from paceline.server.spec_metrics import request_timings, spec_work, speculative_metrics
from paceline.server.telemetry.genai_messages import answered, opening_of, said
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.tracing import NO_SPANS, RequestSpan, Spans
from paceline.trace.online import TrainingSample, rejected_positions
from paceline.trace.record import RequestRecord
from paceline.trace.recorder import Recorder
from paceline.web.api_errors import ApiError
from paceline.web.api_keys import Key, KeyFile, tenant
from paceline.web.rate_limit import Limits, Refused, Ticket
from paceline.web.refusals import refusal, word_for

TYPICAL_ANSWER: Final = 256  # tokens reckoned with until an answer's length is known
BYTES_PER_TOKEN: Final = 4
# Parameters that are recorded apart, or that say whose a request is.
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
        "safety_identifier",
    ]
)


@dataclass(slots=True)
class Visit:
    """One request, from its arrival until all of it is noted."""

    endpoint: str
    route: Route
    caller: Caller
    key: Key | None
    body: Mapping[str, Any]  # as sent
    asked: Sampling
    span: RequestSpan
    ticket: Ticket | None
    arrived: float = field(default_factory=time.perf_counter)
    created: float = field(default_factory=time.time)


class Reception:
    """Lets requests in and notes how they went. Everything but the model is optional."""

    def __init__(
        self,
        llm: LLM,
        metrics: Metrics,
        keys: KeyFile | None = None,
        routes: RouteFile | None = None,
        recorder: Recorder | None = None,
        spans: Spans = NO_SPANS,
        learn: bool = True,
        learning: OnlineTrainer | None = None,
    ) -> None:
        self._llm = llm
        self.metrics = metrics
        self._keys = keys
        self._routes = routes
        self._recorder = recorder
        self._spans = spans
        self._learn = learn
        self.learning = learning
        self._limits = Limits()
        self._know(Routes() if routes is None else routes.current())

    def check_key(self, headers: Mapping[str, str]) -> Key | None:
        if self._keys is None:
            return None
        key = self._keys.current().check(headers.get("authorization"))
        if key is None:
            raise ApiError(
                401,
                "the API key is missing or unknown: send it as 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
            )
        return key

    def admit(
        self,
        path: str,
        headers: Mapping[str, str],
        body: Mapping[str, Any],
        asked: Sampling,
        key: Key | None = None,
    ) -> Visit:
        route = self._route(path, headers, body)
        wish = asked.learn is not False and route.learn is not False and self._learn
        deadline = None if route.timeout_s is None else time.monotonic() + route.timeout_s
        whose = tenant(key, asked.whose, asked.cache_key)
        caller = Caller(whose, (asked.priority or 0) + route.priority, deadline, wish)
        ticket = self._enter(key, body)
        if self.learning is not None:
            self.learning.arrived()
        span = self._spans.start(path, self._llm.name, headers)
        return Visit(path, route, caller, key, body, asked, span, ticket)

    def turned_away(self, problem: Exception) -> None:
        """A request that ended before it was admitted."""
        if reason := refusal(word_for(problem)):
            self.metrics.refused(reason)

    def _route(self, path: str, headers: Mapping[str, str], body: Mapping[str, Any]) -> Route:
        routes = self._known if self._routes is None else self._routes.current()
        if routes is not self._known:  # the file was read again
            self._know(routes)
        return routes.find(RouteRequest.of_body(path, headers, body))

    def _know(self, routes: Routes) -> None:
        self._known = routes
        self.metrics.know_routes(route.name for route in routes.routes)

    def _enter(self, key: Key | None, body: Mapping[str, Any]) -> Ticket | None:
        if key is None:
            return None
        said = len(str(body.get("messages") or body.get("prompt") or body.get("input") or ""))
        entry = self._limits.enter(key, said // BYTES_PER_TOKEN + TYPICAL_ANSWER, time.monotonic())
        if isinstance(entry, Refused):
            raise ApiError(
                429,
                f"{entry.reason} for this key: try again in {entry.retry_after_s:.0f} s",
                "rate_limit_error",
                code="rate_limit_exceeded",
                retry_after=entry.retry_after_s,
            )
        return entry

    def bound(self, visit: Visit, asked: GenerateParams) -> GenerateParams:
        """The request within the limits of its route."""
        most = visit.route.max_tokens
        if most is not None and asked.params.max_tokens > most:
            asked = replace(asked, params=replace(asked.params, max_tokens=most))
        visit.span.asked(asked.params, asked.n, bool(visit.body.get("stream")))
        return asked

    def opened(self, visit: Visit, choice: Choice) -> None:
        """Before a choice goes to the engine."""
        most, length = visit.route.max_prompt_tokens, choice.made.seq.prompt_len
        if most is not None and length > most:
            raise ApiError(
                400,
                f"the prompt has {length} tokens; the route {visit.route.name} takes {most}",
                param=prompt_param(visit.body),
                code="context_length_exceeded",
            )
        self.metrics.route_of(choice.made.seq.id, visit.route.name)

    def done(self, visit: Visit, choices: Sequence[Choice], response: str, failed: str = "") -> None:
        """Whatever became of it. failed: one word for what went wrong."""
        outputs = [self._finished(visit, choice, failed) for choice in choices]
        refused = None if any(choice.begun for choice in choices) else refusal(failed)
        if refused is not None:
            self.metrics.refused(refused)
        for choice, finished in zip(choices, outputs, strict=True):
            if refused is None:
                self.metrics.finished(finished)
            if self._recorder is not None:
                record = self._record(visit, choice, finished, response, failed)
                self._recorder.finished(record, choice.made.seq.id, visit.route.trace_text)
            self._keep(visit, choice)
        self._tell_content(visit, choices)
        if failed or not outputs:
            visit.span.fail(failed or "error")
        else:
            work = [r for choice in choices for r in choice.rounds]
            visit.span.end(outputs, speculative_metrics(work, False), spec_work(work), response)
        if visit.ticket is not None:
            used = sum(c.made.seq.prompt_len + len(c.tally.tokens) for c in choices if c.begun)
            visit.ticket.leave(used, time.monotonic(), refused is not None)

    def _keep(self, visit: Visit, choice: Choice) -> None:
        """For drafters to learn from, unless anybody asked that nothing be kept of it."""
        if self.learning is None or choice.finish not in ("stop", "length"):
            return
        allowed = (
            visit.caller.learn and visit.route.trace_text is not False and visit.body.get("store") is None
        )
        if allowed and isinstance(visit.asked, ChatRequest) and (opening := opening_of(visit.asked.messages)):
            seq = choice.made.seq
            wrong = rejected_positions(choice.rounds)
            bound = seq.cursor is not None
            self.learning.keep(TrainingSample(tuple(seq.tokens), seq.prompt_len, wrong, opening, bound))

    def _tell_content(self, visit: Visit, choices: Sequence[Choice]) -> None:
        if choices and visit.span.keeps_content and visit.route.trace_text is not False:
            chat = visit.asked.messages if isinstance(visit.asked, ChatRequest) else None
            visit.span.content(said(chat, visit.body.get("prompt")), answered(choices))

    def _finished(self, visit: Visit, choice: Choice, failed: str) -> RequestStats:
        seq, first = choice.made.seq, choice.first_token
        waited = choice.submitted - visit.arrived
        return RequestStats(
            model=self._llm.name,
            route=visit.route.name,
            endpoint=visit.endpoint,
            prompt_tokens=seq.prompt_len,
            cached_tokens=seq.cached,
            output_tokens=len(choice.tally.tokens),
            queue_s=waited + choice.queued,
            first_token_s=waited + first if first else None,
            decode_s=choice.last_token - first,
            seconds=time.perf_counter() - visit.arrived,
            reason=choice.finish or ("cancelled" if failed in ("", "cancelled") else "error"),
            lossy=seq.spec.lossy,
            choice=seq.params.choice,
            begun=choice.begun,
        )

    def _record(
        self, visit: Visit, choice: Choice, finished: RequestStats, response: str, failed: str
    ) -> RequestRecord:
        seq, tally, prompt = choice.made.seq, choice.tally, visit.body.get("prompt")
        chat = visit.asked if isinstance(visit.asked, ChatRequest) else None
        return RequestRecord(
            id=response if choice.index == 0 else f"{response}-{choice.index}",
            created=visit.created,
            model=finished.model,
            route=finished.route,
            endpoint=visit.endpoint,
            tenant=seq.tenant,
            drafters=seq.spec.drafters,
            accept=seq.spec.accept,
            lossy=finished.lossy,
            params={name: value for name, value in visit.body.items() if name not in UNRECORDED},
            prompt_tokens=finished.prompt_tokens,
            cached_tokens=finished.cached_tokens,
            output_tokens=finished.output_tokens,
            passes=tally.passes,
            drafted=sum(tally.drafted.values()),
            accepted=sum(tally.accepted.values()),
            drafted_by_source=dict(tally.drafted),
            accepted_by_source=dict(tally.accepted),
            finish=finished.reason,
            error=failed if failed and finished.reason == "error" else None,
            queue_s=finished.queue_s,
            first_token_s=finished.first_token_s,
            seconds=finished.seconds,
            metadata=visit.asked.metadata or {},
            messages=chat.messages if chat else None,
            prompt=prompt if isinstance(prompt, str) else None,
            tools=chat.tools if chat else None,
            output=choice.text,
            prompt_ids=tuple(seq.tokens[: seq.prompt_len]),
            output_ids=tuple(seq.output),
        )

    def report(self, visit: Visit, choices: Sequence[Choice], detailed: bool) -> dict[str, Any] | None:
        """vLLM's `metrics` of a response, and how many passes it took; none for several choices."""
        if len(choices) != 1:
            return None
        choice = choices[0]
        spec = speculative_metrics(choice.rounds, detailed, choice.made.seq.spec.max_draft)
        timings = request_timings(self._finished(visit, choice, ""))
        return {**timings, "passes": choice.tally.passes, "speculative_decoding": spec}

    def start(self) -> None:
        if self.learning is not None:
            self.learning.start()

    def close(self, timeout: float) -> None:
        if self.learning is not None:
            self.learning.close(timeout)
        self._spans.close()
        if self._recorder is not None:
            self._recorder.close(timeout)
