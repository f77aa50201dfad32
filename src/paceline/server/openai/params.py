"""From a request body to the engine's terms: GenerateParams."""

import logging
import secrets
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any, Final, TypeVar

from paceline.config import SamplingParams, SpecConfig
from paceline.constraints import UNCONSTRAINED, Choice, Constraint, Json, Lark, OutputSpec, Regex, Whitespace
from paceline.errors import ConstraintError, SettingError, short
from paceline.loading import not_loaded
from paceline.server.async_engine import GenerateParams
from paceline.server.openai.protocol import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    Prediction,
    SpeculativeConfig,
    StructuredOutputs,
)
from paceline.text import Prompt
from paceline.text.chat_template import ChatTemplate
from paceline.web.api_errors import ApiError

log = logging.getLogger("paceline.server")

Values = TypeVar("Values", bound=Sized)

MAX_PROMPTS: Final = 128  # of one request
MAX_STOPS: Final = 64  # stop strings, stop tokens
MAX_STOP_BYTES: Final = 16 << 10  # of all stop strings together
MAX_BIASES: Final = 1024  # tokens of logit_bias
MAX_WARNINGS: Final = 64  # template variables: the log has each name once
ROLES = ("system", "developer", "user", "assistant", "tool")
OWN_VARIABLES = (
    "self",
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "documents",
)
UNLIMITED = 1 << 30  # tokens: an answer without a limit ends where the model's context does
STRUCTURED: Final[Mapping[str, Callable[[Any, Whitespace], Constraint]]] = {  # fields of StructuredOutputs
    "json_": Json.of,
    "json_object": lambda _, whitespace: Json('{"type": "object"}', whitespace),
    "regex": lambda pattern, _: Regex(pattern),
    "choice": lambda texts, _: Choice(tuple(texts)),
    "grammar": lambda text, _: Lark(text),
}


def chat_params(
    request: ChatRequest, default: SpecConfig, drafters: Mapping[str, str], chat_template: ChatTemplate
) -> GenerateParams:
    """drafters: those loaded, by each name that a request may give them."""
    _warn_of_unread_variables(request.chat_template_kwargs, chat_template)
    shown = (request.top_logprobs or 0) if request.logprobs else None
    if request.top_logprobs and not request.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    check_messages(request.messages)
    _check_stream(request)
    return GenerateParams(
        prompt=request.messages,
        params=_params(request, request.max_completion_tokens or request.max_tokens, shown),
        output=_output_spec(request),
        spec=_spec(request.speculative_config, default, drafters, bool(request.prediction)),
        n=request.n or 1,
        prediction=_text(request.prediction),
        template=_template(request, chat_template),
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=bool(request.continue_final_message),
    )


def completion_params(
    request: CompletionRequest, prompt: Prompt, default: SpecConfig, drafters: Mapping[str, str]
) -> GenerateParams:
    _check_stream(request)
    if request.best_of not in (None, request.n or 1):
        raise ApiError(
            400, f"best_of: expected {request.n or 1}: every choice that is made is returned", param="best_of"
        )
    return GenerateParams(
        prompt=prompt,
        params=_params(request, 16 if request.max_tokens is None else request.max_tokens, request.logprobs),
        output=_structured(request.structured_outputs),
        spec=_spec(request.speculative_config, default, drafters, bool(request.prediction)),
        n=request.n or 1,
        prediction=_text(request.prediction),
    )


def read_prompts(prompt: str | list[str] | list[int] | list[list[int]]) -> list[Prompt]:
    """One or several, as text or as tokens."""
    if isinstance(prompt, str):
        return [prompt]
    if prompt and isinstance(prompt[0], int):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is empty: give a text, or a list of texts or of tokens", param="prompt")
    if len(prompt) > MAX_PROMPTS:
        raise ApiError(
            400, f"prompt: {len(prompt)} are given, at most {MAX_PROMPTS} are taken", param="prompt"
        )
    return list(prompt)  # type: ignore[arg-type]


def _check_stream(request: GenerationRequest) -> None:
    if request.stream_options is not None and not request.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")


def _params(request: GenerationRequest, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
    params: dict[str, Any] = {
        "temperature": 1.0 if request.temperature is None else request.temperature,
        "seed": secrets.randbits(32) if request.seed is None else request.seed % (1 << 64),
        "max_tokens": UNLIMITED if max_tokens is None else max_tokens,
        "logprobs": logprobs,
        "stop": _stop(request.stop),
        "stop_tokens": _limited(request.stop_token_ids or (), "stop_token_ids", MAX_STOPS),
        "logit_bias": _limited(request.logit_bias or {}, "logit_bias", MAX_BIASES),
    }
    same = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    for name in (*same, "ignore_eos", "min_tokens"):
        if (value := getattr(request, name)) is not None:
            params[name] = value
    if params["temperature"] < 1e-4:  # as small as makes no difference
        params["temperature"] = 0.0 if params["temperature"] >= 0 else params["temperature"]
    return SamplingParams(**params)


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)
    _limited(stops, "stop", MAX_STOPS)
    if (size := sum(len(text.encode("utf-8", "surrogatepass")) for text in stops)) > MAX_STOP_BYTES:
        reason = f"stop: {size:,} bytes are given, at most {MAX_STOP_BYTES:,} are taken"
        raise ApiError(400, reason, param="stop")
    return stops


def _limited(values: Values, param: str, limit: int) -> Values:
    if len(values) > limit:
        raise ApiError(400, f"{param}: {len(values):,} are given, at most {limit:,} are taken", param=param)
    return values


def _output_spec(request: ChatRequest) -> OutputSpec:
    if request.response_format is not None and request.structured_outputs is not None:
        raise ApiError(
            400,
            "structured_outputs and response_format say the same thing: give one of them",
            param="structured_outputs",
        )
    choice: str | dict[str, Any] = request.tool_choice or ("auto" if request.tools else "none")
    return replace(
        _structured(request.structured_outputs),
        tools=tuple(request.tools or ()),
        tool_choice=choice,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        response_format=request.response_format,
    )


def _structured(request: StructuredOutputs | None) -> OutputSpec:
    if request is None:
        return UNCONSTRAINED
    names = [name for name in STRUCTURED if _given(getattr(request, name), name)]
    if len(names) != 1:
        raise ApiError(
            400,
            f"structured_outputs needs one of {', '.join(name.rstrip('_') for name in STRUCTURED)}",
            param="structured_outputs",
        )
    param = f"structured_outputs.{names[0].rstrip('_')}"
    try:
        constraint = STRUCTURED[names[0]](getattr(request, names[0]), request.whitespace or "fixed")
    except ConstraintError as error:
        raise error.within(param) from None
    return OutputSpec(output=constraint, output_param=param)


def _given(value: Any, name: str) -> bool:
    """False alone turns `json_object` off; as a `json` it is a schema."""
    return value is not None and not (name == "json_object" and value is False)


def _spec(
    config: SpeculativeConfig | None, default: SpecConfig, drafters: Mapping[str, str], predicted: bool
) -> SpecConfig:
    spec = default if config is None else _changed(config, default, drafters)
    plain = not spec.max_draft or not set(spec.drafters) - {"none"}
    if predicted and "prediction" not in spec.drafters and not plain:
        spec = replace(spec, drafters=("prediction", *spec.drafters))
    return spec


def _changed(config: SpeculativeConfig, default: SpecConfig, drafters: Mapping[str, str]) -> SpecConfig:
    changes: dict[str, Any] = {
        "drafters": None if config.drafters is None else _loaded(config.drafters, "drafters", drafters),
        "max_draft": config.max_draft,
        "threshold": config.threshold,
        "tree_width": config.tree_width,
        "accept": config.accept,
        "adaptive": config.adaptive,
    }
    if config.draft_model is not None:
        if config.drafters is not None:
            param = "speculative_config.draft_model"
            raise ApiError(400, f"{param}: give this or drafters, not both", param=param)
        changes["drafters"] = _loaded([config.draft_model], "draft_model", drafters)
    if config.disabled:
        changes |= {"drafters": ("none",), "max_draft": 0}
    try:
        return replace(default, **{name: value for name, value in changes.items() if value is not None})
    except SettingError as error:
        raise error.renamed(f"speculative_config.{error.setting}") from None


def _loaded(names: Sequence[str], where: str, drafters: Mapping[str, str]) -> tuple[str, ...]:
    for name in names:
        if name not in drafters:
            param = f"speculative_config.{where}"
            raise ApiError(400, f"{param}: {not_loaded(name, drafters)}", param=param)
    return tuple(drafters[name] for name in names)


_INSTEAD: Final = {"function_call": "send tool_calls", "audio": "send its text as content"}


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    for i, message in enumerate(messages):
        if message.get("role") not in ROLES:
            raise ApiError(400, f"a role is one of {', '.join(ROLES)}", param=f"messages[{i}].role")
        if message["role"] != "assistant" and message.get("content") is None:
            where = f"messages[{i}].content"
            raise ApiError(400, f"{where}: expected a text, or a list of texts", param=where)
        for name, instead in _INSTEAD.items():
            if message.get(name) is not None:
                where = f"messages[{i}].{name}"
                raise ApiError(400, f"{where}: not supported: {instead}", param=where)


_warned: set[str] = set()  # template variables


def _warn_of_unread_variables(variables: Mapping[str, Any] | None, template: ChatTemplate) -> None:
    """Clients send variables that only other templates read, such as `enable_thinking`: vLLM ignores them."""
    for name in variables or ():
        if name in OWN_VARIABLES or name in _warned or len(_warned) == MAX_WARNINGS:
            continue
        if not template.reads(name):
            _warned.add(name)
            log.warning("chat_template_kwargs: the chat template does not read %s: ignored", short(name))


def _template(request: ChatRequest, template: ChatTemplate) -> Mapping[str, Any]:
    """The variables of the chat template. `reasoning_effort` is one where the template reads it."""
    variables = request.chat_template_kwargs or {}
    if request.reasoning_effort is not None and template.reads("reasoning_effort"):
        variables = {"reasoning_effort": request.reasoning_effort} | variables
    return template_variables(variables)


def template_variables(variables: Mapping[str, Any]) -> Mapping[str, Any]:
    for name in variables:
        if name in OWN_VARIABLES or not name.isidentifier():
            raise ApiError(
                400, f"{short(name)} cannot be set for the chat template", param="chat_template_kwargs"
            )
    return variables


def _text(prediction: Prediction | None) -> str:
    if prediction is None:
        return ""
    if isinstance(prediction.content, str):
        return prediction.content
    for i, part in enumerate(prediction.content):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise ApiError(400, "a prediction is text only", param=f"prediction.content[{i}]")
    return "".join(part["text"] for part in prediction.content)
