"""POST /v1/completions, top to bottom: the same shape as chat.py, for one prompt or several."""

from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.openai.params import GenerateParams, completion_params, read_prompts
from paceline.server.openai.protocol import CompletionRequest, StreamOptions
from paceline.server.openai.serving import Serving, usage, usage_so_far
from paceline.text import ContentDelta, Tokenizer
from paceline.types import TokenLogprob
from paceline.web.api_errors import ApiError, logged
from paceline.web.json_body import read_object
from paceline.web.sse import DONE, event
from paceline.web.validation import parse_request

OBJECT: Final = "text_completion"


class CompletionServing(Serving):
    async def create(self, http: Request) -> Response:
        body = await read_object(http, self.max_body)
        request = parse_request(body, CompletionRequest)
        context = self.admission.admit(http, body, request, "cmpl-")
        with self.recorded(context):
            prompts, spec = read_prompts(request.prompt), context.route.spec(self.engine.llm.spec)
            if request.stream and len(prompts) > 1:
                raise ApiError(
                    400, "several prompts cannot be streamed: send them one by one", param="prompt"
                )
            params = [completion_params(request, prompt, spec, self.drafters) for prompt in prompts]
            params = [self.limited(context, one) for one in params]
        if request.stream:
            return await self.event_stream(http, self._events(context, request, params[0]))
        await self.run(http, context, params)
        return JSONResponse(self._completion(context, request) | self.log.response_metrics(context))

    async def _events(
        self, context: RequestContext, request: CompletionRequest, params: GenerateParams
    ) -> AsyncGenerator[bytes, None]:
        """A chunk for each round, the usage if it is requested, and DONE."""
        options = request.stream_options or StreamOptions()
        begun: set[int] = set()
        try:
            with self.recorded(context):
                async with aclosing(self.engine.generate(context, params)) as deltas:
                    async for output, delta in deltas:
                        if output.index not in begun:
                            begun.add(output.index)
                            unused = {"usage": None} if options.include_usage else {}
                            yield event(self._chunk(context, output, "") | unused)
                        for chunk in self._chunks(context, request, output, delta):
                            yield event(chunk | usage_so_far(options, context.outputs))
        except Exception as error:
            if not begun:
                raise
            yield event(logged(error, context.endpoint).body)
        else:
            self.log.finished(context)
            if options.include_usage:
                end = {"choices": [], "usage": usage(context.outputs)}
                yield event(self._head(context) | end | self.log.response_metrics(context))
        yield DONE

    def _head(self, context: RequestContext) -> dict[str, Any]:
        return {
            "id": context.id,
            "object": OBJECT,
            "created": int(context.created),
            "model": self.engine.llm.name,
            "system_fingerprint": self.engine.fingerprint,
        }

    def _completion(self, context: RequestContext, request: CompletionRequest) -> dict[str, Any]:
        choices = [self._choice(request, output) for output in context.outputs]
        return {**self._head(context), "choices": choices, "usage": usage(context.outputs)}

    def _choice(self, request: CompletionRequest, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._logprobs(request, output.logprobs, 0)
        return {
            "index": output.index,
            "text": output.content,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def _chunks(
        self, context: RequestContext, request: CompletionRequest, output: RequestOutput, delta: OutputDelta
    ) -> Iterator[dict[str, Any]]:
        text = "".join(part.text for part in delta.deltas if isinstance(part, ContentDelta))
        reason = output.finish_reason if delta.finish is not None else None
        if text or delta.tokens or reason is not None:
            logprobs = self._logprobs(request, delta.logprobs, output.content_len - len(text))
            yield self._chunk(context, output, text, logprobs, reason)

    def _chunk(
        self,
        context: RequestContext,
        output: RequestOutput,
        text: str,
        logprobs: dict[str, Any] | None = None,
        reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": output.index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**self._head(context), "choices": [choice]}

    def _logprobs(
        self, request: CompletionRequest, logprobs: Sequence[TokenLogprob], start: int
    ) -> dict[str, Any] | None:
        if request.logprobs is None:
            return None
        return _logprob_lists(self.engine.llm.tokenizer, logprobs, start)


def _logprob_lists(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], start: int) -> dict[str, Any]:
    """`start`: characters of the answer before these tokens."""
    texts = [tokenizer.piece(t.token).decode("utf-8", "replace") for t in logprobs]
    offsets = [start + sum(map(len, texts[:i])) for i in range(len(texts))]
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in logprobs],
        "top_logprobs": [
            {tokenizer.piece(token).decode("utf-8", "replace"): p for token, p in t.top} for t in logprobs
        ],
        "text_offset": offsets,
    }
