"""POST /v1/prefill: the beginning of a prompt into the cache, before the request that continues it.

The body is that of /v1/chat/completions or of /v1/completions. Of a chat, the part is read that stays
whatever message comes next (`ChatTemplate.continuations`), unless the body says how the prompt ends.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.server.admission import RequestContext
from paceline.server.async_engine import GenerateParams
from paceline.server.openai.params import chat_params, completion_params, read_prompts
from paceline.server.openai.protocol import ChatRequest, CompletionRequest
from paceline.server.openai.serving import Serving
from paceline.web.api_errors import ApiError
from paceline.web.request_body import off_loop, parse_request, read_object

OBJECT: Final = "prefill"


class PrefillServing(Serving):
    async def create(self, http: Request) -> Response:
        _, body = await read_object(http, self.max_body)
        request = await off_loop(http, partial(_parsed, body))
        context = self.admission.admit(http, body, request, "prefill-")
        used = await self.read_ahead(http, context, partial(self._read, http, context))
        answer = {
            "id": context.id,
            "object": OBJECT,
            "created": int(context.created),
            "model": context.model.name,
            "system_fingerprint": context.engine.fingerprint,
            "usage": used,
        }
        return JSONResponse(answer | self.log.response_metrics(context))

    async def _read(self, http: Request, context: RequestContext) -> list[GenerateParams]:
        await self.load(context)
        return [self.limited(context, one) for one in await off_loop(http, partial(self._params, context))]

    def _params(self, context: RequestContext) -> list[GenerateParams]:
        request, engine = context.request, context.engine
        spec = engine.spec(context.route)
        if isinstance(request, ChatRequest):
            return [chat_params(request, spec, engine.drafters, engine.llm.tokenizer.template)]
        assert isinstance(request, CompletionRequest)
        prompts = read_prompts(request.prompt)
        first = completion_params(request, prompts[0], spec, engine.drafters)
        return [replace(first, prompt=prompt) for prompt in prompts]


def _parsed(body: dict[str, Any]) -> ChatRequest | CompletionRequest:
    given = [name for name in ("messages", "prompt") if body.get(name) is not None]
    if len(given) != 1:
        raise ApiError(400, "expected messages, or a prompt", param=given[0] if given else "messages")
    if given == ["prompt"]:
        return parse_request(body, CompletionRequest)
    request = parse_request(body, ChatRequest)
    if request.prefill is False:
        raise ApiError(
            400, "prefill: expected true, or none: this endpoint does nothing else", param="prefill"
        )
    return request
