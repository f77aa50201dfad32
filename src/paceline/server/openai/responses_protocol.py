"""Request bodies of /v1/responses. Nothing is stored: every request has its whole conversation."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic_core import PydanticCustomError

from paceline.errors import short
from paceline.server.openai.protocol import (
    Metadata,
    Never,
    Remember,
    RequestBody,
    SpeculativeConfig,
    exactly,
    never,
)
from paceline.web.api_errors import ApiError
from paceline.web.request_body import parse_request

Status = Literal["in_progress", "completed", "incomplete"]


def _absent(advice: str) -> BeforeValidator:
    """A parameter that must be null. advice: the alternative."""

    def check(value: Any) -> None:
        if value is not None:
            raise PydanticCustomError("unsupported", "not supported: {advice}", {"advice": advice})

    return BeforeValidator(check)


class TextPart(RequestBody):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # these come back with our own answers, and say nothing to a model
    logprobs: list[Any] | None = None
    parsed: Any = None


class MessageItem(RequestBody):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None
    phase: Literal["commentary", "final_answer"] | None = None


class CallItem(RequestBody):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: Status | None = None
    parsed_arguments: Any = None
    caller: dict[Literal["type"], Literal["direct"]] | None = None


class ResultItem(RequestBody):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: dict[Literal["type"], Literal["direct"]] | None = None


Item = MessageItem | CallItem | ResultItem
_ITEMS: Final[dict[str, type[Item]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
}


class FunctionTool(RequestBody):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments follow the schema in any case
    defer_loading: Never = None
    allowed_callers: list[Literal["direct"]] | None = None


class NamedTool(RequestBody):
    type: Literal["function"]
    name: str


class PlainText(RequestBody):
    type: Literal["text"]


class JsonObject(RequestBody):
    type: Literal["json_object"]


class JsonSchema(RequestBody):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, populate_by_name=True)
    type: Literal["json_schema"]
    name: str
    schema_: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: bool | None = None  # the answer follows the schema in any case


class TextSettings(RequestBody):
    format: Annotated[PlainText | JsonObject | JsonSchema, Field(discriminator="type")] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(RequestBody):
    effort: Literal["none"] | None = None
    summary: Literal["auto"] | None = None  # of reasoning that there is none of
    generate_summary: Literal["auto"] | None = None


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: bool | None = None  # padding against eavesdroppers: never sent, so nothing to do


class ResponsesRequest(RequestBody):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1)
    max_tool_calls: int | None = Field(None, ge=1)  # of tools that the server runs: there are none
    temperature: float | None = None
    top_p: float | None = None
    text: TextSettings | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    user: str | None = None
    metadata: Metadata | None = None
    store: Annotated[Never, never("nothing is stored here, send false or leave it out")] = None
    truncation: Literal["disabled"] | None = None
    previous_response_id: Annotated[None, _absent("nothing is stored here, send the whole input")] = None
    conversation: Annotated[None, _absent("nothing is stored here, send the whole input")] = None
    prompt: Annotated[None, _absent("no prompts are stored here, send instructions and input")] = None
    background: Annotated[Never, never("read the answer from this request, whole or as a stream")] = None
    reasoning: Reasoning | None = None
    include: list[Literal["reasoning.encrypted_content"]] | None = None  # of reasoning that there is none of
    service_tier: Literal["auto", "default"] | None = None
    top_logprobs: Annotated[Literal[0] | None, exactly(0)] = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    seed: int | None = None
    speculative_config: SpeculativeConfig | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    remember: Remember = None


def read_items(items_data: Sequence[dict[str, Any]]) -> list[Item]:
    items = []
    for i, data in enumerate(items_data):
        kind = data.get("type", "message")
        shape = _ITEMS.get(kind) if isinstance(kind, str) else None
        if shape is None:
            raise _unknown(f"input[{i}].type", kind, _ITEMS)
        items.append(parse_request(data, shape, f"input[{i}]"))
    return items


def read_tools(tools: Sequence[dict[str, Any]]) -> list[FunctionTool]:
    for i, data in enumerate(tools):
        if data.get("type") != "function":
            raise _unknown(f"tools[{i}].type", data.get("type"), ["function"])
    return [parse_request(data, FunctionTool, f"tools[{i}]") for i, data in enumerate(tools)]


def read_text(content: str | Sequence[dict[str, Any]], where: str) -> str:
    """The text of a content that may come in parts."""
    if isinstance(content, str):
        return content
    texts = []
    for i, data in enumerate(content):
        if data.get("type") not in ("input_text", "output_text"):
            raise _unknown(f"{where}[{i}].type", data.get("type"), ["input_text", "output_text"])
        texts.append(parse_request(data, TextPart, f"{where}[{i}]").text)
    return "".join(texts)


def _unknown(where: str, value: object, known: Sequence[str] | dict[str, Any]) -> ApiError:
    return ApiError(400, f"{where}: {short(value)} is not supported. Known: {', '.join(known)}", param=where)
