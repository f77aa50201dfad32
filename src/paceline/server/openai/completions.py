"""POST /v1/completions, top to bottom: the same shape as chat.py, for one prompt or several."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.output import OutputDelta, RequestOutput
from paceline.server.admission import RequestContext
from paceline.server.async_engine import GenerateParams
from paceline.server.openai.params import completion_params, read_prompts
from paceline.server.openai.protocol import CompletionRequest
from paceline.server.openai.serving import ChunkServing, usage
from paceline.text import ContentDelta, Tokenizer
from paceline.types import TokenLogprob
from paceline.web.request_body import off_loop, read_request

OBJECT: Final = "text_completion"


class CompletionServing(ChunkServing):
    async def create(self, http: Request) -> Response:
        body, request = await read_request(http, CompletionRequest, self.max_body)
        context = self.admission.admit(http, body, request, "cmpl-")
        read = partial(self._read, http, context, request)
        if request.stream:
            return await self.stream(http, context, read)
        await self.run(http, context, read)
        return JSONResponse(self._completion(context) | self.log.response_metrics(context))

    async def _read(
        self, http: Request, context: RequestContext, request: CompletionRequest
    ) -> list[GenerateParams]:
        prompts, engine = read_prompts(request.prompt), await self.load(context)
        spec = engine.spec(context.route)
        read = partial(completion_params, request, prompts[0], spec, engine.drafters)
        first = self.limited(context, await off_loop(http, read))
        return [replace(first, prompt=prompt) for prompt in prompts]

    def head(self, context: RequestContext) -> dict[str, Any]:
        return {
            "id": context.id,
            "object": OBJECT,
            "created": int(context.created),
            "model": context.model.name,
            "system_fingerprint": context.engine.fingerprint,
        }

    def _completion(self, context: RequestContext) -> dict[str, Any]:
        choices = [self._choice(context, output) for output in context.outputs]
        return {**self.head(context), "choices": choices, "usage": usage(context.outputs)}

    def _choice(self, context: RequestContext, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._logprobs(context, output, output.logprobs, 0)
        return {
            "index": output.index,
            "text": output.content,
            "logprobs": logprobs,
            "finish_reason": output.finish_reason,
        }

    def first_chunk(self, context: RequestContext, output: RequestOutput) -> dict[str, Any]:
        return self._chunk(context, output, "")

    def chunks(
        self, context: RequestContext, output: RequestOutput, delta: OutputDelta
    ) -> Iterator[dict[str, Any]]:
        text = "".join(part.text for part in delta.deltas if isinstance(part, ContentDelta))
        reason = output.finish_reason if delta.finish is not None else None
        if text or delta.tokens or reason is not None:
            logprobs = self._logprobs(context, output, delta.logprobs, output.content_len - len(text))
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
        return {**self.head(context), "choices": [choice]}

    def _logprobs(
        self, context: RequestContext, output: RequestOutput, logprobs: Sequence[TokenLogprob], start: int
    ) -> dict[str, Any] | None:
        if output.seq.params.logprobs is None:
            return None
        return _logprob_lists(context.engine.llm.tokenizer, logprobs, start)


def _logprob_lists(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], start: int) -> dict[str, Any]:
    """`start`: characters of the answer before these tokens."""
    texts = [tokenizer.piece(t.token).decode("utf-8", "replace") for t in logprobs]
    offsets = list(accumulate(map(len, texts[:-1]), initial=start)) if texts else []
    return {
        "tokens": texts,
        "token_logprobs": [t.logprob for t in logprobs],
        "top_logprobs": [
            {tokenizer.piece(token).decode("utf-8", "replace"): p for token, p in t.top} for t in logprobs
        ],
        "text_offset": offsets,
    }
