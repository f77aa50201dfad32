"""POST /v1/embeddings: texts to vectors, by the hidden states of the served model.

Texts are read as /v1/prefill reads them: behind all requests that generate, in rows that no other prompt
needs. So they delay no stream.
"""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from paceline.config import SamplingParams
from paceline.constraints import UNCONSTRAINED
from paceline.llm import embedding
from paceline.server.admission import RequestContext
from paceline.server.async_engine import GenerateParams
from paceline.server.openai.protocol import EmbeddingRequest
from paceline.server.openai.serving import Serving, usage
from paceline.text import Prompt
from paceline.web.api_errors import ApiError
from paceline.web.request_body import read_request

MAX_INPUTS: Final = 2048  # of one request, as OpenAI takes


class EmbeddingServing(Serving):
    async def create(self, http: Request) -> Response:
        body, request = await read_request(http, EmbeddingRequest, self.max_body)
        context = self.admission.admit(http, body, request, "embd-")
        await self.run(http, context, partial(self._read, context, request))
        return await context.engine.in_thread(partial(_answer, context, request))

    async def _read(self, context: RequestContext, request: EmbeddingRequest) -> list[GenerateParams]:
        texts, engine = _texts(request.input), await self.load(context)
        width = engine.llm.target.width
        if request.dimensions is not None and request.dimensions > width:
            raise ApiError(400, f"dimensions: expected at most {width}, as the model has", param="dimensions")
        return [_params(text) for text in texts]


def _texts(given: str | list[str] | list[int] | list[list[int]]) -> Sequence[Prompt]:
    """One or several, as text or as tokens."""
    if isinstance(given, str):
        return [given]
    if not given:
        raise ApiError(400, "input is empty: give a text, or a list of texts or of tokens", param="input")
    if isinstance(given[0], int):
        return [given]
    if len(given) > MAX_INPUTS:
        raise ApiError(
            400, f"input: {len(given):,} are given, at most {MAX_INPUTS:,} are taken", param="input"
        )
    return list(given)


def _params(text: Prompt) -> GenerateParams:
    return GenerateParams(text, SamplingParams(), UNCONSTRAINED, None, 1, "", embedded=True)


def _answer(context: RequestContext, request: EmbeddingRequest) -> Response:
    used = usage(context.outputs)
    vectors = [_shortened(embedding(output), request.dimensions) for output in context.outputs]
    written = [_base64(one) if request.encoding_format == "base64" else one.tolist() for one in vectors]
    data = [{"object": "embedding", "index": i, "embedding": one} for i, one in enumerate(written)]
    tokens: dict[str, Any] = {name: used[name] for name in ("prompt_tokens", "total_tokens")}
    return JSONResponse({"object": "list", "data": data, "model": context.model.name, "usage": tokens})


def _shortened(vector: Sequence[float], dimensions: int | None) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As OpenAI shortens them: the first dimensions, made a vector of length 1 again."""
    values = np.asarray(vector[:dimensions], np.float32)
    length = np.linalg.norm(values)
    return values if dimensions is None or not length else values / length


def _base64(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    """Little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode("ascii")
