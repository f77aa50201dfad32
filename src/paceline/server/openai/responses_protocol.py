"""Request bodies of /v1/responses. Nothing is stored: every request has its whole conversation."""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AliasChoices, ConfigDict, Field

from paceline.errors import short
from paceline.server.openai.protocol import (
    NO_MODERATION,
    Absent,
    CacheRetention,
    Effort,
    Hints,
    Metadata,
    Never,
    PredictedCalls,
    Remember,
    RequestBody,
    ServiceTier,
    SpeculativeConfig,
    Store,
    Verbosity,
    never,
)
from paceline.web.api_errors import ApiError
from paceline.web.request_body import parse_request

Status = Literal["in_progress", "completed", "incomplete"]
# Whether a call may be answered later; `async_` is the name in the openai package's objects.
NotAsync = Annotated[Never, Field(validation_alias=AliasChoices("async", "async_"))]


class TextPart(RequestBody):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = None  # these come back with our own answers, and say nothing to a model
    logprobs: list[Any] | None = None
    parsed: Any = None
    prompt_cache_breakpoint: Hints | None = None


class RefusalPart(RequestBody):
    type: Literal["refusal"]
    refusal: str


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
    namespace: str | None = None
    async_: NotAsync = None


class ResultItem(RequestBody):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[dict[str, Any]]
    id: str | None = None
    status: Status | None = None
    name: str | None = None
    caller: dict[Literal["type"], Literal["direct"]] | None = None
    namespace: str | None = None


class ReasoningItem(RequestBody):
    """Another model's reasoning, in a conversation that began elsewhere: not shown to the model."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: list[dict[str, Any]] | None = None
    content: list[dict[str, Any]] | None = None
    encrypted_content: str | None = None
    status: Status | None = None


Item = MessageItem | CallItem | ResultItem | ReasoningItem
_ITEMS: Final[dict[str, type[Item]]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


class FunctionTool(RequestBody):
    type: Literal["function"]
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None  # arguments follow the schema in any case
    defer_loading: Never = None
    output_schema: dict[str, Any] | None = None  # of results: they are the client's
    async_: NotAsync = None
    allowed_callers: list[Literal["direct"]] | None = None
    annotations: dict[str, Any] | None = None  # MCP's hints


class NamedTool(RequestBody):
    type: Literal["function"]
    name: str


class AllowedTools(RequestBody):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]] = Field(min_length=1)


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
    verbosity: Verbosity | None = None


class Reasoning(RequestBody):
    """Of a model that reasons apart from its answer: there is none."""

    effort: Effort | None = None  # a variable of the chat template, where that reads it
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None


LOGPROBS: Final = "message.output_text.logprobs"
Includable = Literal[  # all but the log-probabilities are of items that the server never makes
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesStreamOptions(RequestBody):
    include_obfuscation: bool | None = None  # padding against eavesdroppers: never sent, so nothing to do


class ResponsesRequest(RequestBody):
    model: str | None = None  # None: the one that is served
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "required", "none"] | NamedTool | AllowedTools | None = None
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
    store: Store = None
    truncation: Literal["auto", "disabled"] | None = None  # a conversation that is too long is an error
    previous_response_id: Annotated[None, Absent("nothing is stored here, send the whole input")] = None
    conversation: Annotated[None, Absent("nothing is stored here, send the whole input")] = None
    prompt: Annotated[None, Absent("no prompts are stored here, send instructions and input")] = None
    background: Annotated[Never, never("read the answer from this request, whole or as a stream")] = None
    reasoning: Reasoning | None = None
    include: list[Includable] | None = None
    service_tier: ServiceTier | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)  # beside each token, if `include` has LOGPROBS
    prompt_cache_key: str | None = None
    cache_salt: str | None = Field(None, min_length=1)
    prompt_cache_options: Hints | None = None
    prompt_cache_retention: CacheRetention | None = None
    safety_identifier: str | None = None
    access_programs: Hints | None = None
    client_metadata: Hints | None = None  # of the Codex client
    image: Hints | None = None
    context_management: Annotated[None, Absent("shorten the conversation yourself", ([],))] = None
    moderation: Annotated[None, Absent(NO_MODERATION)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = Field(None, ge=0)
    seed: int | None = None
    speculative_config: SpeculativeConfig | None = None
    priority: int | None = Field(None, ge=-100, le=100)
    remember: Remember = None
    predict_tool_calls: PredictedCalls = None


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
    return "".join(_part_text(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part_text(data: dict[str, Any], where: str) -> str:
    kind = data.get("type")
    if kind == "refusal":
        return parse_request(data, RefusalPart, where).refusal
    if kind not in ("input_text", "output_text"):
        raise _unknown(f"{where}.type", kind, ["input_text", "output_text", "refusal"])
    return parse_request(data, TextPart, where).text


def _unknown(where: str, value: object, known: Sequence[str] | dict[str, Any]) -> ApiError:
    return ApiError(400, f"{where}: {short(value)} is not supported. Known: {', '.join(known)}", param=where)
