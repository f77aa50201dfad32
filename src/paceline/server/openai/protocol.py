"""Request bodies of OpenAI's API, as pydantic models. An unknown parameter is an error that names it."""

import json
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_before_validator_function

from paceline.config import Accept
from paceline.web.request_body import FailFastModel

Message = dict[str, Any]


def exactly(only: bool | int, advice: str = "") -> BeforeValidator:
    """Nothing but this value or null: in Python 0 is False, and 1 is 1.0 and True."""
    message = f"Input should be {json.dumps(only)}{': ' if advice else ''}{advice}"

    def check(value: Any) -> Any:
        if value is not None and (type(value) is not type(only) or value != only):
            raise PydanticCustomError("only", "{message}", {"message": message})
        return value

    return BeforeValidator(check)


def never(advice: str) -> BeforeValidator:
    """A parameter that can only be off. advice: the alternative."""
    return exactly(False, advice)


@dataclass(frozen=True, slots=True)
class Absent:
    """A parameter that must be null, or one of the values that say as little. advice: the alternative."""

    advice: str
    empty: tuple[Any, ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_before_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        return {"enum": [None, *self.empty]}

    def _check(self, value: Any) -> None:
        if value is not None and not any(type(value) is type(e) and value == e for e in self.empty):
            raise PydanticCustomError("unsupported", "not supported: {advice}", {"advice": self.advice})


Never = Annotated[Literal[False] | None, exactly(False)]

# Hints of OpenAI's: they choose between ways of serving that the server does not have, so that no value of
# theirs changes an answer.
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Verbosity = Literal["low", "medium", "high"]
ServiceTier = Literal["auto", "default", "flex", "scale", "priority", "fast"]
CacheRetention = Literal["in_memory", "in-memory", "24h"]
Hints = dict[str, Any]

Store = bool | None  # nothing is stored, and a response says so; False: no part in online training
NO_MODERATION: Final = "there is no moderation here: call a moderation service yourself"


def _labels(labels: dict[str, str]) -> dict[str, str]:
    """Within OpenAI's limits."""
    fits = len(labels) <= 16 and all(len(key) <= 64 and len(value) <= 512 for key, value in labels.items())
    if not fits:
        raise PydanticCustomError(
            "metadata", "at most 16 pairs are taken, of keys up to 64 and values up to 512 characters"
        )
    return labels


Metadata = Annotated[dict[str, str], AfterValidator(_labels)]  # the caller's labels, stored with the trace


# False: drafters remember nothing of the request. `learn` is the name before 0.2.
Remember = Annotated[bool | None, Field(validation_alias=AliasChoices("remember", "learn"))]


class RequestBody(FailFastModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(RequestBody):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # padding against eavesdroppers: never sent, so nothing to do
    continuous_usage_stats: bool = False
    include_rounds: bool = False  # a chunk for each round: the drafter of each token, and rejected ones


class Prediction(RequestBody):
    type: Literal["content"] = "content"
    content: str | list[dict[str, Any]]


class SpeculativeConfig(RequestBody):
    """The speculation of one request. It changes speed; text only where `accept` is not `match`."""

    drafters: list[str] | None = None
    draft_model: str | None = None  # a drafter that the server has loaded
    max_draft: int | None = Field(
        None, ge=0, le=64, validation_alias=AliasChoices("max_draft", "num_speculative_tokens")
    )
    threshold: float | None = Field(  # a drafter stops where it is less sure than this
        None, ge=0, le=1, validation_alias=AliasChoices("threshold", "acceptance_threshold")
    )
    tree_width: int | None = Field(None, ge=1, le=16)
    accept: Accept | None = None
    adaptive: bool | None = None
    disabled: bool = False


class PredictToolCalls(RequestBody):
    """Which calls may be predicted, and how sure a prediction must be."""

    safe_tools: list[str] | None = None  # beside those that say `annotations.readOnlyHint`
    min_probability: float | None = Field(None, ge=0, le=1)
    max_calls: int | None = Field(None, ge=1, le=16)


# True: with the defaults. False is none.
PredictedCalls = Annotated[
    PredictToolCalls | None,
    BeforeValidator(
        lambda value: ({} if value else None) if isinstance(value, bool) else value,
        json_schema_input_type=bool | PredictToolCalls | None,
    ),
]


class StructuredOutputs(RequestBody):
    """vLLM's way to ask for a constraint."""

    json_: Any = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace: Literal["fixed", "compact", "flexible"] | None = None


class AdmittedRequest(RequestBody):
    """The parameters of every request that takes part in passes."""

    model: str | None = None  # None: the default one
    user: str | None = None
    cache_salt: str | None = Field(None, min_length=1)  # vLLM's: only requests with the same one share caches
    priority: int | None = Field(None, ge=-100, le=100)
    remember: Remember = None
    metadata: Metadata | None = None

    @property
    def end_user(self) -> str | None:
        """The client's id of its user."""
        return self.user

    @property
    def cache_key(self) -> str | None:
        return None

    @property
    def streams(self) -> bool:
        return False

    @property
    def report(self) -> bool | str | None:
        """The `metrics` of the answer."""
        return None


class GenerationRequest(AdmittedRequest):
    """The parameters that chat and plain completions share. docs/server.md decides about each of OpenAI's."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    n: int | None = Field(None, ge=1, le=16)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = Field(None, ge=1)
    min_tokens: int | None = Field(None, ge=0)
    skip_special_tokens: Annotated[
        Literal[True] | None, exactly(True, "special tokens are never part of a text")
    ] = None
    spaces_between_special_tokens: bool | None = None  # of tokens that are never part of a text
    include_stop_str_in_output: Annotated[Never, never("append the stop text yourself")] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculative_config: SpeculativeConfig | None = None
    structured_outputs: StructuredOutputs | None = None
    metrics: bool | Literal["summary", "detailed"] | None = None  # report on speculation with the answer
    store: Store = None
    service_tier: ServiceTier | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def report(self) -> bool | str | None:
        return self.metrics


class ChatRequest(GenerationRequest):
    messages: list[Message] = Field(min_length=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    prediction: Prediction | None = None
    predict_tool_calls: PredictedCalls = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    max_completion_tokens: int | None = Field(None, ge=1)
    modalities: list[Literal["text"]] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Hints | None = None
    prompt_cache_retention: CacheRetention | None = None
    safety_identifier: str | None = None
    reasoning_effort: Effort | None = None  # a variable of the chat template, where that reads it
    verbosity: Verbosity | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    prefill: bool | None = None  # only read the prompt into the cache: /v1/prefill
    chat_template_kwargs: dict[str, Any] | None = None
    audio: Annotated[None, Absent("the answer is text")] = None
    functions: Annotated[None, Absent("send tools", ([],))] = None
    function_call: Annotated[None, Absent("send tool_choice", ("auto", "none"))] = None
    moderation: Annotated[None, Absent(NO_MODERATION)] = None
    web_search_options: Annotated[None, Absent("offer a tool that searches", ({},))] = None

    @property
    def end_user(self) -> str | None:
        return self.safety_identifier if self.user is None else self.user

    @property
    def cache_key(self) -> str | None:
        return self.prompt_cache_key


class CompletionRequest(GenerationRequest):
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(None, ge=0, le=20)
    echo: Annotated[Never, never("put the prompt before the text yourself")] = None
    suffix: Annotated[None, Absent("write the model's own marks for infilling into the prompt", ("",))] = None
    best_of: int | None = None  # only the number of choices that are returned
    prediction: Prediction | None = None


class EmbeddingRequest(AdmittedRequest):
    input: str | list[str] | list[int] | list[list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = Field(None, ge=1)  # the first ones, made a vector of length 1 again


class TokenizeRequest(RequestBody):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(RequestBody):
    model: str | None = None
    tokens: list[int]
