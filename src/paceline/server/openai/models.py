"""/v1/models, /v1/routes, /tokenize and /detokenize: endpoints that generate nothing."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.config import SpecConfig
from paceline.errors import PacelineError, SettingError
from paceline.server.async_engine import AsyncEngine
from paceline.server.model_pool import ServedModel
from paceline.server.openai.params import check_messages, template_variables
from paceline.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from paceline.server.openai.serving import Serving, request_error
from paceline.server.routes import Route
from paceline.text import Tokenizer
from paceline.web.api_errors import ApiError
from paceline.web.request_body import read_request
from paceline.web.streaming import cancelled_by_disconnect

_STARTED = int(time.time())
MAX_TOKENIZE_BYTES: Final = 512 << 10  # of a body: a tokenizer needs some 300 bytes for each token
MAX_DETOKENIZE_BYTES: Final = 1 << 20  # of a body
MAX_DETOKENIZE: Final = 131_072  # tokens, each of which may be a text of a hundred bytes


class ModelServing(Serving):
    async def all(self, http: Request) -> Response:
        cards = [_card(model, name) for model in self.models.models for name in model.names]
        return JSONResponse({"object": "list", "data": cards})

    async def model(self, http: Request) -> Response:
        name = http.path_params["name"]
        return JSONResponse(_card(self.models.find(name), name))

    async def routes(self, http: Request) -> Response:
        """What each route does now, and why. Its conditions are not told: they may be another key's."""
        loaded = self.models.loaded
        routes = [
            self._route(route, model, engine.spec(route))
            for model, engine in loaded
            for route in self.admission.routes
        ]
        return JSONResponse({"object": "list", "data": routes})

    def _route(self, route: Route, model: ServedModel, spec: SpecConfig) -> dict[str, Any]:
        accounting = model.metrics.accounting
        speculates = bool(spec.max_draft and set(spec.drafters) - {"none"})
        state, reason = accounting.state(route.name, speculates)
        figures, predicted = accounting.figures(route.name), accounting.prediction(route.name)
        return {
            "name": route.name,
            "object": "route",
            "model": model.name,
            "drafters": list(spec.drafters),
            "max_draft": spec.max_draft,
            "adaptive": spec.adaptive,
            "accept": spec.accept,
            "state": state,
            "reason": reason,
            "predicted": None if predicted is None else predicted.model_dump(exclude={"loads"}),
            "measured": None if figures is None else asdict(figures),
        }

    async def tokenize(self, http: Request) -> Response:
        body, request = await read_request(http, TokenizeRequest, min(self.max_body, MAX_TOKENIZE_BYTES))
        async with self._loaded(http, request.model) as engine:
            encode = partial(_encode, request, engine.llm.tokenizer, body)
            tokens = await engine.in_thread(encode, http.state.large)
            longest = engine.llm.target.max_context
        http.state.used_tokens = len(tokens)
        answer = {"tokens": tokens, "count": len(tokens), "max_model_len": longest}
        return await asyncio.to_thread(JSONResponse, answer)  # its text may be long

    async def detokenize(self, http: Request) -> Response:
        _, request = await read_request(http, DetokenizeRequest, min(self.max_body, MAX_DETOKENIZE_BYTES))
        async with self._loaded(http, request.model) as engine:
            http.state.used_tokens = len(request.tokens)
            text = await asyncio.to_thread(_decode, request, engine.llm.tokenizer)
        return await asyncio.to_thread(JSONResponse, {"prompt": text})

    @asynccontextmanager
    async def _loaded(self, http: Request, name: str | None) -> AsyncIterator[AsyncEngine]:
        model = self.models.find(name)
        engine = self.models.try_acquire(model)
        try:
            if engine is None:
                async with cancelled_by_disconnect(http):  # which may raise after the body has ended
                    engine = await self.models.acquire(model)
            yield engine
        finally:
            if engine is not None:
                self.models.release(model)


def _card(model: ServedModel, name: str) -> dict[str, Any]:
    """status: as llama.cpp's router gives it."""
    return {
        "id": name,
        "object": "model",
        "created": _STARTED,
        "owned_by": "paceline",
        "max_model_len": model.max_model_len,
        "status": {"value": model.state},
    }


def _encode(request: TokenizeRequest, tokenizer: Tokenizer, body: Mapping[str, Any]) -> list[int]:
    """`body`: the request as sent."""
    if (request.prompt is None) == (request.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    try:
        if request.prompt is not None:
            return tokenizer.encode(request.prompt, special=request.add_special_tokens)
        messages = request.messages or []
        check_messages(messages)
        continues = bool(request.continue_final_message)
        if continues and request.add_generation_prompt:
            raise SettingError("add_generation_prompt", True, "false, as continue_final_message is true")
        return tokenizer.encode_chat(
            messages,
            request.tools,
            add_generation_prompt=request.add_generation_prompt is not False,
            continue_final_message=continues,
            **template_variables(request.chat_template_kwargs or {}),
        )
    except PacelineError as error:
        raise request_error(error, body) from error


def _decode(request: DetokenizeRequest, tokenizer: Tokenizer) -> str:
    size = tokenizer.vocab_size
    if len(request.tokens) > MAX_DETOKENIZE:
        raise ApiError(
            400,
            f"tokens: {len(request.tokens):,} of them: expected at most {MAX_DETOKENIZE:,}",
            param="tokens",
        )
    if unknown := [token for token in request.tokens if not 0 <= token < size]:
        raise ApiError(400, f"tokens: {unknown[0]} is not one of {size}", param="tokens")
    return tokenizer.decode(request.tokens)
