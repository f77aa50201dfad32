"""The OpenAPI document of the server, generated from the models of its request bodies."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel

from paceline import __version__
from paceline.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from paceline.server.openai.responses_protocol import ResponsesRequest

Schema = dict[str, Any]

_REF: Final = "#/components/schemas/{model}"
_PROBLEMS: Final = {
    400: "The request cannot be done; `param` names the parameter.",
    401: "The server has API keys, and none of them was sent.",
    403: "A page of another site, by its `Origin` or `Host`.",
    404: "No such model.",
    405: "No such method here; `Allow` names those there are.",
    408: "The request did not arrive in time, or the route's deadline came before the answer's end.",
    413: "The body is too large.",
    415: "The body is not declared as `application/json`.",
    429: "Too many requests, of this key or of all; `Retry-After` says when to try again.",
    431: "The headers are too large.",
    500: "The server failed; its log says more.",
    503: "No room in the cache, a model that cannot be loaded, or the server is shutting down.",
}
_RETRY_LATER: Final = (429, 503)
_ANY: Final = (403, 405, 408, 431, 500)
_BODY: Final = (*_ANY, 400, 401, 413, 415, 429)
_GENERATES: Final = (*_BODY, 404, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    path: str
    summary: str
    answer: str  # one of BODIES
    request: type[BaseModel] | None = None
    or_request: type[BaseModel] | None = None  # the body has one of the two
    problems: tuple[int, ...] = _ANY
    streams: bool = False
    public: bool = False  # needs no API key
    media: str = "application/json"
    unready: bool = False  # 503 comes with the same body as 200

    @property
    def method(self) -> str:
        return "post" if self.requests else "get"

    @property
    def requests(self) -> list[type[BaseModel]]:
        return [one for one in (self.request, self.or_request) if one is not None]


_OPERATIONS: Final = (
    Operation(
        "/v1/chat/completions",
        "Answer a chat",
        "ChatCompletion",
        ChatRequest,
        problems=_GENERATES,
        streams=True,
    ),
    Operation(
        "/v1/completions",
        "Go on with a text",
        "Completion",
        CompletionRequest,
        problems=_GENERATES,
        streams=True,
    ),
    Operation(
        "/v1/responses",
        "Answer a list of items",
        "Response",
        ResponsesRequest,
        problems=_GENERATES,
        streams=True,
    ),
    Operation(
        "/v1/prefill",
        "Read a prompt into the cache",
        "Prefill",
        ChatRequest,
        CompletionRequest,
        problems=_GENERATES,
    ),
    Operation("/v1/embeddings", "Texts to vectors", "Embeddings", EmbeddingRequest, problems=_GENERATES),
    Operation("/v1/models", "The models served", "ModelList", problems=(*_ANY, 401)),
    Operation("/v1/models/{name}", "One model", "Model", problems=(*_ANY, 401, 404)),
    Operation("/v1/routes", "What each route does now, and why", "RouteList", problems=(*_ANY, 401)),
    Operation(
        "/tokenize", "The tokens of a text or a chat", "Tokens", TokenizeRequest, problems=(*_BODY, 404)
    ),
    Operation("/detokenize", "The text of tokens", "Text", DetokenizeRequest, problems=(*_BODY, 404)),
    Operation("/health", "True if the engine runs", "Health", unready=True, public=True),
    Operation("/ready", "True if requests are admitted", "Ready", unready=True, public=True),
    Operation("/metrics", "Prometheus metrics", "Metrics", media="text/plain", public=True),
    Operation("/version", "The server's version", "Version", public=True),
    Operation("/openapi.json", "This document", "Document", public=True),
)


def document(models: Sequence[str]) -> Schema:
    """models: the names of those that are served."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "paceline",
            "version": __version__,
            "description": "Lossless speculative decoding behind OpenAI's API. Errors have OpenAI's shape. "
            "Where the server has API keys, every path needs one but those without `security`.",
        },
        "paths": {each.path: {each.method: _operation(each)} for each in _OPERATIONS},
        "components": {
            "schemas": _schemas(models),
            "securitySchemes": {"bearer": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(each: Operation) -> Schema:
    schema: Schema = {"summary": each.summary, "operationId": _id(each), "responses": dict(_responses(each))}
    if refs := [_ref(model.__name__) for model in each.requests]:
        body = {"application/json": {"schema": refs[0] if len(refs) == 1 else {"anyOf": refs}}}
        schema["requestBody"] = {"required": True, "content": body}
    if "{name}" in each.path:
        name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        schema["parameters"] = [name]
    if not each.public:
        schema["security"] = [{"bearer": []}, {}]  # a server without keys needs none
    return schema


def _id(each: Operation) -> str:
    words = (
        each.path.strip("/").replace(".", "_").replace("/", "_").translate({ord("{"): None, ord("}"): None})
    )
    return f"{each.method}_{words}"


def _responses(each: Operation) -> Iterator[tuple[str, Schema]]:
    content: Schema = {each.media: {"schema": _ref(each.answer)}}
    if each.media == "text/plain":  # OpenMetrics, if the client accepts it
        content["application/openmetrics-text"] = {"schema": _ref(each.answer)}
    if each.streams:
        content["text/event-stream"] = {}  # OpenAPI 3.1 cannot describe events
    yield "200", {"description": each.summary, "content": content}
    if each.unready:
        yield "503", {"description": "Not now.", "content": content}
    for status in sorted(each.problems):
        yield str(status), _problem(status)


def _problem(status: int) -> Schema:
    schema: Schema = {
        "description": _PROBLEMS[status],
        "content": {"application/json": {"schema": _ref("ErrorBody")}},
    }
    if status in _RETRY_LATER:
        schema["headers"] = {"Retry-After": {"schema": {"type": "string", "pattern": "^[0-9]+$"}}}
    if status == 405:
        schema["headers"] = {"Allow": {"schema": {"type": "string"}}}
    return schema


def _schemas(models: Sequence[str]) -> dict[str, Schema]:
    schemas: dict[str, Schema] = {**BODIES, "Message": MESSAGE}
    for each in _OPERATIONS:
        for request in each.requests:
            schema = request.model_json_schema(ref_template=_REF)
            schemas |= schema.pop("$defs", {})
            schemas[request.__name__] = _served(schema, models)
    return schemas


def _served(shape: Schema, models: Sequence[str]) -> Schema:
    """Restricts the model to those that are served, and messages to what templates take."""
    properties = shape["properties"]
    for one in properties["model"]["anyOf"]:
        if one.get("type") == "string":
            one["enum"] = list(models)
    if messages := properties.get("messages"):
        lists = [one for one in (messages, *messages.get("anyOf", ())) if one.get("type") == "array"]
        for one in lists:
            one["items"] = _ref("Message")
    return shape


def _ref(name: str) -> Schema:
    return {"$ref": _REF.format(model=name)}


_STRING: Final = {"type": "string"}
_COUNT: Final = {"type": "integer", "minimum": 0}
_MAYBE: Final = {"type": ["string", "null"]}
_TOKEN: Final = {"type": "integer", "minimum": 0}


def _object(**properties: Any) -> dict[str, Any]:
    """All of these are always there; others may be."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(items: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


_USAGE: Final = _object(prompt_tokens=_COUNT, completion_tokens=_COUNT, total_tokens=_COUNT)
_REASON: Final = {"enum": ["stop", "length", "tool_calls"]}
_HEAD: Final = {"id": _STRING, "created": _COUNT, "model": _STRING, "system_fingerprint": _STRING}

MESSAGE: Final = {
    "type": "object",
    "properties": {
        "role": {"type": "string", "examples": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [
                _STRING,
                {"type": "null"},
                _list(_object(type={"const": "text"}, text=_STRING)),
            ]
        },
    },
    "required": ["role", "content"],
}

BODIES: Final[dict[str, dict[str, Any]]] = {
    "ErrorBody": _object(error=_object(message=_STRING, type=_STRING, param=_MAYBE, code=_MAYBE)),
    "ChatCompletion": _object(
        **_HEAD,
        object={"const": "chat.completion"},
        choices=_list(
            _object(
                index=_COUNT,
                finish_reason=_REASON,
                message=_object(role={"const": "assistant"}, content=_MAYBE, refusal={"type": "null"}),
            )
        ),
        usage=_USAGE,
    ),
    "Completion": _object(
        **_HEAD,
        object={"const": "text_completion"},
        choices=_list(_object(index=_COUNT, text=_STRING, finish_reason=_REASON)),
        usage=_USAGE,
    ),
    "Response": _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_COUNT,
        status={"enum": ["completed", "incomplete"]},
        model=_STRING,
        output=_list(_object(id=_STRING, type={"enum": ["message", "function_call"]}, status=_STRING)),
        usage=_object(input_tokens=_COUNT, output_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Prefill": _object(**_HEAD, object={"const": "prefill"}, usage=_USAGE),
    "Embeddings": _object(
        object={"const": "list"},
        model=_STRING,
        data=_list(
            _object(
                object={"const": "embedding"},
                index=_COUNT,
                embedding={"anyOf": [_list({"type": "number"}), _STRING]},
            )
        ),
        usage=_object(prompt_tokens=_COUNT, total_tokens=_COUNT),
    ),
    "Model": _object(
        id=_STRING,
        object={"const": "model"},
        created=_COUNT,
        owned_by=_STRING,
        max_model_len={"type": ["integer", "null"], "minimum": 0},
        status=_object(value={"enum": ["unloaded", "loading", "loaded", "failed"]}),
    ),
    "ModelList": _object(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
    "RouteList": _object(
        object={"const": "list"},
        data=_list(
            _object(
                name=_STRING,
                object={"const": "route"},
                model=_STRING,
                drafters=_list(_STRING),
                max_draft=_COUNT,
                state={"enum": ["off", "idle", "plain", "drafting"]},
                reason=_STRING,
                predicted={"type": ["object", "null"]},
                measured={"type": ["object", "null"]},
            )
        ),
    ),
    "Tokens": _object(tokens=_list(_TOKEN), count=_COUNT, max_model_len=_COUNT),
    "Text": _object(prompt=_STRING),
    "Health": _object(status=_STRING),
    "Ready": _object(ready={"type": "boolean"}),
    "Metrics": _STRING,
    "Version": _object(version=_STRING),
    "Document": _object(openapi=_STRING, info={"type": "object"}, paths={"type": "object"}),
}
