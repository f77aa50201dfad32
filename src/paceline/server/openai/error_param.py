"""The parameter of a request that an error is about, by the client's name for it."""

from collections.abc import Mapping
from typing import Any, Final

from paceline.errors import ConstraintError, PacelineError, PromptTooLong, SettingError, TextError
from paceline.web.api_errors import ApiError, api_error

_PROMPTS: Final = ("messages", "prompt", "input")
_RENAMED: Final = {"stop_tokens": "stop_token_ids"}  # settings and OpenAI's names for them
_SHAPING: Final = ("tools", "response_format", "text", "structured_outputs")
_RESPONSES: Final = (  # names of a chat's parameters, and those of /v1/responses
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    (".function.parameters", ".parameters"),
)

Body = Mapping[str, Any]  # as sent


def request_error(error: PacelineError, body: Body) -> ApiError:
    """The API error for an error of the engine, with the parameter of this body that it is about."""
    if isinstance(error, ConstraintError):
        return api_error(ConstraintError(error.reason, _constraint_param(error.param, body)))
    if isinstance(error, SettingError):
        return api_error(error.renamed(_RENAMED.get(error.setting, error.setting)))
    about_prompt = isinstance(error, TextError | PromptTooLong)
    return api_error(error, prompt_param(body) if about_prompt else None)


def prompt_param(body: Body) -> str | None:
    """The name of a request's prompt."""
    return next((name for name in _PROMPTS if body.get(name) is not None), None)


def _constraint_param(param: str | None, body: Body) -> str | None:
    if param is None:  # the only part that shapes the answer, if there is one
        shaping = [name for name in _SHAPING if body.get(name) is not None]
        return shaping[0] if len(shaping) == 1 else None
    if "input" in body:
        for chat, responses in _RESPONSES:
            param = param.replace(chat, responses)
    return param
