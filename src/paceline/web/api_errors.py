"""Errors in OpenAI's shape. No prompt, no path of the machine, no stack."""

import re
from itertools import takewhile
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from paceline.errors import (
    BadBody,
    BodyTooLarge,
    Busy,
    CacheFull,
    ConstraintError,
    DrafterMismatch,
    PromptTooLong,
    SettingError,
    ShuttingDown,
    TextError,
    TimedOut,
    UnknownModel,
    UsageError,
)
from paceline.web.validation import place, unknown_key

MOST: Final = 2000  # characters of a message

# Error, status, OpenAI's type, code
_KINDS: Final = (
    (PromptTooLong, 400, "invalid_request_error", "context_length_exceeded"),
    (ConstraintError, 400, "invalid_request_error", "invalid_constraint"),
    (UsageError, 400, "invalid_request_error", None),
    (BodyTooLarge, 413, "invalid_request_error", None),
    (BadBody, 400, "invalid_request_error", None),
    (TextError, 400, "invalid_request_error", None),
    (DrafterMismatch, 400, "invalid_request_error", None),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (Busy, 429, "rate_limit_error", "server_busy"),
    (ShuttingDown, 503, "server_error", "shutting_down"),
    (CacheFull, 503, "server_error", "cache_full"),
    (TimedOut, 408, "timeout_error", "timeout"),
)
_PARAMS: Final = {  # settings whose parameters are called otherwise
    "stop_tokens": "stop_token_ids",
    "max_draft": "num_speculative_tokens",
    "threshold": "acceptance_threshold",
}

_ONE_OF: Final = re.compile(
    r"(str|int|float|bool|(list|dict|literal)\[.*|[A-Z]\w*)"
)  # of a union, not a name


class ApiError(Exception):
    """An answer that is not one."""

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        message = message if len(message) <= MOST else f"{message[:MOST]}..."
        self.status = status
        self.body: dict[str, Any] = {
            "error": {"message": message, "type": kind, "param": param, "code": code}
        }
        self.headers = {} if retry_after is None else {"retry-after": str(max(1, round(retry_after)))}


def failure(error: Exception, param: str | None = None, within: str = "") -> ApiError:
    """`within`: the parameter that holds the one which the error names."""
    for kind, status, type_, code in _KINDS:
        if isinstance(error, kind):
            retry = 1.0 if status in (429, 503) else None
            inside = f"{within}." if within else ""
            named, message = _named(error)
            param = param or (f"{inside}{named}" if named else within or None)
            return ApiError(status, f"{inside}{message}", type_, param, code, retry)
    return ApiError(500, "internal error: the server's log says more", "server_error")


def _named(error: Exception) -> tuple[str | None, str]:
    """The parameter that an error is about, where it knows, and the message with the client's name for it."""
    if isinstance(error, SettingError):
        error = error.renamed(_PARAMS.get(error.setting, error.setting))
        return error.setting, str(error)
    return error.param if isinstance(error, ConstraintError) else None, str(error)


def invalid(error: ValidationError, shape: type[BaseModel], within: str = "") -> ApiError:
    """The first thing that is wrong with a request, and the parameter it is wrong with.

    `within`: where the part that was read lies in the request.
    """
    first = error.errors(include_url=False, include_input=False)[0]
    begin, *inner = first["loc"]
    param = place([begin, *takewhile(lambda part: not _ONE_OF.fullmatch(str(part)), inner)])
    param = ".".join(filter(None, (within, param)))
    unknown = first["type"] == "extra_forbidden"
    return ApiError(
        400, f"{param}: {unknown_key(shape, first['loc']) if unknown else first['msg']}", param=param
    )
