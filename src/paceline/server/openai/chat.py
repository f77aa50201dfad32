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
from paceline.server.openai.protocol import ChatRequest
from paceline.server.openai.serving import ChunkServing, newly_predicted, token_logprobs, usage
from paceline.text import CallDelta, ContentDelta, Delta, ReasoningDelta, Tokenizer, call_id
from paceline.types import TokenLogprob
from paceline.web.request_body import read_request

COMPLETION: Final = "chat.completion"
CHUNK: Final = "chat.completion.chunk"


class ChatServing(ChunkServing):
    async def create(self, http: Request) -> Response:
        body, request = await read_request(http, ChatRequest, self.max_body)
        context = self.admission.admit(http, body, request, "chatcmpl-")
        read = partial(self.read_chat, http, context, request)
        if request.prefill:
            used = await self.read_ahead(http, context, read)
            answer = {**self.head(context, COMPLETION), "choices": [], "usage": used}
            return JSONResponse(answer | self.log.response_metrics(context))
        if request.stream:
            return await self.stream(http, context, read)
        await self.run(http, context, read)
        return JSONResponse(self._completion(context) | self.log.response_metrics(context))

    def head(self, context: RequestContext, kind: str = CHUNK) -> dict[str, Any]:
        return {
            "id": context.id,
            "object": kind,
            "created": int(context.created),
            "model": context.model.name,
            "system_fingerprint": context.engine.fingerprint,
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
        if reasoning := output.reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        logprobs = (
            _logprobs(context.engine.llm.tokenizer, output.logprobs)
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
            for predicted in newly_predicted(context.tool_prediction, delta):
                yield {**self.head(context), "choices": [], **predicted}
        message = self._message_delta(context, output, delta.deltas)
        logprobs = None
        if output.seq.params.logprobs is not None and delta.tokens:
            logprobs = _logprobs(context.engine.llm.tokenizer, delta.logprobs)
        if message or logprobs:
            yield self._chunk(context, output, message, logprobs)
        if delta.finish is not None:
            yield self._chunk(context, output, {}, None, output.finish_reason)

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
        reasoning = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
        calls = [self._call_delta(context, output, delta) for delta in deltas if isinstance(delta, CallDelta)]
        message: dict[str, Any] = {"reasoning_content": reasoning} if reasoning else {}
        if text:
            message["content"] = text
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
        format = context.engine.llm.tokenizer.tool_format
        return call_id(f"{context.id}/{output.index}", call, format)


def _logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
    return {"content": token_logprobs(tokenizer, logprobs), "refusal": None}
