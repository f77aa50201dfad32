"""Schemas of the responses, for the OpenAPI document: the fields that are always there."""

from typing import Any, Final

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
    "Model": _object(
        id=_STRING, object={"const": "model"}, created=_COUNT, owned_by=_STRING, max_model_len=_COUNT
    ),
    "ModelList": _object(object={"const": "list"}, data=_list({"$ref": "#/components/schemas/Model"})),
    "Tokens": _object(tokens=_list(_TOKEN), count=_COUNT, max_model_len=_COUNT),
    "Text": _object(prompt=_STRING),
    "Health": _object(status=_STRING),
    "Ready": _object(ready={"type": "boolean"}),
    "Metrics": _STRING,
    "Version": _object(version=_STRING),
    "Document": _object(openapi=_STRING, info={"type": "object"}, paths={"type": "object"}),
}
