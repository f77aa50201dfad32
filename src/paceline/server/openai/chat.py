"""POST /v1/chat/completions, top to bottom: parse, admit, prepare, run, stream, account.

As vLLM's entrypoints/openai/chat_completion/serving.py. completions.py and responses.py have the same shape.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.async_engine import ADMITTED
from paceline.server.openai.params import chat_params
from paceline.server.openai.protocol import ChatRequest, PredictToolCalls
from paceline.server.openai.serving import ChunkServing, token_logprobs, usage
from paceline.server.tool_prediction import PredictionRequest, ToolPrediction, predicted_field
from paceline.text import CallDelta, ContentDelta, Delta, Tokenizer, call_id
from paceline.types import TokenLogprob
from paceline.web.request_body import off_loop, read_request

COMPLETION: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"


class ChatServing(ChunkServing):
    async def create(self, http: Request) -> Response:
        body, request = await read_request(http, ChatRequest, self.max_body)
        context = self.admission.admit(http, body, request, "chatcmpl-")
        with self.recorded(context):
            llm = self.engine.llm
            read = partial(chat_params, request, context.route.spec(llm.spec), self.drafters)
            params = self.limited(context, await off_loop(http, partial(read, llm.tokenizer.template)))
            if request.predict_tool_calls is not None and not request.prefill:
                context.tool_prediction = await self._predict(context, request, request.predict_tool_calls)
        if request.prefill:
            used = await self.read_ahead(http, context, [params])
            answer = {**self.head(context, COMPLETION), "choices": [], "usage": used}
            return JSONResponse(answer | self.log.response_metrics(context))
        if request.stream:
            return await self.stream(http, context, [params])
        await self.run(http, context, [params])
        return JSONResponse(self._completion(context) | self.log.response_metrics(context))

    async def _predict(
        self, context: RequestContext, request: ChatRequest, options: PredictToolCalls
    ) -> ToolPrediction:
        wanted = PredictionRequest.of(
            request.messages,
            request.tools or (),
            request.tool_choice,
            options.safe_tools or (),
            options.min_probability,
            options.max_calls,
        )
        tenant = None if context.anonymous else context.tenant
        return await self.log.predictions.predict(wanted, tenant, context.remember)

    def head(self, context: RequestContext, kind: str = CHUNK) -> dict[str, Any]:
        return {
            "id": context.id,
            "object": kind,
            "created": int(context.created),
            "model": self.engine.llm.name,
            "system_fingerprint": self.engine.fingerprint,
        }

    def _completion(self, context: RequestContext) -> dict[str, Any]:
        choices = [self._choice(context, output) for output in context.outputs]
        body = {**self.head(context, COMPLETION), "choices": choices, "usage": usage(context.outputs)}
        return body if context.tool_prediction is None else body | context.tool_prediction.field

    def _choice(self, context: RequestContext, output: RequestOutput) -> dict[str, Any]:
        calls = [
            {
                "id": self._call_id(context, output, i),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for i, (name, arguments) in enumerate(output.calls)
        ]
        content = output.content
        message: dict[str, Any] = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
        }
        if calls:
            message["tool_calls"] = calls
        logprobs = (
            _logprobs(self.engine.llm.tokenizer, output.logprobs)
            if output.seq.params.logprobs is not None
            else None
        )
        return {
            "index": output.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def first_chunk(self, context: RequestContext, output: RequestOutput) -> dict[str, Any]:
        return self._chunk(context, output, {"role": "assistant", "content": ""})

    def chunks(
        self, context: RequestContext, output: RequestOutput, delta: OutputDelta
    ) -> Iterator[dict[str, Any]]:
        """One for a round; the last round has another with the reason of the end."""
        if output.index == 0 and context.tool_prediction is not None:
            yield from self._predicted(context, context.tool_prediction, delta)
        message = self._message_delta(context, output, delta.deltas)
        logprobs = None
        if output.seq.params.logprobs is not None and delta.tokens:
            logprobs = _logprobs(self.engine.llm.tokenizer, delta.logprobs)
        if message or logprobs:
            yield self._chunk(context, output, message, logprobs)
        if delta.finish is not None:
            yield self._chunk(context, output, {}, None, output.finish_reason)

    def _predicted(
        self, context: RequestContext, prediction: ToolPrediction, delta: OutputDelta
    ) -> Iterator[dict[str, Any]]:
        """The predicted calls: first before the prompt is read, then once a call's name is written."""
        calls = [prediction.calls] if delta is ADMITTED else []
        names = (part.name for part in delta.deltas if isinstance(part, CallDelta) and part.name is not None)
        calls += [prediction.given_name(name) for name in names]
        for predicted in calls:
            if predicted:
                yield {**self.head(context), "choices": [], **predicted_field(predicted)}

    def _chunk(
        self,
        context: RequestContext,
        output: RequestOutput,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": output.index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return {**self.head(context), "choices": [choice]}

    def _message_delta(
        self, context: RequestContext, output: RequestOutput, deltas: Sequence[Delta]
    ) -> dict[str, Any]:
        text = "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))
        calls = [self._call_delta(context, output, delta) for delta in deltas if isinstance(delta, CallDelta)]
        message: dict[str, Any] = {"content": text} if text else {}
        if calls:
            message["tool_calls"] = calls
        return message

    def _call_delta(self, context: RequestContext, output: RequestOutput, delta: CallDelta) -> dict[str, Any]:
        if delta.name is None:
            return {"index": delta.index, "function": {"arguments": delta.arguments}}
        return {
            "index": delta.index,
            "id": self._call_id(context, output, delta.index),
            "type": "function",
            "function": {"name": delta.name, "arguments": delta.arguments},
        }

    def _call_id(self, context: RequestContext, output: RequestOutput, call: int) -> str:
        return call_id(f"{context.id}/{output.index}", call, self.engine.llm.tokenizer.tool_format)


def _logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": token_logprobs(tokenizer, logprobs), "refusal": None}
